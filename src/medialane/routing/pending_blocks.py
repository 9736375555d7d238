"""Blocks that slots will hold soon: those of requests that were sent there and that no event tells of yet.

A note of thousands of blocks must cost microseconds, since every request makes one. So it keeps ids at some lengths of
the prompt only: 1, 2, 3, and from there on half as much again each time, and the whole. A search probes the same
lengths of another prompt. What it finds is short of the truth by a third at most, and exact for the same prompt.
"""

from __future__ import annotations

import math
from collections import deque
from functools import lru_cache
from itertools import islice
from typing import Final

import numpy as np

from medialane.core.kv_events import BlockIds
from medialane.routing import native_match as native
from medialane.routing.block_holders import BlockHolders
from medialane.routing.native_view import View

#: Ids of a note at most: half as much again each time is beyond any prompt by then.
_MAX_NOTED: Final = 64
_FIRST_LENGTH: Final = 256  # a prompt's ids fit in half of it
#: Notes are counted by block and slot, under the sum of the block's id and a multiple of the slot's number. Two such
#: pairs have the same sum by chance only (2^-64), as two blocks have the same id.
_APART: Final = 0x9E3779B97F4A7C15
_MASK: Final = (1 << 64) - 1


class PendingPrefix:
    """That a slot was sent a prompt. For `PendingBlocks.forget` only; counts until `deadline` at most."""

    __slots__ = ("deadline", "ids", "slot")

    def __init__(self, slot: int, ids: BlockIds, deadline: float) -> None:
        self.slot = slot
        self.ids = ids
        self.deadline = deadline


class PendingBlocks:
    """Notes, and who by them will hold which blocks soon. A block that two notes of a slot name counts until both are
    gone. Pure; times are of any one clock."""

    def __init__(self) -> None:
        self._notes: dict[PendingPrefix, None] = {}  # in order of making, which is that of their first deadlines
        self._fading: deque[PendingPrefix] = deque()  # in order of their last deadlines
        self._nothing_until = math.inf  # no deadline comes before
        self._holders = BlockHolders()
        self._counts = np.zeros((_FIRST_LENGTH, 2), np.uint64)
        self._num_counts = 0
        self._noted = np.empty(_MAX_NOTED, np.uint64)
        self._changed = np.empty(_MAX_NOTED, np.uint64)

    def __len__(self) -> int:
        return len(self._notes)

    @property
    def view(self) -> View:
        """Who will hold what, for `native_match`: bits are slots."""
        return self._holders.view

    @property
    def num_counts(self) -> int:
        """Blocks of notes, each counted once for each slot."""
        return self._num_counts

    def note(self, slot: int, ids: BlockIds, *, deadline: float) -> PendingPrefix:
        """The slot was sent a prompt with these blocks, which begin at the prompt's start. Deadlines never go back."""
        if 4 * (self._num_counts + _MAX_NOTED) > 3 * len(self._counts):
            self._grow()
        num_noted, count = native.note(self._counts, ids, _offset(slot), self._noted, self._changed)
        note = PendingPrefix(slot, self._noted[:num_noted].copy(), deadline)
        self._notes[note] = None
        if deadline < self._nothing_until:
            self._nothing_until = deadline
        if slot >= self._holders.num_bits:
            self._holders.widen(slot + 1)
        self._num_counts += count
        self._holders.store(slot, self._changed[:count])
        return note

    def forget(self, note: PendingPrefix) -> None:
        """The note counts no more. Again, or after its end: nothing happens."""
        if note not in self._notes:
            return
        del self._notes[note]
        count = native.count_down(self._counts, note.ids, _offset(note.slot), self._changed)
        self._num_counts -= count
        self._holders.remove(note.slot, self._changed[:count])

    def fade(self, note: PendingPrefix, *, deadline: float) -> None:
        """The note counts until `deadline` at most. Deadlines given here never go back."""
        if note in self._notes and deadline < note.deadline:
            note.deadline = deadline
            self._fading.append(note)

    def expire(self, now: float) -> None:
        """Forget the notes whose deadline has come."""
        while self._fading and self._fading[0].deadline <= now:
            self.forget(self._fading.popleft())
        if now < self._nothing_until:
            return
        while self._notes:
            oldest = next(islice(self._notes, 1))
            if oldest.deadline > now:
                self._nothing_until = oldest.deadline
                return
            self.forget(oldest)
        self._nothing_until = math.inf

    def clear(self, slot: int) -> None:
        """Forget every note of the slot."""
        for note in [note for note in self._notes if note.slot == slot]:
            self.forget(note)

    def _grow(self) -> None:
        counts = np.zeros((2 * len(self._counts), 2), np.uint64)
        native.copy_entries(self._counts, counts)
        self._counts = counts


@lru_cache(maxsize=1024)
def _offset(slot: int) -> np.uint64:
    return np.uint64(_APART * slot & _MASK)
