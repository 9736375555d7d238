"""How a request that fails by an error of ours is answered: status, headers, and the body that its API defines.

Theory of operation. vLLM's endpoints turn exceptions that they do not know into answers of their own: chat completions
raise them, messages make all of them a 500, a stream ends with an event that has no code. So the error is remembered in
the request's scope where it is raised, and `ErrorSender`, right in front of the app, replaces what the app made of it:

* *an answer of status 400 or more*, by the error's own;
* *a stream that has sent nothing yet*, likewise: its status is held back until its first event, so that the status and
  Retry-After tell of everything that fails before the first token;
* *the error event of a stream*, by an event with the error's message and code. Where the app breaks off instead, the
  event is added.

What a worker's vLLM has refused is left alone: the app answers it as plain vLLM does.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Awaitable, Callable, MutableMapping
from dataclasses import dataclass
from typing import Any

from medialane.core.errors import MedialaneError, from_report
from medialane.gateway.scope import RequestScope

Message = MutableMapping[str, Any]
Scope = MutableMapping[str, Any]
Send = Callable[[Message], Awaitable[None]]
Document = dict[str, Any]

logger = logging.getLogger(__name__)

_SEQUENCE_NUMBER = re.compile(rb'"sequence_number": ?(\d+)')

#: https://docs.anthropic.com/en/api/errors; other statuses below 500 are `invalid_request_error`.
_ANTHROPIC_TYPES = {413: "request_too_large", 503: "overloaded_error"}


@dataclass(frozen=True)
class ErrorForm:
    """An API's errors: the JSON of an answer, and a stream's event without the empty line that ends it. The latter is
    also given what the stream has sent last."""

    document: Callable[[MedialaneError], Document]
    event: Callable[[MedialaneError, bytes], bytes]


def error_form(scope: Scope) -> ErrorForm:
    """The form of the endpoint that a request is for."""
    path = scope["path"].removeprefix(scope.get("root_path", "").rstrip("/"))
    if path in ("/v1/messages", "/v1/messages/count_tokens"):  # /v1/messages/render answers as OpenAI's endpoints do
        return _ANTHROPIC
    if path == "/v1/responses":
        return _RESPONSES
    return _COHERE if path.startswith("/cohere/") else _OPENAI


def error_headers(error: MedialaneError) -> dict[str, str]:
    return {} if error.retry_after_s is None else {"retry-after": str(error.retry_after_s)}


def error_body(error: MedialaneError, form: ErrorForm | None = None) -> bytes:
    """The body of an answer, in OpenAI's form where no other is asked for."""
    return json.dumps((form or _OPENAI).document(error)).encode()


