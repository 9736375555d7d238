"""The choice: what each candidate costs, who is taken, and who would have been next.

One pass over the slots adds up what depends on the slot alone, what the request costs a slot that knows nothing of it,
and takes off what each one holds of it. Arrays over slots may be longer than the highest candidate needs.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from medialane.routing.compiled import compiled, compiled_part
from medialane.routing.native_view import Prefixes, Words

Scores = NDArray[np.float64]

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
    table: Scores,
    begin: int,
    lengths: Prefixes,
    masks: Words,
    items: Scores,
    best: Scores,
    alone: float,
    block: float,
    remote: float,
    session_slot: int,
    session: float,
    last: int,
    temperature: float,
    drawn: float,
) -> int:
    """Score every slot (infinite: no candidate), pick one, and fill `best`; there is a candidate. Returns the longest
    of the candidates' prefixes.

    A slot's score is `table[begin] + alone`, less `block` for each block of its prefix, more `remote` on another host,
    less `session` for `session_slot` (-1: none), less items that need no encoding there. `lengths` has two rows:
    prefixes as they count, and those that workers told of. The first row of `masks` are the candidates, the others the
    holders of each item. `items` has a row (blocks of the prompt that cover the item, what it costs) for each, in the
    order of the former. The least is taken, after `last` if there are equals; with a temperature one is drawn by
    `drawn`, which is in [0, 1).
    """
    candidates, blocks = masks[0], lengths[0]
    scores = table[SCORES, : min(table.shape[1], 64 * len(candidates))]
    standing, is_remote = table[begin], table[IS_REMOTE]
    longest = 0
    for slot in range(len(scores)):
        if candidates[slot >> 6] >> np.uint64(slot & 63) & _ONE:
            scores[slot] = standing[slot] + alone - blocks[slot] * block + is_remote[slot] * remote
            longest = max(longest, np.int64(blocks[slot]))
        else:
            scores[slot] = np.inf
    if session_slot >= 0:
        scores[session_slot] -= session
    if len(items):
        _take_off_covered(scores, blocks, items, longest)
        for item in range(len(items)):
            _take_off_held(scores, blocks, candidates, masks[1 + item], items[item, 0], items[item, 1])
    picked = _least(scores, last) if temperature == 0.0 else _draw(scores, temperature, drawn)
    _fill(best, scores, picked)
    for row in range(NUM_BEST):
        slot = np.int64(best[row, SLOT])
        if slot >= 0:
            best[row, BLOCKS], best[row, TOLD] = blocks[slot], lengths[1, slot]
    return longest


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
