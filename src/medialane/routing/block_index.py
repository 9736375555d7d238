"""Maps KV blocks to the slots that hold them: as reported by workers, and pending from requests in flight.

A block maps to the set of its holders (`native_table.py`), in which a slot is a bit. A slot may hold a hundred thousand
blocks, and removing it from all their sets would block the event loop for 10 ms. So a slot that loses all blocks at
once is given another bit; the old one is swept in small steps, by later calls of `store` and `note`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np

from medialane.core.kv_events import BlockIds
from medialane.routing.block_holders import BlockHolders
from medialane.routing.native_match import LAYOUT, MAX_INTERVALS, NUM_WORK_ROWS, match
from medialane.routing.native_view import Prefixes, View
from medialane.routing.pending_blocks import PendingBlocks, PendingPrefix

#: Bounds a match's time: enough to find a dozen different lengths exactly.
MAX_PROBES: Final = 128
#: One step of sweeping, in places inspected and in blocks changed: a few tenths of a millisecond.
_SWEPT_PLACES: Final = 1 << 13
_SWEPT_BLOCKS: Final = 256
_FIRST_SLOTS: Final = 64
#: A response may arrive before the KV events of its blocks: the worker collects those for 10 ms
#: (`worker.block_reports`), and event loops under load lag. Long enough for that, and short compared with the turnover
#: time of a cache.
_EVENT_DELAY_S: Final = 0.5


@dataclass(frozen=True)
class MatchCounts:
    """Totals of all matches. `num_holes`: slots that lacked a block inside their apparent prefix, where a probe
    happened to see it; `num_bounded`: matches that ran out of probes, so that some of their lengths are lower
    bounds."""

    num_matches: int = 0
    num_probes: int = 0
    num_holes: int = 0
    num_bounded: int = 0


class Matches(NamedTuple):
    """Longest prefixes by slot, in blocks; 0 for slots that are not candidates. `held`: reported by workers. `blocks`:
    pending ones included. Both are overwritten by the next match."""

    blocks: Prefixes
    held: Prefixes


class BlockIndex:
    """One index for all workers of one model. Slots are small ints, one per data-parallel rank of a worker. Ids must be
    contiguous, writable arrays.

    Pure: one thread, no I/O, `clock` in seconds. `ttl_s` is the longest time that a pending prefix counts.
    """

    def __init__(
        self, *, ttl_s: float = 60.0, clock: Callable[[], float] = time.monotonic, max_probes: int = MAX_PROBES
    ) -> None:
        self._ttl_s = ttl_s
        self._clock = clock
        self._holders = BlockHolders()
        self._pending_blocks = PendingBlocks()
        self._free = dict.fromkeys(range(self._holders.num_bits))
        self._retired: list[int] = []
        self._slot_of = np.full(self._holders.num_bits, -1, np.int64)
        self._counts = np.array([0, 0, 0, 0, max_probes], np.int64)
        self._spans = np.zeros((MAX_INTERVALS, 4), np.int64)
        self._work = np.zeros((NUM_WORK_ROWS, 1), np.uint64)
        self._bit_of = np.empty(0, np.int64)
        self._plain = np.empty(0, np.uint64)
        self.view = View(LAYOUT)
        self.have_slots(_FIRST_SLOTS)

    @property
    def counts(self) -> MatchCounts:
        return MatchCounts(*self._counts[:4].tolist())

    @property
    def num_blocks(self) -> int:
        """Distinct blocks held by some slot, including those not swept yet."""
        return self._holders.num_blocks

    @property
    def num_entries(self) -> int:
        """Blocks held, summed over slots."""
        return self._holders.num_entries

    def num_held(self, slot: int) -> int:
        """Return the number of blocks that the slot holds."""
        bit = self._bit(slot)
        return self._holders.num_held(bit) if bit >= 0 else 0

    def holds(self, slot: int, block: int) -> bool:
        """Return whether the slot has reported this block."""
        bit = self._bit(slot)
        return bit >= 0 and self._holders.holds(bit, block)

    def store(self, slot: int, ids: BlockIds) -> None:
        """Add blocks to those that the slot holds; those it holds already are ignored."""
        self.sweep()
        bit = self._bit(slot)
        self._holders.store(bit if bit >= 0 else self._assign_bit(slot), ids)

    def remove(self, slot: int, ids: BlockIds) -> None:
        """Remove blocks from those that the slot holds; those it does not hold are ignored."""
        bit = self._bit(slot)
        if bit >= 0:
            self._holders.remove(bit, ids)

    def clear(self, slot: int) -> None:
        """Drop all blocks and pending prefixes of a slot that left or restarted."""
        self._retire_bit(slot)
        self._pending_blocks.clear(slot)

    def replace(self, slot: int, ids: BlockIds) -> None:
        """Set the blocks that the slot holds. Pending prefixes stay: those requests are still in flight."""
        self._retire_bit(slot)
        self.store(slot, ids)

    def sweep(self) -> bool:
        """Do one step of sweeping blocks of retired bits; `store` and `note` do one each. Return whether none are
        left."""
        if not self._retired:
            return True
        self._holders.sweep(_SWEPT_PLACES, _SWEPT_BLOCKS)
        if not self._holders.num_stale:
            self._collect()
        return not self._retired

    def note(self, slot: int, ids: BlockIds, *, is_sampled: bool = False) -> PendingPrefix:
        """Register a request sent to the slot: its blocks, from the prompt's start on, are pending there. With
        `is_sampled`, `ids` are those of another gateway's PendingPrefix.

        They count until `forget`, half a second after `fade`, the slot's `clear`, or `ttl_s` later. A block of several
        pending prefixes is pending until the last of them ends.
        """
        now = self._clock()
        self._pending_blocks.expire(now)
        if self._retired:
            self.sweep()
        return self._pending_blocks.note(slot, ids, deadline=now + self._ttl_s, is_sampled=is_sampled)

    def forget(self, prefix: PendingPrefix) -> None:
        """Drop a pending prefix. Idempotent."""
        self._pending_blocks.forget(prefix)

    def fade(self, prefix: PendingPrefix, ids: BlockIds) -> None:
        """Expire the pending prefix of a request that ended after its prefill: at once if the slot has reported its
        last block, else after a delay, since the KV events may still be in transit."""
        if len(ids) and not self.holds(prefix.slot, ids.item(-1)):
            self._pending_blocks.fade(prefix, deadline=self._clock() + _EVENT_DELAY_S)
        else:
            self._pending_blocks.forget(prefix)

    def match(self, ids: BlockIds, slots: int) -> Matches:
        """Return the longest prefix of `ids` that each of `slots` (a mask) holds, or that is pending there.

        The arrays end at the highest of `slots`. Pending lengths are too short by at most a third.
        """
        num_slots = slots.bit_length()
        self.have_slots(num_slots)
        # A copy: native code is compiled for writable arrays only.
        candidates = np.frombuffer(bytearray(slots.to_bytes(self._lengths.shape[1] // 8, "little")), np.uint64)
        self._pending_blocks.expire(self._clock())
        match(ids, candidates, self.view.addresses, len(ids))
        return Matches(self._lengths[0, :num_slots], self._lengths[1, :num_slots])

    def expire(self, now: float) -> None:
        """Drop pending prefixes whose time has passed."""
        self._pending_blocks.expire(now)

    def have_slots(self, count: int) -> None:
        """Grow the arrays indexed by slot to at least `count`, rounded up to a multiple of 64."""
        old = len(self._bit_of)
        if count > old:
            new = (count + 63) // 64 * 64
            self._bit_of = np.pad(self._bit_of, (0, new - old), constant_values=-1)
            self._plain = np.pad(self._plain, (0, new // 64 - len(self._plain)))
            self._lengths = np.zeros((2, new), np.int32)
            self._update_view()

    def _bit(self, slot: int) -> int:
        """Return the slot's bit; -1 if it has never held anything."""
        return self._bit_of.item(slot) if slot < len(self._bit_of) else -1

    def _assign_bit(self, slot: int) -> int:
        """Assign a bit to the slot: the one of its own number, which is the fastest to find, if free."""
        self.have_slots(slot + 1)
        if slot >= self._holders.num_bits:
            self._widen(slot + 1)
        if not self._free:
            self._collect()
        if not self._free:
            self._widen(self._holders.num_bits + 1)
        bit = slot if slot in self._free else next(iter(self._free))
        del self._free[bit]
        self._bit_of[slot] = bit
        self._slot_of[bit] = slot
        if bit == slot:
            self._plain[slot >> 6] |= np.uint64(1 << (slot & 63))
        return bit

    def _retire_bit(self, slot: int) -> None:
        bit = self._bit(slot)
        if bit < 0 or not self._holders.num_held(bit):
            return
        self._holders.retire(bit)
        self._retired.append(bit)
        self._bit_of[slot] = self._slot_of[bit] = -1
        self._plain[slot >> 6] &= ~np.uint64(1 << (slot & 63))

    def _collect(self) -> None:
        """Make fully swept bits available again."""
        swept = {bit for bit in self._retired if not self._holders.num_held(bit)}
        for bit in swept:
            self._holders.reuse(bit)
        self._retired = [bit for bit in self._retired if bit not in swept]
        self._free.update(dict.fromkeys(swept))

    def _widen(self, num_bits: int) -> None:
        old = self._holders.num_bits
        self._holders.widen(num_bits)
        new = self._holders.num_bits
        self._free.update(dict.fromkeys(range(old, new)))
        self._slot_of = np.pad(self._slot_of, (0, new - old), constant_values=-1)
        self._work = np.zeros((NUM_WORK_ROWS, new // 64), np.uint64)
        self._update_view()

    def _update_view(self) -> None:
        """Update the view after arrays were replaced."""
        self.view.show(
            self._bit_of,
            self._slot_of,
            self._work,
            self._spans,
            self._counts,
            self._lengths,
            self._holders.view,
            self._pending_blocks.view,
            self._plain,
        )
