"""Policies: how slots are scored (lower is better), and how one is selected by score."""

from __future__ import annotations

import random
from typing import Final

import msgspec
import numpy as np

from medialane.routing.block_index import BlockIndex, PendingBlocks, Prefixes, longest
from medialane.routing.config import PolicyName
from medialane.routing.cost import CostModel, PrefixEvictions, Rates, ScoringInput
from medialane.routing.slots import BASE_COST, NONE, SEQUENCES, RoutingRequest, Scores, Slot, SlotTable, bit_rows

#: Scores are sums of floats in different orders: differences up to this count as equal (ms).
_EQUAL: Final = 1e-6
_NUM_ALTERNATIVES: Final = 3
#: Initial scores and rates of the policies, besides "cost".
_SCORES: Final = {
    "prefix-only": (NONE, Rates(token=1.0)),
    "least-loaded": (SEQUENCES, Rates()),
    "round-robin": (NONE, Rates()),
    "random": (NONE, Rates(temperature=1.0)),
}


class Choice(msgspec.Struct, frozen=True, eq=False):
    """The selected slot, and its longest prefix in tokens; `is_reported`: by the worker, none of it is only pending.
    `longest` is the longest prefix of all candidates. `alternatives` are the next best, best first: slot, score, tokens
    of its prefix; they may leave before the request is sent."""

    slot: int
    tokens: int
    is_reported: bool
    longest: int
    alternatives: list[tuple[Slot, float, int]]


