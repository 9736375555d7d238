"""Embeddings (outputs of models' encoders) in the arena: found, or written once for all clients.

A client that wants an embedding which nobody has gets a *fill*: a range that processes of its engine may write
(`arena.locks`). Others that want the same one wait for it for a while; if the fill ends without a result, one of them
gets the next. The header of the entry shows whether it is completed: the store looks when the embedding is wanted,
while others wait for it, and at the latest when the client releases the fill, or has exited.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress

import msgspec

from medialane.arena import Arena, Pin, Reservation, Unfinished, describe, header_bytes
from medialane.store.messages import FindEmbedding
from medialane.types.feature import Embedding, Feature, FoundEmbedding
from medialane.types.stats import EmbeddingStats

#: Between two looks at a range for whose completion a call waits: an encoder takes some milliseconds or more.
POLL_INTERVAL_S = 0.005
#: Between two looks at a range that a process is writing, although the request that it is for has ended.
REVOKE_INTERVAL_S = 0.1


class Fill:
    """A range that processes of the client with this slot may write, until `release`. `value` describes it as cached
    entry. It may have `ended` before, when it is completed."""

    def __init__(self, embeddings: Embeddings, client: int, reservation: Reservation, value: Feature) -> None:
        self.client = client
        self.reservation = reservation
        self.value = value
        self.ended = asyncio.Event()
        self._embeddings = embeddings

    def release(self) -> None:
        """Cache what was written, or free the range."""
        if not self.ended.is_set():
            self._embeddings.end(self)


class Embeddings:
    """The embeddings in one arena. Call `close` when all fills are released."""

    def __init__(self, arena: Arena, *, revoke_interval_s: float = REVOKE_INTERVAL_S) -> None:
        self._arena = arena
        self._revoke_interval_s = revoke_interval_s
        self._fills: dict[str, Fill] = {}
        self._revoking: dict[Reservation, asyncio.TimerHandle] = {}
        self._num_found = self._num_filled = self._num_dropped = self._num_waited = 0

    @property
    def stats(self) -> EmbeddingStats:
        return EmbeddingStats(
            num_found=self._num_found,
            num_filled=self._num_filled,
            num_dropped=self._num_dropped,
            num_waited=self._num_waited,
            num_writing=len(self._fills),
            num_revoking=len(self._revoking),
        )

    def lookup(self, key: str) -> Pin[Feature] | None:
        """Pin the entry of an embedding, if it is cached or completed. The caller owns the pin."""
        self._fill(key)
        if not self._arena.contains(key, "embedded"):
            return None  # not counted as a miss of the arena: nothing is made because of it
        self._num_found += 1
        return self._arena.lookup(key, "embedded")

    async def find(self, wanted: FindEmbedding, client: int) -> FoundEmbedding | None:
        """Return the embedding, or a fill for the client with this slot if nobody writes it. The caller owns the hold.

        None if the client is writing it already, or another client does not finish in time, or it is larger than the
        arena. Raises ArenaFull. Cancellation leaves nothing behind.
        """
        loop = asyncio.get_running_loop()
        deadline, has_waited = loop.time() + wanted.wait_ms / 1000, False
        while (fill := self._fill(wanted.key)) is not None:
            if fill.client == client or loop.time() >= deadline:
                return None
            self._num_waited += not has_waited
            has_waited = True
            with suppress(TimeoutError):
                async with asyncio.timeout_at(min(deadline, loop.time() + POLL_INTERVAL_S)):
                    await fill.ended.wait()
        return self.find_now(wanted, client)

    def find_now(self, wanted: FindEmbedding, client: int) -> FoundEmbedding | None:
        """As `find`, without waiting for a client that is writing the embedding."""
        if (pin := self.lookup(wanted.key)) is not None:
            return _checked(pin, wanted)
        return None if wanted.key in self._fills else self._start(wanted, client)

    def end(self, fill: Fill) -> None:
        """Cache what was written, or free the range: the client has ended the fill, or it is completed."""
        key, reservation = _embedding(fill.value).key, fill.reservation
        del self._fills[key]
        if self._arena.is_completed(reservation):
            self._num_filled += 1
            self._arena.publish(reservation, key, fill.value).release()
        else:
            self._num_dropped += 1
            self._revoke(reservation)
        fill.ended.set()

    def resume(self, unfinished: Unfinished) -> Fill | None:
        """Continue a fill of an earlier store of the arena. The caller owns it; None if it had ended."""
        value = unfinished.value
        if unfinished.is_revoked or value is None or _embedding(value).key in self._fills:
            self._revoke(unfinished.reservation)
            return None
        fill = Fill(self, unfinished.writer, unfinished.reservation, value)
        self._fills[_embedding(value).key] = fill
        return fill

    def close(self) -> None:
        """Free all ranges: nothing in the arena is read any more. Idempotent."""
        for reservation, again in self._revoking.items():
            again.cancel()
            reservation.abandon()
        self._revoking.clear()

    def _fill(self, key: str) -> Fill | None:
        """Return the fill of an embedding that is not completed yet."""
        fill = self._fills.get(key)
        if fill is not None and self._arena.is_completed(fill.reservation):
            self.end(fill)
        return self._fills.get(key)

    def _start(self, wanted: FindEmbedding, client: int) -> FoundEmbedding | None:
        if wanted.spec.nbytes > self._arena.max_payload_bytes:
            return None
        num_described = header_bytes(wanted.feature.header, [wanted.spec])
        reservation = self._arena.reserve(wanted.spec.nbytes, "embedded", writer=client, header_bytes=num_described)
        (tensor,) = describe(reservation.range, [wanted.spec])
        embedding = Embedding(wanted.key, tensor)
        value = msgspec.structs.replace(wanted.feature, embedding=embedding)
        self._arena.note(reservation, wanted.key, value)
        fill = self._fills[wanted.key] = Fill(self, client, reservation, value)
        return FoundEmbedding(embedding, fill, is_filled=False)

    def _revoke(self, reservation: Reservation) -> None:
        """Free a range as soon as no process writes there; none begins to."""
        self._revoking.pop(reservation, None)
        if not self._arena.revoke(reservation):
            again = asyncio.get_running_loop().call_later(self._revoke_interval_s, self._revoke, reservation)
            self._revoking[reservation] = again


def _embedding(value: Feature) -> Embedding:
    if value.embedding is None:
        raise AssertionError(f"{value} is cached as an embedding")
    return value.embedding


def _checked(pin: Pin[Feature], wanted: FindEmbedding) -> FoundEmbedding | None:
    """Return the embedding that is leased, unless it is not what is wanted."""
    embedding = _embedding(pin.value)
    if embedding.tensor.spec != wanted.spec:
        pin.release()
        return None
    return FoundEmbedding(embedding, pin, is_filled=True)
