"""From a gateway to a worker of another host: the worker's own store copies the media, once."""

from __future__ import annotations

import asyncio
import gc
import json
import tempfile
from contextlib import AsyncExitStack

import pytest
from gateway_parts import FakeWorker, Parts, png, prompt
from host_store import HostStore

from medialane.arena import Arena, ArenaConfig
from medialane.gateway import GatewayConfig, open_scope
from medialane.transfer import TransferConfig
from waiting import eventually

FAST = {"reconnect_initial_s": 0.01, "reconnect_max_s": 0.05}


class OtherHost:
    """An arena directory of its own, with a store and workers: nothing there maps the arena of the gateway's host."""

    def __init__(self, folder: str, arena: Arena, store: HostStore, stack: AsyncExitStack) -> None:
        self.arena = arena
        self.store = store
        self._folder = folder
        self._stack = stack
        self._num_workers = 0

    async def worker(self, **engine) -> FakeWorker:
        self._num_workers += 1
        worker = FakeWorker(f"{self._folder}/{self._num_workers}.sock", arena=self.arena, **engine)
        self._stack.push_async_callback(worker.close)
        await worker.start()
        return worker

    @property
    def num_pulls(self) -> int:
        return self.store.pulls.stats.num_pulls.get("tcp", 0)


@pytest.fixture
async def other_host():
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="host-") as folder:
        arena = Arena.create(ArenaConfig(size_bytes=32 << 20, directory=folder))
        async with AsyncExitStack() as stack:
            stack.callback(arena.close)
            store = await stack.enter_async_context(HostStore(arena, None, None))
            yield OtherHost(folder, arena, store, stack)
            await eventually(lambda: arena.stats().num_leases == 0, "leases end with their requests")
        assert arena.stats().num_reservations == 0
    gc.collect()


def parts_for(arena, preparers, workers, *, transport="auto", stage="auto"):
    config = GatewayConfig(stage=stage, **FAST)
    return Parts(arena, preparers, workers, config=config, transfer=TransferConfig(transport=transport))


def transfer_of(scope):
    report = json.loads(scope.report())
    return report["stage"], report["transport"]


@pytest.mark.parametrize("stage", ["features", "decoded", "url"])
@pytest.mark.parametrize("transport", ["auto", "tcp"])
async def test_every_kind_of_entry_is_pulled_and_gives_the_same_output(
    arena, preparers, worker, other_host, stage, transport
):
    images = [png(), png(seed=1), png()]
    async with parts_for(arena, preparers, [worker], stage=stage) as near:
        with open_scope():
            expected = await near.answer(prompt(*images))
    async with parts_for(arena, preparers, [await other_host.worker()], stage=stage, transport=transport) as far:
        with open_scope() as scope:
            assert await far.answer(prompt(*images)) == expected
        assert transfer_of(scope) == (stage, "pull")
        assert other_host.num_pulls == 2, "the repeated image is pulled once"


async def test_second_worker_of_a_host_costs_no_second_pull(arena, preparers, other_host):
    workers = [await other_host.worker(), await other_host.worker()]
    async with parts_for(arena, preparers, workers[:1]) as first, parts_for(arena, preparers, workers[1:]) as second:
        with open_scope():
            expected = await first.answer(prompt(png()))
        with open_scope():
            assert await second.answer(prompt(png())) == expected
    assert other_host.num_pulls == 1


async def test_concurrent_requests_pull_an_entry_once(arena, preparers, other_host):
    async with parts_for(arena, preparers, [await other_host.worker(), await other_host.worker()]) as parts:

        async def one(number):
            with open_scope():
                return await parts.answer(prompt(png()), f"r{number}")

        answers = await asyncio.gather(*[one(number) for number in range(8)])
    assert len({tuple(answer) for answer in answers}) == 1
    assert other_host.num_pulls == 1
