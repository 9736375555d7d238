"""Pending blocks: those of requests in flight, which a slot will hold soon but no KV event has reported yet.

Every request registers a prefix of up to thousands of blocks, which must take microseconds. So only the ids at some
lengths of the prompt are stored: 1, 2, 3, then growing by half each time, and the whole. A search probes the same
lengths of another prompt. The prefix found is too short by at most a third, and exact for the same prompt.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from typing import Final

import numpy as np

from medialane.core.kv_events import BlockIds
from medialane.core.pending_work import MAX_BLOCK_IDS
from medialane.routing import native_match as native
from medialane.routing.block_holders import BlockHolders
from medialane.routing.native_view import View

#: Most ids stored per prefix: growing by half each time, enough for any prompt.
_MAX_STORED: Final = MAX_BLOCK_IDS
_FIRST_LENGTH: Final = 256  # a prompt's ids fit in half of it
#: Pending ids are counted per block and slot, under the key id + slot * constant. Two pairs collide with probability
#: 2^-64, like block ids.
_SLOT_STRIDE: Final = 0x9E3779B97F4A7C15
_MASK: Final = (1 << 64) - 1


@dataclass(slots=True, eq=False)
class PendingPrefix:
    """A prompt that was sent to a slot: a handle for `PendingBlocks.forget`; expires at `deadline`. `ids` are those
    stored, the last one is the prefix's last block."""

    slot: int
    ids: BlockIds
    deadline: float


class PendingBlocks:
    """Pending prefixes, and the slots that will hold their blocks. A block in two prefixes of a slot counts until both
    are forgotten. Pure; all times are of one clock."""

    def __init__(self) -> None:
        self._prefixes: dict[PendingPrefix, None] = {}  # in order of creation, which is that of their initial deadlines
        self._fading: deque[PendingPrefix] = deque()  # in order of their final deadlines
        self._next_deadline = math.inf  # the earliest deadline is not before this
        self._holders = BlockHolders()
        self._counts = np.zeros((_FIRST_LENGTH, 2), np.uint64)
        self._num_counts = 0
        self._stored = np.empty(_MAX_STORED, np.uint64)
        self._changed = np.empty(_MAX_STORED, np.uint64)

    def __len__(self) -> int:
        return len(self._prefixes)

    @property
    def view(self) -> View:
        """The slots that will hold each block, for `native_match`: bits are slots."""
        return self._holders.view

    def note(self, slot: int, ids: BlockIds, *, deadline: float, is_sampled: bool = False) -> PendingPrefix:
        """Register a prompt sent to the slot; `ids` start at the prompt's start, or are the `ids` of another gateway's
        PendingPrefix (`is_sampled`, at most MAX_BLOCK_IDS). Deadlines must not decrease."""
        if 4 * (self._num_counts + _MAX_STORED) > 3 * len(self._counts):
            self._grow()
        num_stored, count = native.note(self._counts, ids, _offset(slot), self._stored, self._changed, is_sampled)
        prefix = PendingPrefix(slot, self._stored[:num_stored].copy(), deadline)
        self._prefixes[prefix] = None
        if deadline < self._next_deadline:
            self._next_deadline = deadline
        if slot >= self._holders.num_bits:
            self._holders.widen(slot + 1)
        self._num_counts += count
        self._holders.store(slot, self._changed[:count])
        return prefix

    def forget(self, prefix: PendingPrefix) -> None:
        """Drop a pending prefix. Idempotent."""
        if prefix not in self._prefixes:
            return
        del self._prefixes[prefix]
        count = native.count_down(self._counts, prefix.ids, _offset(prefix.slot), self._changed)
        self._num_counts -= count
        self._holders.remove(prefix.slot, self._changed[:count])

    def fade(self, prefix: PendingPrefix, *, deadline: float) -> None:
        """Bring the deadline forward. Deadlines passed here must not decrease."""
        if prefix in self._prefixes and deadline < prefix.deadline:
            prefix.deadline = deadline
            self._fading.append(prefix)

    def expire(self, now: float) -> None:
        """Drop the prefixes whose deadline has passed."""
        while self._fading and self._fading[0].deadline <= now:
            self.forget(self._fading.popleft())
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

    def _grow(self) -> None:
        counts = np.zeros((2 * len(self._counts), 2), np.uint64)
        native.copy_entries(self._counts, counts)
        self._counts = counts


@lru_cache(maxsize=1024)
def _offset(slot: int) -> np.uint64:
    return np.uint64(_SLOT_STRIDE * slot & _MASK)
