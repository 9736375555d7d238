"""Serves simulated workers in one process: one event loop, and a listener and an engine per worker."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence

import msgspec

from medialane.runtime.resources import MemoryUse
from medialane.runtime.stop import DRAIN_TIMEOUT_S, stopped_by_signals
from medialane.testing.simulated.config import SimulatedConfig
from medialane.testing.simulated.engine import SimulatedEngine
from medialane.types.errors import StartupFailed
from medialane.wire.address import TcpAddress, consecutive_ports, parse_address
from medialane.wire.config import RpcConfig
from medialane.wire.protocol import Hello, Welcome
from medialane.worker.config import WorkerConfig
from medialane.worker.host_arena import HostArena
from medialane.worker.serve import default_name, serve_until
from medialane.worker.worker import Worker

#: Placeholder of the worker's number in an address.
NUMBER = "{}"


class SimulatedWorker(Worker):
    """A worker that is compatible with any gateway's features, since its engine never reads them."""

    async def register(self, hello: Hello) -> Welcome:
        """Like `Worker.register`, with the gateway's processor settings in our card."""
        welcome = await super().register(msgspec.structs.replace(hello, processor={}))
        card = msgspec.structs.replace(welcome.card, processor=hello.processor)
        return msgspec.structs.replace(welcome, card=card)


async def serve_simulated(
    config: SimulatedConfig,
    worker: WorkerConfig,
    rpc: RpcConfig,
    *,
    model: str,
    listen: str | None,
    arena_directory: str,
    host_arena: HostArena | None = None,
    gateways: Sequence[TcpAddress] = (),
    drain_timeout_s: float = DRAIN_TIMEOUT_S,
) -> int:
    """Serve `config.num_workers` workers of `model` until SIGTERM or SIGINT (0), or until one fails (EXIT_ENGINE_LOST).

    Raises StartupFailed if it cannot listen at an address.
    """
    memory = MemoryUse(lambda: {"worker": [os.getpid()]})
    addresses = [None] * config.num_workers if listen is None else addresses_of(listen, config.num_workers)
    with stopped_by_signals() as stop:

        async def serve_one(number: int, address: str | None) -> int:
            settings = _of_worker(worker, number) if number else worker
            engine = SimulatedEngine(config, model=model)
            serving = SimulatedWorker(
                engine,
                settings,
                arena_directory=arena_directory,
                host_arena=host_arena,
                memory=dict if number else memory.read,  # one process: counted once
            )
            try:
                return await serve_until(
                    stop,
                    serving,
                    engine,
                    address,
                    config=settings,
                    rpc=rpc,
                    gateways=gateways,
                    drain_timeout_s=drain_timeout_s,
                )
            finally:
                stop.asked.set()  # one end stops all: the process exits and can be restarted

        try:
            async with asyncio.TaskGroup() as tasks:
                serving = [tasks.create_task(serve_one(i, address)) for i, address in enumerate(addresses)]
        except* StartupFailed as group:
            raise group.exceptions[0] from None
    return max(task.result() for task in serving)


def _of_worker(config: WorkerConfig, number: int) -> WorkerConfig:
    """Return the settings of a further worker of this process: a name and a port of its own."""
    name = f"{config.name or default_name(config)}/{number}"
    port = config.metrics_port + number if config.metrics_port else 0
    return msgspec.structs.replace(config, name=name, metrics_port=port)


def addresses_of(listen: str, num_workers: int) -> list[str]:
    """Return the address of each worker: `{}` is replaced by its number, or ports count up. Raises StartupFailed."""
    target = parse_address(listen.replace(NUMBER, "0"), "--listen")
    if num_workers == 1 or NUMBER in listen:
        return [listen.replace(NUMBER, str(number)) for number in range(num_workers)]
    if isinstance(target, TcpAddress):
        return consecutive_ports(listen, num_workers, "--listen")
    raise StartupFailed("several workers need different addresses: use {} for the worker's number in --listen")
