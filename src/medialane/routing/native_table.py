"""Which bits hold which blocks, in arrays that native code works on.

Theory of operation. `table` maps a block's id to the row of a set of bits; consecutive blocks of a prompt mostly have
the same holders, so sets are few, and each is one row of the matrix `sets`, counted by the blocks that have it. Equal
sets are one row: `places` finds it by a hash of the set's words. Rows of no block are used again.

Both tables are open: what belongs at a place stands there or right behind it, without a gap. Removing closes the gap by
moving up what stands behind it, so no marks of what was removed pile up.

`table` grows without a pause: the full one becomes `old`, and with each block that is stored some of its places are
emptied into the next one, which is twice as long: long before that is full. A block is in one of the two. From `old`
entries are only taken, from its start on: up to `state[MOVED]` it is empty.

A bit that is retired is one whose holder lost all at once. Sets that have such bits are marked `STALE`, and `sweep`
goes round both tables, some places with each call, replacing them by sets without. Removing moves entries, so it may
miss one and find it on its next round: it is done when the count of the bits' blocks is zero.

Ints are signed but for ids and words; numba makes a float of the sum of a signed and an unsigned one.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np

from medialane.core.compiled import compiled, compiled_part
from medialane.routing.native_view import (
    INT_ROWS,
    INTS,
    WORD_ROWS,
    WORDS,
    Ints,
    Words,
    int_rows,
    ints,
    signed,
    word_rows,
    words,
)

#: Rows that are no interned set: the empty one, and that in which the next one is put together.
EMPTY: Final = 0
DRAFT: Final = 1
FIRST_ROW: Final = 2
#: Columns of `rows`. `NEXT` is the next unused row, in an unused one.
HASH: Final = 0
COUNT: Final = 1
STALE: Final = 2
NEXT: Final = 3
#: Places of `state`: entries of `table` and of `old`; how far `old` is moved; rows in use so far, and the first unused
#: one among them (0: none); where the next sweep begins, and blocks that retired bits still hold, summed over them.
NUM_NEW: Final = 0
NUM_OLD: Final = 1
MOVED: Final = 2
NUM_ROWS: Final = 3
UNUSED: Final = 4
SWEPT: Final = 5
NUM_STALE: Final = 6

#: Steps of moving for each block stored. `old` takes 1.75 for each of its places, three quarters of which have an
#: entry: it is empty after 0.44 blocks a place, and the next table is not full before 0.75.
_NUM_MOVED: Final = 4

_ONE: Final = np.uint64(1)
_NONE: Final = np.uint64(0)
#: 2^64 over the golden ratio, and the last factor of MurmurHash3's fmix64.
_SPREAD: Final = np.uint64(0x9E3779B97F4A7C15)
_MIX: Final = np.uint64(0xC4CEB9FE1A85EC53)
_HALF: Final = np.uint64(32)


class Holders(NamedTuple):
    """The arrays, in the order in which a view has them. Lengths of tables are powers of two."""

    table: Words  # [n, 2]: block, row of its set; no entry where the row is 0
    old: Words  # [m, 2]
    sets: Words  # [rows, words]
    rows: Ints  # [rows, 4]
    places: Ints  # [p]: row, or 0; p is more than the number of rows
    held: Ints  # [64 * words]: blocks by bit
    retired: Words  # [words]
    state: Ints  # [7]


#: Of the view that `seen` reads.
LAYOUT: Final = (WORD_ROWS, WORD_ROWS, WORD_ROWS, INT_ROWS, INTS, INTS, WORDS, INTS)


@compiled_part
def find(table: Words, block: np.uint64) -> int:
    """The block's place in a table, or ~place of where it would be put."""
    place = _home(table, block)
    while table[place, 1] != _NONE:
        if table[place, 0] == block:
            return place
        place = (place + 1) & (len(table) - 1)
    return ~place


@compiled_part
def delete(table: Words, hole: int) -> None:
    """Take the entry out of a table."""
    last = len(table) - 1
    place = hole
    while True:
        place = (place + 1) & last
        if table[place, 1] == _NONE:
            break
        # It may move up unless that is before the place where it belongs.
        if ((place - _home(table, table[place, 0])) & last) >= ((place - hole) & last):
            table[hole, 0], table[hole, 1] = table[place, 0], table[place, 1]
            hole = place
    table[hole, 1] = _NONE


@compiled_part
def set_of(table: Words, old: Words, state: Ints, block: np.uint64) -> int:
    """The row of the block's holders."""
    place = find(table, block)
    if place >= 0:
        return signed(table[place, 1])
    if state[NUM_OLD]:
        place = find(old, block)
        if place >= 0:
            return signed(old[place, 1])
    return EMPTY


@compiled_part
def seen(view: Ints) -> Holders:
    """The arrays of a view."""
    return Holders(
        word_rows(view, 0),
        word_rows(view, 1),
        word_rows(view, 2),
        int_rows(view, 3),
        ints(view, 4),
        ints(view, 5),
        words(view, 6),
        ints(view, 7),
    )


