"""Behaviour of the fake alone; that of all engines is in tests/contract/test_vllm_engine_contract.py."""

import asyncio
import time
from contextlib import aclosing

import msgspec
import pytest

from fake_engine import FAKE_CARD, FakeEngine, FakeParams
from medialane.types.errors import GenerationFailed, WorkerLost
from medialane.types.feature import MediaPayload, MediaSpan, PlaceholderRange
from medialane.types.kv_blocks import prompt_block_ids
from medialane.types.request import EngineRequest, ExpandedPrompt
from medialane.worker.block_table import BlockTable


def request(max_tokens=3, **params):
    return EngineRequest("r", ExpandedPrompt([1, 2]), msgspec.json.encode(FakeParams(max_tokens, **params)))


async def test_dead_engine_fails_everything_until_it_recovers():
    engine = FakeEngine()
    engine.die()
    with pytest.raises(WorkerLost):
        await engine.ping(1)
    with pytest.raises(WorkerLost):
        await anext(engine.generate(request(), []))
    engine.die(GenerationFailed("slow"))
    with pytest.raises(GenerationFailed):
        await engine.ping(1)
    engine.recover()
    await engine.ping(1)


async def test_dying_engine_fails_requests_in_flight():
    engine = FakeEngine()
    async with aclosing(engine.generate(request(100, token_s=0.001), [])) as deltas:
        await anext(deltas)
        engine.die()
        with pytest.raises(WorkerLost):
            await anext(deltas)
    assert engine.num_reading == 0


async def test_tensors_are_read_slightly_after_the_output_ends():
    engine = FakeEngine(release_s=0.05)
    deltas = engine.generate(request(100), [])
    await anext(deltas)
    closing = asyncio.create_task(deltas.aclose())
    await asyncio.sleep(0)
    assert engine.num_reading == 1
    await closing
    assert engine.num_reading == 0


class Blocks:
    """The block events of an engine."""

    def __init__(self, engine):
        self.batches = []
        self.table = BlockTable(FAKE_CARD.block_size)
        engine.watch_blocks(self._heard)

    def _heard(self, batch):
        self.batches.append(batch)
        self.table.apply(batch.events)


async def prefill(engine, token_ids, *media, cache_salt=None):
    """The prompt's cached tokens as reported by the engine."""
    prompt = ExpandedPrompt(token_ids, media)
    sent = EngineRequest("r", prompt, msgspec.json.encode(FakeParams(1)), cache_salt=cache_salt)
    async with aclosing(engine.generate(sent, [[] for _ in media])) as deltas:
        (only,) = [d async for d in deltas]
    return only.num_cached_tokens


async def test_blocks_of_prompts_are_reported_and_reused():
    engine = FakeEngine()
    blocks = Blocks(engine)
    prompt = list(range(100))
    assert await prefill(engine, prompt) == 0
    assert blocks.table.held() == prompt_block_ids(prompt, block_size=16).tolist()
    assert await prefill(engine, prompt[:50] + [7] * 50) == 48
    assert await prefill(engine, prompt) == 96
    assert await prefill(engine, prompt[:96]) == 80
    assert len(blocks.batches) == 3  # the last token is always computed, so its block is stored twice, as in vLLM
    assert abs(blocks.batches[0].time_s - time.time()) < 60


async def test_block_ids_depend_on_media_and_salt():
    engine = FakeEngine()
    blocks = Blocks(engine)
    prompt, item = list(range(64)), MediaPayload("image", "h", b"", (), placeholder=PlaceholderRange(10, 22))
    await prefill(engine, prompt, item, cache_salt="s")
    ids = prompt_block_ids(prompt, block_size=16, media=[MediaSpan("h", 10, 22)], cache_salt="s")
    assert blocks.table.held() == ids.tolist()
    assert await prefill(engine, prompt, item) == 0
