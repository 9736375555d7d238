"""What a request occupies at its slot: a queue position until its first token, and one in flight until its end; of
another gateway's request, the queue position."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from medialane.core.kv_events import BlockIds
from medialane.core.pending_work import MAX_ITEMS, PendingWork
from medialane.routing.block_index import BlockIndex
from medialane.routing.cost import SlotCost
from medialane.routing.encoder_cache import EncoderCaches
from medialane.routing.pending_blocks import PendingPrefix
from medialane.routing.prediction import Expectation, PredictionMonitor
from medialane.routing.request import RoutingRequest
from medialane.routing.slots import Slot, SlotTable


@dataclass(frozen=True)
class SlotState:
    """All of the router's state about its slots."""

    slots: SlotTable
    index: BlockIndex
    caches: EncoderCaches
    predictions: PredictionMonitor

    def reserve(self, slot: Slot, request: RoutingRequest, terms: SlotCost, *, is_reported: bool) -> Reservation:
        """Count a request at a slot, which must not have left. `is_reported`: its cached prefix there was reported by
        the worker, not inferred from requests in flight."""
        work_ms = terms.parts.prefill + terms.parts.encoder + terms.parts.load
        blocks = request.blocks_at(slot.card)
        expected = self.predictions.sent(
            slot.number,
            blocks.ids,
            block_size=blocks.size,
            num_usable=blocks.num_usable,
            num_held=terms.cached_tokens // blocks.size,
            is_reported=is_reported,
        )
        prefix = self.index.note(slot.number, blocks.ids)
        items = [(item.mm_hash, item.num_embeds) for item in terms.needed]
        pinned = self.caches.pin(slot.number, items)
        self.slots.queue(slot, work_ms)
        return Reservation(self, slot, blocks.ids, work_ms, expected, prefix, items, pinned)

    def reserve_announced(self, slot: Slot, work: PendingWork) -> AnnouncedReservation:
        """Count a request that another gateway has sent to the slot, which must not have left."""
        ids = np.frombuffer(work.block_ids, "<u8").astype(np.uint64)
        prefix = self.index.note(slot.number, ids, is_sampled=True)
        pinned = self.caches.pin(slot.number, work.items)
        self.slots.queue(slot, work.work_ms, announced=True)
        return AnnouncedReservation(self, slot, work.work_ms, prefix, pinned)


@dataclass(slots=True, eq=False)
class AnnouncedReservation:
    """A queued request of another gateway. The owner must call `end`."""

    _state: SlotState
    _slot: Slot
    _work_ms: float
    _prefix: PendingPrefix
    _pinned: list[str]
    _is_ended: bool = False

    def end(self, *, is_computed: bool) -> None:
        """Release everything: the request has its first token (`is_computed`), or has ended without one. Its blocks
        count a little longer if their KV events may still be in transit. Idempotent; may be called after the slot has
        left."""
        state, slot = self._state, self._slot
        if self._is_ended or not state.slots.is_current(slot):
            return
        self._is_ended = True
        state.slots.unqueue(slot, self._work_ms)
        state.slots.finish(slot, announced=True)
        state.caches.unpin(slot.number, self._pinned, computed=is_computed)
        if is_computed:
            state.index.fade(self._prefix, self._prefix.ids)
        else:
            state.index.forget(self._prefix)


@dataclass(slots=True, eq=False)
class Reservation:
    """Both methods are idempotent and may be called after the slot has left. The owner must call `release`."""

    _state: SlotState
    _slot: Slot
    _block_ids: BlockIds
    _work_ms: float
    _expected: Expectation
    _prefix: PendingPrefix
    _items: list[tuple[str, int]]
    _pinned: list[str]
    _on_dequeued: Callable[[bool], None] | None = None
    is_queued: bool = True
    _is_computed: bool = False
    _is_released: bool = False

    def announce(self, send: Callable[[PendingWork], Callable[[bool], None]]) -> None:
        """Announce the request to other gateways by `send`, and its end by the function that it returns. To be called
        at most once, while the request is queued."""
        ids, items = self._prefix.ids.astype("<u8", copy=False).tobytes(), tuple(self._items[:MAX_ITEMS])
        self._on_dequeued = send(PendingWork(self._slot.place[1], ids, items, self._work_ms))

    def prefilled(self, num_cached_tokens: int | None) -> None:
        """Record the first token; `num_cached_tokens` were KV-cache hits (None: the engine does not report them)."""
        if self.is_queued:
            self._unqueue(computed=True)
            self._state.predictions.prefilled(self._expected, num_cached_tokens)

    def release(self) -> None:
        """Release the slot's resources; the request has finished, failed or been aborted."""
        if self._is_released:
            return
        self._is_released = True
        if self.is_queued:
            self._unqueue(computed=False)
            self._state.predictions.drop(self._expected)
        if not self._state.slots.is_current(self._slot):
            return
        if self._is_computed:
            self._state.index.fade(self._prefix, self._block_ids)
        else:
            self._state.index.forget(self._prefix)
        self._state.slots.finish(self._slot)

    def _unqueue(self, *, computed: bool) -> None:
        self.is_queued = False
        self._is_computed = computed
        if self._on_dequeued is not None:
            self._on_dequeued(computed)
        if self._state.slots.is_current(self._slot):
            self._state.slots.unqueue(self._slot, self._work_ms)
            self._state.caches.unpin(self._slot.number, self._pinned, computed=computed)
