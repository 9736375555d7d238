"""What only the fake does; what all engines do is in tests/contract/test_vllm_engine_contract.py."""

import asyncio
from contextlib import aclosing

import msgspec
import pytest

from medialane.core.errors import GenerationFailed, WorkerLost
from medialane.core.request import EngineRequest, ExpandedPrompt
from medialane.worker import FakeEngine, FakeParams


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


async def test_engine_that_dies_fails_what_is_under_way():
    engine = FakeEngine()
    async with aclosing(engine.generate(request(100, token_s=0.001), [])) as deltas:
        await anext(deltas)
        engine.die()
        with pytest.raises(WorkerLost):
            await anext(deltas)
    assert engine.num_reading == 0


async def test_tensors_are_read_a_little_longer_than_the_answer_lasts():
    engine = FakeEngine(release_s=0.05)
    deltas = engine.generate(request(100), [])
    await anext(deltas)
    closing = asyncio.create_task(deltas.aclose())
    await asyncio.sleep(0.01)
    assert engine.num_reading == 1
    await closing
    assert engine.num_reading == 0