class Policy:
    """Scores slots and selects one: the lowest score, or with a temperature at random; `seed` is for that. A score is
    the initial one, which the slots' table has, and the other terms by their rates."""

    def __init__(
        self,
        name: PolicyName,
        *,
        costs: CostModel,
        slots: SlotTable,
        index: BlockIndex,
        pending: PendingBlocks,
        evictions: PrefixEvictions,
        seed: int | None,
    ) -> None:
        self._initial, self._rates = _SCORES[name] if name != "cost" else (BASE_COST, costs.rates)
        self._transferred = costs.transferred if name == "cost" else self._rates
        self._slots = slots
        self._index = index
        self._pending = pending
        self._evictions = evictions
        self._random = random.Random(seed)  # noqa: S311 - load balancing, not security
        self._last = -1  # the slot selected last
        self._candidates = -1
        self._excluded: Scores = np.empty(0)  # infinite for all but the last request's candidates

    def choose(self, scoring_input: ScoringInput) -> Choice:
        """Select one of the candidates, at least one."""
        cached, reported = self._prefixes(scoring_input.request, scoring_input.candidates)
        scores = self.scores(scoring_input, cached)
        slot = self._sample(scores) if self._rates.temperature else self._lowest(scores)
        self._last = slot
        tokens = _tokens(cached, slot)
        return Choice(
            slot,
            tokens,
            is_reported=tokens == _tokens(reported, slot),
            longest=cached[0][0] if cached else 0,
            alternatives=self._alternatives(scores, slot, cached),
        )

    def longest_prefix(self, request: RoutingRequest, slots: int) -> int:
        """Return the longest usable prefix at any of `slots` (a mask), in tokens."""
        cached, _reported = self._prefixes(request, slots)
        return cached[0][0] if cached else 0

    def _prefixes(self, request: RoutingRequest, slots: int) -> tuple[Prefixes, Prefixes]:
        """Return the longest usable prefixes at `slots`, in tokens: with pending blocks, and as reported."""
        reported: Prefixes = []
        pending: Prefixes = []
        for size, ids in request.block_ids.items():
            usable = request.num_usable(size)
            held = self._index.prefixes(ids[:usable], slots)
            reported += [(length * size, holders) for length, holders in held]
            longer = self._pending.prefixes(ids, slots, beyond=_shortest(held, slots))
            pending += [(min(length, usable) * size, holders) for length, holders in longer]
        if not pending and len(request.block_ids) == 1:
            return reported, reported
        return longest(reported + pending), reported

    def scores(self, scoring_input: ScoringInput, cached: Prefixes) -> Scores:
        """Return every slot's score, infinite for all but the candidates: its initial score, and the cost of the
        request at a slot that has none of it cached, less what the slot's caches save."""
        request, candidates = scoring_input.request, scoring_input.candidates
        rates = self._transferred if request.is_transferred else self._rates
        costs = [rates.item(item) for item in scoring_input.items]
        uncached = rates.request + request.num_tokens * rates.token + sum(costs) + request.handover_bytes * rates.byte
        masks, savings = [candidates], [-uncached]
        for tokens, slots in cached:
            masks.append(slots)
            savings.append(tokens * rates.token)
        for item, holders, cost in zip(scoring_input.items, scoring_input.holders, costs, strict=True):
            masks.append(holders & candidates | _covering(cached, item.end))
            savings.append(cost)
        if request.handover_bytes:
            masks.append(candidates & self._slots.remote)
            savings.append(-rates.remote - request.handover_bytes * rates.remote_byte)
        if scoring_input.session_slot is not None:
            masks.append(1 << scoring_input.session_slot)
            savings.append(rates.session)
        rows = bit_rows(masks, self._slots.table.shape[1])
        new_ms: float | Scores = request.num_tokens * rates.evicted
        if cached and rates.evicted:  # as much as a token that is not cached costs
            ends = 1 + len(cached)
            new_ms -= np.dot(savings[1:ends], rows[1:ends])
            savings[1] -= self._evictions.evicted_ms(request, cached[0][0])
        scores: Scores = self._slots.table[self._initial] + self._excluded_except(candidates) - np.dot(savings, rows)
        if rates.evicted:
            scores += self._slots.reuse * new_ms
        return scores

    def _excluded_except(self, candidates: int) -> Scores:
        num_slots = self._slots.table.shape[1]
        if candidates != self._candidates or len(self._excluded) != num_slots:
            self._candidates = candidates
            self._excluded = np.where(bit_rows([candidates], num_slots)[0] > 0, 0.0, np.inf)
        return self._excluded

    def _lowest(self, scores: Scores) -> int:
        """Return the slot with the lowest score; ties are broken round-robin, starting after the last."""
        lowest = int(scores.argmin())
        (equal,) = (scores <= scores.item(lowest) + _EQUAL).nonzero()
        return lowest if len(equal) == 1 else equal.item(equal.searchsorted(self._last, "right") % len(equal))

    def _sample(self, scores: Scores) -> int:
        """Sample a slot with weight exp(-score / temperature)."""
        ends = np.exp((scores.min() - scores) / self._rates.temperature).cumsum()
        return int(ends.searchsorted(self._random.random() * ends.item(-1), "right"))

    def _alternatives(self, scores: Scores, chosen: int, cached: Prefixes) -> list[tuple[Slot, float, int]]:
        """Return the lowest others. Overwrites their scores."""
        alternatives: list[tuple[Slot, float, int]] = []
        scores[chosen] = np.inf
        while len(alternatives) < _NUM_ALTERNATIVES and (score := scores.item(slot := int(scores.argmin()))) != np.inf:
            alternatives.append((self._slots[slot], score, _tokens(cached, slot)))
            scores[slot] = np.inf
        return alternatives


def _covering(prefixes: Prefixes, num_tokens: int) -> int:
    """Return the slots whose prefix has at least that many tokens, as a bit mask."""
    covering = 0
    for tokens, slots in prefixes:
        if tokens < num_tokens:
            break
        covering |= slots
    return covering


def _shortest(prefixes: Prefixes, slots: int) -> int:
    """Return the shortest prefix of `slots`; 0 if one has none."""
    for _, holders in prefixes:
        slots ^= holders
    return prefixes[-1][0] if prefixes and not slots else 0


def _tokens(prefixes: Prefixes, slot: int) -> int:
    """Return the slot's prefix."""
    for tokens, slots in prefixes:
        if slots >> slot & 1:
            return tokens
    return 0
