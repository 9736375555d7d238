"""Unsolicited reports of a worker to one gateway: its load, its KV blocks, and the pending work of other gateways.

`BlockFeed` has the outgoing KV-block updates (a `connection.PieceSource`). Changes are queued in order until the
connection sends them, piece by piece. If too many are queued (the gateway reads slowly), or the gateway has no state or
an inconsistent one, the queue is dropped and snapshots of all blocks held at that time are sent instead. Changes during
a snapshot are queued behind its pieces. So memory is bounded by one list of the held blocks and a fixed number of
changes.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import count

import msgspec
import numpy as np
from numpy.typing import NDArray

from medialane.runtime.tasks import has_failing_tasks
from medialane.types.kv_blocks import KvChange
from medialane.types.request import EncoderCard
from medialane.types.stats import PendingWork
from medialane.wire.config import RpcConfig
from medialane.wire.connection import Connection, append_frame
from medialane.wire.protocol import (
    ArenaMapped,
    EncoderCleared,
    Gateways,
    KvBlocks,
    LoadReport,
    Pending,
    PendingEnded,
    ReportRequest,
    ResyncBlocks,
)
from medialane.worker.requests import Handler

#: Changes of load within this time are reported together.
LOAD_REPORT_DELAY_S = 0.02


class SessionReports:
    """Reports from `start` until `stop`, during which the gateway is a member of `relay`. Used on the event loop."""

    def __init__(
        self,
        handler: Handler,
        connection: Connection,
        config: RpcConfig,
        *,
        relay: PendingWorkRelay,
    ) -> None:
        self.connection = connection
        self._handler = handler
        self._relay = relay
        self._max_pending = config.max_in_flight
        self._pending: dict[int, int] = {}  # the gateway's numbers -> numbers at the other gateways
        self._feed = BlockFeed(handler.held_blocks, max_frame_bytes=config.max_frame_bytes)
        self._unwatch: list[Callable[[], None]] = []
        self._reported: LoadReport | None = None
        self._reporting: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Report everything after registration, then changes."""
        self.report_load()
        if not self.connection.closed.is_set():
            self._unwatch = [
                self._handler.watch_arena(lambda arena: self.connection.send(ArenaMapped(arena))),
                self._handler.watch_blocks(self._blocks_changed),
            ]
            self._send_blocks()
            self._relay.join(self)

    def stop(self) -> None:
        """Stop reporting: the connection is closed."""
        self._relay.leave(self)
        for number in list(self._pending):
            self._end_pending(number, is_computed=False)
        while self._unwatch:
            self._unwatch.pop()()
        if self._reporting is not None:
            self._reporting.cancel()

    def report_load(self) -> None:
        self._reported = self._load()
        self.connection.send(self._reported)

    def load_changed(self) -> None:
        """Report the load soon, if it has changed."""
        if self._reporting is None and not self.connection.closed.is_set():
            self._reporting = asyncio.get_running_loop().call_later(LOAD_REPORT_DELAY_S, self._report_changed_load)

    def received(self, message: ReportRequest) -> None:
        match message:
            case ResyncBlocks():
                self._feed.resync()
                self._send_blocks()
            case Pending(number, work):
                # Beyond the limit it is not relayed: the others then know it from the load alone.
                if number not in self._pending and len(self._pending) < self._max_pending:
                    self._pending[number] = self._relay.relay(self, work)
            case PendingEnded(number, is_computed):
                if number in self._pending:
                    self._end_pending(number, is_computed=is_computed)

    def _end_pending(self, number: int, *, is_computed: bool) -> None:
        self._relay.relay_end(self, self._pending.pop(number), is_computed=is_computed)

    def _report_changed_load(self) -> None:
        self._reporting = None
        if (load := self._load()) != self._reported:
            self.report_load()
        if any(each.num_waiting for each in load.loads):  # gateways send the next request once the engine has begun it
            self.load_changed()

    def _load(self) -> LoadReport:
        handler = self._handler
        return LoadReport(
            tuple(handler.loads()),
            handler.is_stalled,
            handler.has_unknown_blocks,
            has_failing_tasks(),
            handler.is_draining,
        )

    def _blocks_changed(self, change: KvChange) -> None:
        self._feed.push(change)
        self._send_blocks()

    def _send_blocks(self) -> None:
        if self._feed.wants_to_send():
            self.connection.send_in_pieces(self._feed)


class PendingWorkRelay:
    """Gives each of the gateways that are registered with a worker the pending work of the others. Used on the event
    loop."""

    def __init__(self) -> None:
        self._sessions: dict[SessionReports, None] = {}
        self._numbers = count()

    def __len__(self) -> int:
        return len(self._sessions)

    def join(self, session: SessionReports) -> None:
        self._sessions[session] = None
        if len(self._sessions) > 1:
            self._report_count()

    def leave(self, session: SessionReports) -> None:
        """Idempotent."""
        if session in self._sessions:
            del self._sessions[session]
            self._report_count()

    def relay(self, sender: SessionReports, work: PendingWork) -> int:
        """Send pending work to the other gateways; return its number there."""
        number = next(self._numbers)
        message = Pending(number, work)
        for session in self._sessions:
            # To a gateway that reads too slowly, messages that can be omitted are not sent.
            if session is not sender and not session.connection.paused:
                session.connection.send(message)
        return number

    def relay_end(self, sender: SessionReports, number: int, *, is_computed: bool) -> None:
        message = PendingEnded(number, is_computed)
        for session in self._sessions:
            if session is not sender:
                session.connection.send(message)

    def encoder_cleared(self, encoder: EncoderCard | None) -> None:
        for session in self._sessions:
            session.connection.send(EncoderCleared(encoder))

    def load_changed(self) -> None:
        for session in self._sessions:
            session.load_changed()

    def _report_count(self) -> None:
        for session in self._sessions:
            session.connection.send(Gateways(len(self._sessions)))


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
        self._num_waiting = 0
        self._stale = True
        self._is_sending = False

    def push(self, change: KvChange) -> None:
        """Queue a change."""
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
                return piece
            self._pieces.popleft()
        return None

    def _begin(self) -> None:
        held = self._held()
        self._stale = False
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
            yield KvChange(rank, stored, b"", snapshot=start == 0, more=end < len(ids))


def _num_blocks(change: KvChange) -> int:
    return (len(change.stored) + len(change.removed)) // ID_BYTES
