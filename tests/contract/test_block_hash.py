"""Our block ids partition prompts' prefixes as vLLM's block hashes do, and read what vLLM puts into its events.

vLLM's own hasher and its own extra keys are used, over generated pairs of prompts that differ in one aspect. An event
names a LoRA without its path: adapters of one name and different paths are equal to us (not to vLLM's hash).
"""

import itertools
from types import SimpleNamespace

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.multimodal.utils import argsort_mm_positions
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core import kv_cache_utils

from medialane.types.feature import MediaSpan
from medialane.types.kv_blocks import BlockStored, prompt_block_ids, stored_block_ids

BLOCK = 8
HASH = get_hash_fn_by_name("sha256_cbor")
pytestmark = pytest.mark.timeout(60)


@pytest.fixture(scope="module", autouse=True)
def _start_of_chains():
    kv_cache_utils.init_none_hash(HASH)


class Prompt(msgspec.Struct, frozen=True):
    tokens: tuple[int, ...]
    media: tuple[MediaSpan, ...] = ()
    lora: str | None = None
    salt: str | None = None

    @property
    def num_blocks(self):
        return len(self.tokens) // BLOCK

    def ids(self):
        return prompt_block_ids(
            self.tokens, block_size=BLOCK, media=self.media, lora=self.lora, cache_salt=self.salt
        ).tolist()

    def vllm_request(self):
        features = [
            MultiModalFeatureSpec(None, item.modality, item.mm_hash, PlaceholderRange(item.offset, item.length))
            for item in self.media
        ]
        if features:
            order = argsort_mm_positions({"image": [feature.mm_position for feature in features]})
            features = [features[index] for _, index in order]
        return SimpleNamespace(
            block_hashes=[],
            num_tokens=len(self.tokens),
            all_token_ids=list(self.tokens),
            mm_features=features,
            lora_request=LoRARequest(self.lora, 1, "/adapters/" + self.lora) if self.lora else None,
            cache_salt=self.salt,
            prompt_embeds=None,
        )

    def vllm_hashes(self):
        return kv_cache_utils.get_request_block_hasher(BLOCK, HASH)(self.vllm_request())

    def extra_keys(self, first, stop):
        """As `BlockPool` makes the blocks of an event: iteration over the items starts again."""
        request, item, found = self.vllm_request(), 0, []
        for block in range(first, stop):
            keys, item = kv_cache_utils.generate_block_hash_extra_keys(
                request, block * BLOCK, (block + 1) * BLOCK, item
            )
            found.append(keys)
        return kv_cache_utils.to_event_extra_keys(found)

    def stored(self, first, stop):
        """The event of these blocks as it arrives, through msgpack into our type."""
        hashes = [kv_cache_utils.maybe_convert_block_hash(found) for found in self.vllm_hashes()]
        event = {
            "type": "BlockStored",
            "block_hashes": hashes[first:stop],
            "parent_block_hash": hashes[first - 1] if first else None,
            "token_ids": list(self.tokens[first * BLOCK : stop * BLOCK]),
            "block_size": BLOCK,
            "lora_name": self.lora,
            "extra_keys": self.extra_keys(first, stop),
        }
        return msgspec.convert(msgspec.msgpack.decode(msgspec.msgpack.encode(event)), BlockStored)


def item(mm_hash, offset, length):
    return MediaSpan(mm_hash * 32, offset, length)


@st.composite
def prompts(draw):
    """Few tokens to choose from, so that prompts agree often; items side by side, short and long, at blocks' edges."""
    tokens = tuple(draw(st.lists(st.integers(0, 2), min_size=BLOCK, max_size=7 * BLOCK)))
    media, offset = [], 0
    for name in draw(st.lists(st.sampled_from("ab"), max_size=5)):
        offset += draw(st.sampled_from([0, 0, 1, 3, BLOCK]))
        length = draw(st.sampled_from([1, 2, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK]))
        if offset + length > len(tokens):
            break
        media.append(item(name, offset, length))
        offset += length
    lora, salt = draw(st.sampled_from([None, None, "x"])), draw(st.sampled_from([None, None, "x", "y"]))
    return Prompt(tokens, tuple(media), lora, salt)


def alter(prompt, **fields):
    return msgspec.structs.replace(prompt, **fields)


@st.composite
def changed_media(draw, media):
    """The items with one of them, or their order, changed."""
    place = draw(st.integers(0, len(media) - 1))
    chosen = media[place]
    others = [
        (alter(chosen, mm_hash="c" * 32),),
        (alter(chosen, offset=max(0, chosen.offset - 1)),),
        (alter(chosen, length=max(1, chosen.length - 1)),),
        (),
    ]
    names = [found.mm_hash for found in reversed(media)]
    reordered = tuple(alter(found, mm_hash=name) for found, name in zip(media, names, strict=True))
    return draw(st.sampled_from([reordered, *((*media[:place], *other, *media[place + 1 :]) for other in others)]))


