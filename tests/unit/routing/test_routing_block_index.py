"""The index, checked against a dict of sets."""

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from routing_parts import longest

from medialane.routing import BlockIndex

#: In more than one word of a mask.
SLOTS = [0, 1, 63, 64, 130]
ALL = sum(1 << slot for slot in SLOTS)
#: Prompts whose blocks form a tree: the first number says which prompt the block belongs to, the second which block.
FORKS = {0: (0, 0), 1: (0, 6), 2: (0, 11), 3: (1, 9)}
LENGTH = 24


def ids(blocks):
    return np.array(list(blocks), np.uint64)


def mask(slots):
    return sum(1 << slot for slot in slots)


def lengths(prefixes):
    """The prefix of each slot that has one."""
    assert [length for length, _ in prefixes] == sorted((length for length, _ in prefixes), reverse=True)
    slots = {slot: length for length, held in prefixes for slot in range(held.bit_length()) if held >> slot & 1}
    assert len(slots) == sum(held.bit_count() for _, held in prefixes), "each slot is in one mask"
    assert all(slots.values())
    return slots


def sweep_all(index):
    while not index.sweep():
        pass


def prompt(number):
    parent, shared = FORKS[number]
    own = [(1000 * number + block - 1) % 2**64 for block in range(shared, LENGTH)]  # from the greatest id on, then 0
    return (prompt(parent)[:shared] if shared else []) + own


PROMPTS = [prompt(number) for number in FORKS]

slots = st.sampled_from(SLOTS)
numbers = st.sampled_from(sorted(FORKS))
prefix_lengths = st.integers(0, LENGTH)


class IndexMachine(RuleBasedStateMachine):
    """Slots store prompts and free them from the tail, as engines do; the model walks every block."""

    def __init__(self):
        super().__init__()
        self.index = BlockIndex()
        self.held = {slot: set() for slot in SLOTS}

    @rule(slot=slots, number=numbers, length=prefix_lengths)
    def store(self, slot, number, length):
        self.index.store(slot, ids(PROMPTS[number][:length]))
        self.held[slot] |= set(PROMPTS[number][:length])

    @rule(slot=slots, number=numbers, length=prefix_lengths)
    def free_tail(self, slot, number, length):
        keep = {block for other in FORKS for block in PROMPTS[other][:length]}
        gone = [block for block in reversed(PROMPTS[number]) if block not in keep]
        # Whatever hangs on a freed block was freed before it.
        gone += [b for other in FORKS for b in PROMPTS[other] if set(PROMPTS[other]) & set(gone) and b not in keep]
        self.index.remove(slot, ids(gone))
        self.held[slot] -= set(gone)

    @rule(slot=slots)
    def clear(self, slot):
        self.index.clear(slot)
        self.held[slot] = set()

    @rule(slot=slots, number=numbers, length=prefix_lengths)
    def replace(self, slot, number, length):
        self.index.replace(slot, ids(PROMPTS[number][:length]))
        self.held[slot] = set(PROMPTS[number][:length])

    def walked(self, slot, blocks):
        length = 0
        while length < len(blocks) and blocks[length] in self.held[slot]:
            length += 1
        return length

    @invariant()
    def all_is_as_in_the_sets(self):
        for blocks in PROMPTS:
            walked = {slot: length for slot in SLOTS if (length := self.walked(slot, blocks))}
            assert lengths(self.index.prefixes(ids(blocks), ALL)) == walked
            some = {slot: length for slot, length in walked.items() if slot > 1}
            assert lengths(self.index.prefixes(ids(blocks), ALL & ~0b11)) == some
        assert self.index.num_entries == sum(map(len, self.held.values()))
        assert all(self.index.holds(slot, block) for slot in SLOTS for block in self.held[slot])

    @rule(num_blocks=st.integers(1, 20))
    def sweep(self, num_blocks):
        self.index.sweep(num_blocks)

    @rule()
    def sweep_all(self):
        sweep_all(self.index)
        assert self.index.num_blocks == len(set().union(*self.held.values()))

    def teardown(self):
        """Nothing is left of what is gone."""
        for slot in SLOTS:
            self.index.clear(slot)
        sweep_all(self.index)
        assert (self.index.num_blocks, self.index.num_entries) == (0, 0)


IndexMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=15, deadline=None)
TestIndexAgainstSets = IndexMachine.TestCase


def test_block_holders_are_the_slots_that_stored_it():
    index = BlockIndex()
    index.store(0, ids([1, 2]))
    index.store(999, ids([2]))
    assert [index.holds(slot, block) for slot in (0, 999) for block in (1, 2)] == [True, True, False, True]
    assert not index.holds(5, 1)


@pytest.mark.parametrize("order", [[1, 2, 3, 1, 2], [3, 3, 3]])
def test_storing_and_removing_are_idempotent(order):
    index = BlockIndex()
    index.store(1, ids([3, 1]))
    index.store(0, ids(order))
    index.store(0, ids(order))
    assert index.num_entries == 2 + len(set(order))
    index.remove(0, ids(order))
    index.remove(0, ids(order))
    assert (index.num_blocks, index.num_entries) == (2, 2)
    assert not any(index.holds(0, block) for block in order)


def test_removal_from_an_empty_slot_does_not_affect_others():
    index = BlockIndex()
    index.store(1, ids([1, 2]))
    index.remove(0, ids([1, 2]))
    index.clear(0)
    assert lengths(index.prefixes(ids([1, 2]), 0b11)) == {1: 2}


