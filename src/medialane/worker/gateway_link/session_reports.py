"""Unsolicited reports of a worker to one gateway: its load, its KV blocks, and the pending work of other gateways."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from itertools import count

import msgspec

from medialane.runtime.tasks import has_failing_tasks
from medialane.types.kv_events import KvChange
from medialane.types.request import EncoderCard
from medialane.types.stats import PendingWork
from medialane.wire.connection import Connection
from medialane.wire.protocol import (
    ArenaMapped,
    EncoderCleared,
    Gateways,
    LoadReport,
    Pending,
    PendingEnded,
    ReportRequest,
    ResyncBlocks,
)
from medialane.worker.gateway_link.block_feed import BlockFeed
from medialane.worker.gateway_link.handler import Handler

#: Changes of load within this time are reported together.
LOAD_REPORT_DELAY_S = 0.02


class SessionReports:
    """Reports from `start` until `stop`, during which the gateway is a member of `relay`. Used on the event loop."""

    def __init__(
        self,
        handler: Handler,
        connection: Connection,
        *,
        relay: PendingWorkRelay,
        max_frame_bytes: int,
        max_pending: int,
    ) -> None:
        self._handler = handler
        self._connection = connection
        self._relay = relay
        self._max_pending = max_pending
        self._pending: dict[int, int] = {}  # the gateway's numbers -> those at the other gateways
        self._feed = BlockFeed(handler.held_blocks, max_frame_bytes=max_frame_bytes)
        self._unwatch: list[Callable[[], None]] = []
        self._reported: LoadReport | None = None
        self._reporting: asyncio.TimerHandle | None = None

    @property
    def is_slow(self) -> bool:
        """Whether the gateway reads too slowly: messages that can be omitted are."""
        return self._connection.paused

    def send(self, message: msgspec.Struct) -> None:
        self._connection.send(message)

    def start(self) -> None:
        """Report everything after registration, then changes."""
        self.report_load()
        if not self._connection.closed.is_set():
            self._unwatch = [
                self._handler.watch_arena(lambda arena: self._connection.send(ArenaMapped(arena))),
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
        self._connection.send(self._reported)

    def load_changed(self) -> None:
        """Report the load soon, if it has changed."""
        if self._reporting is None and not self._connection.closed.is_set():
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
            self._connection.send_in_pieces(self._feed)


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
            if session is not sender and not session.is_slow:
                session.send(message)
        return number

    def relay_end(self, sender: SessionReports, number: int, *, is_computed: bool) -> None:
        message = PendingEnded(number, is_computed)
        for session in self._sessions:
            if session is not sender:
                session.send(message)

    def encoder_cleared(self, encoder: EncoderCard | None) -> None:
        for session in self._sessions:
            session.send(EncoderCleared(encoder))

    def load_changed(self) -> None:
        for session in self._sessions:
            session.load_changed()

    def _report_count(self) -> None:
        for session in self._sessions:
            session.send(Gateways(len(self._sessions)))
