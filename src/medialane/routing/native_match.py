"""Longest held prefix of one prompt, for all slots at once.

A block's id stands for the whole prompt up to its end, and engines free a prompt's blocks from its tail. So the slots
that hold block i hold those before it, too: along a prompt the sets of holders nest, and where they shrink is found by
probing, not by walking: lengths 1, 4, 16, ... until nobody is left, then bisection wherever the set is smaller at an
interval's end than at its start. That is some tens of look-ups for thousands of blocks and of slots.

Slots that differ in thousands of lengths would take as many probes: the longest prefixes are found first, and when the
probes are used up the rest get a lower bound. A slot that lacks a block inside the prefix that it seems to hold has a
hole: where a probe sees it, its prefix ends there.

What slots will hold soon is noted for some lengths only (`pending_blocks.py`), which are looked up one after the other.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from medialane.core.compiled import compiled, compiled_part
from medialane.routing.native_table import EMPTY, Holders, delete, find, seen, set_of
from medialane.routing.native_view import (
    INT_ROWS,
    INTS,
    PREFIX_ROWS,
    WORD_ROWS,
    WORDS,
    Ints,
    Prefixes,
    Words,
    int_rows,
    ints,
    prefix_rows,
    word_rows,
    words,
)

#: Places of `counts`: those of `MatchCounts`, and how many probes a match may take.
NUM_MATCHES: Final = 0
NUM_PROBES: Final = 1
NUM_HOLES: Final = 2
NUM_BOUNDED: Final = 3
MAX_PROBES: Final = 4

#: Intervals that wait: each is at most half as long as the one before, and prompts are shorter than 2^30 blocks; some
#: fifteen are there from the start.
MAX_WAITING: Final = 64
#: Rows of `work`: those that are left or that a loop is at, those whose length is known, the holders of the longest
#: prefix, and of the ends of the interval at hand; from then on two rows for each interval that waits.
_FOUND: Final = 0
_KNOWN: Final = 1
_TOP: Final = 2
_LOW: Final = 3
_HIGH: Final = 4
_WAITING: Final = 5
NUM_WORK_ROWS: Final = _WAITING + 2 * MAX_WAITING
#: A step that reaches all parts of an interval evenly: 2^32 over the golden ratio.
_STRIDE: Final = 0x9E3779B1

_ONE: Final = np.uint64(1)
_NONE: Final = np.uint64(0)


#: Arrays of the index's view. Two are views themselves: of who holds and of who will hold soon. `lengths` has two rows:
#: with what will be held soon, and without. `plain` are the slots whose bit has the slot's number.
BIT_OF: Final = 0
SLOT_OF: Final = 1
WORK: Final = 2
SPANS: Final = 3
COUNTS: Final = 4
LENGTHS: Final = 5
HELD: Final = 6
SOON: Final = 7
PLAIN: Final = 8
LAYOUT: Final = (INTS, INTS, WORD_ROWS, INT_ROWS, INTS, PREFIX_ROWS, INTS, INTS, WORDS)


@compiled
def match(ids: Words, candidates: Words, view: Ints, max_length: int) -> None:
    """Write the longest prefix of `ids` that each candidate holds, or will hold soon, to `lengths`; 0 for other slots,
    none above `max_length`.

    After `counts[MAX_PROBES]` probes of bisection no other interval is begun; to end the one at hand takes log2 of the
    number of blocks at most, as does what comes before the bisection.
    """
    find_prefixes(ids, candidates, view, max_length)


@compiled_part
def find_prefixes(ids: Words, candidates: Words, view: Ints, max_length: int) -> None:
    lengths, spans = prefix_rows(view, LENGTHS), int_rows(view, SPANS)
    _match_held(
        ids,
        candidates,
        lengths[1],
        ints(view, BIT_OF),
        ints(view, SLOT_OF),
        words(view, PLAIN),
        seen(ints(view, HELD)),
        word_rows(view, WORK),
        spans,
        ints(view, COUNTS),
        max_length,
    )
    for slot in range(lengths.shape[1]):
        lengths[0, slot] = lengths[1, slot]
    _match_soon(ids, candidates, lengths[0], seen(ints(view, SOON)), spans, max_length)


@compiled_part
def _match_held(
    ids: Words,
    candidates: Words,
    lengths: Prefixes,
    bit_of: Ints,
    slot_of: Ints,
    plain: Words,
    now: Holders,
    work: Words,
    spans: Ints,
    counts: Ints,
    max_length: int,
) -> None:
    lengths[:] = 0
    _clear(work, _KNOWN)
    _clear(work, _TOP)
    counts[NUM_MATCHES] += 1
    if not len(ids) or not _take_candidates(candidates, bit_of, plain, work):
        return
    num_waiting = _grow(ids, now, work, spans, counts)
    limit = counts[NUM_PROBES] + counts[MAX_PROBES]
    num_holes = counts[NUM_HOLES]
    is_exact = True
    longest = 0
    while num_waiting:
        num_waiting -= 1
        low, high = spans[num_waiting, 0], spans[num_waiting, 1]
        _copy(work, _WAITING + 2 * num_waiting, _LOW)
        _copy(work, _WAITING + 2 * num_waiting + 1, _HIGH)
        if counts[NUM_PROBES] >= limit:
            is_exact = is_exact and high - low == 1
            high = low + 1
        low, num_waiting = _bisect(ids, lengths, slot_of, now, work, spans, counts, num_waiting, high, num_holes)
        if low >= 0:
            if not longest:
                longest = low + 1
                _copy(work, _LOW, _TOP)
            _write(lengths, slot_of, work, _LOW, min(low + 1, max_length))
    counts[NUM_BOUNDED] += not is_exact
    if longest:
        # One block inside the longest prefix: engines that free blocks from the middle would be seen.
        place = (counts[NUM_MATCHES] - 1) * _STRIDE % longest
        row = set_of(now.table, now.old, now.state, ids[place])
        _note_holes(now.sets, row, _TOP, place, lengths, slot_of, work, counts)


@compiled_part
def _bisect(
    ids: Words,
    lengths: Prefixes,
    slot_of: Ints,
    now: Holders,
    work: Words,
    spans: Ints,
    counts: Ints,
    num_waiting: int,
    high: int,
    num_holes: int,
) -> tuple[int, int]:
    """Find the end of what holders of an interval's start hold: that of the interval that was the last to wait. `high`
    may be nearer than its end. Returns the end, whose holders are then the interval's at hand, and how many wait."""
    low, row_low, row_high = spans[num_waiting, 0], spans[num_waiting, 2], spans[num_waiting, 3]
    has_hole = counts[NUM_HOLES] > num_holes  # of this match
    while high - low > 1:
        counts[NUM_PROBES] += 1
        middle = (low + high) >> 1
        row = set_of(now.table, now.old, now.state, ids[middle])
        if not has_hole:  # then it is mostly one of the two sets, and equal sets are one row
            if row == row_high:
                high = middle
                continue
            if row == row_low:
                low = middle
                continue
        has_hole |= _look(now.sets, row, middle, lengths, slot_of, work, counts)
        if _equal(work, _FOUND, _HIGH):
            high, row_high = middle, row
            continue
        if not _equal(work, _FOUND, _LOW):
            num_waiting = _wait(work, spans, num_waiting, low, row_low, middle, row)
            _copy(work, _FOUND, _LOW)
        low, row_low = middle, row
    return low, num_waiting


