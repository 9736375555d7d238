"""Gap and duplicate detection for the numbered batches of one publisher. Pure."""

from __future__ import annotations

from enum import Enum


class BatchStatus(Enum):
    """What to do with a batch."""

    TAKE = "the next one"
    SEEN = "duplicate"
    GAP = "earlier batches are missing"
    RESTARTED = "the publisher has restarted its numbering"


class EventSequence:
    """`next` is the number of the next expected batch.

    Batches arrive live, each once and in order though some may be missing, and from the publisher's buffer, which is
    read from `next` on.
    """

    def __init__(self) -> None:
        self.next = 0
        self._last_live = -1

    def live(self, number: int) -> BatchStatus:
        """Classify a live batch, and advance past it on TAKE. On RESTARTED, call again with the same batch."""
        if number <= self._last_live:
            self.next, self._last_live = 0, -1
            return BatchStatus.RESTARTED
        self._last_live = number
        return self.buffered(number)

    def buffered(self, number: int) -> BatchStatus:
        """Classify a batch from the buffer, and advance past it on TAKE."""
        if number == self.next:
            self.next += 1
            return BatchStatus.TAKE
        return BatchStatus.SEEN if number < self.next else BatchStatus.GAP

    def skip_to(self, number: int) -> None:
        """Give up the missing batches before `number`."""
        self.next = max(self.next, number)
