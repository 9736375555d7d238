"""Embeddings of eight families, in a real engine each: saved once, then loaded with the items' small fields alone.

Starting an engine takes most of a family's half a minute. Those that `make test-all` starts are those whose items
differ most: embeddings wider than the language model's, masks, timestamps; and three modalities in one prompt.
"""

import os
from contextlib import aclosing
from functools import cache

import msgspec
import pytest
import pytest_asyncio
import torch
from kv_watch import start_engine
from prompt_maker import bytes_of, request
from test_family_preparation import Halves
from tiny_families import FAMILIES, family_params
from vllm.model_executor.model_loader.utils import get_model_cls
from vllm.multimodal.inputs import MultiModalFeatureSpec

from medialane.arena import Arena, ArenaConfig, describe, layout
from medialane.testing.tiny_model import cache_folder
from medialane.types.admin import ResetEncoderCache, ResetPrefixCache
from medialane.types.errors import InvalidFeature
from medialane.types.feature import EmbeddingUse, MediaPayload
from medialane.types.request import EmbeddingCounts, ExpandedPrompt
from medialane.types.tensor import UNNAMED, InlineTensor, TensorSpec
from medialane.vllm_bridge.items import decode_item, decode_item_without_tensors, decode_small_fields, to_vllm_range

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.asyncio(loop_scope="session"),
    pytest.mark.timeout(300),
    # a warning of torch when vLLM resamples audio
    pytest.mark.filterwarnings("ignore:TF32 acceleration:UserWarning"),
]

_ALWAYS = ("qwen3_vl", "qwen2_5_omni")

#: Of an encoder-decoder, no embeddings are kept.
_KEPT = [name for name, family in FAMILIES.items() if not family.has_encoder_prompt]


_BY_GRID, _BY_ROWS = ["image_embeds", "image_grid_thw"], [UNNAMED]

#: The form of `image_embeds`, and their width, of some families.
CLIENT_EMBEDS = {
    "gemma3": ([], 0),
    "qwen2_audio": ([], 0),
    "qwen2_5_omni": ([], 0),  # plain vLLM's engine ends: the model returns the rows of all items as one tensor
    "qwen2_5_vl": (_BY_GRID, 128),
    "qwen3_vl": (_BY_GRID, 256),
    "qwen3_vl_moe": (_BY_GRID, 256),
    "llava_next": (_BY_ROWS, 128),
}


class Case:
    """An engine of one family, and an arena that it has mapped."""

    def __init__(self, engine, halves, arena):
        self.engine = engine
        self.arena = arena
        self.halves = halves
        self._num_requests = 0

    def prompt(self, *parts):
        items, assembled = self.halves.prepared(parts)
        payloads = [
            MediaPayload(
                modality,
                f"{modality} {number}".ljust(64, "0"),
                made.header,
                tuple(InlineTensor(s, bytes(b)) for s, b in zip(made.specs, made.buffers, strict=True)),
                made.size,
                place,
            )
            for number, ((modality, made), place) in enumerate(zip(items, assembled.placeholders, strict=True))
        ]
        return ExpandedPrompt(assembled.token_ids, tuple(payloads))

    async def forget(self):
        assert await self.engine.administer(ResetPrefixCache())
        await self.engine.administer(ResetEncoderCache())

    async def answer(self, prompt, uses=()):
        self._num_requests += 1
        sent = request(f"family-{self._num_requests}", prompt, max_tokens=12)
        async with aclosing(self.engine.generate(sent, bytes_of(prompt), uses)) as deltas:
            return [token async for delta in deltas for token in delta.completions[0].token_ids]

    def reserved(self, feature):
        card = self.engine.card.encoder
        spec = TensorSpec(card.dtype, (feature.placeholder.num_embeds, card.widths[feature.modality]))
        reservation = self.arena.reserve(layout([spec])[1], "embedded")
        return reservation, *describe(reservation.range, [spec])

    async def counts(self):
        await self.engine.ping(60)
        return self.engine.embedding_counts


@pytest_asyncio.fixture(
    scope="module",
    loop_scope="session",
    params=[
        pytest.param(name, marks=() if name in _ALWAYS else (*FAMILIES[name].marks, pytest.mark.slow)) for name in _KEPT
    ],
)
async def case(request, family_renderer):
    family = FAMILIES[request.param]
    engine = start_engine(family.build(cache_folder(os.environ)), *family.flags)
    arena = Arena.create(ArenaConfig(size_bytes=64 << 20))
    try:
        await engine.learn_encoder()
        assert engine.card.no_embeddings == ""
        assert await engine.attach_arena(arena.id, arena.nonce)
        yield Case(engine, Halves(family, family_renderer(family.name)), arena)
    finally:
        await engine.close()
        arena.close()


@pytest.fixture(scope="module")
def halves(family_renderer):
    return cache(lambda name: Halves(FAMILIES[name], family_renderer(name)))


