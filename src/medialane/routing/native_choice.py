"""The choice: scores all candidates, selects one, and reports the next best.

One pass over the slots adds the cost that depends on the slot uncached to that of the request without any cache, and
subtracts what each slot's caches save.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from medialane.core.compiled import compiled, compiled_part
from medialane.routing.native_match import LENGTHS, find_prefixes
from medialane.routing.native_view import (
    INT_ROWS,
    INTS,
    SCORE_LINE,
    SCORE_ROWS,
    WORD_ROWS,
    Ints,
    Prefixes,
    Scores,
    Words,
    line,
    rows,
    signed,
)

#: Scores are sums of floats in different orders: differences up to this count as equal (ms).
_EQUAL: Final = 1e-6
#: Rows of `table`, which has a column for each slot: initial scores, by policy; 1 if on another host; tokens per KV
#: block; of the last choice, the longest prefixes in tokens (with pending blocks, and without) and the scores.
BASE_COST, SEQUENCES, FLAT, IS_REMOTE, BLOCK_SIZE, CACHED, HELD, SCORES, NUM_ROWS = range(9)
#: Arrays of the view: the table; bit masks of slots: the candidates, those of one block size, then the holders of each
#: item in their encoder cache; the items, in the order in which a growing prefix covers them; the rates of the policy;
#: its row of initial scores in the table and the slot that it selected last; the block sizes; the index's view. All
#: arrays over slots have one length, a multiple of 64.
TABLE, MASKS, ITEMS, RATES, PICKED, SIZES, INDEX = range(7)
LAYOUT: Final = (SCORE_ROWS, WORD_ROWS, SCORE_ROWS, SCORE_LINE, INTS, INT_ROWS, INTS)
BEGIN, LAST = range(2)
CANDIDATES, OF_SIZE, FIRST_HOLDERS = range(3)
#: Columns of items: tokens of the prompt up to its end, and its cost at a slot that has it in neither cache.
END, ITEM_COST = range(2)
#: Columns of block sizes: tokens per block, and the number of the prompt's block ids.
TOKENS_PER_BLOCK, NUM_IDS = range(2)
#: Rates, in the unit of scores: per request, per token that is not cached, per byte transferred; on another host
#: additionally per transfer and per byte; a bonus for the session's last slot. With a temperature a slot is sampled
#: with weight exp(-score / temperature), otherwise the lowest score wins.
REQUEST, TOKEN, BYTE, REMOTE, REMOTE_BYTE, SESSION, TEMPERATURE = range(7)
#: Rows of `best`: the selected slot, the next best, then a row with only the longest prefix of all candidates.
NUM_BEST: Final = 4
LONGEST: Final = 4
NUM_BEST_ROWS: Final = 5
#: Columns of `best`.
SLOT, SCORE, TOKENS, REPORTED, NUM_COLUMNS = range(5)

_ONE: Final = np.uint64(1)


@compiled
def choose(
    ids: Words,
    view: Ints,
    best: Scores,
    is_open: bool,
    num_items: int,
    num_tokens: int,
    num_sizes: int,
    handover_bytes: int,
    session_slot: int,
    drawn: float,
) -> int:
    """Find every candidate's prefix (`native_match.match`), score them, select one, fill `best`, and return the
    selected slot. There must be a candidate.

    `ids` are the prompt's block ids by each of `num_sizes` block sizes, one after the other. `is_open`: the candidates
    are exactly the slots with a finite base cost. `session_slot` is -1 if there is none; `drawn` is a random number in
    [0, 1).
    """
    table, masks, rates = rows(view, TABLE, np.float64), rows(view, MASKS, np.uint64), line(view, RATES, np.float64)
    items, picked = rows(view, ITEMS, np.float64)[:num_items], line(view, PICKED, np.int64)
    candidates, cached, found = masks[CANDIDATES], table[CACHED], table[SCORES]
    _find_cached(ids, view, num_sizes, num_tokens)
    uncached = rates[REQUEST] + num_tokens * rates[TOKEN] + items[:, ITEM_COST].sum()
    uncached += handover_bytes * rates[BYTE]
    remote = rates[REMOTE] + handover_bytes * rates[REMOTE_BYTE] if handover_bytes else 0.0
    _score(found, table[picked[BEGIN]], cached, table[IS_REMOTE], uncached, rates[TOKEN], remote)
    if not is_open:
        _exclude_others(found, candidates)
    if session_slot >= 0:
        found[session_slot] -= rates[SESSION]
    longest = _greatest(cached)
    if num_items:
        _subtract_covered(found, cached, items, longest)
        for item in range(num_items):
            end, saved = items[item, END], items[item, ITEM_COST]
            _subtract_encoder_cached(found, cached, candidates, masks[FIRST_HOLDERS + item], end, saved)
    temperature = rates[TEMPERATURE]
    slot = _lowest(found, picked[LAST]) if temperature == 0.0 else _sample(found, temperature, drawn)
    picked[LAST] = slot
    _fill(best, found, slot)
    _add_prefixes(best, table, longest)
    return slot


@compiled_part
def _find_cached(ids: Words, view: Ints, num_sizes: int, num_tokens: int) -> None:
    """Write every candidate's longest prefixes to the table, in tokens: each is matched by the ids of its own block
    size."""
    table, masks, sizes, index = (
        rows(view, TABLE, np.float64),
        rows(view, MASKS, np.uint64),
        rows(view, SIZES, np.int64),
        line(view, INDEX, np.int64),
    )
    first = 0
    for number in range(num_sizes):
        size, count = sizes[number, TOKENS_PER_BLOCK], sizes[number, NUM_IDS]
        if num_sizes > 1:
            _select_size(masks, table[BLOCK_SIZE], size)
        matched = masks[CANDIDATES if num_sizes == 1 else OF_SIZE]
        # An engine computes at least the last token.
        find_prefixes(ids[first : first + count], matched, index, min(count, max(num_tokens - 1, 0) // size))
        lengths = rows(index, LENGTHS, np.int32)
        _write_tokens(table[CACHED], lengths[0], size, number > 0)
        _write_tokens(table[HELD], lengths[1], size, number > 0)
        first += count


@compiled_part
def _select_size(masks: Words, block_sizes: Scores, size: int) -> None:
    """Write the candidates whose blocks have `size` tokens to `masks[OF_SIZE]`."""
    for slot in range(len(block_sizes)):
        if not slot & 63:
            masks[OF_SIZE, slot >> 6] = 0
        if block_sizes[slot] == size:
            masks[OF_SIZE, slot >> 6] |= masks[CANDIDATES, slot >> 6] & _ONE << np.uint64(slot & 63)


@compiled_part
def _write_tokens(tokens: Scores, blocks: Prefixes, size: int, is_more: bool) -> None:
    """Write lengths in tokens; with `is_more`, add them: a slot has one block size, its other lengths are 0."""
    if is_more:
        for slot in range(len(tokens)):
            tokens[slot] += blocks[slot] * size
    else:
        for slot in range(len(tokens)):
            tokens[slot] = blocks[slot] * size


@compiled_part
def _greatest(cached: Scores) -> float:
    greatest = 0.0
    for slot in range(len(cached)):  # max() takes twenty times as long
        greatest = cached[slot] if cached[slot] > greatest else greatest
    return greatest


@compiled_part
def _add_prefixes(best: Scores, table: Scores, longest: float) -> None:
    for row in range(NUM_BEST):
        slot = signed(best[row, SLOT])
        if slot >= 0:
            best[row, TOKENS], best[row, REPORTED] = table[CACHED, slot], table[HELD, slot]
    best[LONGEST, TOKENS] = longest


@compiled_part
def _score(
    found: Scores, base_cost: Scores, cached: Scores, is_remote: Scores, uncached: float, token: float, remote: float
) -> None:
    for slot in range(len(found)):
        found[slot] = base_cost[slot] + uncached - cached[slot] * token + is_remote[slot] * remote


@compiled_part
def _exclude_others(found: Scores, candidates: Words) -> None:
    for slot in range(len(found)):
        if not candidates[slot >> 6] >> np.uint64(slot & 63) & _ONE:
            found[slot] = np.inf


@compiled_part
def _subtract_covered(found: Scores, cached: Scores, items: Scores, longest: float) -> None:
    """Subtract the cost of items that are covered by a slot's prefix."""
    if items[0, END] > longest:
        return
    known, saved = 0.0, 0.0  # of the previous slot: the next mostly has an equal prefix
    for slot in range(len(found)):
        if found[slot] == np.inf:
            continue
        if cached[slot] != known:
            known, saved = cached[slot], 0.0
            for item in range(len(items)):
                if items[item, END] > known:
                    break
                saved += items[item, ITEM_COST]
        found[slot] -= saved


