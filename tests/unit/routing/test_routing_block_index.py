"""The index, checked against a dict of sets."""

import random

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from interned_sets import num_sets

from medialane.routing.block_index import BlockIndex

#: In two words of a set, and more than one slot in each.
SLOTS = [0, 1, 63, 64, 130]
ALL = sum(1 << slot for slot in SLOTS)
#: Prompts whose blocks form a tree: the first number says which prompt the block belongs to, the second which block.
FORKS = {0: (0, 0), 1: (0, 6), 2: (0, 11), 3: (1, 9)}
LENGTH = 24


def ids(blocks):
    return np.array(list(blocks), np.uint64)


def prompt(number):
    parent, shared = FORKS[number]
    own = [(1000 * number + block - 1) % 2**64 for block in range(shared, LENGTH)]  # from the greatest id on, then 0
    return (prompt(parent)[:shared] if shared else []) + own


PROMPTS = [prompt(number) for number in FORKS]


def noted_lengths(num_blocks):
    lengths = [1]
    while lengths[-1] < num_blocks:
        lengths.append(min(num_blocks, lengths[-1] + max(1, lengths[-1] // 2)))
    return lengths if num_blocks else []


def pending(notes, slot, blocks):
    """The longest noted length of a prompt up to which all of them are among the noted blocks of the slot."""
    noted = {sent[n - 1] for where, sent, _ in notes if where == slot for n in noted_lengths(len(sent))}
    longest = 0
    for length in noted_lengths(len(blocks)):
        if blocks[length - 1] not in noted:
            break
        longest = length
    return longest


slots = st.sampled_from(SLOTS)
numbers = st.sampled_from(sorted(FORKS))
lengths = st.integers(0, LENGTH)


class IndexMachine(RuleBasedStateMachine):
    """Slots store prompts and free them from the tail, as engines do; the model walks every block."""

    def __init__(self):
        super().__init__()
        self.now = 0.0
        self.index = BlockIndex(ttl_s=10, clock=lambda: self.now)
        self.held = {slot: set() for slot in SLOTS}
        self.notes = {}

    @rule(slot=slots, number=numbers, length=lengths)
    def store(self, slot, number, length):
        self.index.store(slot, ids(PROMPTS[number][:length]))
        self.held[slot] |= set(PROMPTS[number][:length])

    @rule(slot=slots, number=numbers, length=lengths)
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
        self.notes = {note: sent for note, sent in self.notes.items() if sent[0] != slot}

    @rule(slot=slots, number=numbers, length=lengths)
    def replace(self, slot, number, length):
        self.index.replace(slot, ids(PROMPTS[number][:length]))
        self.held[slot] = set(PROMPTS[number][:length])

    @rule(slot=slots, number=numbers, length=lengths)
    def note(self, slot, number, length):
        note = self.index.note(slot, ids(PROMPTS[number][:length]))
        self.notes[note] = (slot, PROMPTS[number][:length], self.now + 10)

    @rule(data=st.data())
    def forget(self, data):
        if self.notes:
            note = data.draw(st.sampled_from(list(self.notes)))
            self.index.forget(note)
            self.index.forget(note)
            del self.notes[note]

    @rule(seconds=st.sampled_from([1, 4, 9]))
    def wait(self, seconds):
        self.now += seconds
        self.notes = {note: sent for note, sent in self.notes.items() if sent[2] > self.now}

    def walked(self, slot, blocks):
        length = 0
        while length < len(blocks) and blocks[length] in self.held[slot]:
            length += 1
        return length

    @invariant()
    def all_is_as_in_the_sets(self):
        self.prefixes_are_those_of_a_walk()
        assert self.index.num_entries == sum(map(len, self.held.values()))
        assert [self.index.num_held(slot) for slot in SLOTS] == [len(self.held[slot]) for slot in SLOTS]

    def prefixes_are_those_of_a_walk(self):
        for blocks in PROMPTS:
            found = self.index.match(ids(blocks), ALL)
            walked = [self.walked(slot, blocks) for slot in SLOTS]
            expected = [pending(self.notes.values(), slot, blocks) for slot in SLOTS]
            assert found.held[SLOTS].tolist() == walked
            assert found.blocks[SLOTS].tolist() == [max(both) for both in zip(walked, expected, strict=True)]
            assert np.count_nonzero(found.blocks) == np.count_nonzero(found.blocks[SLOTS])
        assert self.index.counts.num_holes == 0
        assert len(self.index._pending_blocks) == len(self.notes), "a match lets notes expire"

    @rule()
    def sweep(self):
        self.index.sweep()

    @rule()
    def sweep_all(self):
        while not self.index.sweep():
            pass
        assert self.index.num_blocks == len(set().union(*self.held.values()))

    def teardown(self):
        """Nothing is left of what is gone."""
        for slot in SLOTS:
            self.index.clear(slot)
        while not self.index.sweep():
            pass
        assert (self.index.num_blocks, self.index.num_entries, len(self.index._pending_blocks)) == (0, 0, 0)
        assert num_sets(self.index._holders) == num_sets(self.index._pending_blocks._holders) == 0
        assert self.index._pending_blocks._num_counts == self.index._pending_blocks._holders.num_blocks == 0
        assert not self.index._holders._now.retired.any()


IndexMachine.TestCase.settings = settings(max_examples=30, stateful_step_count=15, deadline=None)
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
    assert index.num_held(0) == len(set(order))
    index.remove(0, ids(order))
    index.remove(0, ids(order))
    assert (index.num_held(0), index.num_blocks, index.num_entries) == (0, 2, 2)


def test_removal_from_an_empty_slot_does_not_affect_others():
    index = BlockIndex()
    index.store(1, ids([1, 2]))
    index.remove(0, ids([1, 2]))
    index.clear(0)
    assert index.match(ids([1, 2]), 0b11).blocks.tolist() == [0, 2]


def test_array_length_covers_the_highest_candidate():
    index = BlockIndex()
    index.store(900, ids([1]))
    index.store(2, ids([1]))
    assert index.match(ids([1]), 0b111).blocks.tolist() == [0, 0, 1]
    assert index.match(ids([1]), 1 << 900 | 1).blocks.nonzero()[0].tolist() == [900]


def test_replace_keeps_pending_prefixes_and_clear_drops_them():
    index = BlockIndex()
    index.note(0, ids([1, 2, 3]))
    index.replace(0, ids([1]))
    assert index.match(ids([1, 2, 3]), 1).blocks.tolist() == [3]
    assert index.match(ids([1, 2, 3]), 1).held.tolist() == [1]
    index.clear(0)
    assert index.match(ids([1, 2, 3]), 1).blocks.tolist() == [0]


def test_large_slot_is_cleared_incrementally_and_accepts_new_blocks_immediately():
    index = BlockIndex()
    blocks = list(range(3000))
    for slot in (0, 1):
        index.store(slot, ids(blocks))
    index.clear(0)
    assert (index.num_held(0), index.holds(0, 7)) == (0, False)
    index.store(0, ids(blocks[:100]))
    num_steps = 0
    while not index.sweep():
        num_steps += 1
        assert index.num_held(0) == 100
        assert index.match(ids(blocks), 0b11).blocks.tolist() == [100, 3000]
    assert num_steps > 2
    assert index.match(ids(blocks), 0b11).blocks.tolist() == [100, 3000]
    assert index.num_entries == 3100


def test_chunked_snapshot_of_a_large_slot_leaves_the_union_of_its_chunks():
    index = BlockIndex()
    index.store(0, ids(range(5000)))
    index.replace(0, ids(range(2000)))
    index.store(0, ids(range(2000, 4000)))
    while not index.sweep():
        pass
    assert index.match(ids(range(5000)), 1).blocks.tolist() == [4000]
    assert index.num_blocks == 4000


def test_slot_lost_twice_before_the_sweep_is_empty():
    index = BlockIndex()
    index.store(0, ids(range(2000)))
    index.clear(0)
    index.store(0, ids(range(1000, 3000)))
    index.remove(0, ids([2999]))
    index.clear(0)
    while not index.sweep():
        pass
    assert index.num_blocks == 0
    assert index.match(ids(range(3000)), 1).blocks.tolist() == [0]


def test_partially_swept_losses_never_mix_with_later_blocks(monkeypatch):
    """Seeded."""
    monkeypatch.setattr("medialane.routing.block_index._SWEPT_BLOCKS", 3)
    drawn = random.Random(7)
    index, held = BlockIndex(), {slot: set() for slot in range(3)}
    for _ in range(3000):
        slot, blocks = drawn.randrange(3), drawn.sample(range(40), drawn.randrange(15))
        match drawn.choice(["store", "store", "remove", "clear", "replace", "match"]):
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
            case "match":
                found = index.match(ids([0]), 0b111).held
                assert found.astype(bool).tolist() == [0 in held[slot] for slot in held]
        assert all(index.holds(slot, 5) == (5 in held[slot]) for slot in held)
    while not index.sweep():
        pass
    assert index.num_blocks == len(set().union(*held.values()))
    assert index.num_entries == sum(map(len, held.values()))
    for block in range(40):
        assert index.match(ids([block]), 0b111).held.astype(bool).tolist() == [block in held[slot] for slot in held]


def test_hole_inside_a_prefix_is_counted_and_ends_the_prefix():
    """An engine that frees from the middle. Sampling finds the hole sooner or later, and then the prefix ends there."""
    index = BlockIndex()
    blocks = list(range(100))
    index.store(0, ids(blocks))
    index.remove(0, ids([40]))
    lengths = {int(index.match(ids(blocks), 1).blocks[0]) for _ in range(300)}
    assert lengths == {40, 100}
    assert 0 < index.counts.num_holes < 20
    assert index.counts.num_matches == 300


def test_matches_exhausting_their_probes_are_counted():
    index = BlockIndex(max_probes=10)
    for slot in range(60):
        index.store(slot, ids(range(3 * slot)))
    found = index.match(ids(range(200)), (1 << 60) - 1)
    assert index.counts.num_bounded == 1
    assert index.counts.num_probes <= 10 + 5 + 8
    assert found.blocks[59] == 177
    assert all(found.blocks[slot] <= 3 * slot for slot in range(60))


def test_equal_holder_sets_are_interned():
    """A set of a thousand slots takes 128 bytes: shared, it is nothing for each block."""
    index = BlockIndex()
    drawn = random.Random(1)
    for _ in range(2000):
        slot = drawn.randrange(1000)
        index.store(slot, ids(range(100)))
        if drawn.random() < 0.5:
            index.remove(slot, ids(range(100)))
        assert num_sets(index._holders) <= 1


def test_bits_of_repeatedly_reset_slots_are_reused():
    index = BlockIndex()
    for number in range(2000):
        index.replace(number % 3, ids(range(number, number + 50)))
    assert index._holders.num_bits == 64
    assert index.num_entries == 150


def test_slots_beyond_one_word_are_distinguished():
    index = BlockIndex()
    for slot in range(0, 1000, 7):
        index.store(slot, ids(range(slot + 1)))
    found = index.match(ids(range(1000)), (1 << 1000) - 1).blocks
    assert found.nonzero()[0].tolist() == list(range(0, 1000, 7))
    assert all(found[slot] <= slot + 1 for slot in range(1000))
