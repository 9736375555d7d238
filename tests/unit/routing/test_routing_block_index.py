"""The index against a dict of sets."""

import random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from medialane.routing.block_index import BlockIndex
from medialane.routing.cached_soon import CachedSoon
from medialane.routing.prefix_match import prefixes

NUM_SLOTS = 5
ALL = (1 << NUM_SLOTS) - 1
#: Prompts whose blocks form a tree: the first number says which prompt the block belongs to, the second which block.
FORKS = {0: (0, 0), 1: (0, 6), 2: (0, 11), 3: (1, 9)}
LENGTH = 24


def prompt(number):
    parent, shared = FORKS[number]
    own = [1000 * number + block for block in range(shared, LENGTH)]
    return (prompt(parent)[:shared] if shared else []) + own


PROMPTS = [prompt(number) for number in FORKS]

slots = st.integers(0, NUM_SLOTS - 1)
numbers = st.sampled_from(sorted(FORKS))
lengths = st.integers(0, LENGTH)


class IndexMachine(RuleBasedStateMachine):
    """Slots store prompts and free them from the tail, as engines do; the model walks every block."""

    def __init__(self):
        super().__init__()
        self.now = 0.0
        self.index = BlockIndex(ttl_s=10, clock=lambda: self.now)
        self.held = {slot: set() for slot in range(NUM_SLOTS)}
        self.notes = {}

    @rule(slot=slots, number=numbers, length=lengths)
    def store(self, slot, number, length):
        self.index.store(slot, PROMPTS[number][:length])
        self.held[slot] |= set(PROMPTS[number][:length])

    @rule(slot=slots, number=numbers, length=lengths)
    def free_tail(self, slot, number, length):
        keep = {block for other in FORKS for block in PROMPTS[other][:length]}
        gone = [block for block in reversed(PROMPTS[number]) if block not in keep]
        # Whatever hangs on a freed block was freed before it.
        gone += [b for other in FORKS for b in PROMPTS[other] if set(PROMPTS[other]) & set(gone) and b not in keep]
        self.index.remove(slot, gone)
        self.held[slot] -= set(gone)

    @rule(slot=slots)
    def clear(self, slot):
        self.index.clear(slot)
        self.held[slot] = set()
        self.notes = {note: sent for note, sent in self.notes.items() if sent[0] != slot}

    @rule(slot=slots, number=numbers, length=lengths)
    def replace(self, slot, number, length):
        self.index.replace(slot, PROMPTS[number][:length])
        self.held[slot] = set(PROMPTS[number][:length])

    @rule(slot=slots, number=numbers, length=lengths)
    def note(self, slot, number, length):
        note = self.index.note(slot, PROMPTS[number][:length])
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

    def walked(self, slot, ids):
        length = 0
        while length < len(ids) and ids[length] in self.held[slot]:
            length += 1
        return length

    @invariant()
    def all_is_as_in_the_sets(self):
        while not self.index.sweep():
            pass
        self.prefixes_are_those_of_a_walk()
        self.counts_are_those_of_the_sets()

    def prefixes_are_those_of_a_walk(self):
        noted = CachedSoon()
        for slot, ids, _ in self.notes.values():
            noted.note(slot, ids, deadline=0)
        for ids in PROMPTS:
            found = self.index.match(ids, ALL)
            walked = [self.walked(slot, ids) for slot in range(NUM_SLOTS)]
            soon = prefixes(noted.match(ids, ALL), NUM_SLOTS).tolist()
            assert found.held.tolist() == walked
            assert found.blocks.tolist() == [max(both) for both in zip(walked, soon, strict=True)]
        assert self.index.counts.num_holes == 0
        assert self.index.num_notes == len(self.notes), "a match lets notes expire"

    @rule()
    def sweep(self):
        self.index.sweep()

    def counts_are_those_of_the_sets(self):
        assert self.index.num_entries == sum(map(len, self.held.values()))
        assert self.index.num_blocks == len(set().union(*self.held.values()))
        assert [self.index.num_held(slot) for slot in range(NUM_SLOTS)] == [len(held) for held in self.held.values()]


IndexMachine.TestCase.settings = settings(max_examples=30, stateful_step_count=15, deadline=None)
TestIndexAgainstSets = IndexMachine.TestCase


def test_block_has_the_holders_that_stored_it():
    index = BlockIndex()
    index.store(0, [1, 2])
    index.store(999, [2])
    assert [index.holds(slot, block) for slot in (0, 999) for block in (1, 2)] == [True, True, False, True]
    assert not index.holds(5, 1)


@pytest.mark.parametrize("order", [[1, 2, 3, 1, 2], [3, 3, 3]])
def test_stored_or_removed_twice_makes_no_difference(order):
    index = BlockIndex()
    index.store(1, [3, 1])
    index.store(0, order)
    index.store(0, order)
    assert index.num_held(0) == len(set(order))
    index.remove(0, order)
    index.remove(0, order)
    assert (index.num_held(0), index.num_blocks, index.num_entries) == (0, 2, 2)


def test_remove_from_a_slot_that_holds_nothing_leaves_others_alone():
    index = BlockIndex()
    index.store(1, [1, 2])
    index.remove(0, [1, 2])
    index.clear(0)
    assert index.match([1, 2], 0b11).blocks.tolist() == [0, 2]


