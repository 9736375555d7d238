"""The entry table: who holds which range of the arena, and what is evicted. Pure: no memory, no clock, no loop.

    reserve -> WRITING --publish--> PUBLISHED  cached under a key; pinned, or idle and evictable in order of use
                  |  `---keep-----> PUBLISHED  without a key; freed when its last pin ends
                  |                    |
                  `---abandon----------+-----> FREED

A writing or pinned entry is *held*: its bytes belong to somebody and nothing here can take them. Every entry is freed
once, by `_free`, which tells `on_free` (it clears the generation word) before the allocator gets the bytes back.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from itertools import count
from typing import Generic, TypeVar

import msgspec

from medialane.arena.allocator import Allocator
from medialane.arena.eviction import choose_span
from medialane.core.errors import ArenaFull
from medialane.core.tensor import ArenaRange, align

V = TypeVar("V")


class EntryState(Enum):
    WRITING = "writing"
    PUBLISHED = "published"
    FREED = "freed"


@dataclass(slots=True, eq=False)
class Entry:
    """One entry. Only its table changes it."""

    range: ArenaRange
    state: EntryState = EntryState.WRITING
    key: str | None = None
    pins: int = 0
    last_use: int = 0


class ArenaStats(msgspec.Struct, frozen=True):
    """What an arena holds now, and how often it was asked. Bytes are allocated bytes: headers and padding counted.

    free + writing + published = size; pinned is the part of published that leases hold.
    """

    size_bytes: int
    free_bytes: int
    largest_hole_bytes: int
    writing_bytes: int
    published_bytes: int
    pinned_bytes: int
    num_reservations: int
    num_entries: int
    num_leases: int
    num_hits: int
    num_misses: int
    num_evictions: int


class EntryTable(Generic[V]):
    """Entries of one arena in [start, start + size_bytes) of its file; V is what keyed entries are described by."""

    def __init__(self, arena: str, start: int, size_bytes: int, on_free: Callable[[ArenaRange], None]) -> None:
        self._arena = arena
        self._start = start
        self._allocator = Allocator(size_bytes)
        self._on_free = on_free
        self._generations = count(1)
        self._uses = count(1)
        self._held: dict[int, Entry] = {}
        self._by_key: dict[str, tuple[Entry, V]] = {}
        self._idle: dict[int, Entry] = {}  # by offset, least recently used first
        self._writing_bytes = self._pinned_bytes = 0
        self._num_reservations = self._num_leases = 0
        self._num_hits = self._num_misses = self._num_evictions = 0

    def reserve(self, nbytes: int) -> Entry:
        """Take a range for writing, evicting idle entries if need be.

        Raises ArenaFull when held entries leave no room; nothing was evicted then.
        """
        offset = self._allocator.allocate(nbytes)
        if offset is None:
            offset = self._make_room(nbytes)
        range_ = ArenaRange(self._arena, self._start + offset, nbytes, next(self._generations))
        entry = Entry(range_)
        self._held[range_.generation] = entry
        self._num_reservations += 1
        self._writing_bytes += align(nbytes)
        return entry

    def abandon(self, entry: Entry) -> None:
        """Free an entry that is still being written. Its writer must be gone."""
        self._end_writing(entry)
        self._free(entry)

    def publish(self, entry: Entry, key: str, value: V) -> tuple[Entry, V]:
        """Cache `entry` under `key` and pin it. If the key is taken, free `entry` and pin the older one instead."""
        self._end_writing(entry)
        if (found := self._by_key.get(key)) is not None:
            self._free(entry)
        else:
            entry.state, entry.key = EntryState.PUBLISHED, key
            found = self._by_key[key] = (entry, value)
        self.pin(found[0])
        return found

    def keep(self, entry: Entry) -> None:
        """Pin `entry` without caching it: it is freed when its last pin ends."""
        self._end_writing(entry)
        entry.state = EntryState.PUBLISHED
        self.pin(entry)

    def lookup(self, key: str) -> tuple[Entry, V] | None:
        """Pin the entry of `key` if there is one; counts as its use, and as a hit or a miss."""
        found = self._by_key.get(key)
        if found is None:
            self._num_misses += 1
            return None
        self._num_hits += 1
        self.pin(found[0])
        return found

    def contains(self, key: str) -> bool:
        return key in self._by_key

    def pin(self, entry: Entry) -> None:
        """Add a pin to a published entry. Raises RuntimeError for any other."""
        if entry.state is not EntryState.PUBLISHED:
            raise RuntimeError(f"entry {entry.range} is {entry.state.value}")
        if entry.pins == 0:
            self._held[entry.range.generation] = entry
            self._pinned_bytes += align(entry.range.nbytes)
            self._idle.pop(self._offset(entry), None)
        entry.pins += 1
        self._num_leases += 1

    def unpin(self, entry: Entry) -> None:
        """End one pin. Raises RuntimeError if there is none."""
        if entry.pins == 0:
            raise RuntimeError(f"entry {entry.range} is not pinned")
        entry.pins -= 1
        self._num_leases -= 1
        if entry.pins:
            return
        del self._held[entry.range.generation]
        self._pinned_bytes -= align(entry.range.nbytes)
        if entry.key is None:
            self._free(entry)
        else:
            entry.last_use = next(self._uses)
            self._idle[self._offset(entry)] = entry

    def evict(self, key: str) -> bool:
        """Free the entry of `key`. False if there is none, or it is pinned."""
        found = self._by_key.get(key)
        if found is None or found[0].pins:
            return False
        self._evict(found[0])
        return True

    def clear(self) -> int:
        """Free every entry that nobody holds; return their number."""
        idle = list(self._idle.values())
        for entry in idle:
            self._evict(entry)
        return len(idle)

    def stats(self) -> ArenaStats:
        return ArenaStats(
            size_bytes=self._allocator.size_bytes,
            free_bytes=self._allocator.free_bytes,
            largest_hole_bytes=self._allocator.largest_hole_bytes,
            writing_bytes=self._writing_bytes,
            published_bytes=self._allocator.used_bytes - self._writing_bytes,
            pinned_bytes=self._pinned_bytes,
            num_reservations=self._num_reservations,
            num_entries=len(self._held) - self._num_reservations + len(self._idle),
            num_leases=self._num_leases,
            num_hits=self._num_hits,
            num_misses=self._num_misses,
            num_evictions=self._num_evictions,
        )

    def _make_room(self, nbytes: int) -> int:
        need = align(nbytes)
        if need > self._allocator.size_bytes:
            raise ArenaFull("the media need more memory than the server has set aside", retry_after_s=None)
        span = choose_span(self._allocator, need, self._idle, self._last_use)
        if span is None:
            raise ArenaFull("no memory is free for media at the moment")
        for offset in span.offsets:
            self._evict(self._idle[offset])
        found = self._allocator.allocate(nbytes)
        if found is None:
            raise AssertionError(f"evicting {len(span.offsets)} neighbours left no hole of {nbytes} bytes")
        return found

    def _last_use(self, offset: int) -> int | None:
        entry = self._idle.get(offset)
        return None if entry is None else entry.last_use

    def _offset(self, entry: Entry) -> int:
        return entry.range.offset - self._start

    def _evict(self, entry: Entry) -> None:
        self._num_evictions += 1
        del self._idle[self._offset(entry)]
        self._free(entry)

    def _end_writing(self, entry: Entry) -> None:
        if self._held.get(entry.range.generation) is not entry or entry.state is not EntryState.WRITING:
            raise RuntimeError(f"entry {entry.range} is not being written here")
        del self._held[entry.range.generation]
        self._num_reservations -= 1
        self._writing_bytes -= align(entry.range.nbytes)

    def _free(self, entry: Entry) -> None:
        entry.state = EntryState.FREED
        if entry.key is not None:
            del self._by_key[entry.key]
        self._on_free(entry.range)
        self._allocator.free(self._offset(entry))
