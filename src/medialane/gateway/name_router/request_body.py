"""The body of one request on its way to a gateway: read until it has named its model, and passed on from there."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator

from medialane.gateway.bodies import BoundedReceive, BudgetCharge, Receive
from medialane.gateway.name_router.model_name import ModelSearch
from medialane.types.errors import ClientDisconnected, MedialaneError


class RequestBody:
    """What was read is kept, charged to the memory of all bodies, until a gateway takes it. `error` is why reading has
    failed after a gateway was asked, which aiohttp does not report. Reading raises ClientDisconnected, BodyTooLarge,
    BodyMemoryExhausted and ClientTooSlow."""

    def __init__(self, receive: Receive, bounded: BoundedReceive, charge: BudgetCharge) -> None:
        self._receive = receive
        self._bounded = bounded
        self._charge = charge
        self._kept: deque[bytes] = deque()
        self._has_more = True
        self._is_sent = asyncio.Event()
        self.error: MedialaneError | None = None

    async def find(self, search: ModelSearch) -> str | None:
        """Read until the search ends; return the model's name."""
        while self._has_more and not search.is_over:
            piece = await self._next()
            search.feed(piece)
            self._kept.append(piece)
        return search.name

    async def pieces(self) -> AsyncIterator[bytes]:
        """Yield what was kept, then the rest as it comes."""
        while self._kept:
            yield self._kept.popleft()
        self._bounded.keeps = False
        try:
            while self._has_more:
                if piece := await self._next():
                    yield piece
        except MedialaneError as error:
            self.error = error
            raise
        self.close()
        self._is_sent.set()

    async def until_gone(self) -> None:
        """Wait until the client has disconnected, once its body is sent: before that, `pieces` notices it."""
        await self._is_sent.wait()
        while (await self._receive())["type"] != "http.disconnect":
            pass

    def close(self) -> None:
        """Idempotent."""
        self._kept.clear()
        self._charge.release()

    async def _next(self) -> bytes:
        message = await self._bounded()
        if message["type"] == "http.disconnect":
            raise ClientDisconnected("the client has disconnected")
        self._has_more = bool(message.get("more_body", False))
        piece: bytes = message.get("body", b"")
        return piece
