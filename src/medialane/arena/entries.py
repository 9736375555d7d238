"""The entry table: state and eviction of the arena's entries. It accesses no memory, clock or event loop.

Entries are of four *kinds*: encoded bytes as received, decoded media, processed features, and embeddings (outputs of
models' encoders). One LRU order covers all of them. Each kind has a share of the arena, which it may exceed while there
is free space. If there is none, entries of kinds over their share (after adding the new entry) are evicted first.

    reserve -> WRITING --publish--> PUBLISHED  cached under a key; pinned, or idle and evictable in order of use
                  |                    |
                  `---abandon----------+-----> FREED

An entry of an earlier owner may have no key, if its record did not fit: it is freed when its last pin ends.
A writing or pinned entry is *held* and cannot be evicted. Every entry is freed once, by `_free`, which calls `on_free`
(it clears the generation in the header) before the allocator may reuse the bytes.
"""

from __future__ import annotations

import sys
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from heapq import merge
from itertools import count, islice
from types import MappingProxyType
from typing import Generic, TypeVar, get_args

from medialane.arena.allocator import Allocator, Span, choose_span
from medialane.runtime.tasks import TAKER, call_site
from medialane.types.errors import ArenaFull, Permits
from medialane.types.feature import EntryKind
from medialane.types.stats import ArenaStats, HoldRecord
from medialane.types.tensor import ArenaRange, align

V = TypeVar("V")

KINDS: tuple[EntryKind, ...] = get_args(EntryKind)

#: Limit of candidates among entries of kinds over their share: if these are too scattered for one hole, trying all of
#: them (20 000 small images) would block the event loop for a tenth of a second.
_MAX_SEEDS = 64

_NOT_FREE = "no memory for media is free at the moment"

#: Frames of the handle's constructor and of `add`.
_OWN_FRAMES = 2


class State(IntEnum):
    """Of an entry, in the table and in the index of the file."""

    FREED = 0
    WRITING = 1
    #: In the index, with the record of what it will be.
    NOTED = 2
    PUBLISHED = 3


@dataclass(slots=True, eq=False)
class Entry:
    """One entry, modified only by its table. `size` bytes are allocated for it."""

    range: ArenaRange
    size: int
    kind: EntryKind = "processed"
    state: State = State.WRITING
    key: str | None = None
    pins: int = 0
    last_use: int = 0
    is_demoted: bool = False
    #: Slot of the client that writes it, for the index.
    writer: int = 0


