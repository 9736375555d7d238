"""Block ids: a prompt's and an engine's events agree, and different prefixes differ."""

import itertools

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from medialane.types.feature import MediaSpan
from medialane.types.kv_blocks import chain, prompt_block_ids, stored_block_ids, token_array

BLOCK = 4
tokens = st.lists(st.integers(0, 151_935), max_size=80)


@st.composite
def media_of(draw, num_tokens):
    """Items one after the other, some without a token between them, some shorter than a block."""
    spans, offset = [], 0
    for name in draw(st.lists(st.sampled_from("abc"), max_size=6)):
        offset += draw(st.integers(0, 7))
        length = draw(st.integers(1, 11))
        if offset + length > num_tokens:
            break
        spans.append(MediaSpan(name * 64, offset, length))
        offset += length
    return spans


@st.composite
def prompts(draw):
    token_ids = draw(tokens)
    return {
        "token_ids": token_ids,
        "media": draw(media_of(len(token_ids))),
        "lora": draw(st.sampled_from([None, "adapter"])),
        "cache_salt": draw(st.sampled_from([None, "salt", "adapter"])),
    }


def extra_keys(prompt, block):
    """An engine's event fields for one block, in order: the LoRA's name, the items, the salt."""
    start = block * BLOCK
    keys = [prompt["lora"]] if prompt["lora"] else []
    keys += [
        [item.mm_hash, item.offset - start]
        for item in prompt["media"]
        if item.offset < start + BLOCK and item.end > start
    ]
    keys += [prompt["cache_salt"]] if prompt["cache_salt"] and not block else []
    return keys or None


def events(prompt, cuts):
    """A prompt's full blocks as reported by an engine, in several events."""
    num_blocks = len(prompt["token_ids"]) // BLOCK
    edges = [0, *sorted({cut for cut in cuts if 0 < cut < num_blocks}), num_blocks]
    for first, stop in itertools.pairwise(edges):
        yield (
            prompt["token_ids"][first * BLOCK : stop * BLOCK],
            [extra_keys(prompt, block) for block in range(first, stop)],
        )


def ids_of(prompt):
    return prompt_block_ids(block_size=BLOCK, **prompt).tolist()


#: Of the prompt in `test_ids_are_stable_across_processes_and_releases`.
GOLDEN = [8287694774240211956, 1644671015439971455, 9297942061887163148]


@given(prompts(), st.lists(st.integers(0, 20), max_size=4))
def test_ids_of_a_prompt_equal_those_of_its_events(prompt, cuts):
    found = []
    for token_ids, keys in events(prompt, cuts):
        parent = found[-1] if found else None
        # An engine may leave them out where there are none.
        given_keys = keys if any(keys) or len(cuts) % 2 else None
        found += stored_block_ids(
            token_ids, block_size=BLOCK, extra_keys=given_keys, lora_name=prompt["lora"], parent=parent
        ).tolist()
    assert found == ids_of(prompt)


