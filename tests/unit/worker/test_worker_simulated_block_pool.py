import pytest

from medialane.testing.simulated.sequence import BlockPool
from medialane.types.kv_blocks import AllBlocksCleared, BlockRemoved, BlockStored


def stored(pool, ids):
    """Take blocks and fill them, as a request does."""
    blocks = pool.take(len(ids))
    event = BlockStored([pool.engine_hash(i) for i in ids], None, [0] * 4 * len(ids), 4)
    pool.store(blocks, ids, event)
    return blocks


def removed(pool):
    return [h for event in pool.take_events() if isinstance(event, BlockRemoved) for h in event.block_hashes]


def test_null_block_is_never_allocated():
    pool = BlockPool(8)
    assert pool.num_free == 7
    pool.take(7)
    assert pool.usage == 1.0
    assert BlockPool(8).usage == 0.0


def test_freed_blocks_are_cached_until_reallocated():
    pool = BlockPool(5)
    pool.free(reversed(stored(pool, [1, 2])))
    assert len(pool.find([1, 2, 3])) == 2
    pool.take(2)
    assert len(pool.find([1, 2])) == 2
    pool.take(1)
    assert removed(pool) == [2]
    assert len(pool.find([1, 2])) == 1


def test_eviction_is_least_recently_freed_and_tail_first():
    pool = BlockPool(7)
    first, second = stored(pool, [1, 2]), stored(pool, [3, 4])
    pool.free(reversed(second))
    pool.free(reversed(first))
    pool.take(6)
    assert removed(pool) == [4, 3, 2, 1]


def test_using_a_block_makes_it_recent():
    pool = BlockPool(5)
    pool.free(stored(pool, [1]))
    pool.free(stored(pool, [2]))
    found = pool.find([1])
    pool.use(found)
    pool.free(found)
    pool.take(3)
    assert removed(pool) == [2]


def test_blocks_in_use_are_shared_and_not_evicted():
    pool = BlockPool(4)
    blocks = stored(pool, [1])
    pool.use(pool.find([1]))
    pool.free(blocks)
    assert pool.num_free == 2
    pool.take(2)
    assert removed(pool) == []
    pool.free(blocks)
    assert pool.num_free == 1


def test_empty_blocks_are_allocated_first():
    pool = BlockPool(4)
    pool.free(stored(pool, [1]))
    pool.free(pool.take(2))
    pool.take(2)
    assert len(pool.find([1])) == 1


def test_duplicate_blocks_are_kept_and_removed_individually():
    pool = BlockPool(4)
    pool.free(stored(pool, [1]) + stored(pool, [1]))
    pool.take(2)
    assert removed(pool) == [1]
    assert len(pool.find([1])) == 1
    pool.take(1)
    assert removed(pool) == [1]
    assert pool.find([1]) == []


def test_clear_is_rejected_while_blocks_are_in_use():
    pool = BlockPool(4)
    blocks = stored(pool, [1])
    assert not pool.clear()
    pool.free(blocks)
    assert pool.clear()
    assert pool.find([1]) == []
    assert pool.num_free == 3
    assert isinstance(pool.take_events()[-1], AllBlocksCleared)


def test_engine_hashes_are_not_block_ids():
    pool = BlockPool(3, mask=0xFF)
    pool.free(stored(pool, [1]))
    pool.take(2)
    assert removed(pool) == [0xFE]


def test_only_free_blocks_are_allocated():
    pool = BlockPool(3)
    pool.take(2)
    with pytest.raises(KeyError):
        pool.take(1)
