"""What ASGI handlers of ours have in common: a request's headers and query, and responses in one piece."""

from __future__ import annotations

from collections.abc import Awaitable, Sequence
from typing import TYPE_CHECKING
from urllib.parse import parse_qsl

from medialane.runtime.tasks import first_of
from medialane.types.errors import InvalidRequest

if TYPE_CHECKING:  # types only: starlette is installed with vLLM
    from starlette.types import Message, Receive, Scope, Send

JSON = (b"content-type", b"application/json")
NO_STORE = (b"cache-control", b"no-store")

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
