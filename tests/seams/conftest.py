"""A real arena and real preparers with the fake processor."""

import gc
import os
import tempfile

import pytest
from gateway_parts import FakeWorker

from builders import MIB, checked_arena
from medialane.media import MediaConfig
from medialane.prepare import PrepareConfig, PreparerPool
from poison import poison_freed


@pytest.fixture
def arena(monkeypatch):
    """What it frees is overwritten. A test that leaves a lease or a reservation fails."""
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
