"""Outgoing KV-block updates for one gateway (a `connection.PieceSource`).

Changes are queued in order until the connection sends them, piece by piece. If too many are queued (the gateway reads
slowly), or the gateway has no state or an inconsistent one, the queue is dropped and snapshots of all blocks held at
that time are sent instead. Changes during a snapshot are queued behind its pieces. So memory is bounded by one list of
the held blocks and a fixed number of changes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from medialane.types.kv_events import KvChange
from medialane.wire.framing import append_frame
from medialane.wire.protocol import KvBlocks

#: Blocks per message: a gateway needs about 2 us to apply each, and its event loop is blocked in the meantime.
PIECE_BLOCKS = 2048

#: Most blocks in queued changes; a snapshot is rarely larger.
MAX_WAITING_BLOCKS = 1 << 17

ID_BYTES = 8


class BlockFeed:
    """`held` returns the ids of each rank; it may call `push` before it returns.

    After `push` and `resync` the owner calls `wants_to_send`, and if that is True, `append_next` until it returns
    False.
    """

    def __init__(
        self,
        held: Callable[[], Mapping[int, Sequence[int]]],
        *,
        max_frame_bytes: int,
        piece_blocks: int = PIECE_BLOCKS,
        max_waiting_blocks: int = MAX_WAITING_BLOCKS,
    ) -> None:
        self._piece_blocks, self._max_waiting_blocks = piece_blocks, max_waiting_blocks
        self._held = held
        self._max_frame_bytes = max_frame_bytes
        self._pieces: deque[Iterator[KvChange]] = deque()
        self._sequences: dict[int, int] = {}
        self._num_waiting = 0
        self._stale = True
        self._is_sending = False
        self.num_snapshots = 0

    def push(self, change: KvChange) -> None:
        """Queue a change; its `sequence` is ignored."""
        if self._stale:
            return
        if change.snapshot:
            self._pieces.append(self._snapshot(change.rank, np.frombuffer(change.stored, "<u8")))
            return
        self._num_waiting += _num_blocks(change)
        self._pieces.append(self._changes(change))
        if self._num_waiting > self._max_waiting_blocks:
            self.resync()

    def resync(self) -> None:
        """Drop the queue and send snapshots of everything that is held."""
        self._stale = True
        self._pieces.clear()
        self._num_waiting = 0

    def wants_to_send(self) -> bool:
        """Return whether updates are pending and no sender is active. If True, the caller has become the sender."""
        wants = not self._is_sending and (self._stale or bool(self._pieces))
        self._is_sending = self._is_sending or wants
        return wants

    def append_next(self, buffer: bytearray) -> bool:
        change = self.next()
        if change is not None:
            append_frame(buffer, KvBlocks(change), self._max_frame_bytes)
        self._is_sending = self._stale or bool(self._pieces)
        return self._is_sending

    def next(self) -> KvChange | None:
        """Return the next piece; None when everything has been sent."""
        if self._stale:
            self._begin()
        while self._pieces:
            piece = next(self._pieces[0], None)
            if piece is not None:
                return self._numbered(piece)
            self._pieces.popleft()
        return None

    def _begin(self) -> None:
        held = self._held()
        self._stale = False
        self.num_snapshots += 1
        self._pieces.extend(self._snapshot(rank, ids) for rank, ids in held.items())

    def _changes(self, change: KvChange) -> Iterator[KvChange]:
        size = self._piece_blocks * ID_BYTES
        for start in range(0, max(len(change.stored), len(change.removed)), size):
            stored, removed = change.stored[start : start + size], change.removed[start : start + size]
            piece = msgspec.structs.replace(change, stored=stored, removed=removed)
            self._num_waiting -= _num_blocks(piece)
            yield piece

    def _snapshot(self, rank: int, ids: Sequence[int] | NDArray[np.uint64]) -> Iterator[KvChange]:
        for start in range(0, max(1, len(ids)), self._piece_blocks):
            end = start + self._piece_blocks
            stored = np.array(ids[start:end], dtype="<u8").tobytes()
            yield KvChange(rank, 0, stored, b"", snapshot=start == 0, more=end < len(ids))

    def _numbered(self, piece: KvChange) -> KvChange:
        sequence = self._sequences.get(piece.rank, 0)
        self._sequences[piece.rank] = sequence + 1
        return msgspec.structs.replace(piece, sequence=sequence)


def _num_blocks(change: KvChange) -> int:
    return (len(change.stored) + len(change.removed)) // ID_BYTES
