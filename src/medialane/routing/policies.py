"""Policies: what slots are scored by (lower is better), and how one is picked by it."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from medialane.routing.block_index import Matches
from medialane.routing.config import PolicyName
from medialane.routing.cost import CostModel, Offer, Weights
from medialane.routing.native_choice import (
    BLOCKS,
    FLAT,
    NUM_BEST,
    NUM_COLUMNS,
    SCORE,
    SEQUENCES,
    SLOT,
    STANDING,
    TOLD,
    Scores,
    choose,
)
from medialane.routing.slot_words import slot_rows
from medialane.routing.slots import SlotTable

_NO_ITEMS: Scores = np.empty((0, 2))


class Alternative(NamedTuple):
    """A slot that was not picked."""

    slot: int
    score: float
    blocks: int


class Choice(NamedTuple):
    """The slot picked; `longest` is the greatest of all candidates' prefixes, in blocks. `best` is as `native_choice`
    has it."""

    slot: int
    longest: int
    best: Scores

    @property
    def score(self) -> float:
        return self.best.item(0, SCORE)

    @property
    def blocks(self) -> int:
        """The picked slot's prefix."""
        return int(self.best.item(0, BLOCKS))

    @property
    def is_told(self) -> bool:
        """Whether all of that is held by what the worker told, none by what was sent there."""
        return self.best.item(0, BLOCKS) == self.best.item(0, TOLD)

    @property
    def alternatives(self) -> list[Alternative]:
        """The next best, best first."""
        rows = self.best[1:].tolist()
        return [Alternative(int(row[SLOT]), row[SCORE], int(row[BLOCKS])) for row in rows if row[SLOT] >= 0]


class Policy:
    """Scores and picks. `begin` is what scores begin with (a row of the slots' table), `weights` tells what else
    counts; with a temperature (of the scores' unit) a slot is drawn, without, the least is taken."""

    def __init__(
        self,
        slots: SlotTable,
        begin: int,
        weights: Callable[[Offer], Weights],
        *,
        temperature: float = 0.0,
        seed: int | None = None,
    ) -> None:
        self._slots = slots
        self._begin = begin
        self._weights = weights
        self._temperature = temperature
        self._random = random.Random(seed)  # noqa: S311 - spreads load, keeps no secret
        self._last = -1

    def choose(self, offer: Offer, matches: Matches) -> Choice:
        """Pick one of the offer's candidates, of which there is at least one; they are those of `matches`."""
        weights = self._weights(offer)
        items = _NO_ITEMS
        masks = [offer.candidates]
        if offer.items and weights.embed:
            items = np.array([(item.num_blocks, item.num_embeds * weights.embed) for item in offer.items])
            masks += [holders & offer.candidates for holders in offer.holders]
        best = np.empty((NUM_BEST, NUM_COLUMNS))
        longest = choose(
            self._slots.table,
            self._begin,
            matches.lengths,
            slot_rows(masks, (matches.num_slots + 63) // 64),
            items,
            best,
            weights.alone,
            weights.block,
            weights.remote,
            -1 if offer.session_slot is None else offer.session_slot,
            weights.session,
            self._last,
            self._temperature,
            self._random.random() if self._temperature else 0.0,
        )
        self._last = int(best.item(0, SLOT))
        return Choice(self._last, longest, best)


def policy(name: PolicyName, *, costs: CostModel, slots: SlotTable, temperature_ms: float, seed: int | None) -> Policy:
    """The policy of this name. `temperature_ms` is for `cost`; `seed` for what draws."""
    if name == "cost":
        return Policy(slots, STANDING, costs.weights, temperature=temperature_ms, seed=seed)
    if name == "prefix-only":
        return Policy(slots, FLAT, lambda _: Weights(block=1.0))
    if name == "least-loaded":
        return Policy(slots, SEQUENCES, lambda _: Weights())
    return Policy(slots, FLAT, lambda _: Weights(), temperature=0.0 if name == "round-robin" else 1.0, seed=seed)
