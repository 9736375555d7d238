"""The native tables against dicts of sets: growth, removal, sets that come and go, sweeping in between."""

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from interned_sets import num_sets

from medialane.routing.block_holders import BlockHolders

GREATEST = (1 << 64) - 1


def ids(blocks):
    return np.array(list(blocks), np.uint64)


def check(holders, held):
    """All that can be asked is as in `held`: bit -> blocks."""
    blocks = set().union(*held.values())
    assert holders.num_blocks == len(blocks)
    assert holders.num_entries == sum(map(len, held.values()))
    for bit, mine in held.items():
        assert holders.num_held(bit) == len(mine)
        assert {block for block in blocks if holders.holds(bit, block)} == mine
    sets = {frozenset(bit for bit in held if block in held[bit]) for block in blocks}
    assert num_sets(holders) == len(sets)


steps = st.lists(
    st.tuples(
        st.sampled_from(["store", "store", "remove", "retire", "sweep"]),
        st.sampled_from([0, 1, 63, 64, 65, 200]),
        st.lists(st.sampled_from([0, 1, 2, 3, GREATEST, GREATEST - 1, 1 << 63, *range(100, 200)]), max_size=60),
    ),
    max_size=40,
)


@settings(deadline=None)
@given(steps)
def test_tables_behave_like_sets(steps):
    holders, held, free, retired = BlockHolders(), {}, list(range(300, 400)), []
    holders.widen(401)
    names = {}  # what stands for a bit now
    for step, name, blocks in steps:
        bit = names.setdefault(name, name)
        mine = held.setdefault(bit, set())
        match step:
            case "store":
                holders.store(bit, ids(blocks))
                mine |= set(blocks)
            case "remove":
                holders.remove(bit, ids(blocks))
                mine -= set(blocks)
            case "retire":
                holders.retire(bit)
                retired.append(bit)
                del held[bit]
                names[name] = free.pop()
            case "sweep":
                holders.sweep(7, 3)
        assert holders.num_entries == sum(map(len, held.values()))
        assert all(holders.num_held(bit) == len(mine) for bit, mine in held.items())
    while holders.num_stale:
        holders.sweep(50, 10)
    assert not any(holders.num_held(bit) for bit in retired)
    check(holders, held)


@pytest.mark.parametrize("seed", range(3))
def test_table_grows_under_insertions_and_removals(seed):
    drawn = random.Random(seed)
    holders, held = BlockHolders(), {bit: set() for bit in range(4)}
    everything = [drawn.randrange(1 << 64) for _ in range(20_000)] + [0, GREATEST]
    for _ in range(300):
        bit, blocks = drawn.randrange(4), drawn.sample(everything, drawn.randrange(400))
        if drawn.random() < 0.7:
            holders.store(bit, ids(blocks))
            held[bit] |= set(blocks)
        else:
            blocks = drawn.sample(sorted(held[bit]), len(held[bit]) // 2)
            holders.remove(bit, ids(blocks))
            held[bit] -= set(blocks)
        if drawn.random() < 0.1:
            check(holders, held)
    check(holders, held)


def test_table_is_empty_after_removing_everything():
    """Of each kind of set there is one block: as many sets as there are blocks."""
    drawn = random.Random(1)
    holders = BlockHolders()
    holders.widen(130)
    stored = [(drawn.randrange(130), ids([drawn.randrange(500) for _ in range(9)])) for _ in range(3000)]
    for bit, blocks in stored:
        holders.store(bit, blocks)
    assert num_sets(holders) > 300
    num_rows = len(holders._now.sets)
    for _ in range(3):
        for bit, blocks in stored:
            holders.remove(bit, blocks)
        assert (holders.num_blocks, num_sets(holders), holders.num_entries) == (0, 0, 0)
        for bit, blocks in stored:
            holders.store(bit, blocks)
    assert len(holders._now.sets) == num_rows, "rows of sets that are gone are used again"


def test_batch_call_equals_single_calls():
    once, singly = BlockHolders(), BlockHolders()
    blocks = ids(range(1, 5000))
    once.store(3, blocks)
    for block in range(1, 5000):
        singly.store(3, ids([block]))
    for holders in (once, singly):
        check(holders, {3: set(range(1, 5000))})


@pytest.mark.parametrize("bit", [-1, 64, 1 << 40])
def test_out_of_range_bit_is_rejected_before_the_native_call(bit):
    holders = BlockHolders()
    for use in (holders.store, holders.remove):
        with pytest.raises(IndexError, match="no bit"):
            use(bit, ids([1]))
    with pytest.raises(IndexError, match="no bit"):
        holders.retire(bit)
    with pytest.raises(IndexError, match="no bit"):
        holders.holds(bit, 1)
    check(holders, {0: set()})


def test_widened_sets_equal_the_previous_ones():
    holders = BlockHolders()
    holders.store(0, ids([1]))
    holders.widen(1000)
    holders.store(0, ids([2]))
    assert num_sets(holders) == 1
    holders.store(999, ids([1, 2]))
    assert num_sets(holders) == 1
    check(holders, {0: {1, 2}, 999: {1, 2}})
