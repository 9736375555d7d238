"""The choice: what each candidate costs, who is taken, and who would have been next.

One pass over the slots adds up what depends on the slot alone, what the request costs a slot that knows nothing of it,
and takes off what each one holds of it.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from medialane.routing.compiled import compiled, compiled_part
from medialane.routing.native_match import LENGTHS, find_prefixes
from medialane.routing.native_view import Ints, Prefixes, Scores, Words, ints, prefix_rows, score_rows, word_rows

#: Scores are sums of floats in different orders: so close is equal (ms).
_EQUAL: Final = 1e-6
#: Rows of `table`, which has a column for each slot: what scores begin with, by policy; 1 on another host; the scores of
#: the last choice.
STANDING: Final = 0
SEQUENCES: Final = 1
FLAT: Final = 2
IS_REMOTE: Final = 3
SCORES: Final = 4
NUM_ROWS: Final = 5
#: Arrays of the view: the table; bit masks of slots, of the candidates and of who has each item in its encoder cache; of
#: each item the blocks of the prompt that cover it and what encoding it costs, in the order of the former; the index's
#: view. Over slots all are of one length, a multiple of 64.
TABLE: Final = 0
MASKS: Final = 1
ITEMS: Final = 2
INDEX: Final = 3
#: Rows of `best`: the slot that is taken, and the next best.
NUM_BEST: Final = 4
#: Columns of `best`.
SLOT: Final = 0
SCORE: Final = 1
BLOCKS: Final = 2
TOLD: Final = 3
NUM_COLUMNS: Final = 4

_ONE: Final = np.uint64(1)


@compiled
def choose(
    ids: Words,
    view: Ints,
    best: Scores,
    max_probes: int,
    max_length: int,
    is_soon: bool,
    is_open: bool,
    num_items: int,
    begin: int,
    alone: float,
    block: float,
    remote: float,
    session_slot: int,
    session: float,
    last: int,
    temperature: float,
    drawn: float,
) -> int:
    """Find every candidate's prefix (`native_match.match`), score them, pick one, and fill `best`; there is a candidate.
    Returns the longest of their prefixes.

    A slot's score is `table[begin] + alone`, less `block` for each block of its prefix, more `remote` on another host,
    less `session` for `session_slot` (-1: none), less items that need no encoding there. `is_open`: candidates are all
    whose `table[begin]` is finite. The least is taken, after `last` if there are equals; with a temperature one is
    drawn by `drawn`, which is in [0, 1).
    """
    table, masks, index = score_rows(view, TABLE), word_rows(view, MASKS), ints(view, INDEX)
    items = score_rows(view, ITEMS)[:num_items]
    candidates, scores = masks[0], table[SCORES]
    find_prefixes(ids, candidates, index, max_probes, max_length, is_soon)
    lengths = prefix_rows(index, LENGTHS)
    blocks = lengths[0]
    _score(scores, table[begin], blocks, table[IS_REMOTE], alone, block, remote)
    if not is_open:
        _leave_out(scores, candidates)
    if session_slot >= 0:
        scores[session_slot] -= session
    longest = np.int64(blocks.max())
    if num_items:
        _take_off_covered(scores, blocks, items, longest)
        for item in range(num_items):
            _take_off_held(scores, blocks, candidates, masks[1 + item], items[item, 0], items[item, 1])
    picked = _least(scores, last) if temperature == 0.0 else _draw(scores, temperature, drawn)
    _fill(best, scores, picked)
    for row in range(NUM_BEST):
        slot = np.int64(best[row, SLOT])
        if slot >= 0:
            best[row, BLOCKS], best[row, TOLD] = blocks[slot], lengths[1, slot]
    return longest


@compiled_part
def _score(
    scores: Scores, standing: Scores, blocks: Prefixes, is_remote: Scores, alone: float, block: float, remote: float
) -> None:
    for slot in range(len(scores)):
        scores[slot] = standing[slot] + alone - blocks[slot] * block + is_remote[slot] * remote


@compiled_part
def _leave_out(scores: Scores, candidates: Words) -> None:
    for slot in range(len(scores)):
        if not candidates[slot >> 6] >> np.uint64(slot & 63) & _ONE:
            scores[slot] = np.inf


@compiled_part
def _take_off_covered(scores: Scores, blocks: Prefixes, items: Scores, longest: int) -> None:
    """Items within a slot's prefix need no encoding there."""
    if items[0, 0] > longest:
        return
    known, saved = 0, 0.0  # of the slot before: the next mostly has as many
    for slot in range(len(scores)):
        if scores[slot] == np.inf:
            continue
        if blocks[slot] != known:
            known, saved = np.int64(blocks[slot]), 0.0
            for item in range(len(items)):
                if items[item, 0] > known:
                    break
                saved += items[item, 1]
        scores[slot] -= saved


@compiled_part
def _take_off_held(
    scores: Scores, blocks: Prefixes, candidates: Words, holders: Words, covered_by: float, saved: float
) -> None:
    """Nor do those in its encoder cache; the others of the two are taken off already."""
    for word in range(len(holders)):
        bits = holders[word] & candidates[word]
        slot = 64 * word
        while bits:
            if bits & _ONE and blocks[slot] < covered_by:
                scores[slot] -= saved
            bits >>= _ONE
            slot += 1


@compiled_part
def _least(scores: Scores, last: int) -> int:
    """The slot with the least score; between equals, the next after `last`."""
    least = np.inf
    for score in scores:
        least = min(least, score)
    first = -1
    for slot in range(len(scores)):
        if scores[slot] <= least + _EQUAL:
            if slot > last:
                return slot
            if first < 0:
                first = slot
    return first


@compiled_part
def _draw(scores: Scores, temperature: float, drawn: float) -> int:
    """A slot drawn with weight exp(-score / temperature)."""
    least = np.inf
    for score in scores:
        least = min(least, score)
    total = 0.0
    for score in scores:
        total += np.exp((least - score) / temperature)
    left = drawn * total
    slot = -1
    for number in range(len(scores)):
        weight = np.exp((least - scores[number]) / temperature)
        if weight > 0.0:
            slot = number
            left -= weight
            if left < 0.0:
                break
    return slot


@compiled_part
def _fill(best: Scores, scores: Scores, picked: int) -> None:
    """The slot that is picked, then the least of the others; -1 where there is none."""
    best[:, SLOT] = -1.0
    best[:, SCORE] = np.inf
    best[0, SLOT], best[0, SCORE] = picked, scores[picked]
    for slot in range(len(scores)):
        score = scores[slot]
        if slot == picked or not score < best[NUM_BEST - 1, SCORE]:
            continue
        row = NUM_BEST - 1
        while row > 1 and score < best[row - 1, SCORE]:
            best[row, SLOT], best[row, SCORE] = best[row - 1, SLOT], best[row - 1, SCORE]
            row -= 1
        best[row, SLOT], best[row, SCORE] = slot, score
