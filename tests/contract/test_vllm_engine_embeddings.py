"""Embeddings in the real engine: what its encoder computed is saved in an arena, and loaded instead of encoding."""

from contextlib import aclosing, asynccontextmanager

import msgspec
import pytest
import pytest_asyncio
import torch
from prompt_maker import PromptMaker, bytes_of, pixels, request

from medialane.arena import Arena, ArenaConfig, describe, layout
from medialane.core.admin import ResetEncoderCache, ResetPrefixCache
from medialane.core.feature import EmbeddingUse
from medialane.core.request import EmbeddingCounts
from medialane.core.tensor import TensorSpec

pytestmark = [pytest.mark.vllm, pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(300)]

MAX_TOKENS = 8

_ids = iter(range(10**6))


@pytest.fixture(scope="module")
def maker(renderer):
    return PromptMaker(renderer)


class Host:
    """An arena that the engine has mapped, with ranges for embeddings."""

    def __init__(self, engine, arena):
        self.engine = engine
        self.arena = arena
        self.reservations = []

    def reserved(self, feature, **changes):
        """A range for the embedding of an item, and its tensor there."""
        card = self.engine.card.encoder
        spec = TensorSpec(card.dtype, (feature.placeholder.num_embeds, card.widths[feature.modality]))
        spec = msgspec.structs.replace(spec, **changes)
        reservation = self.arena.reserve(layout([spec])[1], "embedded")
        self.reservations.append(reservation)
        (tensor,) = describe(reservation.range, [spec])
        return reservation, tensor

    def values(self, tensor):
        data = self.arena.view.tensor(tensor)
        return torch.frombuffer(bytearray(data), dtype=torch.bfloat16).view(tensor.spec.shape)

    async def forget(self):
        """Have the engine forget the items of all requests, but not the arena."""
        assert await self.engine.administer(ResetPrefixCache())
        await self.engine.administer(ResetEncoderCache())


@asynccontextmanager
async def host_of(engine):
    arena = Arena.create(ArenaConfig(size_bytes=64 << 20))
    host = Host(engine, arena)
    try:
        assert await engine.attach_arena(arena.id, arena.nonce)
        yield host
    finally:
        for reservation in host.reservations:
            reservation.abandon()
        await engine.detach_arena(arena.id)
        arena.close()


@pytest_asyncio.fixture(loop_scope="session")
async def host(vllm_engine):
    async with host_of(vllm_engine) as found:
        await found.forget()
        yield found


def without_tensors(prompt, *indices):
    features = list(prompt.features)
    for index in indices:
        features[index] = msgspec.structs.replace(features[index], tensors=())
    return msgspec.structs.replace(prompt, features=tuple(features))


async def answer(engine, prompt, uses=(), **params):
    sent = request(f"e-{next(_ids)}", prompt, **({"max_tokens": MAX_TOKENS} | params))
    async with aclosing(engine.generate(sent, bytes_of(prompt), uses)) as deltas:
        return [token async for delta in deltas for token in delta.completions[0].token_ids]


async def counted(engine):
    await engine.ping(30)
    return engine.embedding_counts


async def since(engine, before):
    now = await counted(engine)
    return EmbeddingCounts(*(getattr(now, n) - getattr(before, n) for n in EmbeddingCounts.__struct_fields__))


async def test_embedding_that_was_saved_is_loaded_instead_of_encoding(vllm_engine, maker, host):
    array = pixels(300, 200, 40)
    prompt = maker.inline(array)
    expected = await answer(vllm_engine, prompt)
    await host.forget()
    reservation, tensor = host.reserved(prompt.features[0])
    before = await counted(vllm_engine)
    assert await answer(vllm_engine, prompt, [EmbeddingUse(tensor, is_filled=False)]) == expected
    assert await since(vllm_engine, before) == EmbeddingCounts(encoded=1, saved=1)
    assert host.arena.is_completed(reservation)
    await host.forget()
    known = without_tensors(prompt, 0)
    assert await answer(vllm_engine, known, [EmbeddingUse(tensor, is_filled=True)]) == expected
    assert await since(vllm_engine, before) == EmbeddingCounts(loaded=1, encoded=1, saved=1)
