"""Policies: how slots are scored (lower is better), and how one is selected by score."""

from __future__ import annotations

import random
import struct
from typing import Final

import msgspec
import numpy as np

from medialane.routing.block_index import BlockIndex
from medialane.routing.config import PolicyName
from medialane.routing.cost import CostModel, Rates, ScoringInput
from medialane.routing.native_choice import (
    BASE_COST,
    FIRST_HOLDERS,
    FLAT,
    LAYOUT,
    LONGEST,
    NUM_BEST,
    NUM_BEST_ROWS,
    NUM_COLUMNS,
    REPORTED,
    SCORE,
    SEQUENCES,
    SLOT,
    TOKENS,
    choose,
)
from medialane.routing.native_view import View
from medialane.routing.slots import Slot, SlotTable

#: Initial capacity for items of a prompt.
_FIRST_ITEMS: Final = 4
_FIRST_SIZES: Final = 2
#: Layouts of a row of items and of one of block sizes in `native_choice`.
_ITEM: Final = struct.Struct("=2d")
_SIZE: Final = struct.Struct("=2q")


class Choice(msgspec.Struct, frozen=True, eq=False):
    """The selected slot, the next best (best first; they may leave before the request is sent), and the rows of `best`
    in the layout of `native_choice`."""

    slot: int
    others: list[Slot]
    rows: list[list[float]]

    @property
    def longest(self) -> int:
        """The longest prefix of all candidates, in tokens."""
        return int(self.rows[LONGEST][TOKENS])

    @property
    def tokens(self) -> int:
        """The selected slot's prefix, in tokens."""
        return int(self.rows[0][TOKENS])

    @property
    def is_reported(self) -> bool:
        """Whether the worker has reported the whole prefix; False if some of it is only pending."""
        return self.rows[0][TOKENS] == self.rows[0][REPORTED]

    @property
    def alternatives(self) -> list[tuple[Slot, float, int]]:
        """The next best, best first: slot, score, tokens of the prefix."""
        rows = zip(self.others, self.rows[1:NUM_BEST], strict=False)
        return [(slot, row[SCORE], int(row[TOKENS])) for slot, row in rows]


class Policy:
    """Scores slots and selects one. `begin` is the row of the slots' table with the initial scores, `rates` the other
    terms; `seed` is for sampling."""

    def __init__(
        self, slots: SlotTable, index: BlockIndex, begin: int, rates: Rates, *, seed: int | None = None
    ) -> None:
        self._slots = slots
        self._index = index
        self._rates = rates
        self._native_rates = np.array(rates)
        self._draws = rates.temperature > 0
        self._random = random.Random(seed)  # noqa: S311 - load balancing, not security
        self._picked = np.array([begin, -1], np.int64)
        self._best = np.empty((NUM_BEST_ROWS, NUM_COLUMNS))
        self._view = View(LAYOUT)
        self._allocate(_FIRST_ITEMS, _FIRST_SIZES)

    def _allocate(self, num_items: int, num_sizes: int) -> None:
        """Reallocate for these numbers of items and block sizes, and all slots."""
        self._table = self._slots.table
        num_slots = self._table.shape[1]
        self._index.have_slots(num_slots)
        masks = np.zeros((FIRST_HOLDERS + num_items, num_slots // 64), np.uint64)
        items, sizes = np.zeros((num_items, 2)), np.zeros((num_sizes, 2), np.int64)
        self._num_items, self._num_sizes = num_items, num_sizes
        self._mask_bytes = num_slots // 8
        self._written = 0  # the candidates in `_masks`
        self._masks, self._items, self._sizes = masks.data.cast("B"), items.data.cast("B"), sizes.data.cast("B")
        self._view.show(self._table, masks, items, self._native_rates, self._picked, sizes, self._index.view)

    def choose(self, offer: ScoringInput) -> Choice:
        """Select one of the offer's candidates, of which there must be at least one."""
        request, items, slots = offer.request, offer.items, self._slots
        num_sizes = 1 + len(request.other_block_ids)
        if slots.table is not self._table or len(items) > self._num_items or num_sizes > self._num_sizes:
            self._allocate(max(len(items), self._num_items), max(num_sizes, self._num_sizes))
        self._write(offer)
        ids = request.block_ids
        if num_sizes > 1:
            ids = np.concatenate([ids, *request.other_block_ids.values()])
        slot = choose(
            ids,
            self._view.addresses,
            self._best,
            offer.candidates == slots.open,
            len(items),
            request.num_tokens,
            num_sizes,
            request.handover_bytes,
            -1 if offer.session_slot is None else offer.session_slot,
            self._random.random() if self._draws else 0.0,
        )
        best = self._best.tolist()
        return Choice(slot, [slots[int(row[SLOT])] for row in best[1:NUM_BEST] if row[SLOT] >= 0], best)

    def _write(self, offer: ScoringInput) -> None:
        """Write candidates, items and their holders, and block sizes into the arrays that native code reads."""
        request, candidates, size = offer.request, offer.candidates, self._mask_bytes
        _SIZE.pack_into(self._sizes, 0, request.block_size, len(request.block_ids))
        if request.other_block_ids:
            for number, (block_size, ids) in enumerate(request.other_block_ids.items(), 1):
                _SIZE.pack_into(self._sizes, number * _SIZE.size, block_size, len(ids))
        if candidates != self._written:
            self._masks[:size] = candidates.to_bytes(size, "little")
            self._written = candidates
        for number, item in enumerate(offer.items):
            loaded = item.embedding_bytes
            cost = loaded * self._rates.embedding_byte if loaded else item.num_embeds * self._rates.embed
            _ITEM.pack_into(self._items, number * _ITEM.size, item.end, cost)
            start = size * (FIRST_HOLDERS + number)
            self._masks[start : start + size] = offer.holders[number].to_bytes(size, "little")


def policy(name: PolicyName, *, costs: CostModel, slots: SlotTable, index: BlockIndex, seed: int | None) -> Policy:
    """Return the policy of this name; `seed` is for those that sample."""
    if name == "cost":
        return Policy(slots, index, BASE_COST, costs.rates, seed=seed)
    if name == "prefix-only":
        return Policy(slots, index, FLAT, Rates(token=1.0))
    if name == "least-loaded":
        return Policy(slots, index, SEQUENCES, Rates())
    return Policy(slots, index, FLAT, Rates(temperature=0.0 if name == "round-robin" else 1.0), seed=seed)
