import pytest

from medialane.testing.simulated.sequence import BlockPool, SimulatedItem, SimulatedSequence
from medialane.types.feature import PlaceholderRange
from medialane.types.kv_blocks import prompt_block_ids, stored_block_ids


def made(num_tokens, **kwargs):
    return SimulatedSequence("r", range(num_tokens), block_size=4, max_tokens=8, **kwargs)


def store(sequence, pool, num_tokens):
    sequence.blocks += pool.take(-(-num_tokens // 4) - len(sequence.blocks))
    sequence.store_full(pool, num_tokens)
    return pool.take_events()


def test_last_token_of_a_prompt_is_always_computed():
    assert len(made(8).cacheable_ids()) == 1
    assert len(made(9).cacheable_ids()) == 2
    assert made(1).cacheable_ids() == []


def test_chunks_are_stored_in_order_with_their_parents():
    pool, sequence = BlockPool(9), made(11)
    [first] = store(sequence, pool, 5)
    [second] = store(sequence, pool, 11)
    assert store(sequence, pool, 11) == []
    assert (first.parent_block_hash, first.token_ids) == (None, [0, 1, 2, 3])
    assert (second.parent_block_hash, second.token_ids) == (first.block_hashes[-1], [4, 5, 6, 7])


def test_events_contain_the_contents_of_a_block():
    items = [SimulatedItem("a" * 64, PlaceholderRange(2, 4)), SimulatedItem("b" * 64, PlaceholderRange(6, 2))]
    sequence = made(12, items=items, lora="l", cache_salt="s")
    [event] = store(sequence, BlockPool(9), 12)
    assert event.lora_name == "l"
    assert event.extra_keys == [
        ["l", ["a" * 64, 2], "s"],
        ["l", ["a" * 64, -2], ["b" * 64, 2]],
        ["l"],
    ]


@pytest.mark.parametrize("lora", [None, "l"])
@pytest.mark.parametrize("salt", [None, "s"])
def test_ids_from_events_equal_those_of_the_growing_prompt(lora, salt):
    items = [SimulatedItem("a" * 64, PlaceholderRange(2, 4)), SimulatedItem("b" * 64, PlaceholderRange(6, 7))]
    pool, sequence = BlockPool(9), made(13, items=items, lora=lora, cache_salt=salt)
    events = store(sequence, pool, 13)
    sequence.token_ids += [90, 91, 92, 93]
    events += store(sequence, pool, 17)
    found, parent = [], None
    for event in events:
        ids = stored_block_ids(
            event.token_ids, block_size=4, extra_keys=event.extra_keys, lora_name=event.lora_name, parent=parent
        )
        parent = int(ids[-1])
        found += ids.tolist()
    grown = SimulatedSequence(
        "r", sequence.token_ids, block_size=4, max_tokens=1, items=items, lora=lora, cache_salt=salt
    )
    assert found == [*grown.cacheable_ids()]
    assert found == [h for event in events for h in event.block_hashes]
    assert found[:3] != prompt_block_ids(range(12), block_size=4).tolist()


def test_item_is_needed_where_one_of_its_embeddings_is():
    item = SimulatedItem("a", PlaceholderRange(4, 4, is_embed=bytes([0, 1, 1, 0])))
    assert item.needs(0, 6)
    assert not item.needs(0, 5)
    assert not item.needs(7, 20)
    assert not item.needs(8, 20)
    assert SimulatedItem("a", PlaceholderRange(4, 4)).needs(7, 8)
