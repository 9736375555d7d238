"""A request between the router's choice and its end: what it takes from its slot until then."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from medialane.core.request import RoutingDecision
from medialane.routing.block_index import BlockIndex
from medialane.routing.config import PolicyName
from medialane.routing.cost import CostModel, Offer, Terms
from medialane.routing.decisions import Decisions
from medialane.routing.encoder_cache import EncoderCaches
from medialane.routing.explanation import explain
from medialane.routing.policies import Choice
from medialane.routing.prediction import PredictionWatch
from medialane.routing.sessions import Sessions
from medialane.routing.slots import Slot, SlotTable


@dataclass(frozen=True)
class Knowledge:
    """What the router knows. `clock` is monotonic, `wall_clock` since the epoch, in seconds."""

    policy: PolicyName
    slots: SlotTable
    index: BlockIndex
    caches: EncoderCaches
    predictions: PredictionWatch
    decisions: Decisions
    sessions: Sessions
    costs: CostModel
    clock: Callable[[], float]
    wall_clock: Callable[[], float]


class Routed:
    """Where a request goes, known at once: `slot`, and the `worker_id`, `rank` and `num_ranks` of its worker.

    `begin` does what a choice entails: to be called right after the request was sent, before the router is told or
    asked anything else. From then on there is a `decision`; until its first token the request counts in its slot's
    queue, and pins its items in the encoder cache there; until its release it is in flight, and blocks that the worker
    has not told of yet count as cached soon.

    `release` is owed by the request's scope. All three may be called again, and after the slot has left; without
    `begin`, or after `release`, nothing happens.
    """

    _decision: RoutingDecision | None = None
    _is_queued = False
    _is_computed = False
    _is_released = False

    def __init__(self, known: Knowledge, offer: Offer, choice: Choice, slot: Slot, picked_at: float) -> None:
        self.slot = slot.number
        self.worker_id, self.rank = slot.place
        self.num_ranks = slot.num_ranks
        self._known = known
        self._offer = offer
        self._choice = choice
        self._slot = slot
        self._picked_at = picked_at

    @property
    def decision(self) -> RoutingDecision:
        """The choice and its reasons. Raises RuntimeError before `begin`."""
        if self._decision is None:
            raise RuntimeError("the request has not begun")
        return self._decision

    @property
    def has_begun(self) -> bool:
        return self._decision is not None

    def begin(self) -> None:
        """Record the choice, and count the request at its slot."""
        if self._decision is not None or self._is_released:
            return
        known, offer, slot = self._known, self._offer, self._slot
        terms = known.costs.terms(offer, slot, self._choice.blocks)
        self._decision = explain(offer, self._choice, slot, terms, slots=known.slots, policy=known.policy)
        self._record = known.decisions.add(offer.request.request_id, self._decision, time_s=known.wall_clock())
        if offer.request.session_id is not None:
            known.sessions.note(offer.request.session_id, slot.place)
        if known.slots.is_current(slot):
            self._take(terms)

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
        if self._decision is None:
            return
        known = self._known
        if self._is_queued:
            self._unqueue(computed=False)
            known.predictions.drop(self._expected)
        if known.slots.is_current(self._slot):
            if self._is_computed:
                known.index.fade(self._note, self._offer.request.block_ids)
            else:
                known.index.forget(self._note)
            self._slot.num_in_flight -= 1
            known.slots.update(self._slot)

    def _take(self, terms: Terms) -> None:
        known, request = self._known, self._offer.request
        self._work_ms = terms.parts.prefill + terms.parts.encoder
        self._expected = known.predictions.sent(
            self.slot,
            request.block_ids,
            block_size=request.block_size,
            num_usable=request.max_cached_blocks,
            num_held=terms.cached_blocks,
            is_told=self._choice.is_told,
        )
        self._note = known.index.note(self.slot, request.block_ids)
        self._pinned = known.caches.pin(self.slot, [(item.mm_hash, item.num_embeds) for item in terms.needed])
        known.slots.queue(self._slot, self._work_ms)
        self._is_queued = True

    def _unqueue(self, *, computed: bool) -> None:
        self._is_queued = False
        self._is_computed = computed
        known = self._known
        if known.slots.is_current(self._slot):
            known.slots.unqueue(self._slot, self._work_ms)
            known.caches.unpin(self.slot, self._pinned, computed=computed)
