"""The arena that a worker has mapped follows the store of its host."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

from fake_engine import FAKE_CARD, FakeEngine
from medialane.arena import Arena
from medialane.gateway.workers import RpcClient
from medialane.types.tensor import ArenaOffer
from medialane.wire import Hello, RpcConfig
from medialane.worker import Worker, WorkerConfig, serve_worker
from waiting import eventually


class SlowEngine(FakeEngine):
    """Maps an arena when `mapped` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.mapped = asyncio.Event()

    async def attach_arena(self, arena: str, nonce: bytes) -> bool:
        attached = await super().attach_arena(arena, nonce)
        await self.mapped.wait()
        return attached


class Host:
    """A `HostArena` whose store is found and lost by the test."""

    client_id = ""

    def __init__(self, first: ArenaOffer | None = None) -> None:
        self._first = first

    def watch(self, listener) -> None:
        self.tell = listener
        listener(self._first)


def num_mappings(arena: Arena) -> int:
    return Path("/proc/self/maps").read_text().count(arena.path.name)


async def test_arena_of_a_store_that_is_lost_while_it_is_being_mapped_is_unmapped(arena):
    engine, host, before = SlowEngine(), Host(), num_mappings(arena)
    worker = Worker(engine, WorkerConfig(), arena_directory=str(arena.path.parent), host_arena=host)
    reported: list[str | None] = []
    worker.watch_arena(reported.append)
    watching = asyncio.create_task(worker.watch())
    host.tell(ArenaOffer(arena.id, arena.nonce))
    await eventually(lambda: engine.arenas == [arena.id])
    host.tell(None)
    engine.mapped.set()
    await eventually(lambda: engine.arenas == [])
    assert num_mappings(arena) == before
    assert reported == [None]
    watching.cancel()
    await asyncio.wait([watching])
    worker.close()


async def test_gateways_find_a_worker_when_it_has_mapped_the_arena(arena, tmp_path):
    """Otherwise the media of their first requests would be sent in messages."""
    engine, listening = SlowEngine(), tmp_path / "w"
    serving = asyncio.create_task(
        serve_worker(
            WorkerConfig(),
            RpcConfig(),
            engine,
            f"unix:{listening}",
            arena_directory=str(arena.path.parent),
            host_arena=Host(ArenaOffer(arena.id, arena.nonce)),
        )
    )
    await eventually(lambda: engine.arenas == [arena.id])
    assert not listening.exists()
    engine.mapped.set()
    await eventually(listening.exists)
    hello = Hello(gateway_id="g", processor=FAKE_CARD.processor)
    client = await RpcClient.connect(f"unix:{listening}", hello, RpcConfig())
    await eventually(lambda: client.reports.arena == arena.id)
    await client.close()
    os.kill(os.getpid(), signal.SIGTERM)
    assert await serving == 0
