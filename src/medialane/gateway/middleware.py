"""What stands in front of vLLM's app: the scope around every request, and the intake that lifts media out of bodies.

Order matters. `ScopeMiddleware` is the outermost: it sees the end of every request, however it ends. `IntakeMiddleware`
is the innermost, behind vLLM's authentication and CORS: a body is read for nobody who may not send one.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from medialane.core.errors import BodyTooLarge, MedialaneError
from medialane.gateway.error_answers import ErrorSender, error_form, send_error
from medialane.gateway.intake import Intake, lift
from medialane.gateway.report import ReportSender
from medialane.gateway.scope import current_scope, open_scope
from medialane.gateway.turns import Turns
from medialane.media import MediaConfig
from medialane.observability.metrics import Metrics

Message = MutableMapping[str, Any]
Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

logger = logging.getLogger(__name__)


class ScopeMiddleware:
    """Opens the request's scope, adds Server-Timing, observes the timeline, closes the scope."""

    def __init__(self, app: App, metrics: Metrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        with open_scope() as request:

            async def send_timed(message: Message) -> None:
                if message["type"] == "http.response.start":
                    headers = [
                        *message.get("headers", ()),
                        (b"server-timing", request.timeline.server_timing().encode()),
                    ]
                    message = {**message, "headers": headers}
                await send(message)

            try:
                await self._app(scope, receive, send_timed)
            finally:
                if scope["method"] == "POST":  # health checks and scrapes are none of the requests whose times we show
                    self._metrics.observe(request.timeline)
                if request.error_code is not None:
                    self._metrics.count_error(request.error_code)


class IntakeMiddleware:
    """Gives the app JSON bodies without their media. Every body is read within its bound.

    Being the innermost, it is also where the app's answers to our errors are replaced, and where a report is put into
    the answer of who asked for one: before anything else may compress it.

    A client that leaves while it sends ends the request: the app never sees a part of a body.
    """

    def __init__(self, app: App, config: MediaConfig, turns: Turns) -> None:
        self._app = app
        self._config = config
        self._turns = turns

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        limit = self._config.max_body_bytes
        request, form = current_scope(), error_form(scope)
        may_have_media = scope["method"] == "POST" and _is_json(scope)
        try:
            _check_declared(scope, limit)
            # What was read must not live in this frame, which lasts as long as the answer.
            body = await self._lift(receive) if may_have_media else None
        except MedialaneError as error:
            request.fail(error)
            await send_error(send, error, form)
            return
        if not may_have_media:
            receive = _bounded(receive, limit)
        elif body is None:
            return
        else:
            send = ReportSender(send, request.report) if request.wants_report else send
            scope, receive = _with_length(scope, len(body)), _replay(body, receive)
        answer = ErrorSender(send, request, form)
        try:
            await self._app(scope, receive, answer)
        except Exception as error:  # the app cannot put our error into its answer; we do, and raise all others
            if not await answer.break_off(error):
                raise

    async def _lift(self, receive: Receive) -> bytes | None:
        """The body without its media, which the request's scope holds now. None if the client has left."""
        body = await _read_body(receive, self._config.max_body_bytes, self._turns)
        if body is None:
            return None
        request = current_scope()

        def work() -> Intake:
            with request.timeline.measure("lift"):
                return lift(body, self._config)

        intake = await self._turns.run(len(body), work)
        request.refs = intake.refs
        request.wants_report = intake.report
        return intake.body


def _is_json(scope: Scope) -> bool:
    content_type = _header(scope, b"content-type")
    return content_type is None or b"json" in content_type.lower()


def _header(scope: Scope, name: bytes) -> bytes | None:
    return next((value for key, value in scope["headers"] if key == name), None)


def _check_declared(scope: Scope, limit: int) -> None:
    """Raise BodyTooLarge for a length that is too large as it is declared, before anything is read."""
    declared = _header(scope, b"content-length")
    if declared is not None and declared.isdigit() and int(declared) > limit:
        raise BodyTooLarge(f"the request body has {int(declared)} bytes, more than {limit}")


async def _read_body(receive: Receive, limit: int, turns: Turns) -> bytearray | None:
    """The whole body, None if the client leaves first. Raises BodyTooLarge before more than `limit` bytes are held."""
    receive = _bounded(receive, limit)
    body = bytearray()
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        piece = message.get("body", b"")
        async with turns.step(len(piece)):
            body += piece
        if not message.get("more_body", False):
            return body


def _bounded(receive: Receive, limit: int) -> Receive:
    """A receive that raises BodyTooLarge once the body has more than `limit` bytes."""
    num_received = 0

    async def bounded() -> Message:
        nonlocal num_received
        message = await receive()
        num_received += len(message.get("body", b""))
        if num_received > limit:
            error = BodyTooLarge(f"the request body has more than {limit} bytes")
            current_scope().fail(error)  # raised within the app, which makes a 400 of it
            raise error
        return message

    return bounded


def _with_length(scope: Scope, length: int) -> Scope:
    headers = [(k, v) for k, v in scope["headers"] if k not in (b"content-length", b"transfer-encoding")]
    return {**scope, "headers": [*headers, (b"content-length", str(length).encode())]}


def _replay(body: bytes, receive: Receive) -> Receive:
    """A receive that gives `body` once and then what the server says (the disconnect)."""
    pending = [body]

    async def replayed() -> Message:
        if pending:
            return {"type": "http.request", "body": pending.pop(), "more_body": False}
        return await receive()

    return replayed