def all_media(family):
    """A prompt with as many items as the family allows, up to two of each modality."""
    second = [f"{modality}2" for modality, limit in family.limits.items() if limit > 1]
    return "Look: ", *family.limits, *second, " and say."


@pytest.mark.parametrize("name", family_params())
async def test_specification_of_absent_tensors_is_validated_like_tensors(halves, name):
    found = halves(name)
    items, assembled = found.prepared(all_media(found.family))
    features = [
        MediaPayload(modality, "a" * 64, made.header, (), made.size, place)
        for (modality, made), place in zip(items, assembled.placeholders, strict=True)
    ]
    stand_ins = [decode_item_without_tensors(feature.header) for feature in features]
    encoder_token_ids = assembled.encoder_token_ids
    found.checker.check(
        ExpandedPrompt(assembled.token_ids, tuple(features), encoder_token_ids=encoder_token_ids), stand_ins
    )
    shorter = [
        msgspec.structs.replace(
            feature, placeholder=msgspec.structs.replace(place, length=place.length - 1, is_embed=None)
        )
        for feature, place in zip(features, assembled.placeholders, strict=True)
    ]
    with pytest.raises(InvalidFeature):
        found.checker.check(
            ExpandedPrompt(assembled.token_ids, tuple(shorter), encoder_token_ids=encoder_token_ids), stand_ins
        )


def with_positions(found):
    if not found.renderer.model_config.uses_mrope:
        pytest.skip("its positions do not depend on items")
    return found


@pytest.mark.parametrize("name", family_params())
async def test_positions_are_computed_from_small_fields(halves, name):
    """Rotary positions in three dimensions; those of families without do not depend on items."""
    found = with_positions(halves(name))
    items, assembled = found.prepared(all_media(found.family))
    model, positions = model_without_weights(found.renderer.model_config), []
    for read in (lambda made: decode_item(made.header, made.buffers), lambda made: decode_small_fields(made.header)):
        features = [spec(m, read(made), p) for (m, made), p in zip(items, assembled.placeholders, strict=True)]
        features.sort(key=lambda feature: feature.mm_position.offset)
        positions.append(model.get_mrope_input_positions(assembled.token_ids, features))
    (whole, delta), (small, small_delta) = positions
    assert torch.equal(whole, small)
    assert delta == small_delta
    if found.family.in_make_test:  # some of the others have the same position in all three
        assert not torch.equal(whole[0], whole[1])


@pytest.mark.parametrize("name", family_params())
async def test_positions_are_computed_for_an_encode_request(halves, name):
    """Its prompt has the placeholder of one item and the token after it."""
    found = with_positions(halves(name))
    items, assembled = found.prepared(all_media(found.family))
    model = model_without_weights(found.renderer.model_config)
    for (modality, made), place in zip(items, assembled.placeholders, strict=True):
        token_ids = assembled.token_ids[place.offset : place.end + 1]
        alone = msgspec.structs.replace(place, offset=0)
        features = [spec(modality, decode_item(made.header, made.buffers), alone)]
        positions, _ = model.get_mrope_input_positions(token_ids, features)
        assert positions.shape == (3, len(token_ids))


def spec(modality, item, place):
    return MultiModalFeatureSpec(data=item, modality=modality, identifier="a", mm_position=to_vllm_range(place))


def model_without_weights(model_config):
    model_class = get_model_cls(model_config)
    model = model_class.__new__(model_class)
    torch.nn.Module.__init__(model)
    model.config = getattr(model_config.hf_config, "thinker_config", model_config.hf_config)
    return model


async def test_form_of_embeddings_that_the_model_accepts_is_found(case):
    ((found,),) = await case.engine._ask("medialane_try_embeds", timeout_s=60)  # of a worker's start only
    accepted = (found["fields"], found["width"])
    assert accepted == CLIENT_EMBEDS.get(case.halves.family.name, accepted)
    assert bool(found["fault"]) == (not found["fields"]) == (not found["width"])


async def test_loaded_embeddings_give_the_answer_of_encoded_ones(case):
    family = case.halves.family
    assert case.engine.card.encoder.widths.keys() == family.limits.keys()
    prompt = case.prompt(*all_media(family))
    await case.forget()
    expected = await case.answer(prompt)
    await case.forget()
    before = await case.counts()
    found = [case.reserved(feature) for feature in prompt.features]
    assert await case.answer(prompt, [EmbeddingUse(tensor, is_filled=False) for _, tensor in found]) == expected
    assert all(case.arena.is_completed(reservation) for reservation, _ in found)
    await case.forget()
    known = [msgspec.structs.replace(feature, tensors=()) for feature in prompt.features]
    uses = [EmbeddingUse(tensor, is_filled=True) for _, tensor in found]
    assert await case.answer(msgspec.structs.replace(prompt, features=tuple(known)), uses) == expected
    after = await case.counts()
    num = len(found)
    assert after == EmbeddingCounts(before.loaded + num, before.encoded + num, before.saved + num)
    for reservation, _ in found:
        reservation.abandon()
