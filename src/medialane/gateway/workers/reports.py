"""Load, KV blocks and pending work of other gateways that a worker reports unsolicited, and this gateway's pending
work; `worker.reports` is the worker's side. The router learns of all of it. No I/O.

`BlockInbox` queues KV-block updates until the event loop applies them. Pieces are taken one at a time, so that a
snapshot of many blocks does not block the event loop. If more is queued than a worker can hold, the queue is dropped
and snapshots are requested; further changes of a rank are discarded until its snapshot begins.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Sequence
from itertools import count
from typing import Final

import msgspec

from medialane.routing import AnnouncedRequest, Router
from medialane.types.errors import ProtocolViolation
from medialane.types.kv_blocks import KvChange
from medialane.types.request import EncoderCard, Endpoint, ModelCard, WorkerLoad, WorkerState
from medialane.types.stats import PendingWork
from medialane.wire.protocol import (
    ArenaMapped,
    EncoderCleared,
    Gateways,
    KvBlocks,
    LoadReport,
    Pending,
    PendingEnded,
    Report,
    ResyncBlocks,
)

logger = logging.getLogger(__name__)

#: Limits for a worker's card: far beyond any engine, but they bound the state whose size depends on the card.
_MAX_BLOCK_SIZE: Final = 1 << 16

_MAX_RANKS: Final = 1 << 12

_MAX_KV_BLOCKS: Final = 1 << 32


#: Most requests of other gateways that are counted at one worker.
_MAX_ANNOUNCED: Final = 4096


class ClientReports:
    """The latest load of each rank (`loads`, empty before the first report), the engine's `encoder`, the `arena` that
    the worker has mapped, and the number of gateways registered with the worker. From `route` on, the router chooses
    the worker, and learns what it reports."""

    _router: Router
    _same_host: Callable[[], bool]

    def __init__(self, send: Callable[[msgspec.Struct], None]) -> None:
        self._send = send
        self._blocks = BlockInbox()
        self._num_ranks = 0
        #: Of its ranks at the router, while that may choose them.
        self._slots: list[int] = []
        self._name = ""
        #: Requests of other gateways at the router, by their numbers.
        self._announced: dict[int, AnnouncedRequest] = {}
        self._numbers = count()
        self._delivery: asyncio.Handle | None = None
        self.loads: Sequence[WorkerLoad] = ()
        #: Other than `lost`.
        self.state: WorkerState = "ready"
        #: Whether the worker's KV blocks cannot be compared with prompts.
        self.has_unknown_blocks = False
        #: Whether background tasks of the worker have ended lately, and were started again.
        self.has_failing_tasks = False
        #: None if its embeddings are not kept.
        self.encoder: EncoderCard | None = None
        self.arena: str | None = None
        #: The age of the last change of KV blocks when the worker sent it, if known.
        self.event_lag_s = 0.0
        #: Including this one.
        self.num_gateways = 1

    @property
    def num_block_overflows(self) -> int:
        """How often changes of KV blocks were dropped, so that snapshots were requested."""
        return self._blocks.num_overflows

    def open(self, card: ModelCard) -> None:
        """Start with the card of the worker's Welcome. Raises ProtocolViolation if its sizes are out of range."""
        _check(card)
        self._num_ranks = max(1, card.data_parallel_size)
        self.encoder = card.encoder
        self._blocks = BlockInbox(num_blocks=card.num_kv_blocks * self._num_ranks)

    def route(self, router: Router, endpoints: Sequence[Endpoint], *, same_host: Callable[[], bool]) -> None:
        """Have `router` choose the worker, whose ranks are `endpoints`, until the connection is closed. Changes of KV
        blocks that were received before are applied as well.

        Call once, on an open connection. Raises ValueError, with no effect, if the router has one of the ranks already.
        """
        self._router, self._same_host, self._name = router, same_host, endpoints[0].worker_id
        try:
            for endpoint in endpoints:
                self._slots.append(router.join(endpoint))
        except BaseException:  # raised again: the router must not keep some of the ranks
            self._leave()
            raise
        self._deliver_soon()

    def received(self, message: Report) -> bool:
        """Return whether what is known of all workers may have changed: the state, the arena, the encoder; or the
        worker is still stalled, and may have got requests since. Raises ProtocolViolation."""
        before = self.state
        match message:
            case LoadReport():
                self._receive_loads(message)
                return self.state != before or before == "stalled"
            case KvBlocks(change):
                self._receive_blocks(change)
            case ArenaMapped(arena):
                self.arena = arena
                self.host_changed()
            case EncoderCleared(encoder):
                self._receive_cleared(encoder)
            case Gateways(number):
                self.num_gateways = number
            case Pending(number, work):
                self._receive_pending(number, work)
            case PendingEnded(number, is_computed):
                if (announced := self._announced.pop(number, None)) is not None:
                    announced.end(is_computed=is_computed)
        return isinstance(message, ArenaMapped | EncoderCleared)

    def announce(self, work: PendingWork) -> Callable[[bool], None]:
        """Announce pending work to the worker's other gateways. Call the returned function once, when it ends, with
        whether it was computed. Pointless unless `num_gateways` is above 1."""
        number = next(self._numbers)
        self._send(Pending(number, work))
        return lambda is_computed: self._send(PendingEnded(number, is_computed))

    def host_changed(self) -> None:
        """The worker has mapped another arena, or none; or this gateway has another store."""
        for slot in self._slots:
            self._router.move(slot, same_host=self._same_host())

    def apply(self, change: KvChange) -> None:
        """Have the router apply a change: after `route` all blocks first, then changes in order, one per iteration of
        the event loop."""
        self._router.change(self._slots[change.rank], change)

    def lost(self) -> None:
        """The connection is closed. The worker leaves the router in the same iteration of the event loop, so no request
        is routed in between."""
        if self._delivery is not None:
            self._delivery.cancel()
        self._leave()

    def _leave(self) -> None:
        slots, self._slots = self._slots, []
        for slot in slots:
            self._router.leave(slot)

    def _receive_loads(self, report: LoadReport) -> None:
        if len(report.loads) != self._num_ranks:
            raise ProtocolViolation(f"the load of {len(report.loads)} ranks from a worker with {self._num_ranks}")
        before, self.state = self.state, _state(report)
        self.has_unknown_blocks, self.loads = report.has_unknown_blocks, report.loads
        self.has_failing_tasks = report.has_failing_tasks
        for slot, load in zip(self._slots, report.loads, strict=False):  # no slots before `route`
            self._router.report(slot, load)
        if self._slots and self.state != before:
            self._state_changed()

    def _state_changed(self) -> None:
        """The worker is ready again, its engine hangs, or it is draining."""
        level = logging.ERROR if self.state == "stalled" else logging.WARNING
        what = "is ready again" if self.state == "ready" else f"is {self.state}: it gets no new requests"
        logger.log(level, "worker %s %s", self._name, what)
        for slot in self._slots:
            self._router.drain(slot, draining=self.state != "ready")

    def _receive_cleared(self, encoder: EncoderCard | None) -> None:
        """An administrative call of any gateway has emptied the encoder caches of the worker's engine."""
        self.encoder = encoder
        for slot in self._slots:
            self._router.clear_encoder(slot)

    def _receive_pending(self, number: int, work: PendingWork) -> None:
        """Another gateway has sent a request to the worker. An unknown rank is that gateway's fault."""
        announced, slots = self._announced, self._slots
        if number not in announced and len(announced) < _MAX_ANNOUNCED and work.rank < len(slots):
            announced[number] = self._router.announced(slots[work.rank], work)

    def _receive_blocks(self, change: KvChange) -> None:
        if len(change.stored) % 8 or len(change.removed) % 8:
            raise ProtocolViolation("KV blocks with incomplete ids")
        if change.rank not in range(self._num_ranks):
            raise ProtocolViolation("KV blocks of an unknown rank")
        self.event_lag_s = change.age_s or self.event_lag_s
        if not self._blocks.receive(change):
            self._send(ResyncBlocks())
        self._deliver_soon()

    def _deliver_soon(self) -> None:
        if self._delivery is None and self._slots and len(self._blocks):
            self._delivery = asyncio.get_running_loop().call_soon(self._deliver)

    def _deliver(self) -> None:
        self._delivery = None
        if (change := self._blocks.take()) is not None:
            self.apply(change)
            self._deliver_soon()


