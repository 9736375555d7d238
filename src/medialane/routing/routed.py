"""A request between the router's choice and its end: what it takes from its slot until then."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from medialane.core.request import RoutingDecision
from medialane.routing.block_index import BlockIndex
from medialane.routing.cost import EncoderItem
from medialane.routing.decisions import Decisions
from medialane.routing.encoder_cache import EncoderCaches
from medialane.routing.prediction import PredictionWatch
from medialane.routing.request import RoutingRequest
from medialane.routing.slots import Slot, SlotTable


@dataclass(frozen=True)
class Knowledge:
    """What the router knows. `clock` is monotonic, in seconds."""

    slots: SlotTable
    index: BlockIndex
    caches: EncoderCaches
    predictions: PredictionWatch
    decisions: Decisions
    clock: Callable[[], float]


class Routed:
    """Until its first token the request counts in its slot's queue, and pins its items in the encoder cache there;
    until its release it is in flight, and blocks that the worker has not told of yet count as cached soon.

    `release` is owed by the request's scope. Both methods may be called again, and after the slot has left.
    """

    def __init__(
        self,
        known: Knowledge,
        request: RoutingRequest,
        decision: RoutingDecision,
        slot: Slot,
        *,
        needed: Iterable[EncoderItem],
        is_told: bool,
        record: int,
    ) -> None:
        self.decision = decision
        self.slot = slot.number
        self._known = known
        self._slot = slot
        self._record = record
        self._picked_at = known.clock()
        self._work_ms = decision.parts.prefill + decision.parts.encoder
        self._is_queued = True
        self._is_released = False
        num_held = decision.cached_tokens // request.block_size
        self._expected = known.predictions.sent(
            slot.number,
            request.block_ids,
            block_size=request.block_size,
            num_usable=request.max_cached_blocks,
            num_held=num_held,
            is_told=is_told,
        )
        self._note = known.index.note(slot.number, request.block_ids)
        self._pinned = known.caches.pin(slot.number, [(item.mm_hash, item.num_embeds) for item in needed])
        known.slots.queue(slot, self._work_ms)

    def prefilled(self, num_cached_tokens: int | None) -> None:
        """The first token has come; the engine took so many tokens from its KV cache (None: it does not tell)."""
        if not self._is_queued:
            return
        known = self._known
        self._unqueue(computed=True)
        known.predictions.prefilled(self._expected, num_cached_tokens)
        known.decisions.prefilled(
            self._record,
            reported_cached_tokens=num_cached_tokens,
            first_token_ms=(known.clock() - self._picked_at) * 1000,
        )

    def release(self) -> None:
        """The request has ended, in whichever way."""
        if self._is_released:
            return
        self._is_released = True
        known = self._known
        if self._is_queued:
            self._unqueue(computed=False)
            known.predictions.drop(self._expected)
        if known.slots.is_current(self._slot):
            known.index.forget(self._note)
            self._slot.num_in_flight -= 1
            known.slots.update(self._slot)

    def _unqueue(self, *, computed: bool) -> None:
        self._is_queued = False
        known = self._known
        if known.slots.is_current(self._slot):
            known.slots.unqueue(self._slot, self._work_ms)
            known.caches.unpin(self.slot, self._pinned, computed=computed)
