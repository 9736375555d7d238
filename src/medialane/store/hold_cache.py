"""Holds that a client retains for a moment after their last use, so that using the item again needs no message.

The store frees nothing that is held, so that retained holds take memory from new items. They end

* `retention_s` after their last use,
* the least recently used first, while they exceed an eighth of the arena,
* at once if half of the arena is held, by any clients, and
* all of them when the store asks for it (`Reclaim`), before it refuses an item for lack of memory.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Hashable
from typing import Generic, TypeVar

from medialane.store.link import StoreLink
from medialane.types.tensor import ArenaOffer, ArenaRange

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


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
    """One user's hold on one item (`core.feature.Hold`). `is_shared` is whether this client held the item already."""

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
