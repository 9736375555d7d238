"""A request from the router's choice until its release."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from cachetools import TTLCache

from medialane.routing.config import PolicyName
from medialane.routing.cost import CostModel, ScoringInput, SlotCost
from medialane.routing.policies import Choice
from medialane.routing.reservation import Reservation, SlotState
from medialane.routing.slots import Slot, WorkerRank
from medialane.types.request import Alternative, RoutingDecision
from medialane.types.retry_after import Places
from medialane.types.stats import PendingWork


class SentRequest(NamedTuple):
    """A request that was sent: the decision, and its reservation (None: the slot had left)."""

    decision: RoutingDecision
    reservation: Reservation | None


@dataclass
class RouterState:
    """State shared by the router and its requests. `sessions` has the worker of each session's last request;
    `num_unsent` are the decisions whose request ended without having been sent."""

    policy: PolicyName
    costs: CostModel
    slots: SlotState
    sessions: TTLCache[str, WorkerRank]
    places: Places
    num_unsent: int = 0

    def begin(self, scoring_input: ScoringInput, choice: Choice, slot: Slot) -> SentRequest:
        """Explain a choice, and count the request at its slot."""
        request = scoring_input.request
        terms = self.costs.terms(scoring_input, slot, choice.tokens)
        decision = _explain(scoring_input, choice, slot, terms, policy=self.policy)
        if request.session_id is not None:
            self.sessions[request.session_id] = slot.place
        if not self.slots.slots.is_current(slot):
            return SentRequest(decision, None)
        reservation = self.slots.reserve(slot, request, terms, is_reported=choice.is_reported)
        return SentRequest(decision, reservation)


class RoutedRequest:
    """A routing choice, available at once: `slot`, and the `worker_id`, `rank` and `num_ranks` of its worker.

    `begin` does the bookkeeping of the choice. Call it right after the request was sent, before anything else is
    reported to the router or routed. It sets `decision`; until its first token the request counts in its slot's queue
    and pins its items in the encoder cache there; until its release it is in flight, and blocks that the worker has not
    reported yet count as pending.

    The request's scope must call `release`. All three methods are idempotent and may be called after the slot has left;
    without `begin`, or after `release`, they only count that the request was not sent.
    """

    def __init__(self, state: RouterState, scoring_input: ScoringInput, choice: Choice, slot: Slot) -> None:
        self.slot = slot.number
        self.worker_id, self.rank = slot.place
        self.num_ranks = slot.num_ranks
        self._state = state
        self._pending: tuple[ScoringInput, Choice, Slot] | None = (scoring_input, choice, slot)
        self._sent: SentRequest | None = None
        self._is_sent = self._is_released = False

    @property
    def decision(self) -> RoutingDecision:
        """The choice and its reason. Raises RuntimeError before `begin`."""
        if self._sent is None:
            raise RuntimeError("the request has not begun")
        return self._sent.decision

    @property
    def has_begun(self) -> bool:
        return self._sent is not None

    @property
    def is_sent(self) -> bool:
        return self._is_sent

    def begin(self, *, is_sent: bool = True) -> bool:
        """Count the request at its slot, the first time, which returns True. With `is_sent` False it is about to be
        sent: call this again once it was."""
        is_first = self._pending is not None
        if self._pending is not None:
            self._sent = self._state.begin(*self._pending)
            self._pending = None
            self._state.places.take(self)
        self._is_sent |= is_sent and self._sent is not None
        return is_first

    def announce(self, send: Callable[[PendingWork], Callable[[bool], None]]) -> None:
        """See `Reservation.announce`. To be called right after `begin`."""
        if self._sent is not None and self._sent.reservation is not None and self._sent.reservation.is_queued:
            self._sent.reservation.announce(send)

    def prefilled(self, num_cached_tokens: int | None, *, waited_s: float | None = None) -> None:
        """Record the first token; `num_cached_tokens` were KV-cache hits (None: the engine does not report them), and
        it has waited for so long in the engine, if that is known."""
        if self._sent is not None and self._sent.reservation is not None and self._sent.reservation.is_queued:
            self._sent.reservation.prefilled(num_cached_tokens, waited_s=waited_s)

    def release(self) -> None:
        """Release what the request holds; it has finished, failed or been aborted."""
        if self._is_released:
            return
        self._is_released = True
        self._state.places.free(self)
        self._state.num_unsent += not self._is_sent
        self._pending = None
        if self._sent is not None and self._sent.reservation is not None:
            self._sent.reservation.release()


def _explain(
    scoring_input: ScoringInput, choice: Choice, slot: Slot, terms: SlotCost, *, policy: PolicyName
) -> RoutingDecision:
    """Describe the choice, with the state of the slot before the request counts there."""
    alternatives = tuple([Alternative(*other.place, score, tokens) for other, score, tokens in choice.alternatives])
    return RoutingDecision(
        worker_id=slot.place[0],
        rank=slot.place[1],
        num_ranks=slot.num_ranks,
        policy=policy,
        reason=_reason(scoring_input, choice, policy) if alternatives else "the only candidate",
        num_tokens=scoring_input.request.num_tokens,
        cached_tokens=terms.cached_tokens,
        num_items=len(scoring_input.items),
        encoder_items_cached=len(scoring_input.items) - terms.num_to_encode - terms.num_to_load,
        encoder_items_loaded=terms.num_to_load,
        expected_ms=terms.parts.expected_ms,
        parts=terms.parts,
        alternatives=alternatives,
    )


def _reason(scoring_input: ScoringInput, choice: Choice, policy: PolicyName) -> str:
    if policy != "cost":
        return policy
    if choice.tokens < choice.longest:
        return "longer prefix elsewhere, but higher load"
    if choice.tokens:
        return "longest cached prefix"
    if choice.slot == scoring_input.session_slot:
        return "worker of the session's last request"
    return "lowest load"
