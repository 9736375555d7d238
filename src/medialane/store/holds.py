"""Holds of a worker on entries of the arena of its host."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import cast

from medialane.store.hold_cache import HoldCache
from medialane.store.hold_passing import PassedHolds
from medialane.store.link import StoreLink
from medialane.store.messages import (
    MAX_EMBEDDING_WAIT_MS,
    EmbeddingFound,
    EntriesHeld,
    EntriesPulled,
    FindEmbedding,
    GrantPulls,
    HoldEntries,
    HoldsPassed,
    PassedEmbedding,
    PullEntries,
    PullsGranted,
)
from medialane.types.feature import Copied, Embedding, FoundEmbedding, RemoteEntry, WantedEmbedding
from medialane.types.stats import StoreStats
from medialane.types.tensor import ArenaOffer, ArenaRange, TensorDescriptor

#: For a store that is busy: its last figures are exposed then.
_STATUS_TIMEOUT_S = 1.0


class EntriesHold:
    """The holds of one request (`core.feature.Hold`)."""

    def __init__(self, holds: ExitStack) -> None:
        self._holds: ExitStack | None = holds

    def release(self) -> None:
        holds, self._holds = self._holds, None
        if holds is None:
            raise RuntimeError("the hold was already released")
        holds.close()


class StoreGrants:
    """Lets other hosts copy entries that this client holds."""

    def __init__(self, link: StoreLink) -> None:
        self._link = link

    async def grant(self, ranges: Sequence[ArenaRange]) -> list[RemoteEntry]:
        """Return the right to copy each of these entries, which the caller holds until they are copied.

        Raises HandoverFailed, StoreUnavailable.
        """
        if not ranges:
            return []
        reply = await self._link.call_at(ranges[0].arena, lambda call_id: GrantPulls(call_id, list(ranges)))
        return cast("PullsGranted", reply).entries


class StoreEntries:
    """Entries of the arena that gateways refer to (implements `worker.HostArena`). They are retained for `retention_s`
    after their last use (`HoldCache`)."""

    def __init__(self, link: StoreLink, *, retention_s: float = 0.0) -> None:
        self._link = link
        self._passed = PassedHolds(link)
        self._holds: HoldCache[ArenaRange, None] = HoldCache(link, retention_s=retention_s)
        #: Copies of entries of other hosts, by the original's range.
        self._copies: HoldCache[ArenaRange, Copied] = HoldCache(link, retention_s=retention_s)
        #: Embeddings that are cached in the store, by key.
        self._embeddings: HoldCache[str, TensorDescriptor] = HoldCache(link, retention_s=retention_s)
        #: Those that were passed with requests, by request and key.
        self._arrived: dict[tuple[str, str], FoundEmbedding] = {}

    def watch(self, listener: Callable[[ArenaOffer | None], None]) -> None:
        self._link.watch(listener)

    @property
    def client_id(self) -> str:
        return self._link.client_id

    async def exposed_stats(self) -> StoreStats | None:
        await self._link.refresh(_STATUS_TIMEOUT_S)
        status = self._link.status
        return status.stats if status is not None and status.exposed_by == self.client_id else None

    async def hold(self, ranges: Sequence[ArenaRange], *, passed_with: str | None = None) -> EntriesHold:
        with ExitStack() as holds:
            missing = [entry for entry in ranges if not self._use(entry, holds)]
            if passed_with is not None and (passed := await self._passed.take(passed_with)) is not None:
                for entry, hold_id in zip(passed.ranges, passed.hold_ids, strict=True):
                    holds.callback(self._holds.add(entry, hold_id, entry, None).release)
                missing = [entry for entry in missing if entry not in passed.ranges]
                self._adopt(passed, holds)
            if missing:
                reply = await self._link.call_at(missing[0].arena, lambda call_id: HoldEntries(call_id, missing))
                hold_ids = cast("EntriesHeld", reply).hold_ids
                for entry, hold_id in zip(missing, hold_ids, strict=True):
                    holds.callback(self._holds.add(entry, hold_id, entry, None).release)
            return EntriesHold(holds.pop_all())

    async def pull(self, entries: Sequence[RemoteEntry]) -> tuple[EntriesHold, list[Copied]]:
        with ExitStack() as holds:
            copies: dict[ArenaRange, Copied] = {}
            for entry in entries:
                if (hold := self._copies.use(entry.range)) is not None:
                    holds.callback(hold.release)
                    copies[entry.range] = hold.value
            missing = [entry for entry in entries if entry.range not in copies]
            if missing:
                reply = await self._link.call(lambda call_id: PullEntries(call_id, missing))
                pulled = cast("EntriesPulled", reply)
                for entry, hold_id, copy in zip(missing, pulled.hold_ids, pulled.copies, strict=True):
                    holds.callback(self._copies.add(entry.range, hold_id, copy.range, copy).release)
                    copies[entry.range] = copy
            return EntriesHold(holds.pop_all()), [copies[entry.range] for entry in entries]

    async def embedding(
        self, wanted: WantedEmbedding, *, wait_s: float, passed_with: str | None = None
    ) -> FoundEmbedding | None:
        key = wanted.key
        if passed_with is not None and (passed := self._arrived.pop((passed_with, key), None)) is not None:
            return passed
        if (hold := self._embeddings.use(key)) is None:
            wait_ms = min(wait_s * 1000, MAX_EMBEDDING_WAIT_MS)
            reply = await self._link.call_at(
                self._link.arena or "", lambda call_id: FindEmbedding(call_id, *wanted, wait_ms), waits=False
            )
            return self._found(key, reply) if isinstance(reply, EmbeddingFound) else None
        if hold.value.spec != wanted.spec:
            hold.release()
            return None
        return FoundEmbedding(Embedding(key, hold.value), hold, is_filled=True)

    def _adopt(self, passed: HoldsPassed, holds: ExitStack) -> None:
        """Keep the embeddings that were passed with a request until it asks for them, or ends."""
        for embedding in passed.embeddings:
            key = passed.request_id, embedding.key
            self._arrived[key] = self._found(embedding.key, embedding)
            holds.callback(self._drop, key)

    def _drop(self, key: tuple[str, str]) -> None:
        if (unused := self._arrived.pop(key, None)) is not None:
            unused.hold.release()

    def _found(self, key: str, reply: EmbeddingFound | PassedEmbedding) -> FoundEmbedding:
        shared_key = key if reply.is_filled else None
        hold = self._embeddings.add(shared_key, reply.hold_id, reply.tensor.range, reply.tensor)
        return FoundEmbedding(Embedding(key, hold.value), hold, reply.is_filled)

    def _use(self, entry: ArenaRange, holds: ExitStack) -> bool:
        if (hold := self._holds.use(entry)) is None:
            return False
        holds.callback(hold.release)
        return True
