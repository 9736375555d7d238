"""Pooling requests through gateway, RPC and worker: one tensor, whatever happens on the way."""

import asyncio
import gc
import tempfile
from contextlib import AsyncExitStack, aclosing

import msgspec
import numpy as np
import pytest
from gateway_parts import FakeWorker, Parts, png, prompt, request

from medialane.gateway import GatewayConfig, open_scope
from medialane.types.errors import TooLarge
from medialane.wire import RpcConfig
from waiting import eventually

FAST = GatewayConfig(reconnect_initial_s=0.01, reconnect_max_s=0.05)


@pytest.fixture
async def open_parts(arena, preparers):
    async with AsyncExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(dir="/tmp"))

        async def start(count, **parts):
            workers = [FakeWorker(f"{folder}/{number}.sock", arena=arena) for number in range(count)]
            for worker in workers:
                stack.push_async_callback(worker.close)
                await worker.start()
            return await stack.enter_async_context(Parts(arena, preparers, workers, config=FAST, **parts)), workers

        yield start
    gc.collect()


async def pooled(parts, asked, **params):
    """The tensor of a request with these media."""
    prepared = await parts.gateway.prepare(asked)
    sent = msgspec.structs.replace(request("r", prepared.token_ids, **params), is_pooling=True)
    async with aclosing(parts.gateway.generate(sent, prepared)) as deltas:
        (found,) = [delta async for delta in deltas]
    return np.frombuffer(found.pooled.data, np.uint8).reshape(found.pooled.spec.shape)


async def test_media_are_handed_over_and_the_output_is_one_tensor(open_parts):
    parts, (worker,) = await open_parts(1)
    with open_scope():
        one, again = [await pooled(parts, prompt(png()), max_tokens=3) for _ in range(2)]
        other = await pooled(parts, prompt(png(seed=1)), max_tokens=3)
    assert one.shape == (3, 32)
    assert (one == again).all()
    assert (one != other).any()
    await eventually(lambda: not worker.engine.num_reading)


@pytest.mark.parametrize("loss", ["connection", "engine"])
async def test_request_whose_worker_is_lost_halfway_is_answered_by_another(open_parts, loss):
    """Parts that have arrived are dropped: nothing was sent to the client."""
    parts, workers = await open_parts(2)
    with open_scope():
        expected = await pooled(parts, prompt(png()), max_tokens=4)
        running = asyncio.create_task(pooled(parts, prompt(png()), max_tokens=4, token_s=0.4))
        await eventually(lambda: any(worker.engine.num_reading for worker in workers))
        await asyncio.sleep(0.6)  # time: the first of four parts has been sent, the last will be a second later
        (first,) = [worker for worker in workers if worker.engine.num_reading]
        if loss == "engine":
            first.engine.die()
        else:
            first.drop_connections()
        assert (await running == expected).all()
    assert parts.count("medialane_migrations_total") == 1


async def test_output_above_the_limit_fails_its_request_alone(open_parts):
    parts, (worker,) = await open_parts(1, rpc=RpcConfig(max_pooled_bytes=100))
    with open_scope():
        with pytest.raises(TooLarge):
            await pooled(parts, prompt(png()), max_tokens=4)
        assert (await pooled(parts, prompt(png()), max_tokens=3)).shape == (3, 32)
    await eventually(lambda: not worker.engine.num_reading)


async def test_cancelled_request_is_aborted_and_its_media_released(open_parts):
    parts, (worker,) = await open_parts(1)
    with open_scope():
        running = asyncio.create_task(pooled(parts, prompt(png()), max_tokens=1000, token_s=0.1))
        await eventually(lambda: worker.engine.num_reading)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
    await eventually(lambda: not worker.engine.num_reading)
    await eventually(lambda: parts.num_held == 0)