@example(
    one={"token_ids": [0] * BLOCK, "media": [], "lora": None, "cache_salt": "adapter"},
    other={"token_ids": [0] * BLOCK, "media": [], "lora": "adapter", "cache_salt": None},
)
@given(prompts(), prompts())
def test_ids_are_equal_for_equal_prefixes(one, other):
    def covered(prompt):
        blocks = range(len(prompt["token_ids"]) // BLOCK)
        # An engine's keys alone do not distinguish a salt from an adapter of that name.
        start = prompt["lora"] or "", prompt["cache_salt"] or ""
        keys = [extra_keys(prompt, block) for block in blocks]
        return [(start, prompt["token_ids"][: (b + 1) * BLOCK], keys[: b + 1]) for b in blocks]

    same = [a == b for a, b in zip(covered(one), covered(other), strict=False)]
    assert [a == b for a, b in zip(ids_of(one), ids_of(other), strict=False)] == same


def fmix(value):
    value = (value ^ value >> 33) * 0xFF51AFD7ED558CCD % 2**64
    value = (value ^ value >> 33) * 0xC4CEB9FE1A85EC53 % 2**64
    return value ^ value >> 33


@given(st.lists(st.integers(0, 2**64 - 1), max_size=40), st.integers(0, 2**64 - 1))
def test_chain_of_any_length_equals_the_reference(contents, start):
    """Few blocks use another code path than many; parent ids may be arbitrary."""
    expected, state = [], start
    for content in contents:
        state = (0xD1342543DE82EF95 * state + fmix(content)) % 2**64
        expected.append(state)
    sums = np.array(contents, np.uint64)
    chain(sums, start)
    assert sums.tolist() == expected


@given(prompts(), st.lists(st.integers(0, 9), max_size=20))
def test_ids_of_a_prefix_are_a_prefix_of_the_ids(prompt, more):
    longer = {**prompt, "token_ids": prompt["token_ids"] + more}
    ids = ids_of(prompt)
    assert ids_of(longer)[: len(ids)] == ids


BASE = {"token_ids": list(range(32)), "media": [MediaSpan("m", 5, 11)], "lora": None, "cache_salt": None}


@pytest.mark.parametrize(
    ("change", "first"),
    [
        ({"token_ids": [*range(10), 99, *range(11, 32)]}, 2),
        ({"token_ids": [1, 0, *range(2, 32)]}, 0),
        ({"token_ids": [*range(4, 8), *range(4), *range(8, 32)]}, 0),
        ({"media": [MediaSpan("n", 5, 11)]}, 1),
        ({"media": [MediaSpan("m", 4, 12)]}, 1),
        ({"media": []}, 1),
        ({"media": [MediaSpan("m", 5, 12)]}, 4),  # reaches one block more
        ({"media": [MediaSpan("m", 5, 11), MediaSpan("m", 16, 1)]}, 4),
        ({"lora": "adapter"}, 0),
        ({"cache_salt": "salt"}, 0),
    ],
    ids=str,
)
def test_change_affects_its_block_and_all_later_ones(change, first):
    ids, changed = ids_of(BASE), ids_of({**BASE, **change})
    assert [a == b for a, b in zip(ids, changed, strict=True)] == [True] * first + [False] * (8 - first)


def test_block_starting_where_an_item_ends_excludes_it():
    """Half-open ranges: the item of the base ends where block 4 begins."""
    ids = ids_of(BASE)
    rest = stored_block_ids(range(16, 32), block_size=BLOCK, extra_keys=None, lora_name=None, parent=ids[3])
    assert rest.tolist() == ids[4:]


def test_lora_salt_and_block_size_cannot_be_confused():
    ways = [{"lora": "x"}, {"cache_salt": "x"}, {"lora": "x", "cache_salt": "x"}, {}]
    first = {ids_of({**BASE, **way})[0] for way in ways}
    assert len(first) == 4
    assert prompt_block_ids([0] * 8, block_size=8)[0] not in prompt_block_ids([0] * 8, block_size=4)


def test_lora_named_like_the_salt_is_distinguished_in_events():
    def first(keys, lora):
        return stored_block_ids([1] * BLOCK, block_size=BLOCK, extra_keys=[keys], lora_name=lora, parent=None)[0]

    assert first(["x"], "x") == prompt_block_ids([1] * BLOCK, block_size=BLOCK, lora="x")[0]
    assert first(["x", "x"], "x") == prompt_block_ids([1] * BLOCK, block_size=BLOCK, lora="x", cache_salt="x")[0]
    assert first(["x"], None) == prompt_block_ids([1] * BLOCK, block_size=BLOCK, cache_salt="x")[0]


def test_empty_lora_and_salt_equal_none():
    assert ids_of({**BASE, "lora": "", "cache_salt": ""}) == ids_of(BASE)


def test_embeddings_replacing_tokens_affect_the_id():
    ids = {
        int(stored_block_ids([0] * BLOCK, block_size=BLOCK, extra_keys=[keys], lora_name=None, parent=None)[0])
        for keys in (None, [b"one"], [b"two"])
    }
    assert len(ids) == 3


def test_ids_do_not_depend_on_token_container_or_media_order():
    media = [MediaSpan("a", 1, 5), MediaSpan("b", 6, 3), MediaSpan("a", 11, 9)]
    expected = ids_of({**BASE, "media": media})
    for token_ids in (np.arange(32, dtype=np.uint32), np.arange(32), tuple(range(32)), range(32)):
        assert ids_of({**BASE, "token_ids": token_ids, "media": media[::-1]}) == expected


def test_ids_are_stable_across_processes_and_releases():
    """Gateway and worker compute them apart: these were written down when the recipe was made."""
    media = [MediaSpan("f" * 64, 3, 6)]
    found = prompt_block_ids(range(12), block_size=4, media=media, lora="l", cache_salt="s").tolist()
    assert found == GOLDEN


def test_overlapping_items_are_hashed_as_in_the_engine():
    """An item that goes on past the block hides those after it; from the last item's end on, nothing counts."""
    outer, inner = MediaSpan("a", 0, 32), MediaSpan("b", 9, 2)
    ids = ids_of({**BASE, "media": [outer, inner]})
    assert ids[:3] == ids_of({**BASE, "media": [outer]})[:3]
    assert ids == ids_of({**BASE, "media": [MediaSpan("a", 0, 12)]})


def test_prompt_without_a_full_block_has_no_ids():
    assert len(prompt_block_ids([], block_size=16)) == 0
    assert len(prompt_block_ids([1] * 15, block_size=16, media=[MediaSpan("a", 3, 5)])) == 0


def test_item_beyond_the_full_blocks_adds_nothing():
    short = prompt_block_ids(range(10), block_size=4, media=[MediaSpan("a", 8, 2)])
    assert short.tolist() == prompt_block_ids(range(8), block_size=4).tolist()


@pytest.mark.parametrize("wrong", [-1, 1 << 32])
def test_invalid_token_raises(wrong):
    with pytest.raises(OverflowError):
        prompt_block_ids([wrong] * 16, block_size=16)


def test_conversion_keeps_every_token():
    ids = [0, 1, (1 << 32) - 1]
    assert token_array(ids).tolist() == ids
    assert token_array([]).tolist() == []


@pytest.mark.parametrize(
    ("token_ids", "keys", "parent"),
    [
        ([1] * 5, None, None),  # no whole block
        ([1] * 8, [None], None),  # an entry too few
        ([1] * 4, [["salt", "more"]], None),
        ([1] * 4, [["salt"]], 7),  # a salt stands at a prompt's start only
        ([1] * 8, [None, ["salt"]], None),
        ([1] * 4, [[3.5]], None),
        ([1] * 4, [[["a", 1, 2]]], None),
        ([1] * 4, [[["a", "b"]]], None),
    ],
    ids=str,
)
def test_unsupported_event_raises(token_ids, keys, parent):
    with pytest.raises(ValueError, match="a stored event"):
        stored_block_ids(token_ids, block_size=4, extra_keys=keys, lora_name=None, parent=parent)


def test_equal_blocks_of_a_long_prompt_have_different_ids():
    ids = prompt_block_ids(np.zeros(16 << 16, np.uint32), block_size=16)
    assert len(np.unique(ids)) == 1 << 16


def test_each_bit_is_set_in_half_of_the_ids():
    ids = np.concatenate([prompt_block_ids([n, *range(127)], block_size=16) for n in range(1000)])
    bits = np.unpackbits(ids.view(np.uint8)).reshape(-1, 64).mean(axis=0)
    assert np.all(abs(bits - 0.5) < 0.03)
