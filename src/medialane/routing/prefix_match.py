"""Longest held prefix of one prompt, for all slots at once.

A block's id stands for the whole prompt up to its end, and engines free a prompt's blocks from its tail. So the slots
that hold block i hold those before it, too: along a prompt the sets of holders nest, and where they shrink is found by
probing, not by walking: lengths 1, 2, 4, ... until nobody is left, then bisection wherever the set is smaller at an
interval's end than at its start. That is some tens of look-ups for thousands of blocks and of slots.

Sets of slots are int bit masks (1 << slot). Slots that differ in thousands of lengths would take as many probes: the
longest prefixes are found first, and when the probes are used up the rest get a lower bound.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

#: Prefix lengths in blocks; element i is slot i's.
Prefixes = NDArray[np.int32]
#: A length, and slots.
Group = tuple[int, int]

#: Up to so many slots are set one by one, which then is faster than to unpack the mask.
_FEW = 6


class Search(NamedTuple):
    """What was found. `groups` are disjoint: the longest prefix of these slots has this length (those with none are
    left out). `holes`: these slots lack the block at this place (counted from 1) though they hold a later one.
    `is_exact` False: the probes were used up, some lengths are lower bounds."""

    groups: list[Group]
    holes: list[Group]
    num_probes: int
    is_exact: bool


def search(holders: Callable[[int, int], int], ids: Sequence[int], slots: int, *, max_probes: int) -> Search:
    """Find the longest held prefix of `ids` for each of `slots`. `holders(id, 0)` is the mask of a block's holders.

    `max_probes` bounds the bisection; the doubling before it takes log2 of the number of blocks at most.
    """
    steps = _doubling(holders, ids, slots)
    length, mask = steps[-1]
    groups = [(length, mask)] if mask and length else []
    holes: list[Group] = []
    probes = 0
    # Intervals (start, its holders, end, its holders), the deepest last: it is taken first.
    open_ = [(*low, *high) for low, high in pairwise(steps) if low[1] != high[1]]
    while open_ and probes < max_probes:
        low, at_low, high, at_high = open_.pop()
        if high - low == 1:
            if low:
                groups.append((low, at_low ^ at_high))
            continue
        middle = (low + high) // 2
        found = holders(ids[middle - 1], 0) & at_low
        probes += 1
        if found & at_high != at_high:
            holes.append((middle, at_high & ~found))
            found |= at_high
        if found != at_low:
            open_.append((low, at_low, middle, found))
        if found != at_high:
            open_.append((middle, found, high, at_high))
    groups += [(low, at_low ^ at_high) for low, at_low, high, at_high in open_ if low]
    return Search(groups, holes, probes + len(steps) - 1, all(high - low == 1 for low, _, high, _ in open_))


def prefixes(groups: Sequence[Group], width: int) -> Prefixes:
    """Lengths by slot, 0 for slots in no group. Groups are disjoint and below `width`."""
    lengths = np.zeros(width, np.int32)
    for length, mask in groups:
        _set(lengths, length, mask)
    return lengths


def shorten(lengths: Prefixes, holes: Sequence[Group]) -> None:
    """Let no prefix go beyond a hole."""
    for place, mask in holes:
        missing = flags(mask, len(lengths))
        lengths[missing] = np.minimum(lengths[missing], place - 1)


def flags(mask: int, width: int) -> NDArray[np.bool_]:
    """A mask's bits as an array."""
    packed = np.frombuffer(mask.to_bytes((width + 7) // 8, "little"), np.uint8)
    return np.unpackbits(packed, count=width, bitorder="little").view(np.bool_)


def _doubling(holders: Callable[[int, int], int], ids: Sequence[int], slots: int) -> list[Group]:
    """(length, those of `slots` that hold so much) for lengths 0, 1, 2, 4, ...; ends with nobody, or the whole."""
    steps = [(0, slots)]
    length, whole = 0, len(ids)
    while slots and length < whole:
        length = min(2 * length or 1, whole)
        slots &= holders(ids[length - 1], 0)
        steps.append((length, slots))
    return steps


def _set(lengths: Prefixes, length: int, mask: int) -> None:
    if mask.bit_count() > _FEW:
        np.putmask(lengths, flags(mask, len(lengths)), length)
        return
    while mask:
        slot = mask.bit_length() - 1
        lengths[slot] = length
        mask ^= 1 << slot
