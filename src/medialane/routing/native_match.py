"""Longest cached prefix of one prompt, for all slots at once.

A block's id identifies the whole prompt up to its end, and engines evict a prompt's blocks from its tail. So the slots
that hold block i also hold all blocks before it: the sets of holders shrink along a prompt. Where they shrink is found
by exponential search (prefix lengths 1, 4, 16, ... until no slot is left), then binary search in each interval whose
end has fewer holders than its start: some tens of lookups for thousands of blocks and slots.

Thousands of different lengths would take as many probes: the longest prefixes are found first, and when the probe
budget is spent the rest get a lower bound. A slot that lacks a block inside its apparent prefix has a hole: if a probe
sees it, its prefix ends there.

Pending prefixes are stored for some lengths only (`pending_blocks.py`), which are looked up in order.
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
    line,
    rows,
)

#: Elements of `counts`: those of `MatchCounts`, and the limit of probes per match.
NUM_MATCHES, NUM_PROBES, NUM_HOLES, NUM_BOUNDED, MAX_PROBES = range(5)

#: Capacity of the interval stack: each interval is at most half as long as the one below, and prompts are shorter than
#: 2^30 blocks; about fifteen are pushed by the exponential search.
MAX_INTERVALS: Final = 64
#: Rows of `work` (bit sets): the current holders, the bits whose length is known, the holders of the longest prefix,
#: and those of both ends of the current interval; then two rows for each interval on the stack.
_FOUND, _KNOWN, _TOP, _LOW, _HIGH, _STACK = range(6)
NUM_WORK_ROWS: Final = _STACK + 2 * MAX_INTERVALS
#: A stride that visits all parts of an interval evenly: 2^32 / golden ratio.
_STRIDE: Final = 0x9E3779B1

_ONE: Final = np.uint64(1)
_NONE: Final = np.uint64(0)


#: Arrays of the index's view. Two are views themselves: reported holders and pending holders. `lengths` has two rows:
#: with and without pending blocks. `plain` are the slots whose bit has the slot's number.
BIT_OF, SLOT_OF, WORK, SPANS, COUNTS, LENGTHS, HELD, PENDING, PLAIN = range(9)
LAYOUT: Final = (INTS, INTS, WORD_ROWS, INT_ROWS, INTS, PREFIX_ROWS, INTS, INTS, WORDS)


@compiled
def match(ids: Words, candidates: Words, view: Ints, max_length: int) -> None:
    """Write the longest prefix of `ids` that each candidate holds, or that is pending there, to `lengths`; 0 for other
    slots, at most `max_length`.

    After `counts[MAX_PROBES]` probes no new interval is bisected; finishing the current one takes at most log2 of the
    number of blocks, as does the exponential search before.
    """
    find_prefixes(ids, candidates, view, max_length)


@compiled_part
def find_prefixes(ids: Words, candidates: Words, view: Ints, max_length: int) -> None:
    lengths, spans = rows(view, LENGTHS, np.int32), rows(view, SPANS, np.int64)
    _match_held(
        ids,
        candidates,
        lengths[1],
        line(view, BIT_OF, np.int64),
        line(view, SLOT_OF, np.int64),
        line(view, PLAIN, np.uint64),
        seen(line(view, HELD, np.int64)),
        rows(view, WORK, np.uint64),
        spans,
        line(view, COUNTS, np.int64),
        max_length,
    )
    for slot in range(lengths.shape[1]):
        lengths[0, slot] = lengths[1, slot]
    _match_pending(ids, candidates, lengths[0], seen(line(view, PENDING, np.int64)), spans, max_length)


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
    if not len(ids) or not _load_candidates(candidates, bit_of, plain, work):
        return
    num_intervals = _gallop(ids, now, work, spans, counts)
    limit = counts[NUM_PROBES] + counts[MAX_PROBES]
    num_holes = counts[NUM_HOLES]
    is_exact = True
    longest = 0
    while num_intervals:
        num_intervals -= 1
        low, high = spans[num_intervals, 0], spans[num_intervals, 1]
        _copy(work, _STACK + 2 * num_intervals, _LOW)
        _copy(work, _STACK + 2 * num_intervals + 1, _HIGH)
        if counts[NUM_PROBES] >= limit:
            is_exact = is_exact and high - low == 1
            high = low + 1
        low, num_intervals = _bisect(ids, lengths, slot_of, now, work, spans, counts, num_intervals, high, num_holes)
        if low >= 0:
            if not longest:
                longest = low + 1
                _copy(work, _LOW, _TOP)
            _write(lengths, slot_of, work, _LOW, min(low + 1, max_length))
    counts[NUM_BOUNDED] += not is_exact
    if longest:
        # Check one block inside the longest prefix, to detect engines that evict from the middle.
        place = (counts[NUM_MATCHES] - 1) * _STRIDE % longest
        row = set_of(now.table, now.old, now.state, ids[place])
        _record_holes(now.sets, row, _TOP, place, lengths, slot_of, work, counts)


@compiled_part
def _bisect(
    ids: Words,
    lengths: Prefixes,
    slot_of: Ints,
    now: Holders,
    work: Words,
    spans: Ints,
    counts: Ints,
    num_intervals: int,
    high: int,
    num_holes: int,
) -> tuple[int, int]:
    """Bisect the interval popped from the stack (`num_intervals` is its index): find the last block that the holders of
    its start hold. `high` may be lower than its end. Returns that block, whose holders are then in `work[_LOW]`, and
    the size of the stack."""
    low, row_low, row_high = spans[num_intervals, 0], spans[num_intervals, 2], spans[num_intervals, 3]
    has_hole = counts[NUM_HOLES] > num_holes  # in this match
    while high - low > 1:
        counts[NUM_PROBES] += 1
        middle = (low + high) >> 1
        row = set_of(now.table, now.old, now.state, ids[middle])
        if not has_hole:  # fast path: equal sets are one row
            if row == row_high:
                high = middle
                continue
            if row == row_low:
                low = middle
                continue
        has_hole |= _probe(now.sets, row, middle, lengths, slot_of, work, counts)
        if _equal(work, _FOUND, _HIGH):
            high, row_high = middle, row
            continue
        if not _equal(work, _FOUND, _LOW):
            num_intervals = _push(work, spans, num_intervals, low, row_low, middle, row)
            _copy(work, _FOUND, _LOW)
        low, row_low = middle, row
    return low, num_intervals


@compiled_part
def _match_pending(
    ids: Words, candidates: Words, lengths: Prefixes, now: Holders, spans: Ints, max_length: int
) -> None:
    """Raise the lengths of candidates with longer pending prefixes; bits are slots. Too short by at most a third."""
    num_found = 0
    length = 1 if len(ids) else 0
    while length:
        row = set_of(now.table, now.old, now.state, ids[length - 1])
        if not _intersects(now.sets, row, candidates):
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
    """Return the next length of a prompt that is stored: half as long again, at most the whole; 0 after that."""
    if length == num_blocks:
        return 0
    return min(length + max(1, length >> 1), num_blocks)


@compiled
def note(table: Words, ids: Words, offset: np.uint64, noted: Words, out: Words, every: bool) -> tuple[int, int]:
    """Write the last block of each stored length to `noted` and increment its count in `table`, under its id + offset.
    With `every`, `ids` are such blocks already. Blocks whose count was 0 are written to `out`. Returns the sizes of
    both."""
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
        length = next_noted(length, len(ids)) if not every else (length + 1) % (len(ids) + 1)
    return num_noted, count


@compiled
def count_down(table: Words, keys: Words, offset: np.uint64, out: Words) -> int:
    """Decrement the count of each key; write those that reach 0 to `out` and return their number."""
    count = 0
    for key in keys:
        place = find(table, key + offset)
        if place < 0:
            continue
        table[place, 1] -= _ONE
        if table[place, 1] == _NONE:
            table[place, 1] = _ONE  # `delete` expects an entry
            delete(table, place)
            out[count] = key
            count += 1
    return count


@compiled
def copy_entries(source: Words, table: Words) -> None:
    """Copy all entries of a table into another, which is empty."""
    for place in range(len(source)):
        if source[place, 1] != _NONE:
            to = ~find(table, source[place, 0])
            table[to, 0], table[to, 1] = source[place, 0], source[place, 1]


@compiled_part
def _load_candidates(candidates: Words, bit_of: Ints, plain: Words, work: Words) -> bool:
    """Write the candidates, as bits instead of slots, to `work[_FOUND]`; return False if none of them has a bit."""
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
def _gallop(ids: Words, now: Holders, work: Words, spans: Ints, counts: Ints) -> int:
    """Probe prefixes of length 1, 4, 16, ... until no candidate holds one, or all blocks are held. Push the intervals
    in which the set of holders shrinks, the deepest last, and return their number."""
    num_intervals = 0
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
            num_intervals = _push(work, spans, num_intervals, low, row_low, place, row)
        low, row_low, place = place, row, min(4 * place + 3, last)
    if is_any:
        _copy(work, _FOUND, _LOW)
        _clear(work, _FOUND)
        num_intervals = _push(work, spans, num_intervals, low, row_low, low + 1, EMPTY)
    return num_intervals


@compiled_part
def _push(work: Words, spans: Ints, num_intervals: int, low: int, row_low: int, high: int, row_high: int) -> int:
    """Push the interval from `low`, with the holders in `work[_LOW]`, to `high`, with those in `work[_FOUND]`; and the
    rows of both blocks' sets, of which these holders are the candidates."""
    spans[num_intervals, 0], spans[num_intervals, 1] = low, high
    spans[num_intervals, 2], spans[num_intervals, 3] = row_low, row_high
    _copy(work, _LOW, _STACK + 2 * num_intervals)
    _copy(work, _FOUND, _STACK + 2 * num_intervals + 1)
    return num_intervals + 1


