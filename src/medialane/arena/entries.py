"""The entry table: state and eviction of the arena's entries. It accesses no memory, clock or event loop.

Entries are of four *kinds*: encoded bytes as received, decoded media, processed features, and embeddings (outputs of
models' encoders). One LRU order covers all of them. Each kind has a share of the arena, which it may exceed while there
is free space. If there is none, entries of kinds over their share (after adding the new entry) are evicted first.

    reserve -> WRITING --publish--> PUBLISHED  cached under a key; pinned, or idle and evictable in order of use
                  |  `---keep-----> PUBLISHED  without a key; freed when its last pin ends
                  |                    |
                  `---abandon----------+-----> FREED

A writing or pinned entry is *held* and cannot be evicted. Every entry is freed once, by `_free`, which calls `on_free`
(it clears the generation in the header) before the allocator may reuse the bytes.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from heapq import merge
from itertools import count, islice
from types import MappingProxyType
from typing import Generic, TypeVar, get_args

from medialane.arena.allocator import Allocator
from medialane.arena.eviction import Span, choose_span
from medialane.core.errors import ArenaFull
from medialane.core.remote_entry import EntryKind
from medialane.core.retry_after import Places
from medialane.core.stats import ArenaStats
from medialane.core.tensor import ArenaRange, align

V = TypeVar("V")

KINDS: tuple[EntryKind, ...] = get_args(EntryKind)

#: Limit of candidates among entries of kinds over their share: if these are too scattered for one hole, trying all of
#: them (20 000 small images) would block the event loop for a tenth of a second.
_MAX_SEEDS = 64


class EntryState(Enum):
    WRITING = "writing"
    PUBLISHED = "published"
    FREED = "freed"


@dataclass(slots=True, eq=False)
class Entry:
    """One entry, modified only by its table."""

    range: ArenaRange
    kind: EntryKind = "processed"
    state: EntryState = EntryState.WRITING
    key: str | None = None
    pins: int = 0
    last_use: int = 0
    is_demoted: bool = False


class EntryTable(Generic[V]):
    """Entries of one arena in [start, start + size_bytes) of its file; V is the type of values of cached entries.

    `shares` are fractions of `size_bytes` by kind; the default is 1. `usable_bytes` is the size until `extend`.
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
    ) -> None:
        self._arena = arena
        self._start = start
        self._allocator = Allocator(size_bytes, usable_bytes=usable_bytes)
        self._on_free = on_free
        self._generations = count(1)
        self._uses = count(1)
        self._demotions = count(-1, -1)  # before all uses
        self._held: dict[int, Entry] = {}
        self._places = Places()  # of pinned entries
        self._by_key: dict[tuple[EntryKind, str], tuple[Entry, V]] = {}
        #: By offset, least recently used first.
        self._idle: dict[EntryKind, OrderedDict[int, Entry]] = {kind: OrderedDict() for kind in KINDS}
        self._kind_bytes = dict.fromkeys(KINDS, 0)
        self._max_bytes = {kind: shares.get(kind, 1.0) * size_bytes for kind in KINDS}
        self._writing_bytes = self._pinned_bytes = 0
        self._num_reservations = self._num_leases = 0
        self._num_hits = self._num_misses = self._num_evictions = 0
        #: Whether entries are evicted that nobody holds, as far as is known.
        self.may_evict = True

    @property
    def is_growing(self) -> bool:
        return self._allocator.is_growing

    def extend(self, usable_bytes: int) -> None:
        """Use the first `usable_bytes` from now on."""
        self._allocator.extend(usable_bytes)

    def reserve(self, nbytes: int, kind: EntryKind = "processed") -> Entry:
        """Reserve a range for an entry of `kind`, evicting idle entries if necessary.

        Raises ArenaFull if held entries leave no space; nothing was evicted then.
        """
        offset = self._allocator.allocate(nbytes)
        if offset is None:
            offset = self._evict_for(nbytes, kind)
        range_ = ArenaRange(self._arena, self._start + offset, nbytes, next(self._generations))
        entry = Entry(range_, kind)
        self._held[range_.generation] = entry
        self._num_reservations += 1
        self._writing_bytes += align(nbytes)
        self._kind_bytes[kind] += align(nbytes)
        return entry

    def adopt(
        self, known: Iterable[tuple[ArenaRange, EntryKind, tuple[str, V] | None]], generation: int
    ) -> list[Entry]:
        """Fill an empty table with the entries of an earlier owner, cached ones with their key and value, others as
        being written, which are returned. Generations up to `generation` have been used.

        Raises ValueError if they are not disjoint, or outside of the arena; the table cannot be used then.
        """
        writing, gaps, end = [], [], 0
        for range_, kind, cached in sorted(known, key=lambda one: one[0].offset):
            offset = range_.offset - self._start
            if offset > end:
                gaps.append(self._allocator.allocate(offset - end))
            if offset < end or self._allocator.allocate(range_.nbytes) != offset:
                raise ValueError(f"the entry {range_} overlaps another one, or the end of the arena")
            end = offset + align(range_.nbytes)
            entry = Entry(range_, kind)
            self._held[range_.generation] = entry
            self._num_reservations += 1
            self._writing_bytes += align(range_.nbytes)
            self._kind_bytes[kind] += align(range_.nbytes)
            if cached is None:
                writing.append(entry)
            elif (kind, cached[0]) in self._by_key:
                raise ValueError(f"there are two entries of {kind} {cached[0]}")
            else:
                self.unpin(self.publish(entry, *cached)[0])
        for gap in gaps:
            if gap is not None:
                self._allocator.free(gap)
        self._generations = count(generation + 1)
        return writing

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
            self._allocator.shrink(self._offset(entry), nbytes)
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
            entry.state, entry.key = EntryState.PUBLISHED, key
            found = self._by_key[entry.kind, key] = (entry, value)
        self.pin(found[0])
        return found

    def keep(self, entry: Entry) -> None:
        """Pin `entry` without caching it: it is freed when its last pin ends."""
        self._end_writing(entry)
        entry.state = EntryState.PUBLISHED
        self.pin(entry)

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
        return (kind, key) in self._by_key

    def pin_held(self, range_: ArenaRange) -> Entry | None:
        """Add a pin to the published entry at `range_`, which must already have one; None otherwise."""
        entry = self.held(range_)
        if entry is not None:
            self.pin(entry)
        return entry

    def pin_cached(self, range_: ArenaRange, key: str, kind: EntryKind) -> tuple[Entry, V] | None:
        """Pin the entry of `key` if it is the one at `range_`; None otherwise. Not counted as a hit or a miss."""
        found = self._by_key.get((kind, key))
        if found is None or found[0].range != range_:
            return None
        self.pin(found[0])
        return found

    def pin_range(self, range_: ArenaRange) -> tuple[Entry, V] | None:
        """Pin the cached entry at `range_`, held or not; None if there is none."""
        idle = (self._idle[kind].get(range_.offset - self._start) for kind in KINDS)
        entry = self.held(range_) or next((entry for entry in idle if entry is not None), None)
        if entry is None or entry.range != range_ or entry.key is None:
            return None
        self.pin(entry)
        return self._by_key[entry.kind, entry.key]

    def held(self, range_: ArenaRange) -> Entry | None:
        """Return the published entry at `range_` if it is pinned."""
        entry = self._held.get(range_.generation)
        is_it = entry is not None and entry.range == range_ and entry.state is EntryState.PUBLISHED
        return entry if is_it else None

    def pin(self, entry: Entry) -> None:
        """Add a pin to a published entry. Raises RuntimeError for other entries."""
        if entry.state is not EntryState.PUBLISHED:
            raise RuntimeError(f"entry {entry.range} is {entry.state.value}")
        if entry.pins == 0:
            self._held[entry.range.generation] = entry
            self._places.take(entry.range.generation)
            self._pinned_bytes += align(entry.range.nbytes)
            self._idle[entry.kind].pop(self._offset(entry), None)
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
        self._places.free(entry.range.generation)
        self._pinned_bytes -= align(entry.range.nbytes)
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
            num_entries=len(self._held) - self._num_reservations + sum(map(len, self._idle.values())),
            num_leases=self._num_leases,
            num_hits=self._num_hits,
            num_misses=self._num_misses,
            num_evictions=self._num_evictions,
        )

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
        if not self.may_evict:
            raise ArenaFull("media of an earlier store are still in use", retry_after_s=1)
        span = self._choose(need, self._over_share(kind, need), _MAX_SEEDS) or self._choose(need, KINDS, None)
        if span is None:
            message = "no memory for media is free at the moment"
            raise ArenaFull(message, retry_after_s=self._places.retry_after_s)
        for offset in span.offsets:
            self._evict(next(self._idle[k][offset] for k in KINDS if offset in self._idle[k]))
        found = self._allocator.allocate(nbytes)
        if found is None:
            raise AssertionError(f"evicting {len(span.offsets)} neighbours left no hole of {nbytes} bytes")
        return found

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

    def _check_writing(self, entry: Entry) -> None:
        if self._held.get(entry.range.generation) is not entry or entry.state is not EntryState.WRITING:
            raise RuntimeError(f"entry {entry.range} is not being written here")

    def _end_writing(self, entry: Entry) -> None:
        self._check_writing(entry)
        del self._held[entry.range.generation]
        self._num_reservations -= 1
        self._writing_bytes -= align(entry.range.nbytes)

    def _free(self, entry: Entry) -> None:
        entry.state = EntryState.FREED
        if entry.key is not None:
            del self._by_key[entry.kind, entry.key]
        self._kind_bytes[entry.kind] -= align(entry.range.nbytes)
        self._on_free(entry.range)
        self._allocator.free(self._offset(entry))
