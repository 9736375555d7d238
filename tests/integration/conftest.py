"""A real arena and real preparers with the fake processor."""

import gc
import os
import tempfile
from contextlib import AsyncExitStack

import pytest
from gateway_parts import FakeWorker, Parts

from builders import MIB, checked_arena
from medialane.gateway import GatewayConfig
from medialane.media import MediaConfig
from medialane.prepare import PrepareConfig, PreparerPool
from poison import poison_freed


@pytest.fixture
def arena(monkeypatch):
    """What it frees is overwritten. A test that leaves a pin or a reservation fails."""
    poison_freed(monkeypatch)
    with checked_arena(32 * MIB) as arena:
        yield arena


@pytest.fixture
async def preparers(arena):
    pool = PreparerPool(
        PrepareConfig(num_preparers=2, start_timeout_s=15),
        factory="medialane.testing.fake_processor:build_processor",
        factory_config=b"{}",
        arena=arena,
        media=MediaConfig(),
        environment=os.environ,
    )
    await pool.start()
    yield pool
    await pool.close()


@pytest.fixture
async def worker(arena):
    """A worker over a fake engine, alone."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        worker = FakeWorker(f"{folder}/w.sock", arena=arena)
        await worker.start()
        yield worker
        await worker.close()
    gc.collect()


@pytest.fixture
async def open_parts(arena, preparers):
    """Opens a gateway with some workers, which `worker` describes; `parts` are its parts that differ, other settings
    its own."""
    async with AsyncExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(dir="/tmp"))

        async def start(count, *, worker=None, parts=None, **config):
            workers = [FakeWorker(f"{folder}/{n}.sock", arena=arena, **(worker or {})) for n in range(count)]
            for one in workers:
                stack.push_async_callback(one.close)
                await one.start()
            settings = GatewayConfig(reconnect_initial_s=0.01, reconnect_max_s=0.05, **config)
            opened = Parts(arena, preparers, workers, config=settings, **(parts or {}))
            return await stack.enter_async_context(opened), workers

        yield start
    gc.collect()