@compiled_part
def _subtract_encoder_cached(
    found: Scores, cached: Scores, candidates: Words, holders: Words, end: float, saved: float
) -> None:
    """Subtract the cost of an item in a slot's encoder cache, unless the prefix covers it (subtracted already)."""
    for word in range(len(holders)):
        bits = holders[word] & candidates[word]
        slot = 64 * word
        while bits:
            if bits & _ONE and cached[slot] < end:
                found[slot] -= saved
            bits >>= _ONE
            slot += 1


@compiled_part
def _lowest(found: Scores, last: int) -> int:
    """Return the slot with the lowest score; ties are broken round-robin, starting after `last`."""
    equal = _minimum(found) + _EQUAL
    first = -1
    for slot in range(len(found)):
        if found[slot] <= equal:
            if slot > last:
                return slot
            if first < 0:
                first = slot
    return first


@compiled_part
def _minimum(found: Scores) -> float:
    """Return the minimum of an even number of scores, in two independent chains: each comparison waits for the
    previous."""
    one, other = np.inf, np.inf
    for slot in range(0, len(found), 2):
        one = found[slot] if found[slot] < one else one
        other = found[slot + 1] if found[slot + 1] < other else other
    return min(one, other)


@compiled_part
def _sample(found: Scores, temperature: float, drawn: float) -> int:
    """Sample a slot with weight exp(-score / temperature)."""
    least = _minimum(found)
    total = 0.0
    for score in found:
        total += np.exp((least - score) / temperature)
    left = drawn * total
    slot = -1
    for number in range(len(found)):
        weight = np.exp((least - found[number]) / temperature)
        if weight > 0.0:
            slot = number
            left -= weight
            if left < 0.0:
                break
    return slot


@compiled_part
def _fill(best: Scores, found: Scores, picked: int) -> None:
    """Write the selected slot, then the lowest of the others; -1 if there are fewer."""
    best[:, SLOT] = -1.0
    best[:, SCORE] = np.inf
    best[0, SLOT], best[0, SCORE] = picked, found[picked]
    worst = np.inf
    for slot in range(len(found)):
        score = found[slot]
        if not score < worst or slot == picked:
            continue
        row = NUM_BEST - 1
        while row > 1 and score < best[row - 1, SCORE]:
            best[row, SLOT], best[row, SCORE] = best[row - 1, SLOT], best[row - 1, SCORE]
            row -= 1
        best[row, SLOT], best[row, SCORE] = slot, score
        worst = best[NUM_BEST - 1, SCORE]
