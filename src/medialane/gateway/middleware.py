"""What stands in front of vLLM's app: the scope around every request, and the intake that lifts media out of bodies.

Order matters. `ScopeMiddleware` is the outermost: it sees the end of every request, however it ends. `IntakeMiddleware`
is the innermost, behind vLLM's authentication and CORS: a body is read for nobody who may not send one.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, MutableMapping
from functools import partial
from typing import Any

from medialane.core.errors import BodyTooLarge, MedialaneError
from medialane.gateway.bodies import Body, BoundedReceive, Budget, BudgetCharge, Buffers, Message, Receive
from medialane.gateway.config import GatewayConfig
from medialane.gateway.error_responses import ErrorSender, error_form, send_error
from medialane.gateway.intake import Intake, extract
from medialane.gateway.intake.edits import Buffer
from medialane.gateway.loop_fairness import LoopFairness
from medialane.gateway.report import ReportSender
from medialane.gateway.scope import ExtractedMedia, RequestScope, current_scope, open_scope
from medialane.media import MediaConfig
from medialane.observability.metrics import Metrics

Scope = MutableMapping[str, Any]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

logger = logging.getLogger(__name__)

#: Their bodies mean nothing, and no handler reads one.
_WITHOUT_BODY = frozenset({"GET", "HEAD", "OPTIONS"})


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

    def __init__(self, app: App, media: MediaConfig, config: GatewayConfig, fairness: LoopFairness) -> None:
        self._app = app
        self._media = media
        self._config = config
        self._fairness = fairness
        self._buffers = Buffers()
        self._budget = Budget(config.max_bodies_bytes)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        is_read_here = scope["method"] not in _WITHOUT_BODY and not _is_form(scope)
        limit = self._media.max_body_bytes if is_read_here else self._config.max_text_bytes
        request, form = current_scope(), error_form(scope)
        request.take(charge := BudgetCharge(self._budget))
        try:
            declared = _check_declared(scope, limit)
            incoming = BoundedReceive(receive, limit, charge, self._config)
            # What was read must not live in this frame, which lasts as long as the answer.
            body = await self._extract(incoming, declared, charge) if is_read_here else None
        except MedialaneError as error:
            request.fail(error)
            await send_error(send, error, form)
            return
        if not is_read_here:
            receive = _remembering(incoming, request)
        elif body is None:
            return
        else:
            send = ReportSender(send, request.report) if request.extracted.wants_report else send
            scope, receive = _with_length(scope, len(body)), _replay(body, receive)
        answer = ErrorSender(send, request, form)
        try:
            await self._app(scope, receive, answer)
        except Exception as error:  # the app cannot put our error into its answer; we do, and raise all others
            if not await answer.fail_stream(error):
                raise

    async def _extract(self, receive: Receive, declared: int, charge: BudgetCharge) -> bytes | None:
        """The body without its media, which the request's scope holds now. None if the client has left."""
        request = current_scope()
        body = Body(self._buffers, declared)
        if not await body.read(receive, self._fairness):
            body.release()
            return None
        intake = await self._fairness.run(body.size, partial(self._work, body.buffer, body.size, request))
        body.release()
        charge.set(intake.num_bytes)
        request.extracted = ExtractedMedia(intake.refs, wants_report=intake.report, parse_error=intake.parse_error)
        return intake.body

    def _work(self, buffer: Buffer, size: int, request: RequestScope) -> Intake:
        with request.timeline.measure("lift"):
            return extract(buffer, self._media, self._config, size=size)


def _remembering(receive: Receive, request: RequestScope) -> Receive:
    """Errors of `receive` are raised within the app, which would make a 400 of all of them."""

    async def remembering() -> Message:
        try:
            return await receive()
        except MedialaneError as error:
            request.fail(error)
            raise

    return remembering


def _is_form(scope: Scope) -> bool:
    """Whether the body is a form, which has no JSON. All else may be read as JSON: some handlers of vLLM's do so
    whatever the content type says."""
    content_type = _header(scope, b"content-type")
    return content_type is not None and content_type.lower().startswith((b"multipart/", b"application/x-www-form-"))


def _header(scope: Scope, name: bytes) -> bytes | None:
    return next((value for key, value in scope["headers"] if key == name), None)


def _check_declared(scope: Scope, limit: int) -> int:
    """The length that is declared, or 0. Raises BodyTooLarge for one that is too large, before anything is read."""
    declared = _header(scope, b"content-length")
    length = int(declared) if declared is not None and declared.isdigit() else 0
    if length > limit:
        raise BodyTooLarge(f"the request body has {length} bytes, more than {limit}")
    return length


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
