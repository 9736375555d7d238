"""Pending prefixes: matched by other prompts, counted, removed in time."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from routing_parts import PendingBlocks

from builders import Clock

ALL = (1 << 8) - 1


def blocks(found):
    return np.array(list(found), np.uint64)


def pending_blocks(clock=None):
    return PendingBlocks(ttl_s=5, clock=clock or Clock(0.0))


def pending(added, ids, slots=ALL):
    """The pending prefix of each slot."""
    prefixes = added.prefixes(blocks(ids), slots)
    return [sum(length for length, held in prefixes if held >> slot & 1) for slot in range(8)]


def chain(name, length):
    """Ids of one prompt: `name` may be a prefix of another's, then they share those blocks."""
    return [hash((name[: n + 1] if n < len(name) else name, n)) % 2**64 for n in range(length)]


@pytest.mark.parametrize("length", [1, 2, 3, 5, 100, 511, 8192])
def test_equal_prompt_matches_completely(length):
    added = pending_blocks()
    added.add(3, blocks(range(length)))
    assert pending(added, range(length)) == [0, 0, 0, length, 0, 0, 0, 0]


@given(st.integers(0, 2000), st.integers(0, 2000))
def test_ids_of_a_prefix_match_at_another_gateway_as_the_prompt_does_here(length, shared):
    here, there = pending_blocks(), pending_blocks()
    prefix = here.add(2, blocks(range(length)))
    again = there.add_stored(2, prefix.ids)
    other = [*range(shared), *range(5000, 5100)]
    assert pending(there, other) == pending(here, other)
    there.forget(again)
    assert pending(there, other) == [0] * 8


@given(st.integers(1, 300), st.integers(1, 300), st.integers(0, 300))
def test_shared_prefix_match_is_at_least_two_thirds_and_never_too_long(one, other, shared):
    shared = min(one, other, shared)
    added = pending_blocks()
    added.add(0, blocks(range(one)))
    found = pending(added, [*range(shared), *range(1000, 1000 + other - shared)])[0]
    assert shared * 2 / 3 - 1 < found <= shared or found == 0 <= shared < 9


def test_slots_are_distinguished_and_non_candidates_omitted():
    added = pending_blocks()
    added.add(1, blocks(range(100)))
    added.add(2, blocks([*range(9), *range(500, 550)]))
    assert pending(added, range(100)) == [0, 100, 9, 0, 0, 0, 0, 0]
    assert pending(added, range(100), slots=0b100) == [0, 0, 9, 0, 0, 0, 0, 0]


def test_blocks_of_two_pending_prefixes_count_until_both_end():
    added = pending_blocks()
    first, second = (added.add(0, blocks(range(20))) for _ in range(2))
    added.forget(first)
    added.forget(first)
    assert pending(added, range(20))[0] == 20
    added.forget(second)
    assert pending(added, range(20))[0] == 0
    assert len(added) == 0


@given(st.integers(1, 300), st.integers(1, 300), st.integers(0, 300), st.integers(0, 300))
def test_search_beyond_a_length_finds_the_longer_ones(one, other, shared, beyond):
    added = pending_blocks()
    shared = min(one, other, shared)
    added.add(0, blocks(range(one)))
    added.add(1, blocks([*range(shared), *range(1000, 1000 + other - shared)]))
    whole = added.prefixes(blocks(range(one)), ALL)
    assert added.prefixes(blocks(range(one)), ALL, beyond=beyond) == [each for each in whole if each[0] > beyond]


def test_pending_prefixes_expire():
    clock = Clock(0.0)
    added = pending_blocks(clock)
    added.add(0, blocks(range(20)))
    clock.now = 1
    later = added.add(1, blocks(range(20)))
    clock.now = 4.9
    added.expire()
    assert len(added) == 2
    clock.now = 5
    added.expire()
    assert pending(added, range(20))[:2] == [0, 20]
    clock.now = 6
    added.expire()
    added.forget(later)
    assert len(added) == 0


def test_shortened_deadlines_are_kept_and_never_prolonged():
    clock = Clock(0.0)
    added = pending_blocks(clock)
    early, late = added.add(0, blocks(range(20))), added.add(1, blocks(range(20)))
    clock.now = 4.8
    added.shorten_deadline(early, 0.5)
    clock.now = 1
    added.shorten_deadline(late, 0.5)
    clock.now = 1.5
    added.expire()
    assert pending(added, range(20))[:2] == [20, 0]
    clock.now = 5
    added.expire()
    assert len(added) == 0


def test_clear_drops_one_slots_pending_prefixes_and_later_release_is_allowed():
    added = pending_blocks()
    gone, stays = added.add(0, blocks(range(20))), added.add(1, blocks(range(20)))
    added.clear(0)
    assert pending(added, range(20))[:2] == [0, 20]
    again = added.add(0, blocks(range(20)))  # the next worker with this slot number
    added.forget(gone)
    assert pending(added, range(20))[:2] == [20, 20]
    added.forget(again)
    added.forget(stays)
    assert pending(added, range(20))[:2] == [0, 0]


def test_prompt_without_full_blocks_adds_no_pending_prefix():
    added = pending_blocks()
    added.forget(added.add(0, blocks([])))
    assert pending(added, []) == [0] * 8
    assert len(added) == 0


operations = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.integers(0, 3), st.sampled_from(["", "a", "ab", "b"]), st.integers(0, 9)),
        st.tuples(st.just("forget"), st.integers(0, 20)),
        st.tuples(st.just("clear"), st.integers(0, 3)),
    ),
    max_size=40,
)


@given(operations)
def test_ended_pending_prefixes_leave_no_state(steps):
    """Against fresh ones of what is still pending."""
    added, made, alive = pending_blocks(), [], {}
    for step in steps:
        match step:
            case "add", slot, name, length:
                prefix = added.add(slot, blocks(chain(name, length)))
                made.append(prefix)
                alive[prefix] = (slot, chain(name, length))
            case "forget", number if made:
                prefix = made[number % len(made)]
                added.forget(prefix)
                alive.pop(prefix, None)
            case "clear", slot:
                added.clear(slot)
                alive = {prefix: sent for prefix, sent in alive.items() if sent[0] != slot}
    fresh = pending_blocks()
    for slot, ids in alive.values():
        fresh.add(slot, blocks(ids))
    assert len(added) == len(fresh)
    for name in ("", "a", "ab", "b"):
        assert pending(added, chain(name, 9)) == pending(fresh, chain(name, 9))
    for prefix in list(alive):
        added.forget(prefix)
    assert all(pending(added, chain(name, 9)) == [0] * 8 for name in ("", "a", "ab", "b"))


def test_pending_prefixes_of_many_requests_all_end():
    added = pending_blocks()
    made = [added.add(n % 8, blocks([*range(9), *range(1000 * n + 1000, 1000 * n + 1300)])) for n in range(400)]
    assert pending(added, [*range(9), *range(4000, 4300)]) == [9, 9, 9, 309, 9, 9, 9, 9]
    for prefix in made:
        added.forget(prefix)
    assert len(added) == 0
    assert pending(added, range(9)) == [0] * 8
