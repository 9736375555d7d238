"""What ASGI handlers of ours have in common: a request's headers and query, responses in one piece, and streams."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING
from urllib.parse import parse_qsl

from medialane.runtime.tasks import first_of
from medialane.types.errors import InvalidRequest, Unavailable

if TYPE_CHECKING:  # types only: starlette is installed with vLLM
    from starlette.types import Message, Receive, Scope, Send

JSON = (b"content-type", b"application/json")
NO_STORE = (b"cache-control", b"no-store")

#: Between two events of a stream, and at least between two documents.
INTERVAL_S = 1.0
#: Streams that are open at a gateway.
MAX_STREAMS = 32
_EVENTS = ((b"content-type", b"text/event-stream"), NO_STORE, (b"x-accel-buffering", b"no"))

#: Parameters of a query, most of all.
_MAX_QUERY_FIELDS = 16
#: Statuses whose responses have no length (RFC 9110, section 8.6).
WITHOUT_LENGTH = (204, 304)


def header(scope: Scope, name: bytes) -> bytes:
    """Return the value of a header; empty if there is none."""
    return next((value for key, value in scope["headers"] if key == name), b"")


def query_fields(query: str) -> dict[str, str]:
    """Return the parameters of a query. Raises InvalidRequest."""
    try:
        pairs = parse_qsl(query, keep_blank_values=True, errors="strict", max_num_fields=_MAX_QUERY_FIELDS)
    except ValueError as error:  # UnicodeDecodeError is one
        raise InvalidRequest("the query is not valid, or has too many parameters") from error
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


async def until_gone(receive: Receive, work: Awaitable[None]) -> None:
    """Await `work`, which answers a request whose body was read, unless the client disconnects before."""

    async def gone() -> None:
        while not (await receive())["type"].endswith(".disconnect"):
            pass

    await first_of(work, gone())


class StateStreams:
    """Streams of the state as server-sent events: at most MAX_STREAMS are open. They end when `is_stopping`."""

    def __init__(self, is_stopping: Callable[[], bool], *, interval_s: float = INTERVAL_S, place: str = "") -> None:
        self._is_stopping = is_stopping
        self._interval_s = interval_s
        self._place = place
        self._num_open = 0

    async def send(self, send: Send, document: Callable[[], Awaitable[bytes | None]]) -> None:
        """Send the document now and after each interval, until it is None. Raises Unavailable, and what the first
        `document` raises, before the response has begun."""
        if self._num_open >= MAX_STREAMS:
            raise Unavailable(f"{MAX_STREAMS} streams of the state are open{self._place}", retry_after_s=5)
        self._num_open += 1
        try:
            state, start = await document(), b"retry: 1000\n\n"
            await send({"type": "http.response.start", "status": 200, "headers": list(_EVENTS)})
            while state is not None and not self._is_stopping():
                piece = start + b"event: state\ndata: " + state + b"\n\n"
                await send({"type": "http.response.body", "body": piece, "more_body": True})
                await asyncio.sleep(self._interval_s)
                state, start = await document(), b""
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            self._num_open -= 1
