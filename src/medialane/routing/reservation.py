"""What a request occupies at its slot: a queue position until its first token, and one in flight until its end; of
another gateway's request, the queue position."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import numpy as np

from medialane.routing.block_index import BlockIndex
from medialane.routing.cost import SlotCost
from medialane.routing.encoder_cache import EncoderCaches
from medialane.routing.pending_blocks import PendingBlocks, PendingPrefix
from medialane.routing.prediction import Expectation, PredictionMonitor
from medialane.routing.request import RoutingRequest
from medialane.routing.slots import Slot, SlotTable
from medialane.types.stats import MAX_ITEMS, PendingWork

#: A response may arrive before the KV events of its blocks: the worker collects those for 10 ms
#: (`worker.block_reports`), and event loops under load lag. Long enough for that, and short compared with the turnover
#: time of a cache.
_EVENT_DELAY_S: Final = 0.5


@dataclass(frozen=True)
class SlotState:
    """All of the router's state about its slots."""

    slots: SlotTable
    index: BlockIndex
    pending: PendingBlocks
    caches: EncoderCaches
    predictions: PredictionMonitor

    def reserve(self, slot: Slot, request: RoutingRequest, terms: SlotCost, *, is_reported: bool) -> Reservation:
        """Count a request at a slot, which must not have left. `is_reported`: its cached prefix there was reported by
        the worker, not inferred from requests in flight."""
        block_size, block_ids = request.blocks_at(slot.card)
        expected = self.predictions.sent(
            slot.number,
            block_ids,
            block_size=block_size,
            num_usable=min(len(block_ids), request.num_usable(block_size)),
            num_held=terms.cached_tokens // block_size,
            is_reported=is_reported,
        )
        prefix = self.pending.add(slot.number, block_ids)
        items = [(item.mm_hash, item.num_embeds) for item in terms.needed]
        pinned = self.caches.pin(slot.number, items)
        self.slots.queue(slot, terms.work_ms)
        return Reservation(self, slot, terms.work_ms, expected, prefix, items, pinned)

    def reserve_announced(self, slot: Slot, work: PendingWork) -> AnnouncedReservation:
        """Count a request that another gateway has sent to the slot, which must not have left."""
        self.pending.expire()
        prefix = self.pending.add_stored(slot.number, np.frombuffer(work.block_ids, "<u8").tolist())
        pinned = self.caches.pin(slot.number, work.items)
        self.slots.queue(slot, work.work_ms, announced=True)
        return AnnouncedReservation(self, slot, work.work_ms, prefix, pinned)

    def end_pending(self, prefix: PendingPrefix, *, is_computed: bool) -> None:
        """End the pending prefix of a request. If it is computed, and the slot has not reported its last block yet, the
        KV events may still be in transit: then it ends a little later."""
        if is_computed and prefix.ids and not self.index.holds(prefix.slot, prefix.ids[-1]):
            self.pending.shorten_deadline(prefix, _EVENT_DELAY_S)
        else:
            self.pending.forget(prefix)


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
        state.end_pending(self._prefix, is_computed=is_computed)


@dataclass(slots=True, eq=False)
class Reservation:
    """Both methods are idempotent and may be called after the slot has left. The owner must call `release`."""

    _state: SlotState
    _slot: Slot
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
        ids, items = np.array(self._prefix.ids, "<u8").tobytes(), tuple(self._items[:MAX_ITEMS])
        self._on_dequeued = send(PendingWork(self._slot.place[1], ids, items, self._work_ms))

    def prefilled(self, num_cached_tokens: int | None, *, waited_s: float | None = None) -> None:
        """Record the first token; `num_cached_tokens` were KV-cache hits (None: the engine does not report them), and
        it has waited for so long in the engine, if that is known."""
        if self.is_queued:
            if waited_s is not None:
                self._slot.wait_s = waited_s
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
        self._state.end_pending(self._prefix, is_computed=self._is_computed)
        self._state.slots.finish(self._slot)

    def _unqueue(self, *, computed: bool) -> None:
        self.is_queued = False
        self._is_computed = computed
        if self._on_dequeued is not None:
            self._on_dequeued(computed)
        if self._state.slots.is_current(self._slot):
            self._state.slots.unqueue(self._slot, self._work_ms)
            self._state.caches.unpin(self._slot.number, self._pinned, computed=computed)
