"""Responses to requests that fail with a medialane error, in the form of the API, and the id in every response.

Theory of operation. vLLM's endpoints handle unknown exceptions in different ways: chat completions raise them, messages
return 500 for all of them, a stream ends with an event that has no code. So the error is recorded in the request's
scope where it is raised, and `ErrorSender`, directly in front of the app, replaces the app's output:

* *a response of status 400 or more*, by the error's response;
* *a stream that has sent nothing yet*, likewise: its status is held back until its first event, so that status and
  Retry-After are right for everything that fails before the first token;
* *the error event of a stream*, by an event with the error's message and code. If the app aborts the stream instead,
  the event is appended.

A rejection by a worker's vLLM is not replaced: the app responds to it like plain vLLM. Where the app quotes the body
that it got, a reference is replaced by what the client has sent.

The id of a request, `X-Request-Id`, is the client's if it is usable, otherwise one of ours. It is in the response's
header, in every error body and in the log, and vLLM's app makes the ids of its answers of it.

Above that is what all ASGI handlers of ours need: a request's headers and query, and responses in one piece.
"""

from __future__ import annotations

import json
import logging
import re
import secrets
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qsl

from medialane.gateway.request.scope import RequestScope
from medialane.observability.logging import request_id, trace_of
from medialane.types.errors import InvalidRequest, MedialaneError, from_report

if TYPE_CHECKING:  # types only: starlette is installed with vLLM
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

Document = dict[str, Any]

logger = logging.getLogger(__name__)

JSON = (b"content-type", b"application/json")
NO_STORE = (b"cache-control", b"no-store")

#: Parameters of a query, most of all.
_MAX_QUERY_FIELDS = 16
#: Statuses whose responses have no length (RFC 9110, section 8.6).
WITHOUT_LENGTH = (204, 304)


def header(scope: Scope, name: bytes) -> bytes:
    """Return the value of a header; empty if there is none."""
    return next((value for key, value in scope["headers"] if key == name), b"")


def is_anthropic(scope: Scope) -> bool:
    """Return whether the request comes from a client of Anthropic's API, which shares a path with OpenAI's."""
    return bool(header(scope, b"anthropic-version"))


def query_fields(query: str | bytes, allowed: Collection[str]) -> dict[str, str]:
    """Return the parameters of a query. Raises InvalidRequest for others than those allowed."""
    text = query.decode("latin-1") if isinstance(query, bytes) else query
    try:
        pairs = parse_qsl(text, keep_blank_values=True, errors="strict", max_num_fields=_MAX_QUERY_FIELDS)
    except ValueError as error:  # UnicodeDecodeError is one
        raise InvalidRequest("the query is not valid, or has too many parameters") from error
    for name, _ in pairs:
        if name not in allowed:
            known = ", ".join(allowed) or "none"
            raise InvalidRequest(f"unknown parameter; supported here: {known}", param=name[:64])
    return dict(pairs)


def content_type_of(start: Message) -> bytes:
    """Return the media type of a response that begins, in lower case and without parameters; empty if it has none."""
    kind = next((value for name, value in start.get("headers", ()) if name.lower() == b"content-type"), b"")
    return kind.partition(b";")[0].strip().lower()


def with_length(start: Message, length: int) -> Message:
    """Return the start of a response with the length of another body."""
    headers = [(name, value) for name, value in start.get("headers", ()) if name.lower() != b"content-length"]
    return {**start, "headers": [*headers, (b"content-length", str(length).encode())]}


