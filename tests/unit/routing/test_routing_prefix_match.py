"""Search by probing against walking every block."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from medialane.routing.prefix_match import flags, prefixes, search, shorten

ENOUGH = 10_000
lengths_of_slots = st.dictionaries(st.integers(0, 70), st.integers(0, 60), max_size=12)


def holders_of(lengths):
    """A look-up over blocks 0, 1, 2, ... of which each slot holds so many."""
    found = {}
    for slot, length in lengths.items():
        for block in range(length):
            found[block] = found.get(block, 0) | 1 << slot
    return found.get


def mask(slots):
    return sum(1 << slot for slot in slots)


def lengths_found(found, slots):
    return dict(enumerate(prefixes(found.levels, slots.bit_length()).tolist()))


@given(lengths_of_slots, st.integers(0, 60), st.sets(st.integers(0, 70)))
def test_search_finds_every_slots_prefix(lengths, num_blocks, others):
    candidates = mask(others)
    found = search(holders_of(lengths), range(num_blocks), candidates, max_probes=ENOUGH)
    wanted = {slot: min(lengths.get(slot, 0), num_blocks) for slot in others}
    result = lengths_found(found, candidates)
    assert {slot: result[slot] for slot in others} == wanted
    assert not any(length for slot, length in result.items() if slot not in others)
    assert found.is_exact
    assert not found.holes


@given(lengths_of_slots, st.integers(0, 60))
def test_levels_ascend_and_nest(lengths, num_blocks):
    levels = search(holders_of(lengths), range(num_blocks), mask(range(71)), max_probes=ENOUGH).levels
    assert [length for length, _ in levels] == sorted({length for length, _ in levels} - {0})
    for (_, outer), (_, inner) in itertools.pairwise(levels):
        assert inner
        assert outer & inner == inner != outer


@given(lengths_of_slots, st.integers(0, 12))
def test_probes_used_up_leave_lower_bounds(lengths, max_probes):
    found = search(holders_of(lengths), range(60), mask(range(71)), max_probes=max_probes)
    result = lengths_found(found, mask(range(71)))
    assert all(result[slot] <= length for slot, length in lengths.items())
    assert all(result[slot] > 0 for slot, length in lengths.items() if length)
    if found.is_exact:
        assert all(result[slot] == length for slot, length in lengths.items())
    assert found.num_probes <= max_probes + 4 + 6, "growing to 60 takes four, the last bisection six"


def test_thousand_slots_of_different_lengths_take_bounded_probes_and_the_longest_is_exact():
    everyone = mask(range(1000))

    def holders(block, _nobody):  # slot n holds 8 * n blocks
        return everyone & -(1 << block // 8 + 1)

    found = search(holders, range(8192), everyone, max_probes=100)
    result = prefixes(found.levels, 1000)
    assert found.num_probes <= 100 + 8 + 13
    assert not found.is_exact
    assert result.argmax() == 999
    assert result[999] == 8 * 999
    assert np.all(result <= 8 * np.arange(1000))
    assert np.all(result[1:] > 0)


def test_hole_that_a_probe_meets_is_told():
    holders = dict.fromkeys(range(64), 0b11)
    holders[31] = 0b10
    found = search(holders.get, range(128), 0b11, max_probes=ENOUGH)
    assert found.holes == []
    holders = {block: 0b11 if block % 2 == 0 else 0b10 for block in range(40)}
    found = search(holders.get, range(64), 0b11, max_probes=ENOUGH)
    assert all(missing == 0b01 and place % 2 == 0 for place, missing in found.holes)
    lengths = prefixes(found.levels, 2)
    shorten(lengths, found.holes)
    assert lengths[1] == 40
    assert lengths[0] < 40


def test_shorten_cuts_at_the_nearest_hole_only():
    lengths = np.array([10, 10, 3, 0], np.int32)
    shorten(lengths, [(7, 0b0101), (5, 0b0001), (9, 0b1000)])
    assert lengths.tolist() == [4, 10, 3, 0]


@pytest.mark.parametrize("count", [1, 2, 50, 150, 999])
def test_prefixes_sets_few_slots_and_many_alike(count):
    slots = range(7, 7 + count)
    found = prefixes([(5, mask(range(1100))), (9, mask(slots))], 1100)
    assert found.tolist() == [9 if slot in slots else 5 for slot in range(1100)]


def test_flags_are_the_bits_of_a_mask_and_read_only():
    found = flags(0b1000000101, 10)
    assert np.flatnonzero(found).tolist() == [0, 2, 9]
    with pytest.raises(ValueError, match="read-only"):
        found[0] = False


def test_nothing_to_search_finds_nothing():
    assert search({}.get, [], 0b1, max_probes=9) == ([], [], 0, True)
    assert search({5: 1}.get, [5], 0, max_probes=9) == ([], [], 0, True)
    assert prefixes([], 0).tolist() == []
