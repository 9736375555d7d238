"""Which slots hold which KV blocks: what workers report, and what they will have soon by the requests sent to them.

A block maps to the mask of its holders; a slot has the set of its blocks, so that losing it costs its blocks and not
everyone's. Consecutive blocks of a prompt mostly have the same holders, whose mask they share.

A slot may hold a hundred thousand blocks, and to take it from all their masks would hold the event loop for 100 ms. So
what a slot loses at once is swept away in small steps, one with each call. Until that is done, no prefix of the slot's
is found: what it stores meanwhile counts from then on.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np

from medialane.routing.cached_soon import CachedSoon, Note
from medialane.routing.prefix_match import Level, Prefixes, Search, prefixes, search, shorten

#: Bounds a match's time (a probe takes up to half a microsecond): a dozen of different lengths are found exactly.
MAX_PROBES: Final = 128
#: Masks kept to be shared. Past it they are dropped: equal masks then are several objects, which costs memory only.
_MAX_SHARED: Final = 1 << 16
#: Blocks swept with a call: below a millisecond.
_SWEEP: Final = 512
#: A step that reaches all parts of an interval evenly: 2^32 over the golden ratio.
_STRIDE: Final = 0x9E3779B1


@dataclass
class MatchCounts:
    """Of all matches so far. `num_holes`: slots that lacked a block inside the prefix that they seemed to hold, where a
    probe happened to see it; `num_bounded`: matches that ran out of probes, some of their lengths are lower bounds."""

    num_matches: int = 0
    num_probes: int = 0
    num_holes: int = 0
    num_bounded: int = 0


class Matches(NamedTuple):
    """Longest prefixes by slot, in blocks; slots that were not asked for have 0. `held`: by what workers report.
    `blocks`: with what they will hold soon, too. May be one array: write to neither."""

    blocks: Prefixes
    held: Prefixes


class BlockIndex:
    """One index for all workers of one model. Slots are small ints; a data-parallel rank of a worker is a slot.

    Pure: one thread, no I/O, `clock` in seconds. `ttl_s` is how long a note counts at most.
    """

    def __init__(
        self, *, ttl_s: float = 60.0, clock: Callable[[], float] = time.monotonic, max_probes: int = MAX_PROBES
    ) -> None:
        self.counts = MatchCounts()
        self._ttl_s = ttl_s
        self._clock = clock
        self._max_probes = max_probes
        self._holders: dict[int, int] = {}
        self._blocks: dict[int, set[int]] = {}
        self._lost: dict[int, set[int]] = {}  # slot -> blocks whose masks still have it
        self._lost_slots = 0
        self._shared: dict[int, int] = {}
        self._soon = CachedSoon()

    @property
    def num_blocks(self) -> int:
        """Different blocks that some slot holds, or held and that are not swept away yet."""
        return len(self._holders)

    @property
    def num_entries(self) -> int:
        """Blocks held, summed over slots."""
        return sum(map(len, self._blocks.values()))

    @property
    def num_notes(self) -> int:
        return len(self._soon)

    def num_held(self, slot: int) -> int:
        """Blocks that the slot holds."""
        return len(self._blocks.get(slot, ()))

    def holds(self, slot: int, block: int) -> bool:
        """Whether the slot has reported this block."""
        return block in self._blocks.get(slot, ())

    def store(self, slot: int, ids: Collection[int]) -> None:
        """The slot holds these blocks from now on. Those that it holds already make no difference."""
        self._blocks.setdefault(slot, set()).update(ids)
        if self._lost:
            self._lost.get(slot, set()).difference_update(ids)
            self.sweep()
        holders, bit = self._holders, 1 << slot
        before, after = 0, self._share(bit)
        for block in ids:
            mask = holders.get(block, 0)
            if mask is not before:
                if mask & bit:
                    continue
                before, after = mask, self._share(mask | bit)
            holders[block] = after

    def remove(self, slot: int, ids: Collection[int]) -> None:
        """The slot holds these blocks no more. Those that it does not hold make no difference."""
        self._blocks.get(slot, set()).difference_update(ids)
        self._take(slot, ids)

    def clear(self, slot: int) -> None:
        """The slot is gone, or begins anew: neither blocks nor notes of it are left."""
        self._lose(slot)
        self._soon.clear(slot)

    def replace(self, slot: int, ids: Collection[int]) -> None:
        """The slot holds exactly these blocks. Notes stay: what was sent there is still on its way."""
        self._lose(slot)
        self.store(slot, ids)

    def sweep(self) -> bool:
        """One step of sweeping away what slots have lost; `store`, `note` and `match` take one each. Tells whether
        there is nothing left to sweep."""
        if not self._lost:
            return True
        slot, blocks = next(iter(self._lost.items()))
        self._take(slot, [blocks.pop() for _ in range(min(_SWEEP, len(blocks)))])
        if not blocks:
            del self._lost[slot]
            self._lost_slots ^= 1 << slot
        return not self._lost

    def note(self, slot: int, ids: Sequence[int]) -> Note:
        """A request with these blocks, from its prompt's start on, was sent to the slot: it will hold them soon.

        The note counts until `forget`, the slot's `clear`, or `ttl_s` later. A running request's blocks are not freed,
        so it may be forgotten any time between its blocks' events and its end. Several notes of the same blocks count
        each by itself: they are cached soon until the last of these is gone.
        """
        now = self._clock()
        self._soon.expire(now)
        self.sweep()
        return self._soon.note(slot, ids, deadline=now + self._ttl_s)

    def forget(self, note: Note) -> None:
        """The note counts no more; it may have ended before."""
        self._soon.forget(note)

    def match(self, ids: Sequence[int], slots: int) -> Matches:
        """The longest prefix of `ids` that each of `slots` (a mask) holds, or will hold soon.

        The arrays are as long as the highest of `slots` needs. What will be held soon is short by a third at most.
        """
        width = slots.bit_length()
        known = slots if self.sweep() else slots & ~self._lost_slots
        found = search(self._holders.get, ids, known, max_probes=self._max_probes)
        holes = found.holes + self._sample(found.levels, ids)
        self._count(found, holes)
        held = prefixes(found.levels, width)
        shorten(held, holes)
        soon = [level for level in self._match_soon(ids, slots) if not _is_among(level, found.levels)]
        return Matches(np.maximum(held, prefixes(soon, width)) if soon else held, held)

    def _match_soon(self, ids: Sequence[int], slots: int) -> list[Level]:
        if not len(self._soon):
            return []
        self._soon.expire(self._clock())
        return self._soon.match(ids, slots)

    def _sample(self, levels: Sequence[Level], ids: Sequence[int]) -> list[Level]:
        """Look at one block inside the longest prefix: engines that free blocks from the middle would be seen."""
        if not levels:
            return []
        length, mask = levels[-1]
        place = self.counts.num_matches * _STRIDE % length
        missing = mask & ~self._holders.get(ids[place], 0)
        return [(place + 1, missing)] if missing else []

    def _count(self, found: Search, holes: Sequence[Level]) -> None:
        counts = self.counts
        counts.num_matches += 1
        counts.num_probes += found.num_probes
        counts.num_bounded += not found.is_exact
        for _, mask in holes:
            counts.num_holes += mask.bit_count()

    def _take(self, slot: int, ids: Collection[int]) -> None:
        holders, bit = self._holders, 1 << slot
        before, after = bit, 0
        for block in ids:
            mask = holders.get(block, 0)
            if mask is not before:
                if not mask & bit:
                    continue
                before, after = mask, self._share(mask ^ bit)
            if after:
                holders[block] = after
            else:
                del holders[block]

    def _lose(self, slot: int) -> None:
        blocks = self._blocks.pop(slot, None)
        if not blocks:
            return
        if slot in self._lost:
            self._lost[slot] |= blocks
        else:
            self._lost[slot] = blocks  # not copied: there may be many
            self._lost_slots |= 1 << slot

    def _share(self, mask: int) -> int:
        """An int equal to `mask`, the same object for as many blocks as possible."""
        if len(self._shared) >= _MAX_SHARED:
            self._shared.clear()
        return self._shared.setdefault(mask, mask)


def _is_among(level: Level, levels: Sequence[Level]) -> bool:
    """Whether all slots of a level are in one that is as long, or longer."""
    length, mask = level
    for longer, held in levels:
        if longer >= length:  # the first of these is the widest
            return mask & held == mask
    return False
