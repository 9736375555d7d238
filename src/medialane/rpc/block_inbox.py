"""What a worker told of its KV blocks, until the gateway's loop has time for it. Pure.

Pieces are given one at a time, so that a snapshot of many blocks does not hold the loop. A piece that does not follow
the one before it, of the same rank, means that something is missing: nothing of that rank is believed then until a
snapshot of it begins. The same where more waits than a worker has to tell: then it is told again.
"""

from __future__ import annotations

from collections import deque

from medialane.core.kv_events import KvChange

#: Besides two snapshots of the worker's blocks: changes that may wait.
MAX_WAITING_BYTES = 8 << 20


class BlockInbox:
    """`num_gaps` counts the times that something was missing."""

    def __init__(self, *, num_blocks: int = 0) -> None:
        """`num_blocks` is how many the worker may hold, over all of its ranks."""
        self._max_waiting_bytes = MAX_WAITING_BYTES + 2 * 8 * num_blocks
        self._waiting: deque[KvChange] = deque()
        self._num_waiting_bytes = 0
        self._expected: dict[int, int] = {}
        self._lost: set[int] = set()
        self.num_gaps = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def receive(self, change: KvChange) -> bool:
        """Take a piece up. False where a snapshot has to be asked for now."""
        expected = self._expected.get(change.rank, 0)
        self._expected[change.rank] = change.sequence + 1
        if change.snapshot:
            self._lost.discard(change.rank)
        elif change.sequence != expected:  # among what is missing may be the snapshot that was asked for
            self._lost.add(change.rank)
            self.num_gaps += 1
            return False
        elif change.rank in self._lost:
            return True  # asked for already
        self._waiting.append(change)
        self._num_waiting_bytes += len(change.stored) + len(change.removed)
        return self._num_waiting_bytes <= self._max_waiting_bytes or self._overflow()

    def take(self) -> KvChange | None:
        """The next piece, None if there is none."""
        if not self._waiting:
            return None
        change = self._waiting.popleft()
        self._num_waiting_bytes -= len(change.stored) + len(change.removed)
        return change

    def _overflow(self) -> bool:
        self._waiting.clear()
        self._num_waiting_bytes = 0
        self._lost.update(self._expected)
        self.num_gaps += 1
        return False
