"""Hash table from block id to its set of holders (bits), in arrays for native code.

Theory of operation. `table` maps a block's id to the row of a bitmap; consecutive blocks of a prompt mostly have the
same holders, so distinct bitmaps are few. They are interned: each is one row of the matrix `sets`, reference-counted by
the blocks that have it, and found through the hash table `places`. Rows without blocks are reused.

Both tables use open addressing with linear probing and backward-shift deletion, so there are no tombstones.

`table` is rehashed incrementally: a full one becomes `old`, and each stored block moves a few of its entries to the new
one, which is twice as long and is not full before `old` is empty. A block is in one of the two. Entries are only
removed from `old`, in order of position: below `state[MOVED]` it is empty.

A retired bit is one whose holder lost all blocks at once. Bitmaps with such bits are marked `STALE`, and `sweep` scans
both tables, some places per call, replacing them by bitmaps without. Deletion moves entries, so a scan may miss one
that the next finds: sweeping is complete when the count of the retired bits' blocks is zero.

Ints are signed, except ids and words: numba converts the sum of a signed and an unsigned int to float.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np

from medialane.core.compiled import compiled, compiled_part
from medialane.routing.native_view import INT_ROWS, INTS, WORD_ROWS, WORDS, Ints, Words, line, rows, signed

#: Rows that are not interned: the empty set, and the one in which the next set is composed.
EMPTY, DRAFT, FIRST_ROW = range(3)
#: Columns of `rows`. In an unused row, `NEXT` links to the next unused one.
HASH, COUNT, STALE, NEXT = range(4)
#: Elements of `state`: entries of `table` and of `old`; the position up to which `old` is moved; rows used so far, and
#: the head of the list of unused ones (0: none); the position of the next sweep, and the blocks still held by retired
#: bits, summed over them.
NUM_NEW, NUM_OLD, MOVED, NUM_ROWS, UNUSED, SWEPT, NUM_STALE = range(7)

#: Steps of moving for each block stored. `old` takes 1.75 steps per place, as three quarters have an entry: it is empty
#: after 0.44 stored blocks per place; the next table is not full before 0.75.
_NUM_MOVED: Final = 4

_ONE: Final = np.uint64(1)
_NONE: Final = np.uint64(0)
#: 2^64 / golden ratio, and the last factor of MurmurHash3's fmix64.
_SPREAD: Final = np.uint64(0x9E3779B97F4A7C15)
_MIX: Final = np.uint64(0xC4CEB9FE1A85EC53)
_HALF: Final = np.uint64(32)


class Holders(NamedTuple):
    """The arrays, in the order of the view. Lengths of tables are powers of two."""

    table: Words  # [n, 2]: block, row of its set; 0 is an empty place
    old: Words  # [m, 2]
    sets: Words  # [rows, words]
    rows: Ints  # [rows, 4]
    places: Ints  # [p]: row, or 0; p exceeds the number of rows
    held: Ints  # [64 * words]: blocks per bit
    retired: Words  # [words]
    state: Ints  # [7]


#: Layout of the view that `seen` reads.
LAYOUT: Final = (WORD_ROWS, WORD_ROWS, WORD_ROWS, INT_ROWS, INTS, INTS, WORDS, INTS)


@compiled_part
def find(table: Words, block: np.uint64) -> int:
    """Return the block's place in a table, or ~place of where to insert it."""
    place = _home(table, block)
    while table[place, 1] != _NONE:
        if table[place, 0] == block:
            return place
        place = (place + 1) & (len(table) - 1)
    return ~place


@compiled_part
def delete(table: Words, hole: int) -> None:
    """Delete an entry of a table by backward shift."""
    last = len(table) - 1
    place = hole
    while True:
        place = (place + 1) & last
        if table[place, 1] == _NONE:
            break
        # An entry may move up, but not before its home place.
        if ((place - _home(table, table[place, 0])) & last) >= ((place - hole) & last):
            table[hole, 0], table[hole, 1] = table[place, 0], table[place, 1]
            hole = place
    table[hole, 1] = _NONE


@compiled_part
def set_of(table: Words, old: Words, state: Ints, block: np.uint64) -> int:
    """Return the row of the block's holders."""
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
    """Return the arrays of a view."""
    return Holders(
        rows(view, 0, np.uint64),
        rows(view, 1, np.uint64),
        rows(view, 2, np.uint64),
        rows(view, 3, np.int64),
        line(view, 4, np.int64),
        line(view, 5, np.int64),
        line(view, 6, np.uint64),
        line(view, 7, np.int64),
    )


@compiled
def holds(view: Ints, bit: int, block: np.uint64) -> bool:
    now = seen(view)
    row = set_of(now.table, now.old, now.state, block)
    return now.sets[row, bit >> 6] >> np.uint64(bit & 63) & _ONE != _NONE


