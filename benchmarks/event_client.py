"""A client of streamed completions that costs little beside the server: it counts events, and parses none."""

from __future__ import annotations

import asyncio
from typing import cast
from urllib.parse import urlsplit

_END = b"0\r\n\r\n"  # of a chunked body
_EVENT = b"data: "


class EventClient(asyncio.Protocol):
    """One kept-alive connection, for one request at a time."""

    def __init__(self, host: str) -> None:
        self._host = host
        self._transport: asyncio.Transport | None = None
        self._tail = b""
        self._num_events = 0
        self._answered: asyncio.Future[None] | None = None

    @classmethod
    async def connect(cls, base_url: str) -> EventClient:
        """`base_url` is that of an OpenAI client."""
        host = urlsplit(base_url).netloc
        name, _, port = host.rpartition(":")
        _, client = await asyncio.get_running_loop().create_connection(lambda: cls(host), name, int(port))
        return client

    async def ask(self, body: bytes) -> tuple[int, bytes]:
        """Send a streaming chat completion; return the number of events, and the end of the response."""
        assert self._transport is not None
        self._tail, self._num_events = b"", 0
        self._answered = asyncio.get_running_loop().create_future()
        head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: {self._host}\r\ncontent-type: application/json\r\n"
        self._transport.write(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
        await self._answered
        return self._num_events, self._tail

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        whole = self._tail + data
        # An event that begins in the tail has been counted unless its first bytes end it.
        self._num_events += whole.count(_EVENT, max(0, len(self._tail) - len(_EVENT) + 1))
        self._tail = whole[-1000:]
        if whole.endswith(_END) and self._answered is not None and not self._answered.done():
            self._answered.set_result(None)

    def connection_lost(self, error: Exception | None) -> None:
        if self._answered is not None and not self._answered.done():
            self._answered.set_exception(error or ConnectionError("the server has closed the connection"))
