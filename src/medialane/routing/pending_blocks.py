"""Pending blocks: those of requests in flight, which a slot will hold soon but no KV event has reported yet.

Every request adds a prefix of up to thousands of blocks, which must take microseconds. So only the ids at some lengths
of the prompt are stored: 9 blocks, then growing by half each time, and the whole. A search looks up the same lengths of
another prompt. The prefix that it finds is too short by at most a third, or 8 blocks, and exact for the same prompt.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from typing import Final

from medialane.routing.block_index import Prefixes
from medialane.types.kv_events import BlockIds

#: The shortest prefix of a longer prompt that is stored, in blocks.
_FIRST_LENGTH: Final = 9


@dataclass(slots=True, eq=False)
class PendingPrefix:
    """A prompt that was sent to a slot; it counts until `deadline`. `ids` are those stored, the last one is the
    prefix's last block."""

    slot: int
    ids: list[int]
    deadline: float


class PendingBlocks:
    """Pending prefixes, and the slots that will hold their blocks. A block in two prefixes of a slot counts until both
    are forgotten. Pure; `clock` is in seconds, a prefix counts for `ttl_s` at most."""

    def __init__(self, *, ttl_s: float, clock: Callable[[], float]) -> None:
        self._ttl_s = ttl_s
        self._clock = clock
        self._prefixes: dict[PendingPrefix, None] = {}  # in order of creation, which is that of their initial deadlines
        self._shortened: deque[PendingPrefix] = deque()  # in order of their final deadlines
        self._next_deadline = math.inf  # the earliest initial deadline is not before this
        self._holders: dict[int, int] = {}  # block -> bit mask of slots
        self._repeats: dict[tuple[int, int], int] = {}  # block and slot -> prefixes with both, besides the first

    def __len__(self) -> int:
        return len(self._prefixes)

    def add(self, slot: int, ids: BlockIds) -> PendingPrefix:
        """Add a prompt that is sent to the slot: its blocks, from the prompt's start on."""
        return self.add_stored(slot, [ids.item(place) for place in _stored_places(len(ids))])

    def add_stored(self, slot: int, ids: list[int]) -> PendingPrefix:
        """Add the prompt of another gateway's prefix, of which these are the `ids`."""
        prefix = PendingPrefix(slot, ids, self._clock() + self._ttl_s)
        self._prefixes[prefix] = None
        self._next_deadline = min(self._next_deadline, prefix.deadline)
        bit, holders = 1 << slot, self._holders
        for block in ids:
            known = holders.get(block, 0)
            if known & bit:
                self._repeats[block, slot] = self._repeats.get((block, slot), 0) + 1
            else:
                holders[block] = known | bit
        return prefix

    def forget(self, prefix: PendingPrefix) -> None:
        """Drop a pending prefix. Idempotent."""
        if prefix not in self._prefixes:
            return
        del self._prefixes[prefix]
        slot, holders, repeats = prefix.slot, self._holders, self._repeats
        for block in prefix.ids:
            count = repeats.get((block, slot), 0)
            if count > 1:
                repeats[block, slot] = count - 1
            elif count:
                del repeats[block, slot]
            elif left := holders[block] & ~(1 << slot):
                holders[block] = left
            else:
                del holders[block]

    def shorten_deadline(self, prefix: PendingPrefix, delay_s: float) -> None:
        """Let the prefix count for `delay_s` from now at most; the same in every call. Drops those whose deadline has
        passed: a request has ended, so that is off the critical path of any."""
        self.expire()
        deadline = self._clock() + delay_s
        if prefix in self._prefixes and deadline < prefix.deadline:
            prefix.deadline = deadline
            self._shortened.append(prefix)

    def expire(self) -> None:
        """Drop the prefixes whose deadline has passed."""
        now = self._clock()
        while self._shortened and self._shortened[0].deadline <= now:
            self.forget(self._shortened.popleft())
        if now < self._next_deadline:
            return
        while self._prefixes:
            oldest = next(islice(self._prefixes, 1))
            if oldest.deadline > now:
                self._next_deadline = oldest.deadline
                return
            self.forget(oldest)
        self._next_deadline = math.inf

    def clear(self, slot: int) -> None:
        """Drop all pending prefixes of the slot."""
        for prefix in [prefix for prefix in self._prefixes if prefix.slot == slot]:
            self.forget(prefix)

    def prefixes(self, ids: BlockIds, slots: int, *, beyond: int = 0) -> Prefixes:
        """Return the longest pending prefixes of `ids` at `slots` (a mask), in blocks, of those of more than `beyond`
        blocks; too short by at most a third, or 8 blocks."""
        places = _stored_places(len(ids))
        prefixes, length = [], 0
        for place in places[bisect_left(places, beyond) :]:
            holders = slots & self._holders.get(ids.item(place), 0)
            if holders != slots:
                if length:
                    prefixes.append((length, slots ^ holders))
                slots = holders
                if not slots:
                    break
            length = place + 1
        if slots and length:
            prefixes.append((length, slots))
        prefixes.reverse()
        return prefixes


@lru_cache(maxsize=1024)
def _stored_places(num_blocks: int) -> list[int]:
    """Return the places of the blocks that are stored of a prompt."""
    places, length = [], _FIRST_LENGTH
    while length < num_blocks:
        places.append(length - 1)
        length += length >> 1
    return [*places, num_blocks - 1] if num_blocks else []
