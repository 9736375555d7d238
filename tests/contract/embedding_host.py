"""An arena that a real engine has mapped, with ranges for embeddings, and requests that save and load them."""

from contextlib import aclosing, asynccontextmanager

import msgspec
import torch
from prompt_maker import bytes_of, request

from medialane.arena import Arena, ArenaConfig, describe, layout
from medialane.types.admin import ResetEncoderCache, ResetPrefixCache
from medialane.types.feature import EmbeddingUse
from medialane.types.request import EmbeddingCounts
from medialane.types.tensor import TensorSpec

MAX_TOKENS = 8

_ids = iter(range(10**6))


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


def without_tensors(prompt, *indices):
    features = list(prompt.features)
    for index in indices:
        features[index] = msgspec.structs.replace(features[index], tensors=())
    return msgspec.structs.replace(prompt, features=tuple(features))


async def answer(engine, prompt, uses=(), *, rank=None, without_media=False, **params):
    sent = request(f"e-{next(_ids)}", prompt, **({"max_tokens": MAX_TOKENS} | params))
    sent = msgspec.structs.replace(sent, data_parallel_rank=rank, without_media=without_media)
    async with aclosing(engine.generate(sent, bytes_of(prompt), uses)) as deltas:
        return [token async for delta in deltas for token in delta.completions[0].token_ids]


async def counted(engine):
    await engine.ping(30)
    return engine.embedding_counts


async def since(engine, before):
    now = await counted(engine)
    return EmbeddingCounts(*(getattr(now, n) - getattr(before, n) for n in EmbeddingCounts.__struct_fields__))


async def saved(engine, host, prompt, *, rank=None):
    """Save the embeddings of a prompt; return its answer and how to load them."""
    await host.forget()
    found = [host.reserved(feature) for feature in prompt.features]
    tokens = await answer(engine, prompt, [EmbeddingUse(tensor, is_filled=False) for _, tensor in found], rank=rank)
    assert all(host.arena.is_completed(reservation) for reservation, _ in found)
    await host.forget()
    return tokens, [EmbeddingUse(tensor, is_filled=True) for _, tensor in found]


def moved(use, **changes):
    """How to load the embedding from another range: with these `changes`."""
    tensor = use.tensor
    found = msgspec.structs.replace(tensor, range=msgspec.structs.replace(tensor.range, **changes))
    return EmbeddingUse(found, is_filled=True)
