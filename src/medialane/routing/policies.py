"""Policies: what slots are scored by (lower is better), and how one is picked by it."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Final, NamedTuple

import numpy as np

from medialane.routing.block_index import BlockIndex
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
from medialane.routing.native_view import view_of
from medialane.routing.slots import SlotTable

#: Room for items of a prompt at first.
_FIRST_ITEMS: Final = 4


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
        index: BlockIndex,
        begin: int,
        weights: Callable[[Offer], Weights],
        *,
        temperature: float = 0.0,
        seed: int | None = None,
    ) -> None:
        self._slots = slots
        self._index = index
        self._begin = begin
        self._weights = weights
        self._temperature = temperature
        self._random = random.Random(seed)  # noqa: S311 - spreads load, keeps no secret
        self._last = -1
        self._table = slots.table
        self._have(_FIRST_ITEMS)

    def choose(self, offer: Offer) -> Choice:
        """Pick one of the offer's candidates, of which there is at least one."""
        request, items, slots, index = offer.request, offer.items, self._slots, self._index
        if slots.table is not self._table or len(items) > self._num_items:
            self._have(max(len(items), self._num_items))
        weights = self._weights(offer)
        self._write(offer, weights.embed)
        best = np.empty((NUM_BEST, NUM_COLUMNS))
        longest = choose(
            request.block_ids,
            self._view,
            best,
            index.max_probes,
            request.max_cached_blocks,
            index.has_notes(),
            offer.candidates == slots.open,
            len(items),
            self._begin,
            weights.alone,
            weights.block,
            weights.remote,
            -1 if offer.session_slot is None else offer.session_slot,
            weights.session,
            self._last,
            self._temperature,
            self._random.random() if self._temperature else 0.0,
        )
        self._last = slot = int(best.item(0, SLOT))
        return Choice(slot, longest, best)

    def _write(self, offer: Offer, embed: float) -> None:
        """Candidates, items and their holders, where native code looks for them."""
        size, masks = self._mask_bytes, self._masks
        candidates = offer.candidates
        masks[:size] = candidates.to_bytes(size, "little")
        end = size
        for number, item in enumerate(offer.items):
            self._items[number, 0], self._items[number, 1] = item.num_blocks, item.num_embeds * embed
            masks[end : end + size] = (offer.holders[number] & candidates).to_bytes(size, "little")
            end += size

    def _have(self, num_items: int) -> None:
        """Room for so many items, and all slots."""
        self._table = self._slots.table
        num_slots = self._table.shape[1]
        self._index.have_slots(num_slots)
        masks = np.zeros((1 + num_items, num_slots // 64), np.uint64)
        items = np.zeros((num_items, 2))
        self._num_items = num_items
        self._mask_bytes = num_slots // 8
        self._masks, self._items = memoryview(masks).cast("B"), memoryview(items)
        self._view = view_of(self._table, masks, items, self._index.view)


def policy(
    name: PolicyName, *, costs: CostModel, slots: SlotTable, index: BlockIndex, temperature_ms: float, seed: int | None
) -> Policy:
    """The policy of this name. `temperature_ms` is for `cost`; `seed` for what draws."""
    if name == "cost":
        return Policy(slots, index, STANDING, costs.weights, temperature=temperature_ms, seed=seed)
    if name == "prefix-only":
        return Policy(slots, index, FLAT, lambda _: Weights(block=1.0))
    if name == "least-loaded":
        return Policy(slots, index, SEQUENCES, lambda _: Weights())
    return Policy(slots, index, FLAT, lambda _: Weights(), temperature=0.0 if name == "round-robin" else 1.0, seed=seed)
