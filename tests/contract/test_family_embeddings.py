"""Embeddings of eight families, in a real engine each: saved once, then loaded with the items' small fields alone.

Starting an engine takes most of a family's half a minute. The families that `make test` starts are those whose items
differ most: embeddings wider than the language model's, masks, timestamps; and three modalities in one prompt.
"""

import os
from contextlib import aclosing

import msgspec
import pytest
import pytest_asyncio
from kv_watch import start_engine
from prompt_maker import bytes_of, request
from test_family_preparation import Halves
from tiny_families import FAMILIES

from medialane.arena import Arena, ArenaConfig, describe, layout
from medialane.core.admin import ResetEncoderCache, ResetPrefixCache
from medialane.core.feature import EmbeddingUse, MediaPayload
from medialane.core.request import EmbeddingCounts, ExpandedPrompt
from medialane.core.tensor import InlineTensor, TensorSpec
from medialane.vllm_bridge.tiny_model import cache_folder

pytestmark = [pytest.mark.vllm, pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(300)]

_ALWAYS = ("qwen3_vl", "qwen2_5_omni")


class Case:
    """An engine of one family, and an arena that it has mapped."""

    def __init__(self, engine, halves, arena):
        self.engine = engine
        self.arena = arena
        self._halves = halves
        self._num_requests = 0

    def prompt(self, *parts):
        items, assembled = self._halves.prepared(parts)
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
    params=[pytest.param(name, marks=() if name in _ALWAYS else pytest.mark.slow) for name in FAMILIES],
)
async def case(request, family_renderer):
    family = FAMILIES[request.param]
    engine = start_engine(family.build(cache_folder(os.environ)), *family.flags)
    arena = Arena.create(ArenaConfig(size_bytes=64 << 20))
    try:
        await engine.learn_encoder()
        assert engine.encode_cache_reason == ""
        assert await engine.attach_arena(arena.id, arena.nonce)
        yield Case(engine, Halves(family, family_renderer(family.name)), arena)
    finally:
        await engine.close()
        arena.close()


async def test_loaded_embeddings_give_the_answer_of_encoded_ones(case):
    limits = case._halves.family.limits
    assert case.engine.card.encoder.widths.keys() == limits.keys()
    media = [*limits] + [f"{modality}2" for modality, limit in limits.items() if limit > 1]
    prompt = case.prompt("Look: ", *media, " and say.")
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
