"""Load, KV blocks and pending work of other gateways that a worker reports unsolicited, and this gateway's pending
work; `session_reports` is the worker's side."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from itertools import count
from typing import Final

import msgspec

from medialane.core.errors import ProtocolViolation
from medialane.core.kv_events import KvChange
from medialane.core.pending_work import PendingWork
from medialane.core.request import EncoderCard, ModelCard, WorkerLoad
from medialane.gateway.worker_link.block_inbox import BlockInbox
from medialane.wire.protocol import (
    EncoderCleared,
    Gateways,
    KvBlocks,
    LoadReport,
    Pending,
    PendingEnded,
    Report,
    ResyncBlocks,
)

#: Limits for a worker's card: far beyond any engine, but they bound the state whose size depends on the card.
_MAX_BLOCK_SIZE: Final = 1 << 16
_MAX_RANKS: Final = 1 << 12
_MAX_KV_BLOCKS: Final = 1 << 32


class ClientReports:
    """The latest load of each rank (`loads`, empty before the first report), the engine's `encoder`, the number of
    gateways registered with the worker, and changes of KV blocks, delivered to the callbacks of `watch`, one change per
    iteration of the event loop. Changes are queued until there is a callback."""

    def __init__(self, send: Callable[[msgspec.Struct], None]) -> None:
        self._send = send
        self._blocks = BlockInbox()
        self._num_ranks = 0
        self._on_blocks: Callable[[KvChange], None] | None = None
        self._on_loads: Callable[[Sequence[WorkerLoad]], None] | None = None
        self._on_pending: Callable[[int, PendingWork], None] | None = None
        self._on_pending_ended: Callable[[int, bool], None] | None = None
        self._on_encoder_cleared: Callable[[], None] | None = None
        self._numbers = count()
        self._delivery: asyncio.Handle | None = None
        self.loads: Sequence[WorkerLoad] = ()
        self.is_stalled = False
        self.has_unknown_blocks = False
        self.encoder: EncoderCard | None = None
        self.num_gateways = 1

    @property
    def num_block_gaps(self) -> int:
        return self._blocks.num_gaps

    def open(self, card: ModelCard) -> None:
        """Start with the card of the worker's Welcome. Raises ProtocolViolation if its sizes are out of range."""
        _check(card)
        self._num_ranks = max(1, card.data_parallel_size)
        self.encoder = card.encoder
        self._blocks = BlockInbox(num_blocks=card.num_kv_blocks * self._num_ranks)

    def watch(
        self,
        *,
        on_blocks: Callable[[KvChange], None],
        on_loads: Callable[[Sequence[WorkerLoad]], None],
        on_pending: Callable[[int, PendingWork], None] | None,
        on_pending_ended: Callable[[int, bool], None] | None,
        on_encoder_cleared: Callable[[], None] | None,
    ) -> None:
        self._on_blocks, self._on_loads = on_blocks, on_loads
        self._on_pending, self._on_pending_ended = on_pending, on_pending_ended
        self._on_encoder_cleared = on_encoder_cleared
        self._deliver_soon()

    def received(self, message: Report) -> None:
        """Raises ProtocolViolation."""
        match message:
            case LoadReport(loads, is_stalled, has_unknown_blocks):
                self.is_stalled, self.has_unknown_blocks = is_stalled, has_unknown_blocks
                self.receive_loads(loads)
            case KvBlocks(change):
                self.receive_blocks(change)
            case EncoderCleared(encoder):
                self.encoder = encoder
                if self._on_encoder_cleared is not None:
                    self._on_encoder_cleared()
            case Gateways(count):
                self.num_gateways = count
            case Pending(number, work):
                # A rank that the worker does not have is another gateway's fault.
                if self._on_pending is not None and work.rank < self._num_ranks:
                    self._on_pending(number, work)
            case PendingEnded(number, is_computed):
                if self._on_pending_ended is not None:
                    self._on_pending_ended(number, is_computed)

    def receive_loads(self, loads: Sequence[WorkerLoad]) -> None:
        """Raises ProtocolViolation."""
        if len(loads) != self._num_ranks:
            raise ProtocolViolation(f"the load of {len(loads)} ranks from a worker with {self._num_ranks}")
        self.loads = loads
        if self._on_loads is not None:
            self._on_loads(loads)

    def announce(self, work: PendingWork) -> Callable[[bool], None]:
        """Announce pending work to the worker's other gateways. Call the returned function once, when it ends, with
        whether it was computed."""
        number = next(self._numbers)
        self._send(Pending(number, work))
        return lambda is_computed: self._send(PendingEnded(number, is_computed))

    def receive_blocks(self, change: KvChange) -> None:
        """Raises ProtocolViolation."""
        if len(change.stored) % 8 or len(change.removed) % 8:
            raise ProtocolViolation("KV blocks with incomplete ids")
        if change.rank not in range(self._num_ranks):
            raise ProtocolViolation("KV blocks of an unknown rank")
        if not self._blocks.receive(change):
            self._send(ResyncBlocks())
        self._deliver_soon()

    def lost(self) -> None:
        """Stop deliveries: the connection is closed."""
        self._on_blocks = self._on_loads = self._on_pending = self._on_pending_ended = None
        self._on_encoder_cleared = None
        if self._delivery is not None:
            self._delivery.cancel()

    def _deliver_soon(self) -> None:
        if self._delivery is None and self._on_blocks is not None and len(self._blocks):
            self._delivery = asyncio.get_running_loop().call_soon(self._deliver)

    def _deliver(self) -> None:
        self._delivery = None
        change = self._blocks.take()
        if change is not None and self._on_blocks is not None:
            self._on_blocks(change)
            self._deliver_soon()


def _check(card: ModelCard) -> None:
    if not (
        0 <= card.block_size <= _MAX_BLOCK_SIZE
        and 0 <= card.data_parallel_size <= _MAX_RANKS
        and 0 <= card.num_kv_blocks <= _MAX_KV_BLOCKS
        and card.encoder_cache_tokens >= 0
        and card.max_num_seqs >= 0
    ):
        raise ProtocolViolation("a worker's card with sizes out of range")