@compiled
def holds(view: Ints, bit: int, block: np.uint64) -> bool:
    now = seen(view)
    row = set_of(now.table, now.old, now.state, block)
    return now.sets[row, bit >> 6] >> np.uint64(bit & 63) & _ONE != _NONE


@compiled
def store(view: Ints, bit: int, ids: Words, first: int) -> int:
    """The bit holds ids[first:], too. Returns how many of `ids` are done: not all, if there must be more room."""
    now = seen(view)
    table, sets, state = now.table, now.sets, now.state
    word, flag = bit >> 6, _ONE << np.uint64(bit & 63)
    before = after = -1  # the last change of a set: the next block mostly has the same
    for number in range(first, len(ids)):
        if state[NUM_OLD]:
            _move(now, _NUM_MOVED)
        block = ids[number]
        place = _find_moved(now, block)
        row = signed(table[place, 1]) if place >= 0 else EMPTY
        if sets[row, word] & flag:
            continue
        if place < 0 and _is_full(state[NUM_NEW], len(table)):
            return number
        if row != before:
            after = _toggled(now, row, word, flag)
            if after < 0:
                return number
            before = row
        if place < 0:
            place = ~place
            table[place, 0] = block
            state[NUM_NEW] += 1
        table[place, 1] = np.uint64(after)
        now.held[bit] += 1
        if _recount(now, row, after):
            before = -1
    return len(ids)


@compiled
def remove(view: Ints, bit: int, ids: Words, first: int) -> int:
    """The bit holds ids[first:] no more. Returns as `store`."""
    now = seen(view)
    word, flag = bit >> 6, _ONE << np.uint64(bit & 63)
    before = after = -1
    for number in range(first, len(ids)):
        block = ids[number]
        table, counter = now.table, NUM_NEW
        place = find(table, block)
        if place < 0 and now.state[NUM_OLD]:
            table, counter = now.old, NUM_OLD
            place = find(table, block)
        if place < 0:
            continue
        row = signed(table[place, 1])
        if not now.sets[row, word] & flag:
            continue
        if row != before:
            after = _toggled(now, row, word, flag)
            if after < 0:
                return number
            before = row
        now.held[bit] -= 1
        _put(now, table, counter, place, after)
        if _recount(now, row, after):
            before = -1
    return len(ids)


@compiled
def retire(view: Ints, bit: int) -> None:
    """What the bit holds is to be swept."""
    now = seen(view)
    word, flag = bit >> 6, _ONE << np.uint64(bit & 63)
    now.retired[word] |= flag
    now.state[NUM_STALE] += now.held[bit]
    for row in range(FIRST_ROW, now.state[NUM_ROWS]):
        if now.rows[row, COUNT] and now.sets[row, word] & flag:
            now.rows[row, STALE] = 1


@compiled
def sweep(view: Ints, num_places: int, num_blocks: int) -> bool:
    """Look at so many places at most, and take retired bits from so many blocks at most. False if there must be more
    room first."""
    now = seen(view)
    state = now.state
    while num_places > 0 and num_blocks > 0 and state[NUM_STALE] > 0:
        num_places -= 1
        place = state[SWEPT]
        if place >= len(now.table) + len(now.old):
            state[SWEPT] = place = 0
        table, counter = now.table, NUM_NEW
        if place >= len(table):
            place -= len(table)
            table, counter = now.old, NUM_OLD
        row = signed(table[place, 1])
        if not now.rows[row, STALE]:
            state[SWEPT] += 1
            continue
        after = _swept(now, row)
        if after < 0:
            return False
        num_blocks -= 1
        _discount(now, row)
        _put(now, table, counter, place, after)  # may move another one here, which is looked at next
        _recount(now, row, after)
    return True


@compiled
def intern_all(view: Ints) -> None:
    """Put every row that is in use into `places`, which are empty."""
    now = seen(view)
    last = len(now.places) - 1
    for row in range(FIRST_ROW, now.state[NUM_ROWS]):
        if now.rows[row, COUNT]:
            place = now.rows[row, HASH] & last
            while now.places[place]:
                place = (place + 1) & last
            now.places[place] = row


@compiled_part
def _is_full(num_entries: int, length: int) -> bool:
    """Whether a table is too full for one more: past three quarters, looking up takes long."""
    return 4 * num_entries >= 3 * length


@compiled_part
def _home(table: Words, block: np.uint64) -> int:
    return signed((block * _SPREAD) >> _HALF) & (len(table) - 1)


@compiled_part
def _find_moved(now: Holders, block: np.uint64) -> int:
    """As `find` in `table`, where the block is moved to if it is in `old`."""
    place = find(now.table, block)
    if place >= 0 or not now.state[NUM_OLD]:
        return place
    found = find(now.old, block)
    if found < 0:
        return place
    now.table[~place, 0], now.table[~place, 1] = block, now.old[found, 1]
    delete(now.old, found)
    now.state[NUM_OLD] -= 1
    now.state[NUM_NEW] += 1
    return ~place