@compiled
def store(view: Ints, bit: int, ids: Words, first: int) -> int:
    """Add ids[first:] to the bit. Returns how many of `ids` are done: fewer than all if the arrays must grow first."""
    now = seen(view)
    table, sets, state = now.table, now.sets, now.state
    word, flag = bit >> 6, _ONE << np.uint64(bit & 63)
    before = after = -1  # the last change of a set: the next block mostly needs the same
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
    """Remove ids[first:] from the bit. Returns as `store` does."""
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
        _set_row(now, table, counter, place, after)
        if _recount(now, row, after):
            before = -1
    return len(ids)


@compiled
def retire(view: Ints, bit: int) -> None:
    """Leave the bit's blocks to `sweep`."""
    now = seen(view)
    word, flag = bit >> 6, _ONE << np.uint64(bit & 63)
    now.retired[word] |= flag
    now.state[NUM_STALE] += now.held[bit]
    for row in range(FIRST_ROW, now.state[NUM_ROWS]):
        if now.rows[row, COUNT] and now.sets[row, word] & flag:
            now.rows[row, STALE] = 1


@compiled
def sweep(view: Ints, num_places: int, num_blocks: int) -> bool:
    """Inspect up to `num_places` places and remove retired bits from up to `num_blocks` blocks. Returns False if the
    arrays must grow first."""
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
        _uncount_retired(now, row)
        _set_row(now, table, counter, place, after)  # may move another entry here, which is inspected next
        _recount(now, row, after)
    return True


@compiled
def intern_all(view: Ints) -> None:
    """Insert every row in use into `places`, which must be empty."""
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
    """Return whether a table is full: above a load factor of three quarters, probing gets slow."""
    return 4 * num_entries >= 3 * length


@compiled_part
def _home(table: Words, block: np.uint64) -> int:
    return signed((block * _SPREAD) >> _HALF) & (len(table) - 1)


@compiled_part
def _find_moved(now: Holders, block: np.uint64) -> int:
    """Like `find` in `table`; moves the block there if it is in `old`."""
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
    """Move entries of `old` to `table`, in up to `num_steps` steps; a step moves an entry or skips an empty place."""
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
def _set_row(now: Holders, table: Words, counter: int, place: int, row: int) -> None:
    """Set the row of an entry; delete the entry if the row is empty."""
    if row == EMPTY:
        delete(table, place)
        now.state[counter] -= 1
    else:
        table[place, 1] = np.uint64(row)


@compiled_part
def _toggled(now: Holders, row: int, word: int, flag: np.uint64) -> int:
    """Return the row of a set with one bit flipped; -1 if `sets` is full."""
    sets = now.sets
    for other in range(sets.shape[1]):
        sets[DRAFT, other] = sets[row, other]
    sets[DRAFT, word] ^= flag
    return _intern(now)


@compiled_part
def _swept(now: Holders, row: int) -> int:
    """Return the row of a set without its retired bits; -1 if `sets` is full."""
    for word in range(now.sets.shape[1]):
        now.sets[DRAFT, word] = now.sets[row, word] & ~now.retired[word]
    return _intern(now)


@compiled_part
def _intern(now: Holders) -> int:
    """Return the row that equals the draft, inserting it if there is none; -1 if `sets` is full."""
    sets, rows, places = now.sets, now.rows, now.places
    found, mixed, stale = _NONE, _NONE, _NONE
    for word in range(sets.shape[1]):
        bits = sets[DRAFT, word]
        found |= bits
        stale |= bits & now.retired[word]
        bits *= _SPREAD * np.uint64(2 * word + 1)  # 0 for 0: the hash must not change when sets get wider
        mixed ^= (bits ^ bits >> _HALF) * _MIX
    if found == _NONE:
        return EMPTY
    code = signed(mixed >> _ONE)
    place = code & (len(places) - 1)
    while places[place]:
        if rows[places[place], HASH] == code and _equals_draft(sets, places[place]):
            return places[place]
        place = (place + 1) & (len(places) - 1)
    row = _allocate_row(now)
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
def _allocate_row(now: Holders) -> int:
    """Allocate a row; -1 if `sets` is full."""
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
    """Update the reference counts after a block's set changed. Returns whether the old set was freed."""
    if after != EMPTY:
        now.rows[after, COUNT] += 1
    if before == EMPTY:
        return False
    now.rows[before, COUNT] -= 1
    if now.rows[before, COUNT]:
        return False
    _free_row(now, before)
    return True


@compiled_part
def _uncount_retired(now: Holders, row: int) -> None:
    """Update the counts of the retired bits for a block that is removed from them."""
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
def _free_row(now: Holders, row: int) -> None:
    """Remove a row from `places` by backward shift, and free it."""
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
