"""Builds the record of a routing decision."""

from __future__ import annotations

from medialane.core.request import Alternative, RoutingDecision
from medialane.routing.config import PolicyName
from medialane.routing.cost import ScoringInput, SlotCost
from medialane.routing.policies import Choice
from medialane.routing.slots import Slot


def explain(
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
