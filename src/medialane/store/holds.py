"""Holds of gateways and workers on entries of the arena of their host.

A client retains holds for a moment after their last use (`HoldCache`), so that using the item again needs no message.
The store frees nothing that is held, so that retained holds take memory from new items. They end

* `retention_s` after their last use,
* the least recently used first, while they exceed an eighth of the arena,
* at once if half of the arena is held, by any clients, and
* all of them when the store asks for it (`Reclaim`), before it refuses an item for lack of memory.

A gateway passes holds to the worker that it sends a request to (`HoldPasser`), so that the worker need not ask the
store. With them go the embeddings that the worker will want: the ones that exist, and memory for the ones that it is to
write. The gateway informs the store before it sends the request, and the store the worker while the request is on
its way. If a hold does not arrive in time, the worker asks for one itself (`HoldEntries`); it releases one that arrives
for no request (`PassedHolds`).
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from contextlib import ExitStack
from typing import Generic, TypeVar, cast

from cachetools import TTLCache

from medialane.store.client import StoreLink
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
    PassHolds,
    PullEntries,
    PullsGranted,
)
from medialane.types.feature import Embedding, FoundEmbedding, LocalCopy, RemoteEntry, WantedEmbedding
from medialane.types.stats import StoreStats
from medialane.types.tensor import ArenaOffer, ArenaRange, TensorDescriptor

#: Longest time for which a worker waits for a hold. The store takes 0.1 ms; if it is late, asking it takes as long.
MAX_WAIT_S = 0.1

#: After this time, no request is coming for a hold: its gateway was lost between the two messages.
MAX_AGE_S = 1.0

#: Entries that are remembered as held by a worker.
_MAX_REMEMBERED = 4096

#: For a store that is busy: its last figures are exposed then.
_STATUS_TIMEOUT_S = 1.0

K = TypeVar("K", bound=Hashable)

V = TypeVar("V")


class HoldCache(Generic[K, V]):
    """Holds of one link by key; `value` describes the entry that is held. `retention_s` 0 retains none."""

    def __init__(self, link: StoreLink, *, retention_s: float) -> None:
        self._link = link
        self._retention_s = retention_s
        self._held: dict[K, _Held[K, V]] = {}
        self._idle: OrderedDict[K, _Held[K, V]] = OrderedDict()  # least recently used first
        self._idle_bytes = 0
        self._expiry: asyncio.TimerHandle | None = None
        link.watch(self._arena_changed)
        link.watch_reclaim(self.clear)

    def __len__(self) -> int:
        """Return the number of holds that are retained without a user."""
        return len(self._idle)

    def __contains__(self, key: K) -> bool:
        return key in self._held

    def use(self, key: K) -> StoreHold[K, V] | None:
        """Return another hold on the item of `key` if this client holds it. The caller owns it."""
        held = self._held.get(key)
        if held is None:
            return None
        if held.num_users == 0:
            self._pop_idle(key)
        return StoreHold(self, held, is_shared=True)

    def add(self, key: K | None, hold_id: int, entry: ArenaRange, value: V) -> StoreHold[K, V]:
        """Adopt a hold that the store has granted; without a key, for one user only. The caller owns the result."""
        held = _Held(key, hold_id, entry, value)
        if key is not None and entry.arena == self._link.arena:
            self._held.setdefault(key, held)  # of two calls for one item, the second hold is not shared
        return StoreHold(self, held)

    def unused(self, held: _Held[K, V]) -> None:
        """One user of `held` has ended."""
        held.num_users -= 1
        if held.num_users:
            return
        if held.key is None or self._held.get(held.key) is not held:
            self._link.release(held.hold_id, held.entry.arena)
        elif not self._retention_s:
            del self._held[held.key]
            self._link.release(held.hold_id, held.entry.arena)
        else:
            self._retain(held.key, held)

    def forget(self, held: _Held[K, V]) -> None:
        """Do not give `held`, which has a user, to others. It ends with its last user."""
        if held.key is not None and self._held.get(held.key) is held:
            del self._held[held.key]

    def clear(self) -> None:
        """End all holds without users."""
        for key in list(self._idle):
            self._end(key)

    def _arena_changed(self, arena: ArenaOffer | None) -> None:
        """The holds have ended with their arena."""
        if arena is None:
            self.clear()
            self._held.clear()

    def _retain(self, key: K, held: _Held[K, V]) -> None:
        held.idle_since = asyncio.get_running_loop().time()
        self._idle[key] = held
        self._idle_bytes += held.entry.nbytes
        while self._idle_bytes > self._link.retainable_bytes:
            self._end(next(iter(self._idle)))
        self._schedule()

    def _pop_idle(self, key: K) -> _Held[K, V]:
        held = self._idle.pop(key)
        self._idle_bytes -= held.entry.nbytes
        return held

    def _end(self, key: K) -> None:
        held = self._pop_idle(key)
        del self._held[key]
        self._link.release(held.hold_id, held.entry.arena)

    def _schedule(self) -> None:
        if self._idle and self._expiry is None:
            oldest = next(iter(self._idle.values()))
            when = oldest.idle_since + self._retention_s
            self._expiry = asyncio.get_running_loop().call_at(when, self._expire)

    def _expire(self) -> None:
        self._expiry = None
        ended_before = asyncio.get_running_loop().time() - self._retention_s
        while self._idle and (key := next(iter(self._idle))) and self._idle[key].idle_since <= ended_before:
            self._end(key)
        self._schedule()


class _Held(Generic[K, V]):
    """One hold at the store and its users in this process; retained since `idle_since` if it has none."""

    def __init__(self, key: K | None, hold_id: int, entry: ArenaRange, value: V) -> None:
        self.key = key
        self.hold_id = hold_id
        self.entry = entry
        self.value = value
        self.num_users = 0
        self.idle_since = 0.0


class StoreHold(Generic[K, V]):
    """One user's hold on one item (`types.feature.Hold`). `is_shared` is whether this client held the item already."""

    def __init__(self, cache: HoldCache[K, V], held: _Held[K, V], *, is_shared: bool = False) -> None:
        self.is_shared = is_shared
        self._cache = cache
        self._held: _Held[K, V] | None = held
        self.value = held.value
        held.num_users += 1

    def release(self) -> None:
        held, self._held = self._held, None
        if held is None:
            raise RuntimeError("the hold was already released")
        self._cache.unused(held)

    def forget(self) -> None:
        """Do not share or retain it from now on. No effect after `release`."""
        if self._held is not None:
            self._cache.forget(self._held)