@compiled_part
def _match_soon(ids: Words, candidates: Words, lengths: Prefixes, now: Holders, spans: Ints, max_length: int) -> None:
    """Raise the lengths of candidates that will hold more soon; bits are slots. Short by a third at most."""
    num_found = 0
    length = 1 if len(ids) else 0
    while length:
        row = set_of(now.table, now.old, now.state, ids[length - 1])
        if not _meet(now.sets, row, candidates):
            break
        spans[num_found, 0], spans[num_found, 1] = length, row
        num_found += 1
        length = next_noted(length, len(ids))
    for word in range(min(len(candidates), now.sets.shape[1])):
        known = _NONE
        for number in range(num_found - 1, -1, -1):
            length = min(spans[number, 0], max_length)
            bits = now.sets[spans[number, 1], word] & candidates[word] & ~known
            known |= bits
            slot = 64 * word
            while bits:
                if bits & _ONE and lengths[slot] < length:
                    lengths[slot] = length
                bits >>= _ONE
                slot += 1


@compiled_part
def next_noted(length: int, num_blocks: int) -> int:
    """The next of a prompt's lengths that are noted: half as much again each time, and the whole. 0 after that."""
    if length == num_blocks:
        return 0
    return min(length + max(1, length >> 1), num_blocks)


@compiled
def note(table: Words, ids: Words, offset: np.uint64, noted: Words, out: Words) -> tuple[int, int]:
    """Write the last block of each length that is noted to `noted`; one note more of each is counted in `table` under
    its id + offset. Those that had none go to `out`. Returns how many are in both."""
    num_noted = count = 0
    length = 1 if len(ids) else 0
    while length:
        key = ids[length - 1]
        noted[num_noted] = key
        num_noted += 1
        place = find(table, key + offset)
        if place >= 0:
            table[place, 1] += _ONE
        else:
            table[~place, 0], table[~place, 1] = key + offset, _ONE
            out[count] = key
            count += 1
        length = next_noted(length, len(ids))
    return num_noted, count


@compiled
def count_down(table: Words, keys: Words, offset: np.uint64, out: Words) -> int:
    """One note less of each key; those that have none any more go to `out`. Returns how many."""
    count = 0
    for key in keys:
        place = find(table, key + offset)
        if place < 0:
            continue
        table[place, 1] -= _ONE
        if table[place, 1] == _NONE:
            table[place, 1] = _ONE  # `delete` takes entries only
            delete(table, place)
            out[count] = key
            count += 1
    return count


@compiled
def copy_entries(source: Words, table: Words) -> None:
    """Put what is in one table into another, which is empty."""
    for place in range(len(source)):
        if source[place, 1] != _NONE:
            to = ~find(table, source[place, 0])
            table[to, 0], table[to, 1] = source[place, 0], source[place, 1]


