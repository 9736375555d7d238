"""Policies: a score for every slot (lower is better, infinite for who is no candidate), and how one is picked by it."""

from __future__ import annotations

import random
from typing import Final, NamedTuple, Protocol

import numpy as np

from medialane.routing.config import PolicyName
from medialane.routing.cost import CostModel, Offer, flags
from medialane.routing.slots import Scores, SlotTable

#: Scores are sums of floats in different orders: so close is equal (ms).
_EQUAL: Final = 1e-6
_NUM_ALTERNATIVES: Final = 3


class Scorer(Protocol):
    def __call__(self, offer: Offer, out: Scores) -> None:
        """Write the score of each slot to `out`. Slots that take no requests are infinite; whether the others are
        candidates does not matter here."""
        ...


class Picker(Protocol):
    def __call__(self, scores: Scores) -> int:
        """One slot whose score is finite; at least one is."""
        ...


class Choice(NamedTuple):
    """The slot picked, and the next best (slot, score), best first."""

    slot: int
    score: float
    alternatives: tuple[tuple[int, float], ...]


class Policy:
    """A scorer and a picker. The array of scores is used again for each choice."""

    def __init__(self, scorer: Scorer, picker: Picker, slots: SlotTable) -> None:
        self._scorer = scorer
        self._picker = picker
        self._slots = slots
        self._scores = np.empty(0)

    def choose(self, offer: Offer) -> Choice:
        """Pick one of the offer's candidates, of which there is at least one."""
        num_slots = len(offer.prefixes)
        if len(self._scores) != num_slots:
            self._scores = np.empty(num_slots)
        scores = self._scores
        self._scorer(offer, scores)
        if offer.candidates != self._slots.open:
            scores[~flags(offer.candidates, num_slots)] = np.inf
        slot = self._picker(scores)
        score = float(scores[slot])
        scores[slot] = np.inf
        return Choice(slot, score, _next_best(scores))


def policy(name: PolicyName, *, costs: CostModel, slots: SlotTable, temperature_ms: float, seed: int | None) -> Policy:
    """The policy of this name. `temperature_ms` is for `cost`; `seed` for what draws."""

    def flat(offer: Offer, out: Scores) -> None:
        out[:] = slots.flat[: len(out)]

    def sequences(offer: Offer, out: Scores) -> None:
        out[:] = slots.sequences[: len(out)]

    def uncached(offer: Offer, out: Scores) -> None:
        np.subtract(slots.flat[: len(out)], offer.prefixes, out=out)

    if name == "cost":
        return Policy(costs.costs, Draw(temperature_ms, seed) if temperature_ms else Least(), slots)
    if name == "prefix-only":
        return Policy(uncached, Least(), slots)
    if name == "least-loaded":
        return Policy(sequences, Least(), slots)
    return Policy(flat, Least() if name == "round-robin" else Draw(1.0, seed), slots)


class Least:
    """The least score; between equals, the next after the last that was picked."""

    def __init__(self) -> None:
        self._last = -1

    def __call__(self, scores: Scores) -> int:
        least = scores.argmin()
        equals = (scores <= scores[least] + _EQUAL).nonzero()[0]
        if len(equals) > 1:
            least = equals[equals.searchsorted(self._last, side="right") % len(equals)]
        self._last = int(least)
        return self._last


class Draw:
    """One drawn with weight exp(-score / temperature)."""

    def __init__(self, temperature: float, seed: int | None) -> None:
        self._temperature = temperature
        self._random = random.Random(seed)  # noqa: S311 - spreads load, keeps no secret

    def __call__(self, scores: Scores) -> int:
        weights = np.exp((scores.min() - scores) / self._temperature)
        sums = np.cumsum(weights)
        drawn = int(np.searchsorted(sums, self._random.random() * sums[-1], side="right"))
        return min(drawn, int(np.flatnonzero(weights)[-1]))


def _next_best(scores: Scores) -> tuple[tuple[int, float], ...]:
    found = []
    for _ in range(min(_NUM_ALTERNATIVES, len(scores))):
        slot = int(scores.argmin())
        score = float(scores[slot])
        if score == np.inf:
            break
        found.append((slot, score))
        scores[slot] = np.inf
    return tuple(found)
