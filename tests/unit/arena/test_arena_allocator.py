"""The allocator, and which neighbours are evicted for one hole: pure, so tables and a model."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, rule

from medialane.arena.allocator import Allocator, choose_span

UNIT = 64


@pytest.mark.parametrize(
    ("asked", "taken"),
    [(1, 64), (63, 64), (64, 64), (65, 128), (10 * UNIT, 10 * UNIT)],
)
def test_sizes_are_rounded_up_to_the_alignment(asked, taken):
    allocator = Allocator(10 * UNIT)
    assert allocator.allocate(asked) == 0
    assert allocator.used_bytes == taken


def test_best_fit_prefers_the_lowest_of_equal_holes():
    allocator = Allocator(20 * UNIT)
    sizes = [3, 1, 2, 1, 2, 1, 10]
    offsets = [allocator.allocate(n * UNIT) for n in sizes]
    for index in (0, 2, 4):  # holes of 3, 2 and 2 units
        allocator.free(offsets[index])
    assert allocator.allocate(2 * UNIT) == offsets[2]
    assert allocator.allocate(2 * UNIT) == offsets[4]
    assert allocator.allocate(2 * UNIT) == offsets[0]
    assert allocator.allocate(2 * UNIT) is None
    assert allocator.largest_hole_bytes == UNIT


@pytest.mark.parametrize("order", [(0, 1, 2), (0, 2, 1), (1, 0, 2), (2, 0, 1), (2, 1, 0)])
def test_adjacent_holes_coalesce_in_every_order_of_freeing(order):
    allocator = Allocator(3 * UNIT)
    offsets = [allocator.allocate(UNIT) for _ in range(3)]
    assert allocator.free_bytes == 0
    assert allocator.largest_hole_bytes == 0
    for index in order:
        allocator.free(offsets[index])
    assert allocator.largest_hole_bytes == 3 * UNIT


def test_failed_allocation_changes_nothing():
    allocator = Allocator(4 * UNIT)
    allocator.allocate(UNIT)
    assert allocator.allocate(4 * UNIT) is None
    assert (allocator.used_bytes, allocator.largest_hole_bytes) == (UNIT, 3 * UNIT)


def test_double_free_is_rejected():
    allocator = Allocator(4 * UNIT)
    offset = allocator.allocate(UNIT)
    allocator.free(offset)
    with pytest.raises(ValueError, match="nothing is allocated"):
        allocator.free(offset)
    with pytest.raises(ValueError, match="nothing is allocated"):
        allocator.free(UNIT)


def test_unallocated_range_cannot_be_shrunk():
    with pytest.raises(ValueError, match="cannot be shrunk"):
        Allocator(4 * UNIT).shrink(UNIT, 1)


@pytest.mark.parametrize("size", [0, -64, 65])
def test_impossible_sizes_are_rejected(size):
    with pytest.raises(ValueError, match="multiple"):
        Allocator(size)
    with pytest.raises(ValueError, match="cannot allocate"):
        Allocator(64).allocate(min(size, 0))


def test_extent_includes_adjacent_holes():
    allocator = Allocator(8 * UNIT)
    offsets = [allocator.allocate(UNIT) for _ in range(5)]
    allocator.free(offsets[1])
    allocator.free(offsets[3])
    assert allocator.extent(offsets[2]) == (offsets[1], offsets[4])
    assert allocator.extent(offsets[0]) == (0, offsets[2])
    assert allocator.extent(offsets[4]) == (offsets[3], 8 * UNIT)
    assert list(allocator.neighbours(offsets[1], offsets[4])) == [offsets[0], offsets[4]]
    assert list(allocator.neighbours(0, 8 * UNIT)) == []


def test_memory_is_allocated_only_once_it_is_usable():
    allocator = Allocator(8 * UNIT, usable_bytes=0)
    assert allocator.allocate(UNIT) is None
    allocator.extend(2 * UNIT)
    first = allocator.allocate(UNIT)
    assert allocator.allocate(2 * UNIT) is None
    allocator.extend(3 * UNIT)
    assert (first, allocator.allocate(2 * UNIT)) == (0, UNIT), "the new memory joins the hole before it"
    allocator.extend(8 * UNIT)
    allocator.free(first)
    assert (allocator.free_bytes, allocator.largest_hole_bytes) == (6 * UNIT, 5 * UNIT)
    for impossible in (7 * UNIT, 9 * UNIT):
        with pytest.raises(ValueError, match="extended"):
            allocator.extend(impossible)


class AllocatorMachine(RuleBasedStateMachine):
    """Checked against a trivial byte map."""

    SIZE = 64 * UNIT
    pieces = Bundle("pieces")

    def __init__(self):
        super().__init__()
        self.allocator = Allocator(self.SIZE)
        self.map = [None] * 64  # per unit the offset of the piece that has it

    def runs(self):
        """The runs of free units, as (first, length)."""
        runs, first = [], None
        for unit, owner in enumerate([*self.map, -1]):
            if owner is None:
                first = unit if first is None else first
            elif first is not None:
                runs.append((first, unit - first))
                first = None
        return runs

    @rule(target=pieces, units=st.integers(1, 24), slack=st.integers(0, 63))
    def allocate(self, units, slack):
        fitting = [run for run in self.runs() if run[1] >= units]
        offset = self.allocator.allocate(units * UNIT - slack)
        if not fitting:
            assert offset is None
            return multiple()
        assert offset == min(fitting, key=lambda run: (run[1], run[0]))[0] * UNIT
        first = offset // UNIT
        assert self.map[first : first + units] == [None] * units
        self.map[first : first + units] = [offset] * units
        return offset

    @rule(offset=consumes(pieces))
    def free(self, offset):
        self.allocator.free(offset)
        self.map = [None if owner == offset else owner for owner in self.map]

    @rule(offset=pieces, nbytes=st.integers(1, 24 * UNIT))
    def shrink(self, offset, nbytes):
        units, left = self.map.count(offset), -(-nbytes // UNIT)
        if left >= units:
            with pytest.raises(ValueError, match="cannot be shrunk"):
                self.allocator.shrink(offset, nbytes)
            return
        self.allocator.shrink(offset, nbytes)
        end = offset // UNIT + left
        self.map = [None if owner == offset and unit >= end else owner for unit, owner in enumerate(self.map)]

    @rule(offset=pieces)
    def look_around(self, offset):
        first, last = offset // UNIT, offset // UNIT + self.map.count(offset)
        around = {run[0] + run[1]: run[0] for run in self.runs()}, dict(self.runs())
        start = around[0].get(first, first)
        end = last + around[1].get(last, 0)
        assert self.allocator.extent(offset) == (start * UNIT, end * UNIT)
        touching = {self.map[unit] for unit in (start - 1, end) if 0 <= unit < 64}
        assert set(self.allocator.neighbours(start * UNIT, end * UNIT)) == touching

    @invariant()
    def accounts(self):
        lengths = [run[1] for run in self.runs()]
        assert self.allocator.free_bytes == sum(lengths) * UNIT
        assert self.allocator.largest_hole_bytes == max(lengths, default=0) * UNIT

    def teardown(self):
        for offset in {owner for owner in self.map if owner is not None}:
            self.allocator.free(offset)
        assert self.allocator.allocate(self.SIZE) == 0, "after freeing all, the whole is one piece again"


TestAllocatorMachine = AllocatorMachine.TestCase
TestAllocatorMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def span_for(need, pieces):
    """`pieces`: (units, last use; None is held, "hole" is free) in address order. Returns the indices to evict."""
    allocator = Allocator(sum(units for units, _ in pieces) * UNIT)
    offsets = [allocator.allocate(units * UNIT) for units, _ in pieces]
    uses = {}
    for offset, (_, use) in zip(offsets, pieces, strict=True):
        if use == "hole":
            allocator.free(offset)
        elif use is not None:
            uses[offset] = use
    span = choose_span(allocator, need * UNIT, sorted(uses, key=uses.__getitem__), uses.get)
    return None if span is None else sorted(offsets.index(offset) for offset in span.offsets)


@pytest.mark.parametrize(
    ("pieces", "need", "evicted"),
    [
        pytest.param([(1, 3), (1, 1), (1, 2)], 1, [1], id="one size: the least recently used"),
        pytest.param([(1, 3), (1, 1), (1, 2)], 2, [1, 2], id="grows towards the older neighbour"),
        pytest.param([(1, 3), (1, 1), (1, 2)], 3, [0, 1, 2], id="everything if need be"),
        pytest.param([(2, 2), (1, 1)], 2, [0], id="an older one that is too small is spared"),
        pytest.param([(1, "hole"), (1, 1), (1, "hole"), (1, 2)], 3, [1], id="holes on both sides count"),
        pytest.param([(1, 1), (1, "hole"), (1, 2)], 3, [0, 2], id="grows across a hole"),
        pytest.param([(1, 1), (1, None), (2, 2)], 2, [2], id="does not grow across a held one"),
        pytest.param([(1, 1), (1, None), (1, 2)], 2, None, id="held ones leave no room"),
        pytest.param([(1, None), (1, None)], 1, None, id="nothing is evictable"),
        pytest.param([(1, 1), (1, 9), (1, None), (1, 2), (1, 3)], 2, [3, 4], id="oldest span, not oldest entry"),
    ],
)
def test_span_covers_the_cheapest_contiguous_entries(pieces, need, evicted):
    assert span_for(need, pieces) == evicted


def test_large_entry_evicts_less_than_strict_lru():
    pieces = [(1, use) for use in (10, 90, 20, 80, 30, 70, 40, 60, 50, 5, 6, 7)]
    assert span_for(3, pieces) == [9, 10, 11]
