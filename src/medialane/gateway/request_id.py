"""The id of a request, `X-Request-Id`: the client's if it is usable, else one of ours. It is in the response's header,
in every error body and in the log, and vLLM's app makes the ids of its answers of it."""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Awaitable
from typing import TYPE_CHECKING, Any

from medialane.observability.logging import trace_of

if TYPE_CHECKING:  # types only: starlette is installed with vLLM
    from starlette.types import Message, Scope, Send

HEADER = b"x-request-id"

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
    value: bytes = next((value for name, value in scope["headers"] if name == HEADER), b"")
    return value.decode("latin-1")


def given_trace(scope: Scope) -> str:
    """Return the id of the trace that the client has begun; empty if none."""
    value: bytes = next((value for name, value in scope["headers"] if name == b"traceparent"), b"")
    return trace_of(value.decode("latin-1"))


def with_id(scope: Scope, request_id: str) -> Scope:
    """Return the scope of a request as if its client had given this id."""
    others = [(name, value) for name, value in scope["headers"] if name != HEADER]
    return {**scope, "headers": [*others, (HEADER, request_id.encode())]}


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
    and so that of a model in a folder, although `/v1/models` has it."""
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
        """Send the start of a response; that of an error with its body, to which the id is added."""
        if message["type"] == "http.response.start":
            headers = [(name, value) for name, value in message.get("headers", ()) if name.lower() != HEADER]
            message = {**message, "headers": [*headers, (HEADER, self._id.encode())]}
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
        headers = [(name, value) for name, value in start["headers"] if name.lower() != b"content-length"]
        length = (b"content-length", str(len(body)).encode())
        return {**start, "headers": [*headers, length]}, {**piece, "body": body}


def _is_json_error(start: Message) -> bool:
    kind = next((value for name, value in start["headers"] if name.lower() == b"content-type"), b"")
    is_encoded = any(name.lower() == b"content-encoding" for name, _ in start["headers"])
    return start["status"] >= 400 and kind.lower().startswith(b"application/json") and not is_encoded
