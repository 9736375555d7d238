"""What one gateway has still to be told of the worker's KV blocks (a `connection.PieceSource`).

Theory of operation. Changes wait in order until the connection takes them, piece by piece. Where too many wait (the
gateway reads slowly), and where the gateway knows nothing yet or not any more, what waits is dropped and everything
that is held then is told instead, as snapshots. Changes during a snapshot's pieces wait behind them. So memory is one
list of what is held, at the most, and a bounded number of changes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence

import msgspec
import numpy as np

from medialane.core.kv_events import KvChange
from medialane.rpc.framing import append_frame
from medialane.rpc.messages import KvBlocks

#: Blocks in a message: a gateway takes them up in some 2 us each, and does nothing else meanwhile.
PIECE_BLOCKS = 2048

#: Blocks in changes that may wait; above that, a snapshot is rarely more.
MAX_WAITING_BLOCKS = 1 << 17

ID_BYTES = 8


class BlockFeed:
    """`held` gives the ids of each rank; it may call `push` before it returns.

    After `push` and `resync` the owner asks `wants_to_send`, and if so gives it a turn: `append_next` until it is
    False.
    """

    def __init__(self, held: Callable[[], Mapping[int, Sequence[int]]], *, max_frame_bytes: int) -> None:
        self._held = held
        self._max_frame_bytes = max_frame_bytes
        self._pieces: deque[Iterator[KvChange]] = deque()
        self._sequences: dict[int, int] = {}
        self._num_waiting = 0
        self._stale = True
        self._is_sending = False
        self.num_snapshots = 0

    def push(self, change: KvChange) -> None:
        """Something has changed; its sequence does not count."""
        if self._stale:
            return
        if change.snapshot:
            self._pieces.append(_snapshot(change.rank, np.frombuffer(change.stored, "<u8")))
            return
        self._num_waiting += _num_blocks(change)
        self._pieces.append(self._changes(change))
        if self._num_waiting > MAX_WAITING_BLOCKS:
            self.resync()

    def resync(self) -> None:
        """Start again with everything that is held."""
        self._stale = True
        self._pieces.clear()
        self._num_waiting = 0

    def wants_to_send(self) -> bool:
        """Whether there is something to tell and nobody sees to it; the asker does then."""
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
        """The next piece; None when everything is told."""
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
        self._pieces.extend(_snapshot(rank, ids) for rank, ids in held.items())

    def _changes(self, change: KvChange) -> Iterator[KvChange]:
        size = PIECE_BLOCKS * ID_BYTES
        for start in range(0, max(len(change.stored), len(change.removed)), size):
            stored, removed = change.stored[start : start + size], change.removed[start : start + size]
            piece = msgspec.structs.replace(change, stored=stored, removed=removed)
            self._num_waiting -= _num_blocks(piece)
            yield piece

    def _numbered(self, piece: KvChange) -> KvChange:
        sequence = self._sequences.get(piece.rank, 0)
        self._sequences[piece.rank] = sequence + 1
        return msgspec.structs.replace(piece, sequence=sequence)


def _snapshot(rank: int, ids: Sequence[int] | np.ndarray[tuple[int], np.dtype[np.uint64]]) -> Iterator[KvChange]:
    for start in range(0, max(1, len(ids)), PIECE_BLOCKS):
        end = start + PIECE_BLOCKS
        stored = np.array(ids[start:end], dtype="<u8").tobytes()
        yield KvChange(rank, 0, stored, b"", snapshot=start == 0, more=end < len(ids))


def _num_blocks(change: KvChange) -> int:
    return (len(change.stored) + len(change.removed)) // ID_BYTES
