"""Which neighbours are evicted for one hole."""

import pytest

from medialane.arena.allocator import Allocator, choose_span

UNIT = 64


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
