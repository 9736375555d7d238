"""Runs a worker process: listen for gateways or join them, watch the engine, shut down.

On a signal, or when an operator asks for it, the worker drains: gateways are informed, new requests are refused, and
running requests have some time to end. Then they are failed, whereupon the gateways continue them elsewhere, and
cancelled, and the engine releases them; then the engine's processes are terminated. If the engine is lost, it cannot
release anything, so its processes are terminated first. What the requests hold at the store ends with them, or with
this process.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import Coroutine, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from medialane.runtime.phase import enter_phase, show_ready, show_stopping, watched
from medialane.runtime.resources import MemoryUse, group_below
from medialane.runtime.stop import DRAIN_TIMEOUT_S, Stop, stopped_by_signals
from medialane.runtime.tasks import first_of
from medialane.types.errors import WorkerLost
from medialane.wire.address import TcpAddress
from medialane.wire.config import RpcConfig
from medialane.wire.protocol import Join
from medialane.worker.config import WorkerConfig
from medialane.worker.engine import Engine
from medialane.worker.link import RpcServer
from medialane.worker.media import HostArena
from medialane.worker.membership import Membership
from medialane.worker.metrics_server import WorkerStatus, metrics_served
from medialane.worker.worker import Worker

logger = logging.getLogger(__name__)

#: Exit status of a worker whose engine is lost: EX_SOFTWARE of sysexits.h. The worker should be restarted.
EXIT_ENGINE_LOST = 70


async def serve_worker(
    config: WorkerConfig,
    rpc: RpcConfig,
    engine: Engine,
    address: str | None,
    *,
    arena_directory: str,
    host_arena: HostArena | None = None,
    gateways: Sequence[TcpAddress] = (),
    drain_timeout_s: float = DRAIN_TIMEOUT_S,
) -> int:
    """Serve `engine` at `address`, if given, and to `gateways`, which it joins, until it has drained (0), or the engine
    is lost (EXIT_ENGINE_LOST).

    Owns the engine, which is closed in any case. Raises StartupFailed if it cannot listen at the address.
    """
    memory = MemoryUse(lambda: {engine.card.role: [os.getpid()], "engine": group_below()})
    worker = Worker(engine, config, arena_directory=arena_directory, host_arena=host_arena, memory=memory.read)
    with stopped_by_signals() as stop:
        return await serve_until(
            stop, worker, engine, address, config=config, rpc=rpc, gateways=gateways, drain_timeout_s=drain_timeout_s
        )


async def serve_until(
    stop: Stop,
    worker: Worker,
    engine: Engine,
    address: str | None,
    *,
    config: WorkerConfig,
    rpc: RpcConfig,
    gateways: Sequence[TcpAddress] = (),
    drain_timeout_s: float = DRAIN_TIMEOUT_S,
) -> int:
    """Serve one worker until it has drained, after `stop` or a gateway's Drain (0), or its engine is lost
    (EXIT_ENGINE_LOST), like `serve_worker`. Closes worker and engine."""
    server = RpcServer(worker, rpc)
    status = WorkerStatus(worker, engine, server)
    num_ranks = max(1, worker.card.data_parallel_size)
    lost = False
    try:
        async with metrics_served(status, config, num_ranks=num_ranks, registry=worker.registry):
            with suppress(WorkerLost):  # reported by `watch`
                await worker.map_arena()  # before gateways connect
            if gateways:
                enter_phase("joining gateways")
            if address is not None:
                listening = await server.serve(address)
                logger.info("worker %s listens at %s", worker.worker_id, listening)
            membership = _membership(worker, server, gateways, config)
            draining = _drained(stop, worker, server, drain_timeout_s)
            show_ready("serving")
            async with watched(lambda: f"{server.num_gateways} gateways, {server.num_in_flight} requests"):
                lost = await _is_lost(worker, draining, membership)
    finally:
        if lost:
            await _close(engine, config.stop_timeout_s)
        await server.stop(WorkerLost("the worker has lost its engine") if lost else None)
        await _close(engine, config.stop_timeout_s)
        await server.close()
        worker.close()
    return EXIT_ENGINE_LOST if lost else 0


def default_name(config: WorkerConfig) -> str:
    """Return a name that other workers of this cluster do not have. With a metrics port, or in a container, a restarted
    worker has it again."""
    return f"{socket.gethostname()}:{config.metrics_port or os.getpid()}"


def _membership(worker: Worker, server: RpcServer, gateways: Sequence[TcpAddress], config: WorkerConfig) -> Membership:
    name = config.name or default_name(config)
    join = Join(name=name, worker_id=worker.worker_id, card=worker.card)
    if gateways:
        logger.info("worker %s joins gateways as %s", worker.worker_id, name)
    return Membership(gateways, partial(server.join, join=join), config=config)


async def _drained(stop: Stop, worker: Worker, server: RpcServer, timeout_s: float) -> None:
    """Wait until the worker is to stop, and has drained, or is not to wait any longer."""
    await first_of(stop.asked.wait(), worker.draining.wait())
    show_stopping()
    worker.drain()
    await first_of(server.drain(), stop.at_once.wait(), asyncio.sleep(timeout_s))
    if num_left := server.num_in_flight:
        logger.warning("%d requests have not ended while draining: gateways continue them elsewhere", num_left)


async def _is_lost(worker: Worker, draining: Coroutine[Any, Any, None], membership: Membership) -> bool:
    """Stay connected, and wait until the worker has drained (return False) or the engine is lost (return True)."""
    try:
        await first_of(worker.watch(), draining, membership.run())
    except WorkerLost as error:
        logger.critical("%s: exiting", error)
        return True
    return False


async def _close(engine: Engine, timeout_s: float) -> None:
    try:
        async with asyncio.timeout(timeout_s):
            await engine.close()
    except TimeoutError:
        logger.error("the engine did not stop within %g s", timeout_s)