def _state(report: LoadReport) -> WorkerState:
    return "stalled" if report.is_stalled else "draining" if report.is_draining else "ready"


def _check(card: ModelCard) -> None:
    if not (
        0 <= card.block_size <= _MAX_BLOCK_SIZE
        and 0 <= card.data_parallel_size <= _MAX_RANKS
        and 0 <= card.num_kv_blocks <= _MAX_KV_BLOCKS
        and card.encoder_cache_tokens >= 0
        and card.max_num_seqs >= 0
    ):
        raise ProtocolViolation("a worker's card with sizes out of range")


#: Limit of queued changes, in addition to two snapshots of the worker's blocks.
MAX_WAITING_BYTES = 8 << 20


class BlockInbox:
    """`num_overflows` counts how often the queue was dropped."""

    def __init__(self, *, num_blocks: int = 0) -> None:
        """`num_blocks` is the total capacity of the worker's ranks."""
        self._max_waiting_bytes = MAX_WAITING_BYTES + 2 * 8 * num_blocks
        self._waiting: deque[KvChange] = deque()
        self._num_waiting_bytes = 0
        self._ranks: set[int] = set()
        self._lost: set[int] = set()
        self.num_overflows = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def receive(self, change: KvChange) -> bool:
        """Queue a piece. Return False if a snapshot must be requested now."""
        self._ranks.add(change.rank)
        if change.snapshot:
            self._lost.discard(change.rank)
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
        self._lost.update(self._ranks)
        self.num_overflows += 1
        return False
