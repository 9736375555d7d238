"""Longest held prefix of one prompt, for all slots at once.

A block's id stands for the whole prompt up to its end, and engines free a prompt's blocks from its tail. So the slots
that hold block i hold those before it, too: along a prompt the sets of holders nest, and where they shrink is found by
probing, not by walking: lengths 1, 4, 16, ... until nobody is left, then bisection wherever the set is smaller at an
interval's end than at its start. That is some tens of look-ups for thousands of blocks and of slots.

Sets of slots are int bit masks (1 << slot). Slots that differ in thousands of lengths would take as many probes: the
longest prefixes are found first, and when the probes are used up the rest get a lower bound. A thousand slots' mask is
compared by identity where it can be: an index lets blocks with the same holders share one object.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

#: Prefix lengths in blocks; element i is slot i's.
Prefixes = NDArray[np.int32]
#: A length in blocks, and the slots that hold at least so much.
Level = tuple[int, int]
#: Two blocks of the prompt, between which the set of holders shrinks: place of the one (-1: before the first), its
#: holders, place of the other, its holders.
_Interval = tuple[int, int, int, int]

#: Up to so many slots are set one by one, from so many on by flags; between, by their numbers, which are remembered.
_FEW, _MANY = 8, 100


class Search(NamedTuple):
    """What was found. `levels` ascend, and their sets nest: a slot's prefix is as long as the last level that has it.
    `holes`: these slots lack the block at this place (counted from 1) though they hold a later one. `is_exact` False:
    the probes were used up, some lengths are lower bounds."""

    levels: list[Level]
    holes: list[Level]
    num_probes: int
    is_exact: bool


def search(holders: Callable[[int, int], int], ids: Sequence[int], slots: int, *, max_probes: int) -> Search:
    """Find the longest held prefix of `ids` for each of `slots`. `holders(id, 0)` is the mask of a block's holders.

    After `max_probes` of bisection no other interval is begun; to end the one at hand takes log2 of the number of
    blocks at most, as does what comes before the bisection.
    """
    levels: list[Level] = []
    holes: list[Level] = []
    intervals, probes = _grow(holders, ids, slots)
    limit = probes + max_probes
    is_exact = True
    while intervals:
        low, at_low, high, at_high = intervals.pop()
        if probes >= limit:
            is_exact = is_exact and high - low == 1
            high = low + 1
        while high - low > 1:
            probes += 1
            middle = (low + high) >> 1
            found = holders(ids[middle], 0)
            if found is at_low:
                low = middle
            elif found is at_high:
                high = middle
            elif (found := _nested(found, at_low, at_high, middle, holes)) == at_high:
                high, at_high = middle, found
            else:
                if found != at_low:
                    intervals.append((low, at_low, middle, found))
                low, at_low = middle, found
        if low >= 0:
            levels.append((low + 1, at_low))
    levels.reverse()
    return Search(levels, holes, probes, is_exact)


def prefixes(levels: Sequence[Level], width: int) -> Prefixes:
    """Lengths by slot, 0 for slots in no level. Levels are as `Search` has them, and below `width`."""
    lengths = np.zeros(width, np.int32)
    for length, mask in levels:
        count = mask.bit_count()
        if count <= _FEW:
            while mask:
                slot = mask.bit_length() - 1
                lengths[slot] = length
                mask ^= 1 << slot
        elif count < _MANY:
            lengths[_places(mask, width)] = length
        else:
            np.putmask(lengths, flags(mask, width), length)
    return lengths


def shorten(lengths: Prefixes, holes: Sequence[Level]) -> None:
    """Let no prefix go beyond a hole."""
    for place, mask in holes:
        missing = flags(mask, len(lengths))
        lengths[missing] = np.minimum(lengths[missing], place - 1)


@lru_cache(maxsize=1024)  # a kilobyte each; who holds a system prompt or a hot image is the same from match to match
def flags(mask: int, width: int) -> NDArray[np.bool_]:
    """A mask's bits as an array, which is read-only."""
    packed = np.frombuffer(mask.to_bytes((width + 7) // 8, "little"), np.uint8)
    found = np.unpackbits(packed, count=width, bitorder="little").view(np.bool_)
    found.flags.writeable = False
    return found


@lru_cache(maxsize=1024)
def _places(mask: int, width: int) -> NDArray[np.intp]:
    """The numbers of a mask's bits."""
    return np.flatnonzero(flags(mask, width))


def _grow(holders: Callable[[int, int], int], ids: Sequence[int], slots: int) -> tuple[list[_Interval], int]:
    """Probe prefixes of length 1, 4, 16, ... until nobody holds so much, or the whole is held. Returns the intervals in
    which the set of holders shrinks, the deepest last, and the number of probes. Equal sets are one object."""
    intervals: list[_Interval] = []
    low, place, last = -1, 0, len(ids) - 1
    probes = 0
    while slots and low < last:
        probes += 1
        found = holders(ids[place], 0)
        if found is not slots:
            found = _nested(found, slots, 0, place, [])
            if found != slots:
                intervals.append((low, slots, place, found))
            slots = found
        low, place = place, min(4 * place + 3, last)
    if slots and low >= 0:
        intervals.append((low, slots, low + 1, 0))
    return intervals, probes


def _nested(found: int, at_low: int, at_high: int, place: int, holes: list[Level]) -> int:
    """A probe's holders, none but of `at_low`. Those of `at_high` must be among them: else there is a hole, and they
    count as if there were none. Returns `found` itself where it can."""
    held = found & at_low
    if held == found:
        held = found
    missing = at_high & ~held
    if missing:
        holes.append((place + 1, missing))
        held |= at_high
    return held
