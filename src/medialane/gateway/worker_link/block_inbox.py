"""Incoming KV-block updates, queued until the event loop applies them. No I/O.

Pieces are taken one at a time, so that a snapshot of many blocks does not block the event loop. A gap in a rank's
sequence means that a piece is missing: further changes of that rank are discarded until a snapshot begins. If more is
queued than a worker can hold, the queue is dropped and snapshots are requested.
"""

from __future__ import annotations

from collections import deque

from medialane.types.kv_events import KvChange

#: Limit of queued changes, in addition to two snapshots of the worker's blocks.
MAX_WAITING_BYTES = 8 << 20


class BlockInbox:
    """`num_gaps` counts gaps and overflows."""

    def __init__(self, *, num_blocks: int = 0) -> None:
        """`num_blocks` is the total capacity of the worker's ranks."""
        self._max_waiting_bytes = MAX_WAITING_BYTES + 2 * 8 * num_blocks
        self._waiting: deque[KvChange] = deque()
        self._num_waiting_bytes = 0
        self._expected: dict[int, int] = {}
        self._lost: set[int] = set()
        self.num_gaps = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def receive(self, change: KvChange) -> bool:
        """Queue a piece. Return False if a snapshot must be requested now."""
        expected = self._expected.get(change.rank, 0)
        self._expected[change.rank] = change.sequence + 1
        if change.snapshot:
            self._lost.discard(change.rank)
        elif change.sequence != expected:  # a requested snapshot may be among the missing pieces
            self._lost.add(change.rank)
            self.num_gaps += 1
            return False
        elif change.rank in self._lost:
            return True  # a snapshot was already requested
        self._waiting.append(change)
        self._num_waiting_bytes += len(change.stored) + len(change.removed)
        return self._num_waiting_bytes <= self._max_waiting_bytes or self._overflow()

    def take(self) -> KvChange | None:
        """Remove and return the next piece, None if there is none."""
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