@compiled_part
def _move(now: Holders, num_steps: int) -> None:
    """Move entries of `old` on: so many places of it are looked at or emptied."""
    table, old, state = now.table, now.old, now.state
    while num_steps > 0 and state[NUM_OLD] > 0:
        num_steps -= 1
        place = state[MOVED]
        if old[place, 1] == _NONE:
            state[MOVED] += 1
            continue
        to = ~find(table, old[place, 0])
        table[to, 0], table[to, 1] = old[place, 0], old[place, 1]
        delete(old, place)
        state[NUM_OLD] -= 1
        state[NUM_NEW] += 1


@compiled_part
def _put(now: Holders, table: Words, counter: int, place: int, row: int) -> None:
    """Give an entry another set; without any holder it goes."""
    if row == EMPTY:
        delete(table, place)
        now.state[counter] -= 1
    else:
        table[place, 1] = np.uint64(row)


@compiled_part
def _toggled(now: Holders, row: int, word: int, flag: np.uint64) -> int:
    """The row of a set that has one bit more or less."""
    sets = now.sets
    for other in range(sets.shape[1]):
        sets[DRAFT, other] = sets[row, other]
    sets[DRAFT, word] ^= flag
    return _intern(now)


@compiled_part
def _swept(now: Holders, row: int) -> int:
    """The row of a set without retired bits."""
    for word in range(now.sets.shape[1]):
        now.sets[DRAFT, word] = now.sets[row, word] & ~now.retired[word]
    return _intern(now)


@compiled_part
def _intern(now: Holders) -> int:
    """The row that equals the draft, a new one if there is none; -1 if there is no room for one."""
    sets, rows, places = now.sets, now.rows, now.places
    found, mixed, stale = _NONE, _NONE, _NONE
    for word in range(sets.shape[1]):
        bits = sets[DRAFT, word]
        found |= bits
        stale |= bits & now.retired[word]
        bits *= _SPREAD * np.uint64(2 * word + 1)  # nothing for nothing: sets may become wider
        mixed ^= (bits ^ bits >> _HALF) * _MIX
    if found == _NONE:
        return EMPTY
    code = signed(mixed >> _ONE)
    place = code & (len(places) - 1)
    while places[place]:
        if rows[places[place], HASH] == code and _equals_draft(sets, places[place]):
            return places[place]
        place = (place + 1) & (len(places) - 1)
    row = _unused_row(now)
    if row > 0:
        for word in range(sets.shape[1]):
            sets[row, word] = sets[DRAFT, word]
        rows[row, HASH] = code
        rows[row, COUNT] = 0
        rows[row, STALE] = stale != _NONE
        places[place] = row
    return row


@compiled_part
def _equals_draft(sets: Words, row: int) -> bool:
    for word in range(sets.shape[1]):  # noqa: SIM110 - numba has no generators here
        if sets[row, word] != sets[DRAFT, word]:
            return False
    return True


@compiled_part
def _unused_row(now: Holders) -> int:
    """A row for a new set, -1 if there is none."""
    state = now.state
    row = state[UNUSED]
    if row:
        state[UNUSED] = now.rows[row, NEXT]
        return row
    if state[NUM_ROWS] == len(now.sets):
        return -1
    state[NUM_ROWS] += 1
    return state[NUM_ROWS] - 1


@compiled_part
def _recount(now: Holders, before: int, after: int) -> bool:
    """A block's set is another one now. Tells whether that was the last block of the one before."""
    if after != EMPTY:
        now.rows[after, COUNT] += 1
    if before == EMPTY:
        return False
    now.rows[before, COUNT] -= 1
    if now.rows[before, COUNT]:
        return False
    _forget_set(now, before)
    return True


@compiled_part
def _discount(now: Holders, row: int) -> None:
    """A block of this set is taken from the retired bits."""
    for word in range(now.sets.shape[1]):
        bits = now.sets[row, word] & now.retired[word]
        bit = 64 * word
        while bits:
            if bits & _ONE:
                now.held[bit] -= 1
                now.state[NUM_STALE] -= 1
            bits >>= _ONE
            bit += 1


@compiled_part
def _forget_set(now: Holders, row: int) -> None:
    """Take a row out of `places`, closing the gap as `delete` does; it is unused then."""
    rows, places, last = now.rows, now.places, len(now.places) - 1
    hole = rows[row, HASH] & last
    while places[hole] != row:
        hole = (hole + 1) & last
    place = hole
    while True:
        place = (place + 1) & last
        if not places[place]:
            break
        if ((place - (rows[places[place], HASH] & last)) & last) >= ((place - hole) & last):
            places[hole] = places[place]
            hole = place
    places[hole] = 0
    rows[row, STALE] = 0
    rows[row, NEXT] = now.state[UNUSED]
    now.state[UNUSED] = row
