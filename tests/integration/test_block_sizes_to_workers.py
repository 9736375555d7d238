"""Workers over simulated engines whose KV blocks differ in size, behind one gateway: each prompt returns to the worker
that has cached it, and the engines hit what the router has predicted."""

from __future__ import annotations

import gc
import tempfile
from contextlib import AsyncExitStack

import msgspec
import pytest
from gateway_parts import FakeWorker, Parts

from medialane.gateway import open_scope
from medialane.testing.simulated import SimulatedConfig, SimulatedEngine
from medialane.types.request import EngineRequest, ExpandedPrompt
from waiting import eventually

SIZES = (16, 32)
#: 6 blocks of 32 tokens, 12 or 13 of 16.
NUM_TOKENS = 220


class Engine(SimulatedEngine):
    attaches = True

    def __init__(self, block_size: int) -> None:
        config = SimulatedConfig(block_size=block_size, speedup=100.0)
        super().__init__(config, model="fake")


@pytest.fixture
async def parts(arena, preparers):
    async with AsyncExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(dir="/tmp"))
        workers = []
        for size in SIZES:
            workers.append(FakeWorker(f"{folder}/{size}.sock", arena=arena, kind=Engine, block_size=size))
            stack.push_async_callback(workers[-1].close)
            await workers[-1].start()
        yield await stack.enter_async_context(Parts(arena, preparers, workers))
    gc.collect()


async def answer(parts, seed, suffix=()):
    """Answer a prompt; return the record of its attempt."""
    tokens = [seed * 1000 + number for number in range(NUM_TOKENS)] + list(suffix)
    params = msgspec.msgpack.encode({"max_tokens": 1, "output_kind": 1})
    with open_scope() as scope:
        await parts.generate(EngineRequest(f"r{seed}", ExpandedPrompt(tokens), params), None)
    return scope.record.attempts[-1]


async def test_prompts_return_to_the_worker_that_caches_them_at_its_block_size(parts):
    sizes = {worker.address: size for worker, size in zip(parts.workers, SIZES, strict=True)}
    first = [await answer(parts, seed) for seed in range(6)]
    used = [sizes[found.decision.worker_id] for found in first]
    assert set(used) == set(SIZES)
    num_blocks = sum(NUM_TOKENS // size for size in used)
    await eventually(lambda: parts.gateway.routes.stats().num_entries == num_blocks)
    for seed in range(6):
        found = await answer(parts, seed, suffix=range(900_000, 900_100))
        assert found.decision.worker_id == first[seed].decision.worker_id
        assert found.decision.cached_tokens == NUM_TOKENS // used[seed] * used[seed] == found.engine_cached_tokens
    counts = parts.router.predictions
    assert (counts.num_fewer, counts.num_more) == (0, 0)