@compiled_part
def _take_candidates(candidates: Words, bit_of: Ints, plain: Words, work: Words) -> bool:
    """Write the candidates, as bits instead of slots, to the first row; False if nobody holds anything."""
    _clear(work, _FOUND)
    is_any = False
    for word in range(len(candidates)):
        bits = candidates[word]
        if bits & plain[word]:
            work[_FOUND, word] |= bits & plain[word]
            is_any = True
        bits &= ~plain[word]
        slot = 64 * word
        while bits:
            bit = bit_of[slot]
            if bits & _ONE and bit >= 0:
                work[_FOUND, bit >> 6] |= _ONE << np.uint64(bit & 63)
                is_any = True
            bits >>= _ONE
            slot += 1
    return is_any


@compiled_part
def _grow(ids: Words, now: Holders, work: Words, spans: Ints, counts: Ints) -> int:
    """Probe prefixes of length 1, 4, 16, ... until nobody holds so much, or the whole is held. Returns how many
    intervals wait in which the set of holders shrinks, the deepest last."""
    num_waiting = 0
    low, place, last = -1, 0, len(ids) - 1
    row_low = -1
    is_any = True
    while is_any and low < last:
        counts[NUM_PROBES] += 1
        row = set_of(now.table, now.old, now.state, ids[place])
        _copy(work, _FOUND, _LOW)
        is_any = is_other = False
        for word in range(work.shape[1]):
            bits = work[_LOW, word] & now.sets[row, word]
            is_any |= bits != _NONE
            is_other |= bits != work[_LOW, word]
            work[_FOUND, word] = bits
        if is_other:
            num_waiting = _wait(work, spans, num_waiting, low, row_low, place, row)
        low, row_low, place = place, row, min(4 * place + 3, last)
    if is_any:
        _copy(work, _FOUND, _LOW)
        _clear(work, _FOUND)
        num_waiting = _wait(work, spans, num_waiting, low, row_low, low + 1, EMPTY)
    return num_waiting


@compiled_part
def _wait(work: Words, spans: Ints, num_waiting: int, low: int, row_low: int, high: int, row_high: int) -> int:
    """An interval more: from `low`, the interval's at hand, to `high`, whose holders were just found; with the rows of
    both places' sets, of which these holders are those that count."""
    spans[num_waiting, 0], spans[num_waiting, 1] = low, high
    spans[num_waiting, 2], spans[num_waiting, 3] = row_low, row_high
    _copy(work, _LOW, _WAITING + 2 * num_waiting)
    _copy(work, _FOUND, _WAITING + 2 * num_waiting + 1)
    return num_waiting + 1


@compiled_part
def _look(sets: Words, row: int, place: int, lengths: Prefixes, slot_of: Ints, work: Words, counts: Ints) -> bool:
    """Find a probe's holders, none but of the interval's start. Those of its end must be among them: else there is a
    hole, which it tells, and they count as if there were none."""
    has_hole = False
    for word in range(work.shape[1]):
        bits = sets[row, word] & work[_LOW, word]
        has_hole |= work[_HIGH, word] & ~bits != _NONE
        work[_FOUND, word] = bits | work[_HIGH, word]
    if has_hole:
        _note_holes(sets, row, _HIGH, place, lengths, slot_of, work, counts)
    return has_hole


@compiled_part
def _note_holes(
    sets: Words, row: int, wanted: int, place: int, lengths: Prefixes, slot_of: Ints, work: Words, counts: Ints
) -> None:
    """End the prefixes of those wanted that lack the block at `place`. Their lengths are written already."""
    for word in range(work.shape[1]):
        bits = work[wanted, word] & ~sets[row, word]
        bit = 64 * word
        while bits:
            if bits & _ONE:
                counts[NUM_HOLES] += 1
                slot = slot_of[bit]
                lengths[slot] = min(lengths[slot], place)
            bits >>= _ONE
            bit += 1


@compiled_part
def _write(lengths: Prefixes, slot_of: Ints, work: Words, row: int, length: int) -> None:
    """Set the length of those whose length is not known yet."""
    for word in range(work.shape[1]):
        bits = work[row, word] & ~work[_KNOWN, word]
        work[_KNOWN, word] |= bits
        bit = 64 * word
        while bits:
            if bits & _ONE:
                lengths[slot_of[bit]] = length
            bits >>= _ONE
            bit += 1


@compiled_part
def _copy(work: Words, row: int, to: int) -> None:
    for word in range(work.shape[1]):
        work[to, word] = work[row, word]


@compiled_part
def _clear(work: Words, row: int) -> None:
    for word in range(work.shape[1]):
        work[row, word] = _NONE


@compiled_part
def _equal(work: Words, one: int, other: int) -> bool:
    for word in range(work.shape[1]):  # noqa: SIM110 - numba has no generators here
        if work[one, word] != work[other, word]:
            return False
    return True


@compiled_part
def _meet(sets: Words, row: int, candidates: Words) -> bool:
    for word in range(min(len(candidates), sets.shape[1])):  # noqa: SIM110 - numba has no generators here
        if sets[row, word] & candidates[word]:
            return True
    return False
