"""Blocks that slots will hold soon: those of requests that were sent there and that no event tells of yet.

A note of thousands of blocks must cost microseconds, since every request makes one. So it keeps ids at some lengths of
the prompt only: 1, 2, 3, and from there on half as much again each time, and the whole. A search probes the same
lengths of another prompt. What it finds is short of the truth by a third at most, and exact for the same prompt.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import islice

from medialane.routing.prefix_match import Level


def _ladder(limit: int) -> list[int]:
    rungs = [1]
    while rungs[-1] < limit:
        rungs.append(rungs[-1] + max(1, rungs[-1] // 2))
    return rungs


#: Lengths that are noted. The last one is more than any prompt has, in blocks.
_RUNGS = _ladder(1 << 24)


class Note:
    """That a slot was sent a prompt. For `CachedSoon.forget` only; counts until `deadline` at most."""

    __slots__ = ("deadline", "ids", "slot")

    def __init__(self, slot: int, ids: list[int], deadline: float) -> None:
        self.slot = slot
        self.ids = ids
        self.deadline = deadline


class CachedSoon:
    """Notes, and who by them will hold which blocks soon. A block that two notes of a slot name counts until both are
    gone. Pure; times are of any one clock."""

    def __init__(self) -> None:
        self._notes: dict[Note, None] = {}  # in order of making, which is that of their deadlines
        self._holders: dict[int, int] = {}
        self._counts: dict[int, dict[int, int]] = {}  # slot -> block -> notes that name it

    def __len__(self) -> int:
        return len(self._notes)

    def note(self, slot: int, ids: Sequence[int], *, deadline: float) -> Note:
        """The slot was sent a prompt with these blocks, which begin at the prompt's start. Deadlines never go back."""
        note = Note(slot, [ids[length - 1] for length in _lengths(len(ids))], deadline)
        self._notes[note] = None
        counts = self._counts.setdefault(slot, {})
        holders, bit = self._holders, 1 << slot
        for block in note.ids:
            count = counts.get(block, 0)
            counts[block] = count + 1
            if not count:
                holders[block] = holders.get(block, 0) | bit
        return note

    def forget(self, note: Note) -> None:
        """The note counts no more. Again, or after its end: nothing happens."""
        if note not in self._notes:
            return
        del self._notes[note]
        counts = self._counts[note.slot]
        for block in note.ids:
            count = counts.pop(block)
            if count > 1:
                counts[block] = count - 1
            else:
                self._take(note.slot, block)

    def expire(self, now: float) -> None:
        """Forget the notes whose deadline has come."""
        while self._notes:
            oldest = next(islice(self._notes, 1))
            if oldest.deadline > now:
                return
            self.forget(oldest)

    def clear(self, slot: int) -> None:
        """Forget every note of the slot."""
        for block in self._counts.pop(slot, ()):
            self._take(slot, block)
        self._notes = {note: None for note in self._notes if note.slot != slot}

    def match(self, ids: Sequence[int], slots: int) -> list[Level]:
        """Levels (as `Search` has them) of what slots will hold soon; lengths are short of the truth by a third at
        most."""
        levels: list[Level] = []
        for length in _lengths(len(ids)):
            held = self._holders.get(ids[length - 1], 0) & slots
            if not held:
                break
            if levels and levels[-1][1] == held:
                levels.pop()
            levels.append((length, held))
        return levels

    def _take(self, slot: int, block: int) -> None:
        left = self._holders[block] ^ 1 << slot
        if left:
            self._holders[block] = left
        else:
            del self._holders[block]


def _lengths(num_blocks: int) -> list[int]:
    """The lengths of a prompt that are noted."""
    lengths = _RUNGS[: bisect_right(_RUNGS, num_blocks)]
    if lengths and lengths[-1] != num_blocks:
        lengths.append(num_blocks)
    return lengths
