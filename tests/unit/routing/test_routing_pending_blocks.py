"""Pending prefixes: matched by other prompts, counted, removed in time."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from interned_sets import num_sets

from medialane.routing.block_index import BlockIndex
from medialane.routing.pending_blocks import PendingBlocks

ALL = (1 << 8) - 1


def blocks(found):
    return np.array(list(found), np.uint64)


def pending(notes, ids, slots=ALL):
    """Matches of an index with these pending prefixes."""
    index = BlockIndex(clock=lambda: 0.0)
    index._pending_blocks = notes
    index._update_view()
    found = index.match(blocks(ids), slots).blocks.tolist()
    return found + [0] * (8 - len(found))


def chain(name, length):
    """Ids of one prompt: `name` may be a prefix of another's, then they share those blocks."""
    return [hash((name[: n + 1] if n < len(name) else name, n)) % 2**64 for n in range(length)]


@pytest.mark.parametrize("length", [1, 2, 3, 5, 100, 511, 8192])
def test_equal_prompt_matches_completely(length):
    notes = PendingBlocks()
    notes.note(3, blocks(range(length)), deadline=1)
    assert pending(notes, range(length)) == [0, 0, 0, length, 0, 0, 0, 0]


@given(st.integers(0, 2000), st.integers(0, 2000))
def test_ids_of_a_prefix_match_at_another_gateway_as_the_prompt_does_here(length, shared):
    here, there = PendingBlocks(), PendingBlocks()
    prefix = here.note(2, blocks(range(length)), deadline=1)
    again = there.note(2, prefix.ids, deadline=1, is_sampled=True)
    other = [*range(shared), *range(5000, 5100)]
    assert pending(there, other) == pending(here, other)
    there.forget(again)
    assert pending(there, other) == [0] * 8


@given(st.integers(1, 300), st.integers(1, 300), st.integers(0, 300))
def test_shared_prefix_match_is_at_least_two_thirds_and_never_too_long(one, other, shared):
    shared = min(one, other, shared)
    notes = PendingBlocks()
    notes.note(0, blocks(range(one)), deadline=1)
    found = pending(notes, [*range(shared), *range(1000, 1000 + other - shared)])[0]
    assert shared * 2 / 3 - 1 < found <= shared


def test_slots_are_distinguished_and_non_candidates_omitted():
    notes = PendingBlocks()
    notes.note(1, blocks(range(100)), deadline=1)
    notes.note(2, blocks([*range(9), *range(500, 550)]), deadline=1)
    assert pending(notes, range(100)) == [0, 100, 9, 0, 0, 0, 0, 0]
    assert pending(notes, range(100), slots=0b100) == [0, 0, 9, 0, 0, 0, 0, 0]


def test_blocks_of_two_pending_prefixes_count_until_both_end():
    notes = PendingBlocks()
    first, second = (notes.note(0, blocks(range(20)), deadline=1) for _ in range(2))
    notes.forget(first)
    notes.forget(first)
    assert pending(notes, range(20))[0] == 20
    notes.forget(second)
    assert pending(notes, range(20))[0] == 0
    assert len(notes) == 0


def test_pending_prefixes_expire():
    notes = PendingBlocks()
    notes.note(0, blocks(range(20)), deadline=5)
    later = notes.note(1, blocks(range(20)), deadline=6)
    notes.expire(4.9)
    assert len(notes) == 2
    notes.expire(5)
    assert pending(notes, range(20))[:2] == [0, 20]
    notes.expire(6)
    notes.forget(later)
    assert len(notes) == 0


def test_clear_drops_one_slots_pending_prefixes_and_later_release_is_allowed():
    notes = PendingBlocks()
    gone, stays = notes.note(0, blocks(range(20)), deadline=5), notes.note(1, blocks(range(20)), deadline=5)
    notes.clear(0)
    assert pending(notes, range(20))[:2] == [0, 20]
    again = notes.note(0, blocks(range(20)), deadline=5)  # the next worker with this slot number
    notes.forget(gone)
    assert pending(notes, range(20))[:2] == [20, 20]
    notes.forget(again)
    notes.forget(stays)
    assert pending(notes, range(20))[:2] == [0, 0]


def test_prompt_without_full_blocks_adds_no_pending_prefix():
    notes = PendingBlocks()
    notes.forget(notes.note(0, blocks([]), deadline=1))
    assert pending(notes, []) == [0] * 8
    assert len(notes) == 0


operations = st.lists(
    st.one_of(
        st.tuples(st.just("note"), st.integers(0, 3), st.sampled_from(["", "a", "ab", "b"]), st.integers(0, 9)),
        st.tuples(st.just("forget"), st.integers(0, 20)),
        st.tuples(st.just("clear"), st.integers(0, 3)),
    ),
    max_size=40,
)


@given(operations)
def test_ended_pending_prefixes_leave_no_state(steps):
    """Against fresh notes of what is still noted."""
    notes, made, alive = PendingBlocks(), [], {}
    for step in steps:
        match step:
            case "note", slot, name, length:
                note = notes.note(slot, blocks(chain(name, length)), deadline=1)
                made.append(note)
                alive[note] = (slot, chain(name, length))
            case "forget", number if made:
                note = made[number % len(made)]
                notes.forget(note)
                alive.pop(note, None)
            case "clear", slot:
                notes.clear(slot)
                alive = {note: sent for note, sent in alive.items() if sent[0] != slot}
    fresh = PendingBlocks()
    for slot, ids in alive.values():
        fresh.note(slot, blocks(ids), deadline=1)
    assert len(notes) == len(fresh)
    for name in ("", "a", "ab", "b"):
        assert pending(notes, chain(name, 9)) == pending(fresh, chain(name, 9))
    for note in list(alive):
        notes.forget(note)
    assert (notes._num_counts, notes._holders.num_blocks, num_sets(notes._holders)) == (0, 0, 0)
    assert not notes._counts[:, 1].any()


def test_pending_prefixes_of_many_requests_all_end():
    notes = PendingBlocks()
    made = [
        notes.note(n % 8, blocks([*range(9), *range(1000 * n + 1000, 1000 * n + 1300)]), deadline=1) for n in range(400)
    ]
    assert pending(notes, [*range(9), *range(4000, 4300)]) == [9, 9, 9, 309, 9, 9, 9, 9]
    for note in made:
        notes.forget(note)
    assert (len(notes), notes._num_counts, notes._holders.num_blocks) == (0, 0, 0)
