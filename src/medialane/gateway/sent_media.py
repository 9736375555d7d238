"""Media that clients send once: from the body of a request into the arena, as they arrive, and the leases on them.

Nothing of the media stays in this process: each piece is hashed, and copied to the range that the store has reserved.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, cast

import msgspec
from blake3 import blake3

from medialane.core.errors import ClientDisconnected, EmptyMedia, ProtocolViolation, StoreUnavailable
from medialane.core.loop_fairness import LoopFairness
from medialane.core.media import Alias, Modality
from medialane.core.media_lease import LeasedMedia
from medialane.core.tensor import ArenaRange
from medialane.store.link import StoreLink
from medialane.store.messages import MAX_UPLOAD_S, AskLease, MediaLeased, PutMedia, Question, WriteMedia, Written

Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]

#: Bytes copied per iteration of the event loop, about 100 us.
_PIECE_BYTES = 512 * 1024

#: The store waits longer than the gateway for the client.
_MARGIN_S = 30.0


class SentFile(msgspec.Struct, frozen=True):
    """What a client has declared about the body that it sends; `num_bytes` is 0 if that is not known."""

    owner: str
    salt: str = ""
    num_bytes: int = 0
    modality: Modality | None = None
    alias: Alias | None = None
    ttl_s: float | None = None


class SentMedia:
    """Leases at the store of this host. All raise StoreUnavailable if it is not connected."""

    def __init__(self, link: StoreLink, *, fairness: LoopFairness, timeout_s: float) -> None:
        self._link = link
        self._fairness = fairness
        self._timeout_s = min(timeout_s + _MARGIN_S, MAX_UPLOAD_S)

    async def put(self, file: SentFile, receive: Receive) -> LeasedMedia:
        """Lease media that `receive` returns; it is not called before the store has accepted what is declared.

        Raises what `receive` raises, ClientDisconnected, EmptyMedia, InvalidRequest (ttl), MediaLeasesFull, ArenaFull,
        UuidConflict, and the errors of media.
        """
        arriving = _Arriving(self._link, receive, self._fairness)

        def put(call_id: int) -> PutMedia:
            arriving.begin()
            return PutMedia(
                call_id,
                file.owner,
                file.salt,
                file.num_bytes,
                self._timeout_s,
                ttl_s=file.ttl_s,
                modality=file.modality,
                alias=file.alias,
            )

        return cast("MediaLeased", await self._link.call(put, arriving.write)).media

    async def find(self, owner: str, salt: str, media: str) -> LeasedMedia:
        """Raises UnknownMedia."""
        return await self._ask(lambda call_id: AskLease(call_id, owner, media, "find", salt=salt))

    async def renew(self, owner: str, salt: str, media: str, ttl_s: float | None) -> LeasedMedia:
        """Raises UnknownMedia, InvalidRequest (ttl)."""
        return await self._ask(lambda call_id: AskLease(call_id, owner, media, "renew", ttl_s, salt))

    async def end(self, owner: str, salt: str, media: str) -> LeasedMedia:
        """Raises UnknownMedia."""
        return await self._ask(lambda call_id: AskLease(call_id, owner, media, "end", salt=salt))

    async def _ask(self, make: Callable[[int], AskLease]) -> LeasedMedia:
        return cast("MediaLeased", await self._link.call(make)).media


class _Arriving:
    """The media of one body, which are written while they arrive."""

    def __init__(self, link: StoreLink, receive: Receive, fairness: LoopFairness) -> None:
        self._link = link
        self._receive = receive
        self._fairness = fairness
        self._hasher = blake3()
        self._num_bytes = 0
        self._range: ArenaRange | None = None
        self._rest = memoryview(b"")
        self._more = True

    def begin(self) -> None:
        """The body is asked for, by the next store if one is lost: what that had is lost, and the client has it alone.
        Raises StoreUnavailable then."""
        if self._num_bytes or self._rest or not self._more:
            raise StoreUnavailable("the media store was lost while it received the media: send them again")
        self._range = None

    async def write(self, question: Question) -> Written:
        """Write to a range of the store until it is full, or the body has ended."""
        if not isinstance(question, WriteMedia):
            raise ProtocolViolation(f"unexpected {type(question).__name__}")
        await self._move(question.range)
        while self._rest or self._more:
            if not self._rest:
                self._rest = await self._next()
                continue
            room = len(self._link.payload(question.range)) - self._num_bytes
            if not room:
                return Written(question.call_id)
            piece, self._rest = self._rest[:room], self._rest[room:]
            await self._append(piece, question.range)
        if not self._num_bytes:
            raise EmptyMedia("the body is empty")
        return Written(question.call_id, self._num_bytes, self._hasher.hexdigest())

    async def _move(self, entry: ArenaRange) -> None:
        """Continue in another range, with what is in the one before."""
        old, self._range = self._range, entry
        if old is None:
            return
        for start in range(0, self._num_bytes, _PIECE_BYTES):
            await asyncio.sleep(0)
            end = min(start + _PIECE_BYTES, self._num_bytes)
            self._link.payload(entry)[start:end] = self._link.payload(old)[start:end]

    async def _append(self, piece: memoryview, entry: ArenaRange) -> None:
        start, end = self._num_bytes, self._num_bytes + len(piece)
        async with self._fairness.step(len(piece)):
            self._link.payload(entry)[start:end] = piece  # raises if the store is lost
            self._hasher.update(piece)
        self._num_bytes = end

    async def _next(self) -> memoryview:
        message = await self._receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnected("the client has disconnected")
        self._more = bool(message.get("more_body", False))
        return memoryview(message.get("body", b""))
