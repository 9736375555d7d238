"""When a worker calls its engine stalled: it hangs, and is not in a long step."""

import asyncio

import pytest

from fake_engine import FakeEngine
from medialane.types.errors import WorkerLost
from medialane.worker import Worker, WorkerConfig
from waiting import eventually

STALL_S = 0.4


@pytest.fixture
async def engine():
    return FakeEngine()


@pytest.fixture
async def watched(engine):
    watching = []

    def make(**config):
        config = WorkerConfig(**{"ping_interval_s": 0.02, "stall_timeout_s": STALL_S, **config})
        worker = Worker(engine, config, arena_directory="/dev/shm")
        watching.append(asyncio.create_task(worker.watch()))
        return worker, watching[-1]

    yield make
    for task in watching:
        task.cancel()
    await asyncio.wait(watching)


async def test_engine_that_hangs_is_stalled_until_it_replies(engine, watched):
    worker, _ = watched()
    await eventually(lambda: engine.num_pings > 1)
    started = asyncio.get_running_loop().time()
    engine.stall()
    await eventually(lambda: worker.is_stalled)
    assert STALL_S / 2 <= asyncio.get_running_loop().time() - started < STALL_S + 2
    assert worker.is_stalled
    engine.resume()
    await eventually(lambda: not worker.is_stalled)


async def test_engine_in_a_long_step_is_not_stalled(engine, watched):
    worker, _ = watched()
    await eventually(lambda: engine.num_pings > 1)
    engine.stall(computing=True)
    await asyncio.sleep(3 * STALL_S)  # time: in which one that hangs would be stalled
    assert not worker.is_stalled


async def test_engine_that_computes_without_end_is_stalled_by_a_missed_ping_and_lost_by_the_second(engine, watched):
    worker, watching = watched(ping_timeout_s=0.5)
    await eventually(lambda: engine.num_pings > 1)
    engine.stall(computing=True)
    await eventually(lambda: worker.is_stalled)
    assert not watching.done()
    with pytest.raises(WorkerLost, match="the engine does not respond"):
        await watching


async def test_stall_that_lasts_for_one_ping_loses_the_worker(engine, watched):
    worker, watching = watched(ping_timeout_s=2 * STALL_S)
    await eventually(lambda: engine.num_pings > 1)
    num_pings = engine.num_pings
    engine.stall()
    with pytest.raises(WorkerLost, match="the engine does not respond"):
        await watching
    assert worker.is_stalled
    assert engine.num_pings <= num_pings + 1
