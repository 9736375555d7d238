"""Numbered batches of one publisher, some of them lost, some told twice: which of them count. Pure."""

from __future__ import annotations

from enum import Enum


class Verdict(Enum):
    """What a batch is to its reader."""

    TAKE = "the next one"
    SEEN = "known already"
    GAP = "others before it are missing"
    RESTARTED = "the publisher counts from the start again"


class EventSequence:
    """`next` is the number of the batch that is wanted.

    Batches come live, each once and in order though some may be missing, and out of the publisher's buffer, which is
    read from `next` on.
    """

    def __init__(self) -> None:
        self.next = 0
        self._last_live = -1

    def live(self, number: int) -> Verdict:
        """Judge a live batch; what is taken counts as taken. A restarted publisher's is to be judged again."""
        if number <= self._last_live:
            self.next, self._last_live = 0, -1
            return Verdict.RESTARTED
        self._last_live = number
        return self.buffered(number)

    def buffered(self, number: int) -> Verdict:
        """Judge a batch out of the buffer."""
        if number == self.next:
            self.next += 1
            return Verdict.TAKE
        return Verdict.SEEN if number < self.next else Verdict.GAP

    def skip_to(self, number: int) -> None:
        """Give up what is missing before `number`."""
        self.next = max(self.next, number)