@compiled_part
def _probe(sets: Words, row: int, place: int, lengths: Prefixes, slot_of: Ints, work: Words, counts: Ints) -> bool:
    """Write the holders of a probed block, among those of the interval's start, to `work[_FOUND]`. They must include
    those of its end: otherwise there is a hole, which is recorded and otherwise ignored. Returns whether there is
    one."""
    has_hole = False
    for word in range(work.shape[1]):
        bits = sets[row, word] & work[_LOW, word]
        has_hole |= work[_HIGH, word] & ~bits != _NONE
        work[_FOUND, word] = bits | work[_HIGH, word]
    if has_hole:
        _record_holes(sets, row, _HIGH, place, lengths, slot_of, work, counts)
    return has_hole


@compiled_part
def _record_holes(
    sets: Words, row: int, expected: int, place: int, lengths: Prefixes, slot_of: Ints, work: Words, counts: Ints
) -> None:
    """End the prefixes of those slots of `work[expected]` that lack the block at `place`. Their lengths are already
    set."""
    for word in range(work.shape[1]):
        bits = work[expected, word] & ~sets[row, word]
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
def _intersects(sets: Words, row: int, candidates: Words) -> bool:
    for word in range(min(len(candidates), sets.shape[1])):  # noqa: SIM110 - numba has no generators here
        if sets[row, word] & candidates[word]:
            return True
    return False
