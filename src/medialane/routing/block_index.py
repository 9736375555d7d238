"""Maps KV blocks to the slots that hold them, as reported by workers, and finds which prefixes of a prompt they hold.

Each block has a bit mask of the slots that hold it. A block's id identifies the whole prompt up to its end, and engines
evict a prompt's blocks from its tail, so a slot that holds block i holds all blocks before it: the masks shrink along a
prompt. Where they shrink is found by exponential search (prefixes of 16, 64, 256, ... blocks), then by bisection: some
tens of look-ups for thousands of blocks and slots. A hole inside a prefix (an engine that evicts from the middle) is
not noticed unless a look-up happens to hit it.

A slot may hold a hundred thousand blocks, and clearing its bit in all their masks would block the event loop for some
30 ms. So the blocks of a slot that loses all of them at once are swept in small steps, by later calls. Until that is
done the masks are not trusted about this slot: its own table of blocks is bisected instead.

Pending blocks belong to requests in flight: a slot will hold them soon, but no KV event has reported them yet. Every
request adds a prefix of up to thousands of blocks, which must take microseconds. So only the ids at some lengths of the
prompt are stored: 9 blocks, then growing by half each time, and the whole. A search looks up the same lengths of
another prompt. The prefix that it finds is too short by at most a third, or 8 blocks, and exact for the same prompt.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from typing import Final

from medialane.types.kv_blocks import BlockIds

#: Longest prefixes of a prompt by slot, longest first: a number of blocks (or tokens), and the slots that have it, as a
#: bit mask. A slot is in one mask at most.
Prefixes = list[tuple[int, int]]

#: Look-ups by bisection per prompt. Enough to find a dozen different lengths exactly; further ones are too short.
_MAX_BISECTIONS: Final = 128

#: Blocks swept per step, at least: about 0.1 ms.
_SWEPT_BLOCKS: Final = 256

#: Blocks are spread over this many dicts: one with a million entries blocks the event loop for 120 ms when it grows.
_NUM_SHARDS: Final = 64

#: Most masks that are kept for sharing between blocks: there are few different ones, and with a thousand slots each
#: takes 160 bytes.
_MAX_SHARED_MASKS: Final = 1 << 14


class BlockIndex:
    """One index for all workers of one model. Slots are small ints, one per data-parallel rank of a worker. Pure."""

    def __init__(self) -> None:
        self._holders: list[dict[int, int]] = [{} for _ in range(_NUM_SHARDS)]
        # Dicts without values instead of sets: the garbage collector does not visit them.
        self._held: dict[int, dict[int, None]] = {}
        self._lost: deque[tuple[int, dict[int, None]]] = deque()
        self._unswept = 0  # the slots in `_lost`
        self._shared_masks: dict[int, int] = {}

    @property
    def num_blocks(self) -> int:
        """Distinct blocks held by some slot, including those not swept yet."""
        return sum(map(len, self._holders))

    @property
    def num_entries(self) -> int:
        """Blocks held, summed over slots."""
        return sum(map(len, self._held.values()))

    def holds(self, slot: int, block: int) -> bool:
        """Return whether the slot has reported this block."""
        return block in self._held.get(slot, ())

    def store(self, slot: int, ids: BlockIds) -> None:
        """Add blocks to the slot's; blocks it holds already are ignored."""
        # At least as many as are stored, or a slot that is replaced again and again would leave ever more to sweep.
        self.sweep(max(_SWEPT_BLOCKS, len(ids)))
        held, shards, bit = self._held.setdefault(slot, {}), self._holders, 1 << slot
        before, after = -1, 0  # the last change of a mask: the next block mostly needs the same
        for block in ids.tolist():
            shard = shards[block % _NUM_SHARDS]
            holders = shard.get(block, 0)
            if holders != before:
                before, after = holders, self._shared(holders | bit)
            shard[block] = after
            held[block] = None

    def remove(self, slot: int, ids: BlockIds) -> None:
        """Remove blocks from the slot's; blocks it does not hold are ignored."""
        held, others = self._held.get(slot, {}), ~(1 << slot)
        for block in ids.tolist():
            if block in held:
                del held[block]
                self._reduce(block, others)

    def clear(self, slot: int) -> None:
        """Drop all blocks of a slot that left or restarted."""
        held = self._held.pop(slot, None)
        if held:
            self._lost.append((slot, held))
            self._unswept |= 1 << slot

    def replace(self, slot: int, ids: BlockIds) -> None:
        """Set the blocks that the slot holds."""
        self.clear(slot)
        self.store(slot, ids)

    def sweep(self, num_blocks: int = _SWEPT_BLOCKS) -> bool:
        """Do one step of sweeping blocks of cleared slots, up to `num_blocks`. Return whether none are left."""
        if not self._lost:
            return True
        slot, lost = self._lost[0]
        held, others = self._held.get(slot, {}), ~(1 << slot)
        for _ in range(min(num_blocks, len(lost))):
            block, _none = lost.popitem()
            if block not in held:
                self._reduce(block, others)
        if not lost:
            self._lost.popleft()
            self._unswept = _mask(slot for slot, _ in self._lost)
        return not self._lost

    def prefixes(self, ids: BlockIds, slots: int) -> Prefixes:
        """Return the longest prefixes of `ids` that `slots` (a mask) hold, in blocks."""
        unswept = slots & self._unswept
        if not unswept:
            return self._search(ids, slots)
        return longest([*self._search(ids, slots ^ unswept), *self._search_each(ids, unswept)])

    def _search(self, ids: BlockIds, slots: int) -> Prefixes:
        shards, num_blocks = self._holders, len(ids)
        intervals = []  # of slots whose length is at least the first and below the second number
        length, next_length = 0, min(16, num_blocks)
        while slots and length < num_blocks:
            block = ids.item(next_length - 1)
            holders = slots & shards[block % _NUM_SHARDS].get(block, 0)
            if holders != slots:
                intervals.append((length, next_length, slots ^ holders))
            slots, length, next_length = holders, next_length, min(4 * next_length, num_blocks)
        whole = [(length, slots)] if slots and length else []
        return whole + self._bisect(ids, intervals)

    def _bisect(self, ids: BlockIds, intervals: list[tuple[int, int, int]]) -> Prefixes:
        """Bisect the intervals from the last, which is the longest, to the first."""
        shards, prefixes, num_left = self._holders, [], _MAX_BISECTIONS
        while intervals:
            low, high, slots = intervals.pop()
            while high - low > 1 and num_left:
                num_left -= 1
                middle = (low + high) >> 1
                block = ids.item(middle - 1)
                holders = slots & shards[block % _NUM_SHARDS].get(block, 0)
                if not holders:
                    high = middle
                    continue
                if holders != slots:
                    intervals.append((low, middle, slots ^ holders))
                slots, low = holders, middle
            if low:
                prefixes.append((low, slots))
        return prefixes

    def _search_each(self, ids: BlockIds, slots: int) -> Iterator[tuple[int, int]]:
        for slot in {slot for slot, _lost in self._lost}:
            held = self._held.get(slot)
            if held and slots >> slot & 1:
                length = bisect_left(ids, True, key=lambda block, held=held: int(block) not in held)  # type: ignore[misc]
                if length:
                    yield length, 1 << slot

    def _reduce(self, block: int, others: int) -> None:
        """Reduce the block's holders to those among `others`."""
        shard = self._holders[block % _NUM_SHARDS]
        holders = shard.get(block, 0) & others
        if holders:
            shard[block] = self._shared(holders)
        else:
            shard.pop(block, None)

    def _shared(self, mask: int) -> int:
        """Return the mask as an object that is shared by all blocks with equal ones."""
        if len(self._shared_masks) >= _MAX_SHARED_MASKS:
            self._shared_masks.clear()
        return self._shared_masks.setdefault(mask, mask)


def longest(prefixes: Prefixes) -> Prefixes:
    """Return each slot's longest of several prefixes."""
    each_longest, known = [], 0
    for length, slots in sorted(prefixes, reverse=True):
        new = slots & ~known
        if new:
            each_longest.append((length, new))
            known |= new
    return each_longest


def _mask(slots: Iterator[int]) -> int:
    mask = 0
    for slot in slots:
        mask |= 1 << slot
    return mask


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
        self._prefixes: dict[PendingPrefix, None] = {}  # in order of creation, so of their initial deadlines
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
        """Add the prompt of another gateway's prefix with these `ids`."""
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
        """Let the prefix count for `delay_s` from now at most; the same in every call. Drops prefixes whose deadline
        has passed: a request has ended, so that is off the critical path of any."""
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
        """Return the longest pending prefixes of `ids` at `slots` (a mask), in blocks, of prefixes of more than
        `beyond` blocks; too short by at most a third, or 8 blocks."""
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