class HoldPasser:
    """The gateway's side. Workers retain holds for `retention_s` after
    their last use: what was passed within this time is not passed again."""

    def __init__(self, link: StoreLink, *, retention_s: float) -> None:
        self._link = link
        self._recent: TTLCache[tuple[str, ArenaRange], None] = TTLCache(_MAX_REMEMBERED, retention_s)

    def pass_on(
        self, ranges: Sequence[ArenaRange], *, to: str, request_id: str, wanted: Sequence[WantedEmbedding] = ()
    ) -> bool:
        """Pass holds on entries, which the caller holds, to the store's client `to`, and on embeddings that it will
        want. Return False if none is passed: the client may hold the entries already."""
        new = [entry for entry in ranges if (to, entry) not in self._recent]
        embeddings = [FindEmbedding(0, *one) for one in wanted]
        is_passed = bool(to and (new or (ranges and embeddings))) and self._link.notify(
            ranges[0].arena, PassHolds(to, request_id, new, embeddings)
        )
        if is_passed or not new:
            for entry in ranges:
                self._recent[to, entry] = None
        return is_passed


class PassedHolds:
    """The worker's side: holds that have arrived, until the request that uses them does."""

    def __init__(self, link: StoreLink, *, max_wait_s: float, max_age_s: float) -> None:
        self._link = link
        self._max_wait_s, self._max_age_s = max_wait_s, max_age_s
        #: Of requests whose holds have arrived, or are awaited.
        self._arrivals: dict[str, asyncio.Future[HoldsPassed]] = {}
        link.watch(self._arena_changed)
        link.watch_passed(self._arrive)

    async def take(self, request_id: str) -> HoldsPassed | None:
        """Wait for the holds of a request. The caller owns them; None if they do not arrive in time."""
        if request_id not in self._arrivals and self._link.arena is None:
            return None
        arrival = self._arrival(request_id)
        try:
            if not arrival.done():
                await asyncio.wait((arrival,), timeout=self._max_wait_s)
        except asyncio.CancelledError:
            self._drop(request_id, arrival)
            raise
        if self._arrivals.get(request_id) is arrival:
            del self._arrivals[request_id]
        return arrival.result() if arrival.done() and not arrival.cancelled() else None

    def _arrival(self, request_id: str) -> asyncio.Future[HoldsPassed]:
        if (arrival := self._arrivals.get(request_id)) is None:
            arrival = self._arrivals[request_id] = asyncio.get_running_loop().create_future()
        return arrival

    def _arrive(self, passed: HoldsPassed) -> None:
        arrival = self._arrival(passed.request_id)
        if arrival.done():
            self._link.release_passed(passed)
            return
        arrival.set_result(passed)
        asyncio.get_running_loop().call_later(self._max_age_s, self._drop, passed.request_id, arrival)

    def _drop(self, request_id: str, arrival: asyncio.Future[HoldsPassed]) -> None:
        """Release the holds, if they have arrived, or end the wait for them; no effect if they have been taken."""
        if self._arrivals.get(request_id) is arrival:
            del self._arrivals[request_id]
            if not arrival.cancel():
                self._link.release_passed(arrival.result())

    def _arena_changed(self, arena: ArenaOffer | None) -> None:
        """The holds have ended with their arena."""
        if arena is None:
            for request_id, arrival in list(self._arrivals.items()):
                self._drop(request_id, arrival)


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
        reply = await self._link.call(lambda call_id: GrantPulls(call_id, list(ranges)), arena=ranges[0].arena)
        return cast("PullsGranted", reply).entries


