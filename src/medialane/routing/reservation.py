"""What a request occupies at its slot: a queue position until its first token, and one in flight until its end."""

from __future__ import annotations

from dataclasses import dataclass

from medialane.core.kv_events import BlockIds
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
        work_ms = terms.parts.prefill + terms.parts.encoder
        expected = self.predictions.sent(
            slot.number,
            request.block_ids,
            block_size=request.block_size,
            num_usable=request.max_cached_blocks,
            num_held=terms.cached_blocks,
            is_reported=is_reported,
        )
        prefix = self.index.note(slot.number, request.block_ids)
        pinned = self.caches.pin(slot.number, [(item.mm_hash, item.num_embeds) for item in terms.needed])
        self.slots.queue(slot, work_ms)
        return Reservation(self, slot, request.block_ids, work_ms, expected, prefix, pinned)


@dataclass(slots=True, eq=False)
class Reservation:
    """Both methods are idempotent and may be called after the slot has left. The owner must call `release`."""

    _state: SlotState
    _slot: Slot
    _block_ids: BlockIds
    _work_ms: float
    _expected: Expectation
    _prefix: PendingPrefix
    _pinned: list[str]
    is_queued: bool = True
    _is_computed: bool = False
    _is_released: bool = False

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
        if self._state.slots.is_current(self._slot):
            self._state.slots.unqueue(self._slot, self._work_ms)
            self._state.caches.unpin(self._slot.number, self._pinned, computed=computed)
