"""The choice: what each candidate costs, who is taken, and who would have been next.

One pass over the slots adds up what depends on the slot alone, what the request costs a slot that knows nothing of it,
and takes off what each one holds of it. Arrays over slots may be longer than `scores`, which has a slot more than the
highest candidate.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from medialane.core.compiled import compiled, compiled_part
from medialane.routing.native_match import Prefixes
from medialane.routing.native_table import Words

Scores = NDArray[np.float64]

#: Scores are sums of floats in different orders: so close is equal (ms).
_EQUAL: Final = 1e-6
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
    standing: Scores,
    is_remote: Scores,
    candidates: Words,
    blocks: Prefixes,
    told: Prefixes,
    items: Scores,
    holders: Words,
    num_items: int,
    alone: float,
    block: float,
    remote: float,
    session_slot: int,
    session: float,
    last: int,
    temperature: float,
    drawn: float,
    scores: Scores,
    best: Scores,
) -> int:
    """Score every slot (infinite: no candidate), pick one, and fill `best`; there is a candidate. Returns the longest
    of the candidates' prefixes.

    A slot's score is `standing + alone`, less `block` for each block of its prefix, more `remote` on another host, less
    `session` for `session_slot` (-1: none), less items that need no encoding there. `items` are rows of (blocks of the
    prompt that cover the item, what it costs), in the order of the former, `holders` the slots that have it. The least
    is taken, after `last` if there are equals; with a temperature one is drawn by `drawn`, which is in [0, 1).
    """
    longest = 0
    for slot in range(len(scores)):
        if candidates[slot >> 6] >> np.uint64(slot & 63) & _ONE:
            scores[slot] = standing[slot] + alone - blocks[slot] * block + is_remote[slot] * remote
            longest = max(longest, np.int64(blocks[slot]))
        else:
            scores[slot] = np.inf
    if session_slot >= 0:
        scores[session_slot] -= session
    if num_items:
        _take_off_covered(scores, blocks, items, num_items, longest)
        for item in range(num_items):
            _take_off_held(scores, blocks, candidates, holders[item], items[item, 0], items[item, 1])
    picked = _least(scores, last) if temperature == 0.0 else _draw(scores, temperature, drawn)
    _fill(best, scores, picked)
    for row in range(NUM_BEST):
        slot = np.int64(best[row, SLOT])
        if slot >= 0:
            best[row, BLOCKS], best[row, TOLD] = blocks[slot], told[slot]
    return longest


@compiled_part
def _take_off_covered(scores: Scores, blocks: Prefixes, items: Scores, num_items: int, longest: int) -> None:
    """Items within a slot's prefix need no encoding there."""
    if items[0, 0] > longest:
        return
    known, saved = 0, 0.0  # of the slot before: the next mostly has as many
    for slot in range(len(scores)):
        if blocks[slot] != known:
            known, saved = np.int64(blocks[slot]), 0.0
            for item in range(num_items):
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
