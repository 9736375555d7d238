"""Search by probing, checked against a scan of every block."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from medialane.routing.block_index import BlockIndex

ENOUGH = 10_000
NUM_SLOTS = 71
lengths_of_slots = st.dictionaries(st.integers(0, NUM_SLOTS - 1), st.integers(0, 60), max_size=12)


def blocks(count):
    return np.arange(count, dtype=np.uint64)


def index_of(lengths, **kwargs):
    """Blocks 0, 1, 2, ... of which each slot holds so many."""
    index = BlockIndex(**kwargs)
    for slot, length in lengths.items():
        index.store(slot, blocks(length))
    return index


def mask(slots):
    return sum(1 << slot for slot in slots)


@given(lengths_of_slots, st.integers(0, 60), st.sets(st.integers(0, NUM_SLOTS - 1), min_size=1))
def test_search_finds_every_slots_prefix(lengths, num_blocks, others):
    index = index_of(lengths, max_probes=ENOUGH)
    found = index.match(blocks(num_blocks), mask(others)).held.tolist()
    assert found == [min(lengths.get(slot, 0), num_blocks) if slot in others else 0 for slot in range(max(others) + 1)]
    assert (index.counts.num_bounded, index.counts.num_holes) == (0, 0)


@given(lengths_of_slots, st.integers(0, 12))
def test_exhausted_probes_give_lower_bounds(lengths, max_probes):
    index = index_of(lengths, max_probes=max_probes)
    found = index.match(blocks(60), mask(range(NUM_SLOTS))).held.tolist()
    assert all(found[slot] <= length for slot, length in lengths.items())
    assert all(found[slot] > 0 for slot, length in lengths.items() if length)
    if max_probes >= 6:
        assert max(found) == max(lengths.values(), default=0)
    if not index.counts.num_bounded:
        assert all(found[slot] == length for slot, length in lengths.items())
    assert index.counts.num_probes <= max_probes + 4 + 6, "growing to 60 takes four, the last bisection six"


def test_thousand_slots_need_bounded_probes_and_the_longest_match_is_exact():
    index = index_of({slot: 8 * slot for slot in range(1000)}, max_probes=100)
    found = index.match(blocks(8192), mask(range(1000))).held
    assert index.counts.num_probes <= 100 + 8 + 13
    assert index.counts.num_bounded == 1
    assert found.argmax() == 999
    assert found[999] == 8 * 999
    assert np.all(found <= 8 * np.arange(1000))
    assert np.all(found[1:] > 0)


def test_hole_found_by_a_probe_ends_that_slots_prefix():
    index = index_of({0: 64, 1: 64, 2: 128})
    index.remove(0, np.array([95 // 2], np.uint64))  # where bisection between 63 and 31 looks first
    index.remove(2, np.array([95], np.uint64))
    found = index.match(blocks(128), 0b111).held
    assert found[1] == 64
    assert found[2] <= 128
    assert index.counts.num_holes == (found[0] < 64) + (found[2] < 128)


@pytest.mark.parametrize("place", [1, 2, 17, 33, 50, 62])
def test_prefix_never_extends_past_a_counted_hole(place):
    index = index_of({0: 64, 70: 64})
    index.remove(0, np.array([place], np.uint64))
    for _ in range(200):
        before = index.counts.num_holes
        found = index.match(blocks(80), mask([0, 70])).held
        assert found[70] == 64
        assert found[0] == (place if index.counts.num_holes > before else 64)
    assert index.counts.num_holes > 0


def test_empty_search_finds_nothing():
    index = index_of({3: 5})
    assert index.match(blocks(0), 0b1111).blocks.tolist() == [0] * 4
    assert index.match(blocks(9), 0).blocks.tolist() == []
    assert index.counts.num_probes == 0
