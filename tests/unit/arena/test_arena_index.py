"""The index of entries: what the next owner reads, wherever the earlier one, or it itself, was killed, and whatever
was damaged."""

import random
import sys

import pytest

from medialane.arena import index as index_module
from medialane.arena.entries import State
from medialane.arena.index import ROW_BYTES, Index, Indexed
from medialane.types.tensor import ArenaRange

ARENA = "ab" * 16
PAGE_BYTES = 4096
GENERATIONS = (1, 2, 3)


def entry(generation, state=State.PUBLISHED, nbytes=100):
    range_ = ArenaRange(ARENA, PAGE_BYTES * generation, nbytes, generation)
    return Indexed(range_, 1024, "embedded", state, writer=7, record_bytes=300, record_checksum=99)


def over(data):
    return Index(memoryview(data).cast("Q"), ARENA)


@pytest.fixture
def data():
    """The index of an arena of three entries."""
    data = bytearray(PAGE_BYTES)
    index = over(data)
    for generation in GENERATIONS:
        index.use_generation(generation)
        index.put(entry(generation, State.WRITING))
        index.put(entry(generation))
    index.set_usable(16 * PAGE_BYTES)
    return data


def load(data):
    """What the next owner reads in a copy."""
    return over(bytearray(data)).load()


def stores(data, act):
    """The contents of `data` after each line of the index's code that `act` runs."""
    taken = [bytes(data)]

    def trace(frame, _event, _):
        if frame.f_code.co_filename != index_module.__file__:
            return None
        if taken[-1] != data:
            taken.append(bytes(data))
        return trace

    sys.settrace(trace)
    try:
        act()
    finally:
        sys.settrace(None)
    return [*taken, bytes(data)]


def test_entries_are_read_as_they_were_entered(data):
    ceiling, usable, entries = load(data)
    assert ceiling >= max(GENERATIONS)
    assert usable == 16 * PAGE_BYTES
    assert entries == [entry(generation) for generation in GENERATIONS]


@pytest.mark.parametrize(
    "later", [entry(4, State.NOTED), entry(4, State.PUBLISHED), entry(4, State.WRITING, nbytes=65)], ids=str
)
def test_entry_that_changes_is_there_at_every_moment(data, later):
    earlier = entry(4, State.WRITING)
    index = over(data)
    index.load()
    taken = stores(data, lambda: index.put(earlier))
    assert {tuple(load(each)[2][3:]) for each in taken} == {(), (earlier,)}
    taken = stores(data, lambda: index.put(later))
    assert {tuple(load(each)[2][3:]) for each in taken} == {(earlier,), (later,)}
    taken = stores(data, lambda: index.remove(4))
    assert {tuple(load(each)[2][3:]) for each in taken} == {(later,), ()}
    assert all(load(each)[2][:3] == [entry(generation) for generation in GENERATIONS] for each in taken)


def test_reader_may_be_killed_at_every_moment(data):
    """Two rows of one entry. The next owner erases one: it is killed, too, and another one reads."""
    index = over(data)
    index.load()
    index.put(entry(4, State.WRITING))
    twice = next(each for each in stores(data, lambda: index.put(entry(4))) if each.count(b"\x04" + bytes(7)) == 2)
    expected = load(twice)
    assert expected[2][3] == entry(4)
    rewritten = bytearray(twice)
    taken = stores(rewritten, lambda: over(rewritten).load())
    assert len(set(taken)) > 1, "one of the slots is erased"
    assert all(load(each) == expected for each in taken)


def test_no_generation_is_above_the_ceiling_of_the_next_owner():
    data = bytearray(PAGE_BYTES)
    index = over(data)
    for generation in range(1, 10_000, 7):
        taken = stores(data, lambda generation=generation: index.use_generation(generation)) if generation < 50 else []
        index.use_generation(generation)
        assert load(data)[0] >= generation
        assert all(load(each)[0] in (0, load(data)[0]) for each in taken)


def is_harmless(data, expected):
    """Whether what is read is rejected, or right: an entry may only be missing as a whole."""
    try:
        ceiling, usable, entries = load(data)
    except ValueError:
        return True
    return (ceiling, usable) == expected[:2] and all(each in expected[2] for each in entries)


def test_no_flipped_bit_makes_another_entry(data):
    """Every bit of the slots in use, and of the words of the whole arena, by itself."""
    expected = load(data)
    num_rejected = 0
    num_bits = ROW_BYTES * 8 * 6
    for bit in range(num_bits):
        data[bit // 8] ^= 1 << bit % 8
        assert is_harmless(data, expected), f"bit {bit}"
        try:
            load(data)
        except ValueError:
            num_rejected += 1
        data[bit // 8] ^= 1 << bit % 8
    assert num_rejected > 3 * ROW_BYTES * 8


def test_no_few_flipped_bits_make_another_entry(data):
    expected = load(data)
    chosen = random.Random(25)
    for _ in range(3000):
        bits = [chosen.randrange(ROW_BYTES * 8 * 6) for _ in range(chosen.randint(2, 5))]
        damaged = bytearray(data)
        for bit in bits:
            damaged[bit // 8] ^= 1 << bit % 8
        assert is_harmless(damaged, expected), f"bits {bits}"


def test_next_owner_finds_as_many_entries_as_there_may_be():
    data = bytearray(5 * ROW_BYTES)
    index = over(data)
    for generation in range(1, index.max_entries + 1):
        index.use_generation(generation)
        index.put(entry(generation, State.WRITING))
        index.put(entry(generation))
    assert [each.state for each in load(data)[2]] == [State.PUBLISHED] * 3


def test_index_of_a_large_arena_is_bounded():
    assert index_module.index_bytes(1 << 40) == index_module.MAX_ROWS * ROW_BYTES
