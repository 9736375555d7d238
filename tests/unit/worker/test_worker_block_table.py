"""The table, checked against a naive cache: prompts, evictions anywhere, copies and groups."""

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from medialane.types.kv_blocks import AllBlocksCleared, BlockRemoved, BlockStored, prompt_block_ids
from medialane.worker.block_table import BlockTable, pack

SIZE = 4


def tokens(prompt, num_blocks):
    """Prompts of one number share all their tokens, prompts 2n and 2n+1 the first two blocks."""
    ids = [random.Random(prompt // 2 if i < 2 * SIZE else 100 + prompt).randrange(1000) + i for i in range(64)]
    return ids[: num_blocks * SIZE]


def ids_of(prompt, num_blocks):
    return prompt_block_ids(tokens(prompt, num_blocks), block_size=SIZE).tolist()


def key(found):
    """An engine's hash of a block: anything, as long as it is always the same."""
    return (found * 31 + 7) % 2**64


def stored(prompt, start, stop, **fields):
    keys = [key(found) for found in ids_of(prompt, stop)]
    settings = {"group_idx": 0, "kv_cache_spec_kind": "full_attention", "medium": "GPU"} | fields
    parent = keys[start - 1] if start else None
    return BlockStored(keys[start:], parent, tokens(prompt, stop)[start * SIZE :], SIZE, **settings)


def removed(*found, **fields):
    return BlockRemoved([key(f) for f in found], **({"medium": "GPU", "group_idx": 0} | fields))


class View:
    """The state after applying every reported change."""

    def __init__(self):
        self.ids = set()

    def take(self, table):
        change = table.take()
        if change is None:
            return
        if change.snapshot:
            self.ids.clear()
            assert change.removed == b""
        gone, come = (set(np.frombuffer(b, "<u8").tolist()) for b in (change.removed, change.stored))
        assert not gone & come
        self.ids = (self.ids - gone) | come


@pytest.fixture
def table():
    return BlockTable(SIZE)


def test_blocks_do_not_depend_on_event_chunking(table):
    table.apply([stored(1, 0, 2)])
    table.apply([stored(1, 2, 3), stored(1, 3, 7)])
    assert table.held() == ids_of(1, 7)
    assert table.num_faults == 0


def test_changes_are_net(table):
    first, second, third = ids_of(1, 3)
    table.apply([stored(1, 0, 3), removed(third)])
    change = table.take()
    assert (set(np.frombuffer(change.stored, "<u8").tolist()), change.removed) == ({first, second}, b"")
    table.apply([removed(second), stored(1, 1, 2)])
    assert table.take() is None


def test_block_with_two_copies_is_held_until_both_are_removed(table):
    (found,) = ids_of(1, 1)
    table.apply([stored(1, 0, 1), stored(1, 0, 1), removed(found)])
    assert table.held() == [found]
    table.apply([removed(found)])
    assert table.held() == []


def test_duplicate_blocks_may_precede_new_ones(table):
    table.apply([stored(1, 0, 2)])
    table.apply([stored(1, 1, 4), removed(ids_of(1, 2)[1])])
    assert table.held() == ids_of(1, 4)


def test_clear_is_reported_as_a_snapshot_of_later_blocks(table):
    table.apply([stored(1, 0, 3)])
    table.take()
    table.apply([stored(2, 0, 1), AllBlocksCleared(), stored(4, 0, 2)])
    change = table.take()
    assert change.snapshot
    assert change.stored == pack(ids_of(4, 2))


def test_events_of_other_storage_media_are_ignored(table):
    table.apply([stored(1, 0, 2, medium="CPU"), stored(2, 0, 2, locality="REMOTE")])
    assert table.held() == []
    table.apply([stored(1, 0, 2), removed(*ids_of(1, 2), medium="CPU")])
    assert table.held() == ids_of(1, 2)


def test_events_without_medium_or_group_are_accepted(table):
    table.apply([stored(1, 0, 2, medium=None, group_idx=None, kv_cache_spec_kind=None)])
    assert table.held() == ids_of(1, 2)
    table.apply([removed(ids_of(1, 2)[1], medium=None, group_idx=None)])
    assert table.held() == ids_of(1, 1)


def test_block_is_held_once_every_full_attention_group_holds_it(table):
    table.apply([stored(1, 0, 3), stored(1, 0, 2, group_idx=1, kv_cache_spec_kind="mla_attention")])
    assert table.held() == ids_of(1, 2)
    table.apply([removed(ids_of(1, 1)[0], group_idx=1)])
    assert table.held() == ids_of(1, 2)[1:]
    table.apply([stored(1, 0, 1, group_idx=1, kv_cache_spec_kind="mla_attention")])
    assert set(table.held()) == set(ids_of(1, 2))


def test_groups_without_full_attention_are_ignored(table):
    table.apply([stored(1, 0, 3), stored(2, 0, 3, group_idx=1, kv_cache_spec_kind="sliding_window")])
    table.apply([removed(*ids_of(1, 3), group_idx=1)])
    assert table.held() == ids_of(1, 3)


def test_lowest_group_is_used_without_full_attention(table):
    sliding = {"kv_cache_spec_kind": "sliding_window"}
    table.apply([stored(2, 0, 3, group_idx=2, **sliding), stored(1, 0, 3, group_idx=1, **sliding)])
    assert table.held() == ids_of(1, 3)


def test_late_full_attention_group_takes_over(table):
    table.apply([stored(1, 0, 3, kv_cache_spec_kind="mamba")])
    assert table.held() == ids_of(1, 3)
    table.take()
    table.apply([stored(2, 0, 3, group_idx=1)])
    change = table.take()
    assert change.snapshot
    assert change.stored == pack(ids_of(2, 3))


def test_child_of_an_unknown_block_is_counted_but_not_held(table):
    table.apply([stored(1, 2, 4)])
    assert (table.held(), table.num_unknown_parents) == ([], 1)


def test_partial_blocks_are_ignored(table):
    event = stored(1, 0, 1)
    table.apply([BlockStored(event.block_hashes, None, event.token_ids[:2], 2, medium="GPU", group_idx=0)])
    assert (table.held(), table.num_faults) == ([], 0)


@pytest.mark.parametrize(
    "changes",
    [{"token_ids": [1, 2, 3]}, {"token_ids": [-1] * 8}, {"extra_keys": [[["h", "x"]], None]}, {"block_hashes": [5]}],
)
def test_inconsistent_event_is_counted_and_the_next_is_applied(table, changes):
    event = stored(1, 0, 2)
    fields = {name: getattr(event, name) for name in event.__struct_fields__}
    table.apply([BlockStored(**(fields | changes)), stored(4, 0, 2)])
    assert (table.held(), table.num_unreadable) == (ids_of(4, 2), 1)


def test_table_never_exceeds_the_engine_cache():
    table = BlockTable(SIZE, max_blocks=5)
    table.apply([stored(1, 0, 4)])
    table.apply([stored(4, 0, 4)])
    assert len(table.held()) == 5
    assert table.num_dropped == 3


ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("prompt"), st.integers(0, 5), st.integers(1, 8)),
        st.tuples(st.just("copy"), st.integers(0, 5), st.integers(1, 8)),
        st.tuples(st.just("evict"), st.integers(1, 4), st.integers(0, 10**6)),
        st.tuples(st.just("take"), st.just(0), st.just(0)),
        st.tuples(st.just("clear"), st.just(0), st.just(0)),
    ),
    max_size=40,
)


@settings(max_examples=150, deadline=None)
@given(ACTIONS)
def test_applied_changes_equal_the_cache(actions):
    """A cache that keeps no order of eviction: blocks in the middle of a chain may go, too."""
    table, view, cache = BlockTable(SIZE), View(), {}
    for action, first, second in actions:
        if action == "prompt":
            ids = ids_of(first, second)
            start = next((i for i, found in enumerate(ids) if found not in cache), len(ids))
            if start < len(ids):
                table.apply([stored(first, start, second)])
                for found in ids[start:]:
                    cache[found] = cache.get(found, 0) + 1
        elif action == "copy":
            table.apply([stored(first, 0, second)])
            for found in ids_of(first, second):
                cache[found] = cache.get(found, 0) + 1
        elif action == "evict":
            for found in random.Random(second).sample(sorted(cache), min(first, len(cache))):
                table.apply([removed(found)])
                cache[found] -= 1
                cache = {k: n for k, n in cache.items() if n}
        elif action == "clear":
            table.apply([AllBlocksCleared()])
            cache = {}
        else:
            view.take(table)
    view.take(table)
    assert view.ids == set(table.held()) == set(cache)
    assert table.num_faults == 0
