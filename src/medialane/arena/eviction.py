"""Which cached entries make room for a new one: least recently used first, as far as the map of the arena allows.

A new entry needs one hole, and what was used long ago lies scattered. Evicting strictly in order of use until a hole
happens to be large enough empties three quarters of a 2 GiB arena for one 150 MB video among 5 MB images (simulated).
So a *span* is grown around each of the few entries that were used longest ago: the entry, the holes beside it, and the
neighbour used longer ago of the two, until the span is large enough. Of these spans the one is evicted whose most
recent use is the oldest; of two such, the one of fewer entries. Among entries of one size that is plain LRU; on mixed
sizes (0.2 to 150 MB, Zipf requests) it raised the simulated hit rate from 0.51 to 0.56, and costs some 15 steps
instead of a walk over the arena.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

from medialane.arena.allocator import Allocator

#: Spans to compare. One gets half of what eight get; 32 gain a little more for four times the work.
NUM_SPANS = 8

#: The time of an evictable piece's last use by its offset; None for a piece that must stay.
LastUse = Callable[[int], int | None]


class Span(NamedTuple):
    """Pieces to free for one hole, and how recently the one used last was used."""

    last_use: int
    offsets: frozenset[int]


def choose_span(allocator: Allocator, need: int, oldest_first: Iterable[int], last_use: LastUse) -> Span | None:
    """Return the pieces to free for a hole of `need` bytes.

    `oldest_first` are the offsets of all evictable pieces. None means that freeing all of them would not do: a gap
    between two pieces that must stay is found from any piece inside it, and each is tried.
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