def test_array_is_as_long_as_the_highest_candidate_needs():
    index = BlockIndex()
    index.store(900, [1])
    index.store(2, [1])
    assert index.match([1], 0b111).blocks.tolist() == [0, 0, 1]
    assert index.match([1], 1 << 900 | 1).blocks.nonzero()[0].tolist() == [900]


def test_replace_keeps_notes_and_clear_does_not():
    index = BlockIndex()
    index.note(0, [1, 2, 3])
    index.replace(0, [1])
    assert index.match([1, 2, 3], 1).blocks.tolist() == [3]
    assert index.match([1, 2, 3], 1).held.tolist() == [1]
    index.clear(0)
    assert index.match([1, 2, 3], 1).blocks.tolist() == [0]


def test_large_slot_is_lost_in_small_steps_and_unknown_until_it_is():
    index = BlockIndex()
    ids = list(range(3000))
    for slot in (0, 1):
        index.store(slot, ids)
    index.clear(0)
    assert (index.num_held(0), index.holds(0, 7)) == (0, False)
    index.store(0, ids[:100])
    assert index.match(ids, 0b11).blocks.tolist() == [0, 3000]
    while not index.sweep():
        assert index.num_held(0) == 100
    assert index.match(ids, 0b11).blocks.tolist() == [100, 3000]
    assert index.num_entries == 3100


def test_snapshot_of_a_large_slot_in_parts_leaves_what_all_parts_name():
    index = BlockIndex()
    index.store(0, range(5000))
    index.replace(0, range(2000))
    index.store(0, range(2000, 4000))
    while not index.sweep():
        pass
    assert index.match(range(5000), 1).blocks.tolist() == [4000]
    assert index.num_blocks == 4000


def test_slot_lost_twice_before_it_is_swept_is_empty():
    index = BlockIndex()
    index.store(0, range(2000))
    index.clear(0)
    index.store(0, range(1000, 3000))
    index.remove(0, [2999])
    index.clear(0)
    while not index.sweep():
        pass
    assert index.num_blocks == 0
    assert index.match(range(3000), 1).blocks.tolist() == [0]


def test_losses_that_are_half_swept_never_mix_with_what_comes_after_them(monkeypatch):
    """Seeded: the machine above sweeps after each step."""
    monkeypatch.setattr("medialane.routing.block_index._SWEEP", 3)
    drawn = random.Random(7)
    index, held = BlockIndex(), {slot: set() for slot in range(3)}
    for _ in range(3000):
        slot, ids = drawn.randrange(3), drawn.sample(range(40), drawn.randrange(15))
        match drawn.choice(["store", "store", "remove", "clear", "replace", "match"]):
            case "store":
                index.store(slot, ids)
                held[slot] |= set(ids)
            case "remove":
                index.remove(slot, ids)
                held[slot] -= set(ids)
            case "clear":
                index.clear(slot)
                held[slot] = set()
            case "replace":
                index.replace(slot, ids)
                held[slot] = set(ids)
            case "match":
                blocks = index.match([0], 0b111).blocks
                assert all(0 in held[slot] for slot in blocks.nonzero()[0])
        assert all(index.holds(slot, 5) == (5 in held[slot]) for slot in held)
    while not index.sweep():
        pass
    assert index.num_blocks == len(set().union(*held.values()))
    assert index.num_entries == sum(map(len, held.values()))
    for block in range(40):
        assert index.match([block], 0b111).held.astype(bool).tolist() == [block in held[slot] for slot in held]


def test_block_missing_inside_a_prefix_is_counted_and_ends_the_prefix():
    """An engine that frees from the middle. Sampling finds the hole sooner or later, and then the prefix ends there."""
    index = BlockIndex()
    ids = list(range(100))
    index.store(0, ids)
    index.remove(0, [40])
    lengths = {int(index.match(ids, 1).blocks[0]) for _ in range(300)}
    assert lengths == {40, 100}
    assert 0 < index.counts.num_holes < 20
    assert index.counts.num_matches == 300


def test_matches_that_run_out_of_probes_are_counted():
    index = BlockIndex(max_probes=10)
    for slot in range(60):
        index.store(slot, range(3 * slot))
    found = index.match(range(200), (1 << 60) - 1)
    assert index.counts.num_bounded == 1
    assert index.counts.num_probes <= 10 + 5 + 8
    assert found.blocks[59] == 177
    assert all(found.blocks[slot] <= 3 * slot for slot in range(60))


def test_equal_sets_of_holders_share_memory():
    """A mask of a thousand slots takes 160 bytes: shared, it is nothing for each block."""
    index = BlockIndex()
    drawn = random.Random(1)
    for _ in range(2000):
        slot = drawn.randrange(1000)
        index.store(slot, range(100))
        if drawn.random() < 0.5:
            index.remove(slot, range(100))
    assert len({id(mask) for mask in index._holders.values()}) == 1


def test_masks_that_are_shared_are_bounded(monkeypatch):
    monkeypatch.setattr("medialane.routing.block_index._MAX_SHARED", 16)
    index = BlockIndex()
    for slot in range(200):
        index.store(slot, range(10))
    assert len(index._shared) <= 16
    assert index.match(range(10), (1 << 200) - 1).blocks.tolist() == [10] * 200
