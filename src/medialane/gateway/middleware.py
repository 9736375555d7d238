"""What stands in front of vLLM's app: the scope around every request, and the intake that lifts media out of bodies.

Order matters. `ScopeMiddleware` is the outermost: it sees the end of every request, however it ends. `IntakeMiddleware`
is the innermost, behind vLLM's authentication and CORS: a body is read for nobody who may not send one.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from medialane.core.errors import BodyTooLarge, MedialaneError
from medialane.gateway.intake import lift
from medialane.gateway.scope import current_scope, open_scope
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
                self._metrics.observe(request.timeline)


class IntakeMiddleware:
    """Reads JSON bodies within their bound, and gives the app the body without its media."""

    def __init__(self, app: App, config: MediaConfig, metrics: Metrics) -> None:
        self._app = app
        self._config = config
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST" or not _is_json(scope):
            await self._app(scope, receive, send)
            return
        request = current_scope()
        try:
            with request.timeline.measure("lift"):
                body = await _read_body(scope, receive, self._config.max_body_bytes)
                intake = lift(body, self._config)
        except MedialaneError as error:
            self._metrics.count_error(error.code)
            await send_error(send, error)
            return
        request.refs = intake.refs
        await self._app(_with_length(scope, len(intake.body)), _replay(intake.body, receive), send)


async def send_error(send: Send, error: MedialaneError) -> None:
    """Answer with the error as OpenAI's APIs spell it."""
    body = error_body(error)
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    headers += [(name.encode(), value.encode()) for name, value in error_headers(error).items()]
    await send({"type": "http.response.start", "status": error.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def error_body(error: MedialaneError) -> bytes:
    return json.dumps(
        {"error": {"message": error.message, "type": error.kind, "param": error.param, "code": error.code}}
    ).encode()


def error_headers(error: MedialaneError) -> dict[str, str]:
    return {} if error.retry_after_s is None else {"retry-after": str(error.retry_after_s)}


def _is_json(scope: Scope) -> bool:
    content_type = _header(scope, b"content-type")
    return content_type is None or b"json" in content_type.lower()


def _header(scope: Scope, name: bytes) -> bytes | None:
    return next((value for key, value in scope["headers"] if key == name), None)


async def _read_body(scope: Scope, receive: Receive, limit: int) -> bytearray | bytes:
    """The whole body. Raises BodyTooLarge before more than `limit` bytes are held."""
    declared = _header(scope, b"content-length")
    if declared is not None and declared.isdigit() and int(declared) > limit:
        raise BodyTooLarge(f"the request body has {int(declared)} bytes, more than {limit}")
    body = bytearray()
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return b""
        body += message.get("body", b"")
        if len(body) > limit:
            raise BodyTooLarge(f"the request body has more than {limit} bytes")
        if not message.get("more_body", False):
            return body


def _with_length(scope: Scope, length: int) -> Scope:
    headers = [(k, v) for k, v in scope["headers"] if k != b"content-length"]
    return {**scope, "headers": [*headers, (b"content-length", str(length).encode())]}


def _replay(body: bytes, receive: Receive) -> Receive:
    """A receive that gives `body` once and then what the server says (the disconnect)."""
    pending = [body]

    async def replayed() -> Message:
        if pending:
            return {"type": "http.request", "body": pending.pop(), "more_body": False}
        return await receive()

    return replayed