async def send_error(send: Send, error: MedialaneError, form: ErrorForm) -> None:
    """Answer with `error`."""
    body = error_body(error, form)
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    headers += [(name.encode(), value.encode()) for name, value in error_headers(error).items()]
    await send({"type": "http.response.start", "status": error.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


class ErrorSender:
    """An ASGI `send` for the app, which answers in its place once the request has failed by an error of ours."""

    def __init__(self, send: Send, request: RequestScope, form: ErrorForm) -> None:
        self._send = send
        self._request = request
        self._form = form
        self._start: Message | None = None
        self._has_started = False
        self._answered = False
        self._is_stream = False
        self._last = b""

    async def __call__(self, message: Message) -> None:
        if self._answered:
            return
        if message["type"] == "http.response.start":
            await self._on_start(message)
        elif message["type"] == "http.response.body" and self._is_stream:
            await self._on_piece(message)
        else:
            await self._send(message)

    async def fail_stream(self, cause: Exception) -> bool:
        """End the answer of an app that has raised `cause`. False if the request has not failed by an error of ours."""
        error = self._error()
        if error is None or (self._has_started and not self._is_stream):
            return False
        logger.warning("after %s, vLLM's app broke an answer off: %r", error.code, cause)
        if not self._has_started:
            await self._answer(error)
        elif not self._answered:
            self._answered = True
            event = self._form.event(error, self._last) + b"\n\n"
            await self._send({"type": "http.response.body", "body": event})
        return True

    async def _on_start(self, message: Message) -> None:
        error = self._error()
        if error is not None and message["status"] >= 400:
            await self._answer(error)
            return
        self._is_stream = _is_event_stream(message)
        if self._is_stream:
            self._start = message
        else:
            self._has_started = True
            await self._send(message)

    async def _on_piece(self, message: Message) -> None:
        """The first piece decides what the stream's status is."""
        error = self._error()
        if self._start is not None:
            if error is not None:
                await self._answer(error)
                return
            start, self._start = self._start, None
            self._has_started = True
            await self._send(start)
        if error is not None:
            message = {**message, "body": self._with_event(message.get("body", b""), error)}
        self._last = message.get("body", b"") or self._last
        await self._send(message)

    async def _answer(self, error: MedialaneError) -> None:
        self._has_started = self._answered = True
        await send_error(self._send, error, self._form)

    def _error(self) -> MedialaneError | None:
        failure = self._request.failure
        return None if failure is None or failure.app_responds else from_report(failure.error)

    def _with_event(self, piece: bytes, error: MedialaneError) -> bytes:
        """`piece` of a stream, its error events replaced."""
        events = bytes(piece).split(b"\n\n")
        own = self._form.event(error, self._last)
        return b"\n\n".join(own if _is_error(event) else event for event in events)


def _is_event_stream(start: Message) -> bool:
    kind = next((value for name, value in start.get("headers", ()) if name.lower() == b"content-type"), b"")
    is_stream: bool = start["status"] == 200 and kind.lower().startswith(b"text/event-stream")
    return is_stream


def _is_error(event: bytes) -> bool:
    """Whether an event of a stream tells of an error: at its top, or in Cohere's API within its delta."""
    _, found, data = event.partition(b"data: ")
    try:
        document = json.loads(data) if found else None
    except ValueError:
        return False
    if not isinstance(document, dict):
        return False
    delta = document.get("delta")
    return bool(document.get("error") or (isinstance(delta, dict) and delta.get("error")))


# OpenAI: chat completions, completions, and vLLM's own endpoints, which answer as those do.


def _openai(error: MedialaneError) -> Document:
    return {"error": {"message": error.message, "type": error.kind, "param": error.param, "code": error.code}}


def _openai_event(error: MedialaneError, _last: bytes) -> bytes:
    return _event(_openai(error))


def _responses_event(error: MedialaneError, last: bytes) -> bytes:
    """The event `error` of a streamed response, which goes on counting."""
    numbers = _SEQUENCE_NUMBER.findall(last)
    number = int(numbers[-1]) + 1 if numbers else 0
    document = {"type": "error", "code": error.code, "message": error.message, "param": error.param}
    return _event({**document, "sequence_number": number}, name=b"error")


# Anthropic: the members that its API has, and ours beside them.


def _anthropic(error: MedialaneError) -> Document:
    other = "api_error" if error.status >= 500 else "invalid_request_error"
    kind = _ANTHROPIC_TYPES.get(error.status, other)
    found = {"type": kind, "message": error.message, "code": error.code}
    if error.param is not None:
        found["param"] = error.param
    return {"type": "error", "error": found}


def _anthropic_event(error: MedialaneError, _last: bytes) -> bytes:
    return _event(_anthropic(error), name=b"error")


# Cohere


def _cohere(error: MedialaneError) -> Document:
    return {"message": error.message, "code": error.code}


def _cohere_event(error: MedialaneError, _last: bytes) -> bytes:
    return _event({"type": "message-end", "delta": {"error": error.message, "finish_reason": "ERROR"}})


def _event(document: Document, *, name: bytes = b"") -> bytes:
    data = b"data: " + json.dumps(document).encode()
    return b"event: " + name + b"\n" + data if name else data


_OPENAI = ErrorForm(_openai, _openai_event)
_RESPONSES = ErrorForm(_openai, _responses_event)
_ANTHROPIC = ErrorForm(_anthropic, _anthropic_event)
_COHERE = ErrorForm(_cohere, _cohere_event)