class EntryTable(Generic[V]):
    """Entries of one arena in [start, start + size_bytes) of its file; V is the type of values of cached entries.

    `shares` are fractions of `size_bytes` by kind; the default is 1. `usable_bytes` is the size until `extend`. There
    are at most `max_entries`, held ones included.
    """

    def __init__(
        self,
        arena: str,
        start: int,
        size_bytes: int,
        on_free: Callable[[ArenaRange], None],
        *,
        shares: Mapping[EntryKind, float] = MappingProxyType({}),
        usable_bytes: int | None = None,
        max_entries: int = sys.maxsize,
    ) -> None:
        self._max_entries = max_entries
        self._arena = arena
        self._start = start
        self._allocator = Allocator(size_bytes, usable_bytes=usable_bytes)
        self._on_free = on_free
        self._generations = count(1)
        #: Entries without a key that were published by an earlier owner, until they are pinned.
        self._unclaimed: dict[int, Entry] = {}
        #: Whether entries without pins may be evicted, and any be reserved.
        self.may_evict = self.may_reserve = True
        self._uses = count(1)
        self._demotions = count(-1, -1)  # before all uses
        self._held: dict[int, Entry] = {}
        self._permits = Permits()  # of pinned entries
        self._by_key: dict[tuple[EntryKind, str], tuple[Entry, V]] = {}
        #: By offset, least recently used first.
        self._idle: dict[EntryKind, OrderedDict[int, Entry]] = {kind: OrderedDict() for kind in KINDS}
        self._kind_bytes = dict.fromkeys(KINDS, 0)
        self._max_bytes = {kind: shares.get(kind, 1.0) * size_bytes for kind in KINDS}
        self._writing_bytes = self._pinned_bytes = 0
        self._num_reservations = self._num_pins = 0
        self._num_hits = self._num_misses = self._num_evictions = 0
        #: Set to record who takes pins and reservations.
        self.log: HoldLog | None = None

    @property
    def is_growing(self) -> bool:
        return self._allocator.is_growing

    def extend(self, usable_bytes: int) -> None:
        """Use the first `usable_bytes` from now on."""
        self._allocator.extend(usable_bytes)

    def reserve(self, nbytes: int, kind: EntryKind = "processed", *, more_bytes: int = 0) -> Entry:
        """Reserve a range for an entry of `kind`, and `more_bytes` behind it, evicting idle entries if necessary.

        Raises ArenaFull if held entries leave no space, or are as many as there may be; nothing was evicted then.
        """
        if not self.may_reserve:
            raise ArenaFull(_NOT_FREE, retry_after_s=self._permits.retry_after_s)
        size = align(nbytes) + align(more_bytes)
        offset = self._allocator.allocate(size)
        if offset is None:
            offset = self._evict_for(size, kind)
        elif self._num_entries >= self._max_entries and not self._evict_oldest():
            self._allocator.free(offset)
            raise ArenaFull(_NOT_FREE, retry_after_s=self._permits.retry_after_s)
        range_ = ArenaRange(self._arena, self._start + offset, nbytes, next(self._generations))
        entry = Entry(range_, size, kind)
        self._hold_writing(entry)
        return entry

    def restore(self, ceiling: int, writing: Sequence[Entry], published: Sequence[tuple[Entry, str, V | None]]) -> None:
        """Have the entries of an earlier owner: entries being written, and published entries, the least
        recently used first; a published entry without a value has no key. Generations are above `ceiling`.

        Raises ValueError if they do not fit.
        """
        self._generations = count(ceiling + 1)
        entries = [*writing, *(entry for entry, _, _ in published)]
        for entry in sorted(entries, key=self._offset):
            self._allocator.allocate_at(self._offset(entry), entry.size)
        for entry in writing:
            self._hold_writing(entry)
        for entry, key, value in published:
            entry.state = State.PUBLISHED
            self._kind_bytes[entry.kind] += entry.size
            if value is None:
                self._unclaimed[entry.range.generation] = entry
            elif (entry.kind, key) in self._by_key:
                raise ValueError("two entries have one key")
            else:
                entry.key = key
                self._by_key[entry.kind, key] = (entry, value)
                self._idle_since_now(entry)

    def free_unclaimed(self) -> None:
        """Free entries of an earlier owner that have no key and no pins."""
        while self._unclaimed:
            self._free(self._unclaimed.popitem()[1])

    def trim(self, entry: Entry, nbytes: int) -> None:
        """Shrink an entry that is being written to `nbytes`. Its range changes, but not its generation.

        Raises ValueError if it is shorter.
        """
        self._check_writing(entry)
        old = entry.range
        if not 0 < nbytes <= old.nbytes:
            raise ValueError(f"entry {old} cannot be trimmed to {nbytes} bytes")
        freed = align(old.nbytes) - align(nbytes)
        if freed:
            entry.size -= freed
            self._allocator.shrink(self._offset(entry), entry.size)
        entry.range = ArenaRange(old.arena, old.offset, nbytes, old.generation)
        self._writing_bytes -= freed
        self._kind_bytes[entry.kind] -= freed

    def abandon(self, entry: Entry) -> None:
        """Free an entry that is being written. Its writer must have stopped."""
        self._end_writing(entry)
        self._free(entry)

    def publish(self, entry: Entry, key: str, value: V) -> tuple[Entry, V]:
        """Cache `entry` under `key` and its kind, and pin it.

        If the key exists, free `entry` and pin the existing one instead.
        """
        self._end_writing(entry)
        if (found := self._by_key.get((entry.kind, key))) is not None:
            self._free(entry)
        else:
            entry.state, entry.key = State.PUBLISHED, key
            found = self._by_key[entry.kind, key] = (entry, value)
        self.pin(found[0])
        return found

    def lookup(self, key: str, kind: EntryKind = "processed") -> tuple[Entry, V] | None:
        """Pin the entry of `key` if it exists; counts as a use, and as a hit or a miss."""
        found = self._by_key.get((kind, key))
        if found is None:
            self._num_misses += 1
            return None
        self._num_hits += 1
        found[0].is_demoted = False
        self.pin(found[0])
        return found

    def contains(self, key: str, kind: EntryKind = "processed") -> bool:
        """Return whether `key` is cached, without counting as a use of the entry."""
        return (kind, key) in self._by_key

    def pin_held(self, range_: ArenaRange) -> tuple[Entry, V | None] | None:
        """As `pin_range`, for an entry that must already have a pin; None otherwise."""
        return None if self.held(range_) is None else self.pin_range(range_)

    def pin_range(self, range_: ArenaRange) -> tuple[Entry, V | None] | None:
        """Pin the published entry at `range_`, held or not, and return it with its value if it is cached; None if there
        is none. Not counted as a hit or a miss."""
        idle = (self._idle[kind].get(range_.offset - self._start) for kind in KINDS)
        others = (*idle, self._unclaimed.get(range_.generation))
        entry = self.held(range_) or next((entry for entry in others if entry is not None), None)
        if entry is None or entry.range != range_:
            return None
        self.pin(entry)
        return (entry, None) if entry.key is None else self._by_key[entry.kind, entry.key]

    def held(self, range_: ArenaRange) -> Entry | None:
        """Return the published entry at `range_` if it is pinned."""
        entry = self._held.get(range_.generation)
        is_it = entry is not None and entry.range == range_ and entry.state is State.PUBLISHED
        return entry if is_it else None

    def pin(self, entry: Entry) -> None:
        """Add a pin to a published entry. Raises RuntimeError for other entries."""
        if entry.state is not State.PUBLISHED:
            raise RuntimeError(f"entry {entry.range} is {entry.state.name.lower()}")
        if entry.pins == 0:
            self._held[entry.range.generation] = entry
            self._permits.take(entry.range.generation)
            self._pinned_bytes += entry.size
            self._idle[entry.kind].pop(self._offset(entry), None)
            self._unclaimed.pop(entry.range.generation, None)
        entry.pins += 1
        self._num_pins += 1

    def unpin(self, entry: Entry) -> None:
        """End one pin. Raises RuntimeError if there is none."""
        if entry.pins == 0:
            raise RuntimeError(f"entry {entry.range} is not pinned")
        entry.pins -= 1
        self._num_pins -= 1
        if entry.pins:
            return
        del self._held[entry.range.generation]
        self._permits.free(entry.range.generation)
        self._pinned_bytes -= entry.size
        if entry.key is None:
            self._free(entry)
        else:
            self._idle_since_now(entry)

    def demote(self, key: str, kind: EntryKind = "processed") -> None:
        """Make the entry of `key`, if there is one, the least recently used one; if it is pinned, when its pins end,
        unless it is looked up before."""
        if (found := self._by_key.get((kind, key))) is not None:
            entry, _ = found
            entry.is_demoted = True
            if not entry.pins:
                self._idle_since_now(entry)

    def evict(self, key: str, kind: EntryKind = "processed") -> bool:
        """Free the entry of `key`. Return False if there is none, or it is pinned."""
        found = self._by_key.get((kind, key))
        if found is None or found[0].pins or not self.may_evict:
            return False
        self._evict(found[0])
        return True

    def clear(self) -> int:
        """Free every entry that is not held; return their number."""
        if not self.may_evict:
            return 0
        idle = [entry for kind in KINDS for entry in self._idle[kind].values()]
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
            encoded_bytes=self._kind_bytes["encoded"],
            decoded_bytes=self._kind_bytes["decoded"],
            processed_bytes=self._kind_bytes["processed"],
            embedded_bytes=self._kind_bytes["embedded"],
            num_reservations=self._num_reservations,
            num_entries=self._num_entries - self._num_reservations,
            num_leases=self._num_pins,
            num_hits=self._num_hits,
            num_misses=self._num_misses,
            num_evictions=self._num_evictions,
        )

    @property
    def _num_entries(self) -> int:
        return len(self._held) + sum(map(len, self._idle.values())) + len(self._unclaimed)

    def _idle_since_now(self, entry: Entry) -> None:
        """Put an entry without pins at the end of the LRU order, or at its start if it is demoted."""
        entry.last_use = next(self._demotions if entry.is_demoted else self._uses)
        idle, offset = self._idle[entry.kind], self._offset(entry)
        idle[offset] = entry
        idle.move_to_end(offset, last=not entry.is_demoted)

    def _evict_for(self, nbytes: int, kind: EntryKind) -> int:
        need = align(nbytes)
        if need > self._allocator.size_bytes:
            raise ArenaFull("the media need more memory than the server has for media", retry_after_s=None)
        span = None
        if self.may_evict:
            span = self._choose(need, self._over_share(kind, need), _MAX_SEEDS) or self._choose(need, KINDS, None)
        if span is None:
            raise ArenaFull(_NOT_FREE, retry_after_s=self._permits.retry_after_s)
        for offset in span.offsets:
            self._evict(next(self._idle[k][offset] for k in KINDS if offset in self._idle[k]))
        found = self._allocator.allocate(nbytes)
        if found is None:
            raise AssertionError(f"evicting {len(span.offsets)} neighbours left no hole of {nbytes} bytes")
        return found

    def _evict_oldest(self) -> bool:
        """Free the least recently used entry. Return False if none may be evicted."""
        first = (next(iter(idle.values())) for idle in self._idle.values() if idle and self.may_evict)
        oldest = min(first, key=lambda entry: entry.last_use, default=None)
        if oldest is not None:
            self._evict(oldest)
        return oldest is not None

    def _over_share(self, kind: EntryKind, need: int) -> list[EntryKind]:
        """Return the kinds that exceed their share if `kind` gets `need` more bytes."""
        num_bytes = {k: self._kind_bytes[k] + (need if k == kind else 0) for k in KINDS}
        return [k for k in KINDS if num_bytes[k] > self._max_bytes[k]]

    def _choose(self, need: int, kinds: Collection[EntryKind], max_seeds: int | None) -> Span | None:
        """Choose what to evict, among entries of `kinds` only."""

        def last_use(offset: int) -> int | None:
            found = (self._idle[kind].get(offset) for kind in kinds)
            return next((entry.last_use for entry in found if entry is not None), None)

        oldest_first = merge(*(self._idle[kind].values() for kind in kinds), key=lambda entry: entry.last_use)
        seeds = (self._offset(entry) for entry in islice(oldest_first, max_seeds))
        return choose_span(self._allocator, need, seeds, last_use)

    def _offset(self, entry: Entry) -> int:
        return entry.range.offset - self._start

    def _evict(self, entry: Entry) -> None:
        self._num_evictions += 1
        del self._idle[entry.kind][self._offset(entry)]
        self._free(entry)

    def _hold_writing(self, entry: Entry) -> None:
        self._held[entry.range.generation] = entry
        self._num_reservations += 1
        self._writing_bytes += entry.size
        self._kind_bytes[entry.kind] += entry.size

    def _check_writing(self, entry: Entry) -> None:
        if self._held.get(entry.range.generation) is not entry or entry.state is not State.WRITING:
            raise RuntimeError(f"entry {entry.range} is not being written here")

    def _end_writing(self, entry: Entry) -> None:
        self._check_writing(entry)
        del self._held[entry.range.generation]
        self._num_reservations -= 1
        self._writing_bytes -= entry.size

    def _free(self, entry: Entry) -> None:
        entry.state = State.FREED
        if entry.key is not None:
            del self._by_key[entry.kind, entry.key]
        self._kind_bytes[entry.kind] -= entry.size
        self._on_free(entry.range)
        self._allocator.free(self._offset(entry))


class HoldLog:
    """One per arena, for pins and reservations from their construction to their end."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._taken: dict[int, tuple[Entry, float, str, str]] = {}

    def add(self, handle: object, entry: Entry) -> None:
        self._taken[id(handle)] = entry, self._clock(), TAKER.get(), call_site(_OWN_FRAMES)

    def remove(self, handle: object) -> None:
        self._taken.pop(id(handle), None)

    def records(self, number: int) -> tuple[HoldRecord, ...]:
        """Return the oldest ones."""
        now = self._clock()
        return tuple(
            HoldRecord(
                offset=entry.range.offset,
                size_bytes=entry.size,
                kind=entry.kind,
                key=entry.key or "",
                state=entry.state.name.lower(),
                taker=taker,
                call_site=at,
                age_s=now - since,
            )
            for entry, since, taker, at in islice(self._taken.values(), number)
        )
