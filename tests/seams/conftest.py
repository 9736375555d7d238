"""A real arena and real preparers with the fake processor."""

import gc
import os
import tempfile

import pytest
from gateway_parts import FakeWorker

from medialane.arena import Arena, ArenaConfig
from medialane.media import MediaConfig
from medialane.prepare import PrepareConfig, PreparerPool
from poison import poison_freed


@pytest.fixture
def arena(monkeypatch):
    """What it frees is overwritten. A test that leaves a lease or a reservation fails."""
    poison_freed(monkeypatch)
    arena = Arena.create(ArenaConfig(size_bytes=32 << 20))
    yield arena
    stats = arena.stats()
    arena.close()
    gc.collect()  # a traceback references frames, which reference views of the arena
    assert (stats.num_leases, stats.num_reservations) == (0, 0)


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