@st.composite
def changed(draw, prompt):
    """The same prompt except for one aspect, which may make no difference."""
    at = draw(st.integers(0, len(prompt.tokens) - 1))
    other = {
        "tokens": st.just((*prompt.tokens[:at], prompt.tokens[at] ^ 1, *prompt.tokens[at + 1 :])),
        "lora": st.sampled_from([None, "x", "z"]),
        "salt": st.sampled_from([None, "", "x", "z"]),
    }
    if prompt.media:
        other["media"] = changed_media(prompt.media)
    aspect = draw(st.sampled_from([*other, "end"]))
    if aspect == "end":
        return alter(prompt, tokens=prompt.tokens + (1,) * draw(st.integers(0, 2 * BLOCK)))
    return alter(prompt, **{aspect: draw(other[aspect])})


def agreement(one, other):
    return [a == b for a, b in zip(one, other, strict=False)]


@settings(max_examples=400, deadline=None)
@given(st.data())
def test_block_ids_are_equal_iff_vllms_hashes_are(data):
    one = data.draw(prompts())
    other = data.draw(changed(one))
    assert agreement(one.ids(), other.ids()) == agreement(one.vllm_hashes(), other.vllm_hashes())


@settings(max_examples=150, deadline=None)
@given(prompts(), prompts())
def test_block_ids_collide_only_if_vllms_hashes_do(one, other):
    found = dict(zip(one.vllm_hashes() + other.vllm_hashes(), one.ids() + other.ids(), strict=True))
    assert len(found) == len(set(found.values()))
    assert len(found) == len(set(zip(one.vllm_hashes() + other.vllm_hashes(), one.ids() + other.ids(), strict=True)))


@settings(max_examples=200, deadline=None)
@given(prompts(), st.sets(st.integers(1, 6)))
def test_block_ids_from_vllm_events_equal_those_of_the_prompt(prompt, cuts):
    edges = [0, *sorted(cut for cut in cuts if cut < prompt.num_blocks), prompt.num_blocks]
    found = []
    for first, stop in itertools.pairwise(edges):
        event = prompt.stored(first, stop)
        found += stored_block_ids(
            event.token_ids,
            block_size=event.block_size,
            extra_keys=event.extra_keys,
            lora_name=event.lora_name,
            parent=found[-1] if found else None,
        ).tolist()
    assert found == prompt.ids()


@pytest.mark.parametrize(
    "media",
    [
        (item("a", 0, 40), item("b", 0, 40)),
        (item("a", 0, 40), item("b", 3, 20)),
        (item("a", 2, 20), item("b", 10, 30)),
        (item("a", 2, 20), item("b", 10, 4), item("c", 30, 3)),
        (item("a", 5, 11), item("b", 16, 8), item("c", 20, 20)),
    ],
    ids=["alike", "inside", "overlapping", "inside, then more", "overlapping from an edge"],
)
def test_overlapping_items_are_hashed_as_in_vllm(media):
    """Audio inside its video. vLLM omits the item hidden by the first; so do we."""
    prompt = Prompt(tuple(range(48)), media)
    event = prompt.stored(0, prompt.num_blocks)
    ids = stored_block_ids(event.token_ids, block_size=BLOCK, extra_keys=event.extra_keys, lora_name=None, parent=None)
    assert ids.tolist() == prompt.ids()
    for other in (prompt, Prompt(prompt.tokens, media[:1]), Prompt(prompt.tokens, media[1:])):
        assert agreement(prompt.ids(), other.ids()) == agreement(prompt.vllm_hashes(), other.vllm_hashes())


def test_kv_events_have_the_fields_that_we_read():
    """The shapes: the LoRA's name first, [mm_hash, offset] pairs, the salt with the first block only; None for none."""
    prompt = Prompt(tuple(range(32)), (item("a", 2, 4), item("b", 6, 6)), "x", "s")
    a, b = "a" * 32, "b" * 32
    assert prompt.stored(0, 4).extra_keys == [["x", [a, 2], [b, 6], "s"], ["x", [b, -2]], ["x"], ["x"]]
    plain = Prompt(tuple(range(32)), (item("a", 8, 8),))
    assert plain.stored(0, 4).extra_keys == [None, [[a, 0]], None, None]
    assert plain.stored(2, 4).extra_keys == [None, None]
