"""Records of routing decisions, and the last of them, for diagnosis."""

from __future__ import annotations

from itertools import count, islice

import msgspec

from medialane.core.request import Alternative, RoutingDecision
from medialane.routing.config import PolicyName
from medialane.routing.cost import ScoringInput, SlotCost
from medialane.routing.policies import Choice
from medialane.routing.slots import Slot, SlotTable


class DecisionRecord(msgspec.Struct, frozen=True):
    """A decision, when it was made (seconds since the epoch), its request, and the outcome: the cached tokens that the
    engine reported and the milliseconds from the choice to the first token, None until then."""

    number: int
    time_s: float
    request_id: str
    decision: RoutingDecision
    reported_cached_tokens: int | None = None
    first_token_ms: float | None = None


class Decisions:
    """The last `size` decisions."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._numbers = count()
        self._records: dict[int, DecisionRecord] = {}  # the oldest first

    def add(self, request_id: str, decision: RoutingDecision, *, time_s: float) -> int:
        """Record a decision and return its number."""
        number = next(self._numbers)
        self._records[number] = DecisionRecord(number, time_s, request_id, decision)
        self._records.pop(number - self._size, None)
        return number

    def prefilled(self, number: int, *, reported_cached_tokens: int | None, first_token_ms: float) -> None:
        """Record the first token of a request; ignored if the decision has been dropped."""
        if (record := self._records.get(number)) is not None:
            self._records[number] = msgspec.structs.replace(
                record, reported_cached_tokens=reported_cached_tokens, first_token_ms=first_token_ms
            )

    def last(self, limit: int | None = None) -> list[DecisionRecord]:
        """Return the records, newest first; at most `limit`."""
        return list(islice(reversed(self._records.values()), limit))


def explain(
    offer: ScoringInput, choice: Choice, slot: Slot, terms: SlotCost, *, slots: SlotTable, policy: PolicyName
) -> RoutingDecision:
    """Describe the choice, with the state of the slots before the request counts at its own."""
    block_size = offer.request.block_size
    alternatives = tuple(
        [Alternative(*slots[slot].place, score, blocks * block_size) for slot, score, blocks in choice.alternatives]
    )
    return RoutingDecision(
        worker_id=slot.place[0],
        rank=slot.place[1],
        num_ranks=slot.num_ranks,
        policy=policy,
        reason=_reason(offer, choice, policy) if alternatives else "the only candidate",
        num_tokens=offer.request.num_tokens,
        cached_tokens=terms.cached_blocks * block_size,
        num_items=len(offer.items),
        encoder_items_cached=len(offer.items) - terms.num_to_encode,
        expected_ms=terms.parts.expected_ms,
        parts=terms.parts,
        alternatives=alternatives,
    )


def _reason(offer: ScoringInput, choice: Choice, policy: PolicyName) -> str:
    if policy != "cost":
        return policy
    if choice.blocks < choice.longest:
        return "longer prefix elsewhere, but higher load"
    if choice.blocks:
        return "longest cached prefix"
    if choice.slot == offer.session_slot:
        return "worker of the session's last request"
    return "lowest load"