class StoreEntries:
    """Entries of the arena that gateways refer to (implements `worker.media.HostArena`). They are retained for
    `retention_s` after their last use (`HoldCache`); passed holds are waited for, and kept for their requests,
    at most `max_wait_s` and `max_age_s`."""

    def __init__(
        self,
        link: StoreLink,
        *,
        retention_s: float = 0.0,
        max_wait_s: float = MAX_WAIT_S,
        max_age_s: float = MAX_AGE_S,
    ) -> None:
        self._link = link
        self._passed = PassedHolds(link, max_wait_s=max_wait_s, max_age_s=max_age_s)
        self._holds: HoldCache[ArenaRange, None] = HoldCache(link, retention_s=retention_s)
        #: Copies of entries of other hosts, by the original's range.
        self._copies: HoldCache[ArenaRange, LocalCopy] = HoldCache(link, retention_s=retention_s)
        #: Embeddings that are cached in the store, by key.
        self._embeddings: HoldCache[str, TensorDescriptor] = HoldCache(link, retention_s=retention_s)
        #: Holds that were passed with requests, by request and key.
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
                reply = await self._link.call(lambda call_id: HoldEntries(call_id, missing), arena=missing[0].arena)
                hold_ids = cast("EntriesHeld", reply).hold_ids
                for entry, hold_id in zip(missing, hold_ids, strict=True):
                    holds.callback(self._holds.add(entry, hold_id, entry, None).release)
            return EntriesHold(holds.pop_all())

    async def pull(self, entries: Sequence[RemoteEntry]) -> tuple[EntriesHold, list[LocalCopy]]:
        with ExitStack() as holds:
            copies: dict[ArenaRange, LocalCopy] = {}
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
            reply = await self._link.call(
                lambda call_id: FindEmbedding(call_id, *wanted, wait_ms), arena=self._link.arena or "", waits=False
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


class EntriesHold:
    """The holds of one request (`types.feature.Hold`)."""

    def __init__(self, holds: ExitStack) -> None:
        self._holds: ExitStack | None = holds

    def release(self) -> None:
        holds, self._holds = self._holds, None
        if holds is None:
            raise RuntimeError("the hold was already released")
        holds.close()