def test_large_slot_is_cleared_incrementally_and_accepts_new_blocks_immediately():
    index = BlockIndex()
    blocks = list(range(3000))
    for slot in (0, 1):
        index.store(slot, ids(blocks))
    index.clear(0)
    assert (index.num_entries, index.holds(0, 7)) == (3000, False)
    index.store(0, ids(blocks[:100]))
    num_steps = 0
    while not index.sweep():
        num_steps += 1
        assert index.num_entries == 3100
        assert lengths(index.prefixes(ids(blocks), 0b11)) == {0: 100, 1: 3000}
    assert num_steps > 2
    assert lengths(index.prefixes(ids(blocks), 0b11)) == {0: 100, 1: 3000}
    assert index.num_entries == 3100


def test_chunked_snapshot_of_a_large_slot_leaves_the_union_of_its_chunks():
    index = BlockIndex()
    index.store(0, ids(range(5000)))
    index.replace(0, ids(range(2000)))
    index.store(0, ids(range(2000, 4000)))
    sweep_all(index)
    assert lengths(index.prefixes(ids(range(5000)), 1)) == {0: 4000}
    assert index.num_blocks == 4000


def test_slot_lost_twice_before_the_sweep_is_empty():
    index = BlockIndex()
    index.store(0, ids(range(2000)))
    index.clear(0)
    index.store(0, ids(range(1000, 3000)))
    index.remove(0, ids([2999]))
    index.clear(0)
    sweep_all(index)
    assert index.num_blocks == 0
    assert index.prefixes(ids(range(3000)), 1) == []


def test_slot_replaced_again_and_again_leaves_no_growing_rest():
    index = BlockIndex()
    for number in range(50):
        index.replace(0, ids(range(2000 * number, 2000 * number + 2000)))
    assert index.num_blocks <= 3 * 2000


def test_partially_swept_losses_never_mix_with_later_blocks():
    """Seeded."""
    drawn = random.Random(7)
    index, held = BlockIndex(), {slot: set() for slot in range(3)}
    for _ in range(3000):
        slot, blocks = drawn.randrange(3), drawn.sample(range(2000), drawn.randrange(600))
        match drawn.choice(["store", "store", "remove", "clear", "replace", "prefixes"]):
            case "store":
                index.store(slot, ids(blocks))
                held[slot] |= set(blocks)
            case "remove":
                index.remove(slot, ids(blocks))
                held[slot] -= set(blocks)
            case "clear":
                index.clear(slot)
                held[slot] = set()
            case "replace":
                index.replace(slot, ids(blocks))
                held[slot] = set(blocks)
            case "prefixes":
                assert lengths(index.prefixes(ids([0]), 0b111)) == {slot: 1 for slot in held if 0 in held[slot]}
        assert all(index.holds(slot, 5) == (5 in held[slot]) for slot in held)
    sweep_all(index)
    assert index.num_blocks == len(set().union(*held.values()))
    assert index.num_entries == sum(map(len, held.values()))
    for block in range(40):
        assert lengths(index.prefixes(ids([block]), 0b111)) == {slot: 1 for slot in held if block in held[slot]}


@given(
    st.dictionaries(st.integers(0, 70), st.integers(0, 60), max_size=12),
    st.integers(0, 60),
    st.sets(st.integers(0, 70), min_size=1),
)
def test_search_finds_every_slots_prefix(held, num_blocks, others):
    index = BlockIndex()
    for slot, length in held.items():
        index.store(slot, ids(range(length)))
    expected = {slot: min(length, num_blocks) for slot, length in held.items() if slot in others}
    found = lengths(index.prefixes(ids(range(num_blocks)), mask(others)))
    assert found == {slot: length for slot, length in expected.items() if length}


def test_of_thousands_of_lengths_the_longest_is_exact_and_the_others_are_not_too_long():
    index = BlockIndex()
    for slot in range(1000):
        index.store(slot, ids(range(8 * slot)))
    found = lengths(index.prefixes(ids(range(8192)), (1 << 1000) - 1))
    assert found[999] == 8 * 999
    assert all(length <= 8 * slot for slot, length in found.items())
    assert len(found) > 900
    assert len(set(found.values())) > 20


@pytest.mark.parametrize("place", [1, 2, 17, 33, 50, 62])
def test_hole_inside_a_prefix_affects_only_its_slot(place):
    """An engine that frees from the middle: its prefix may seem whole, or ends at the hole."""
    index = BlockIndex()
    for slot in (0, 70):
        index.store(slot, ids(range(64)))
    index.remove(0, ids([place]))
    found = lengths(index.prefixes(ids(range(80)), mask([0, 70])))
    assert found[70] == 64
    assert found[0] in (place, 64)


def test_empty_search_finds_nothing():
    index = BlockIndex()
    index.store(3, ids(range(5)))
    assert index.prefixes(ids([]), 0b1111) == []
    assert index.prefixes(ids(range(9)), 0) == []


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(0, 255)), max_size=12))
def test_longest_of_several_prefixes(prefixes):
    expected = {}
    for length, held in prefixes:
        for slot in range(8):
            if held >> slot & 1:
                expected[slot] = max(length, expected.get(slot, 0))
    found = longest(prefixes)
    assert {slot: length for length, held in found for slot in range(8) if held >> slot & 1} == expected
    assert sum(held.bit_count() for _, held in found) == len(expected)
