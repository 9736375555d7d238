"""Unsolicited reports of a worker to one gateway: its load and its KV blocks."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from medialane.core.kv_events import KvChange
from medialane.core.request import WorkerLoad
from medialane.rpc.block_feed import BlockFeed
from medialane.rpc.connection import Connection
from medialane.rpc.handler import Handler
from medialane.rpc.messages import ArenaMapped, LoadReport

#: Changes of load within this time are reported together.
LOAD_REPORT_DELAY_S = 0.02


class SessionReports:
    """Reports from `start` until `stop`. Used on the event loop."""

    def __init__(self, handler: Handler, connection: Connection, *, max_frame_bytes: int) -> None:
        self._handler = handler
        self._connection = connection
        self._feed = BlockFeed(handler.held_blocks, max_frame_bytes=max_frame_bytes)
        self._unwatch: list[Callable[[], None]] = []
        self._reported: tuple[WorkerLoad, ...] = ()
        self._reporting: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Report everything after registration, then changes."""
        self.report_load()
        if not self._connection.closed.is_set():
            self._unwatch = [
                self._handler.watch_arena(lambda arena: self._connection.send(ArenaMapped(arena))),
                self._handler.watch_blocks(self._blocks_changed),
            ]
            self._send_blocks()

    def stop(self) -> None:
        """Stop reporting: the connection is closed."""
        while self._unwatch:
            self._unwatch.pop()()
        if self._reporting is not None:
            self._reporting.cancel()

    def report_load(self) -> None:
        self._reported = tuple(self._handler.loads())
        self._connection.send(LoadReport(self._reported))

    def load_changed(self) -> None:
        """Report the load soon, if it has changed."""
        if self._reporting is None and not self._connection.closed.is_set():
            self._reporting = asyncio.get_running_loop().call_later(LOAD_REPORT_DELAY_S, self._report_changed_load)

    def resync_blocks(self) -> None:
        """Report all blocks again: the gateway has missed changes."""
        self._feed.resync()
        self._send_blocks()

    def _report_changed_load(self) -> None:
        self._reporting = None
        if tuple(self._handler.loads()) != self._reported:
            self.report_load()

    def _blocks_changed(self, change: KvChange) -> None:
        self._feed.push(change)
        self._send_blocks()

    def _send_blocks(self) -> None:
        if self._feed.wants_to_send():
            self._connection.send_in_pieces(self._feed)