async def send_response(
    send: Send, status: int, body: bytes = b"", headers: Sequence[tuple[bytes, bytes]] = (JSON,)
) -> None:
    """Send a response, with its length."""
    length = [] if status in WITHOUT_LENGTH else [(b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": [*headers, *length]})
    await send({"type": "http.response.body", "body": body})


class Endpoint:
    """A function as an ASGI app: Starlette takes functions for handlers of its own."""

    def __init__(self, respond: ASGIApp) -> None:
        self._respond = respond

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._respond(scope, receive, send)


_SEQUENCE_NUMBER = re.compile(rb'"sequence_number": ?(\d+)')

#: https://docs.anthropic.com/en/api/errors; other statuses below 500 are `invalid_request_error`.
_ANTHROPIC_TYPES = {413: "request_too_large", 429: "rate_limit_error", 503: "overloaded_error"}


@dataclass(frozen=True)
class ErrorForm:
    """An API's error format: the JSON of a response, and of a stream's event if it differs, for which `streamed`
    also gets the last chunk that the stream has sent."""

    document: Callable[[MedialaneError], Document]
    streamed: Callable[[MedialaneError, bytes], Document] | None = None
    event_name: bytes = b""

    def event(self, error: MedialaneError, last: bytes) -> bytes:
        """Return the event of a stream without its terminating empty line."""
        document = self.document(error) if self.streamed is None else self.streamed(error, last)
        data = b"data: " + json.dumps(_with_current_id(document)).encode()
        return b"event: " + self.event_name + b"\n" + data if self.event_name else data


def error_form(scope: Scope) -> ErrorForm:
    """Return the error format of the request's endpoint."""
    path = scope["path"].removeprefix(scope.get("root_path", "").rstrip("/"))
    if path in ("/v1/messages", "/v1/messages/count_tokens"):  # /v1/messages/render has OpenAI's format
        return _ANTHROPIC
    if path.startswith("/v1/files") and is_anthropic(scope):
        return _ANTHROPIC
    if path == "/v1/responses":
        return _RESPONSES
    return _COHERE if path.startswith("/cohere/") else _OPENAI


def error_headers(error: MedialaneError) -> dict[str, str]:
    return {} if error.retry_after_s is None else {"retry-after": str(error.retry_after_s)}


def error_body(error: MedialaneError, form: ErrorForm | None = None) -> bytes:
    """Return the body of a response, in OpenAI's format by default."""
    return json.dumps(_with_current_id((form or _OPENAI).document(error))).encode()


def _with_current_id(document: Document) -> Document:
    current = request_id.get()
    return identified(document, current) if current else document


async def send_error(send: Send, error: MedialaneError, form: ErrorForm) -> None:
    """Send `error` as the response."""
    body = error_body(error, form)
    headers = [(name.encode(), value.encode()) for name, value in error_headers(error).items()]
    await send_response(send, error.status, body, [JSON, *headers])


class ErrorSender:
    """An ASGI `send` for the app, which replaces the app's response once the request has failed with our error."""

    def __init__(self, send: Send, request: RequestScope, form: ErrorForm) -> None:
        self._send = send
        self._request = request
        self._form = form
        self._start: Message | None = None
        self._has_started = False
        self._responded = False
        self._is_stream = False
        self._last = b""

    def __call__(self, message: Message) -> Awaitable[None]:
        """Not a coroutine for what it passes on: this costs each token of every stream."""
        if self._responded:
            return _nothing()
        if message["type"] == "http.response.start":
            return self._on_start(message)
        if message["type"] != "http.response.body":
            return self._send(message)
        if not self._has_started or self._request.failure is not None or self._request.extracted.refs:
            return self._on_piece(message)
        self._last = message.get("body", b"") or self._last
        return self._send(message)

    async def fail_stream(self, cause: Exception) -> bool:
        """Complete the response after the app has raised `cause`. False if the request has no error of ours."""
        error = self._error()
        if error is None or (self._has_started and not self._is_stream):
            return False
        logger.warning("vLLM's app aborted a response after %s: %r", error.code, cause)
        if not self._has_started:
            await self._respond(error)
        elif not self._responded:
            self._responded = True
            event = self._form.event(error, self._last) + b"\n\n"
            await self._send({"type": "http.response.body", "body": event})
        return True

    async def end(self, error: MedialaneError) -> None:
        """Respond with `error` if there is no response yet. If nobody reads it, it is what requests are counted by."""
        if not self._has_started:
            await self._respond(error)

    async def _on_start(self, message: Message) -> None:
        error = self._error()
        if error is not None and message["status"] >= 400:
            await self._respond(error)
            return
        self._is_stream = _is_event_stream(message)
        self._start = message

    async def _on_piece(self, message: Message) -> None:
        """Send the status with the first chunk, unless a stream's request has failed by then."""
        error = self._error() if self._is_stream else None
        start, self._start = self._start, None
        if start is not None and error is not None:
            await self._respond(error)
            return
        piece: bytes = message.get("body", b"")
        if self._is_stream or (start is not None and not message.get("more_body", False)):
            is_error = start is not None and start["status"] >= 400
            piece = self._request.quoting_client(piece, is_error=is_error)
        if start is not None:
            self._has_started = True
            await self._send(start if self._is_stream else _of_length(start, piece, message))
        if error is not None:
            piece = self._with_event(piece, error)
        self._last = piece or self._last
        await self._send({**message, "body": piece})

    async def _respond(self, error: MedialaneError) -> None:
        self._has_started = self._responded = True
        await send_error(self._send, error, self._form)

    def _error(self) -> MedialaneError | None:
        failure = self._request.failure
        return None if failure is None or failure.app_responds else from_report(failure.error)

    def _with_event(self, piece: bytes, error: MedialaneError) -> bytes:
        """Return `piece` of a stream with its error events replaced."""
        events = bytes(piece).split(b"\n\n")
        own = self._form.event(error, self._last)
        return b"\n\n".join(own if _is_error(event) else event for event in events)


async def _nothing() -> None:
    """Send nothing: what the app says after our response is dropped."""


def _of_length(start: Message, body: bytes, sent: Message) -> Message:
    """Return the start of a response whose whole body, `sent`, was replaced by `body`, if it was."""
    return start if len(body) == len(sent.get("body", b"")) else with_length(start, len(body))


def _is_event_stream(start: Message) -> bool:
    return bool(start["status"] == 200) and content_type_of(start) == b"text/event-stream"


def _is_error(event: bytes) -> bool:
    """Return whether a stream's event has a member `error`: at its top level, or within its delta (Cohere)."""
    _, separator, data = event.partition(b"data: ")
    try:
        document = json.loads(data) if separator else None
    except ValueError:
        return False
    if not isinstance(document, dict):
        return False
    delta = document.get("delta")
    return bool(document.get("error") or (isinstance(delta, dict) and delta.get("error")))


# OpenAI: chat completions, completions, and vLLM's own endpoints, which use the same format.


def _openai(error: MedialaneError) -> Document:
    return {"error": {"message": error.message, "type": error.kind, "param": error.param, "code": error.code}}


def _responses_event(error: MedialaneError, last: bytes) -> Document:
    """Return the `error` event of the responses API, with the next sequence number of the stream."""
    numbers = _SEQUENCE_NUMBER.findall(last)
    document = {"type": "error", "code": error.code, "message": error.message, "param": error.param}
    return {**document, "sequence_number": int(numbers[-1]) + 1 if numbers else 0}


# Anthropic: the members of its API, plus our code and param.


def _anthropic(error: MedialaneError) -> Document:
    other = "api_error" if error.status >= 500 else "invalid_request_error"
    kind = _ANTHROPIC_TYPES.get(error.status, other)
    body = {"type": kind, "message": error.message, "code": error.code}
    if error.param is not None:
        body["param"] = error.param
    return {"type": "error", "error": body}


# Cohere


def _cohere(error: MedialaneError) -> Document:
    return {"message": error.message, "code": error.code}


def _cohere_event(error: MedialaneError, _last: bytes) -> Document:
    return {"type": "message-end", "delta": {"error": error.message, "finish_reason": "ERROR"}}


_OPENAI = ErrorForm(_openai)
_RESPONSES = ErrorForm(_openai, _responses_event, event_name=b"error")
_ANTHROPIC = ErrorForm(_anthropic, event_name=b"error")
_COHERE = ErrorForm(_cohere, _cohere_event)


REQUEST_ID = b"x-request-id"

#: A longer body of an error is not read to add the id.
_MAX_BODY_BYTES = 1 << 16

#: How vLLM's errors name a model that is a path (`sanitize_message`), with or without the full stop.
_HIDDEN = "<path>"
_HIDDEN_MODEL = f"Valid aliases: {_HIDDEN}"

_USABLE = re.compile(r"[\w.:-]{1,128}", re.ASCII)


def new_id() -> str:
    return secrets.token_hex(16)


def usable_id(given: str) -> str:
    """Return the id that a client has given, or a new one if that is not usable."""
    return given if _USABLE.fullmatch(given) else new_id()


def given_id(scope: Scope) -> str:
    """Return the id that the client has given; empty if none."""
    return header(scope, REQUEST_ID).decode("latin-1")


def given_trace(scope: Scope) -> str:
    """Return the id of the trace that the client has begun; empty if none."""
    return trace_of(header(scope, b"traceparent").decode("latin-1"))


def with_id(scope: Scope, request_id: str) -> Scope:
    """Return the scope of a request as if its client had given this id."""
    others = [(name, value) for name, value in scope["headers"] if name != REQUEST_ID]
    return {**scope, "headers": [*others, (REQUEST_ID, request_id.encode())]}


def identified(document: dict[str, Any], request_id: str) -> dict[str, Any]:
    """Return the document of an error with the request's id where its API has such members: in OpenAI's `error`, beside
    Anthropic's (which defines it), and at the top of others. What is no error is returned as it is."""
    error = document.get("error")
    if isinstance(error, dict) and document.get("type") != "error":
        return {**document, "error": {**error, "request_id": request_id}}
    if any(name in document for name in ("error", "message", "detail")):
        return {**document, "request_id": request_id}
    return document


def _with_model(document: dict[str, Any], model: str) -> dict[str, Any]:
    """Return vLLM's error about an unknown model with the name that is served. vLLM hides whatever looks like a path,
    and so the name of a model in a folder, although `/v1/models` has it."""
    error = document.get("error")
    message = str(error.get("message")).removesuffix(".") if isinstance(error, dict) else ""
    if not isinstance(error, dict) or not message.endswith(_HIDDEN_MODEL):
        return document
    return {**document, "error": {**error, "message": f"{message.removesuffix(_HIDDEN)}{model}."}}


class IdentifiedSend:
    """An ASGI `send` that adds the request's id to the response's header, and to its body if that is an error; an error
    about an unknown model names the `model` that is served."""

    def __init__(self, send: Send, request_id: str, model: str = "") -> None:
        self._send = send
        self._id = request_id
        self._model = model
        self._start: Message | None = None

    def __call__(self, message: Message) -> Awaitable[None]:
        """Not a coroutine for what it passes on: this costs each token of every stream."""
        if message["type"] == "http.response.body" and self._start is None:
            return self._send(message)
        return self._begin(message)

    async def _begin(self, message: Message) -> None:
        """Send the start of a response; of an error together with its body, to which the id is added."""
        if message["type"] == "http.response.start":
            headers = [(name, value) for name, value in message.get("headers", ()) if name.lower() != REQUEST_ID]
            message = {**message, "headers": [*headers, (REQUEST_ID, self._id.encode())]}
            if _is_json_error(message):
                self._start = message
                return
        elif self._start is not None:
            start, self._start = self._start, None
            start, message = self._with_id(start, message)
            await self._send(start)
        await self._send(message)

    def _with_id(self, start: Message, piece: Message) -> tuple[Message, Message]:
        body: bytes = piece.get("body", b"")
        if piece.get("more_body", False) or len(body) > _MAX_BODY_BYTES:
            return start, piece
        try:
            document = json.loads(body)
        except ValueError:
            return start, piece
        if not isinstance(document, dict) or (named := identified(document, self._id)) is document:
            return start, piece
        body = json.dumps(_with_model(named, self._model) if self._model else named, ensure_ascii=False).encode()
        return with_length(start, len(body)), {**piece, "body": body}


def _is_json_error(start: Message) -> bool:
    is_encoded = any(name.lower() == b"content-encoding" for name, _ in start["headers"])
    return start["status"] >= 400 and content_type_of(start) == b"application/json" and not is_encoded
