"""The life of a worker's process: listen, watch, stop.

How it stops decides what gateways may believe: one that finds nobody listening at the address reuses every byte that
it handed over. On a signal, requests are failed and cancelled, and the engine releases them; then the engine's
processes are ended, which releases those that it did not confirm in time. Only then this process stops listening. When
the engine is lost, nothing could be released: its processes are ended first.
"""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Iterator
from contextlib import contextmanager

from medialane.core.errors import WorkerLost
from medialane.rpc import RpcConfig, RpcServer
from medialane.worker.config import WorkerConfig
from medialane.worker.engine import Engine
from medialane.worker.worker import Worker

logger = logging.getLogger(__name__)

#: Exit status of a worker whose engine is lost: EX_SOFTWARE of sysexits.h. Start it again.
EXIT_ENGINE_LOST = 70


async def serve_worker(
    config: WorkerConfig, rpc: RpcConfig, engine: Engine, address: str, *, arena_directory: str
) -> int:
    """Serve `engine` at `address` until SIGTERM or SIGINT (0) or the engine is lost (EXIT_ENGINE_LOST).

    Takes the engine over: it is closed at the end, whatever happens. Raises StartupFailed when the address cannot be
    had.
    """
    worker = Worker(engine, config, arena_directory=arena_directory)
    with stopped_by_signals() as stop:
        return await serve_until(stop, worker, engine, address, config=config, rpc=rpc)


@contextmanager
def stopped_by_signals() -> Iterator[asyncio.Event]:
    """An event that SIGTERM and SIGINT set, meanwhile."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    try:
        yield stop
    finally:
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)


async def serve_until(
    stop: asyncio.Event, worker: Worker, engine: Engine, address: str, *, config: WorkerConfig, rpc: RpcConfig
) -> int:
    """Serve one worker until `stop` is set (0) or its engine is lost; else as `serve_worker`. Closes worker and
    engine."""
    server = RpcServer(worker, rpc)
    lost = False
    try:
        listening = await server.serve(address)
        logger.info("worker %s listens at %s", worker.worker_id, listening)
        lost = await _is_lost(worker, stop)
    finally:
        if lost:
            await _close(engine, config.stop_timeout_s)
        await server.stop()
        await _close(engine, config.stop_timeout_s)
        await server.close()
        worker.close()
    return EXIT_ENGINE_LOST if lost else 0


async def _is_lost(worker: Worker, stop: asyncio.Event) -> bool:
    """Wait for the stop, False, or for the loss of the engine, True."""
    watching = asyncio.create_task(worker.watch(), name="engine watch")
    stopping = asyncio.create_task(stop.wait(), name="stop")
    try:
        await asyncio.wait({watching, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if not watching.done():
            return False
        error = watching.exception()
        if not isinstance(error, WorkerLost):
            watching.result()
        logger.critical("%s: this worker exits", error)
        return True
    finally:
        watching.cancel()
        stopping.cancel()
        await asyncio.gather(watching, stopping, return_exceptions=True)


async def _close(engine: Engine, timeout_s: float) -> None:
    try:
        async with asyncio.timeout(timeout_s):
            await engine.close()
    except TimeoutError:
        logger.error("the engine has not stopped within %g s", timeout_s)
