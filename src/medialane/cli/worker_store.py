"""The store of a worker's host, started by the worker if none runs there (`medialane worker --start-store`)."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from functools import partial

from medialane.cluster.child_process import ChildProcess
from medialane.cluster.process_spec import INTERPRETER
from medialane.config import Config, child_environ, process_environ
from medialane.runtime.owner_lock import try_lock
from medialane.runtime.tasks import Backoff, WatchedTask
from medialane.wire.address import parse_unix
from medialane.wire.listener import has_listener

logger = logging.getLogger(__name__)

#: How often it is checked that the host has a store: another worker, which has started it, may have stopped.
CHECK_S = 1.0
MAX_BACKOFF_S = 30.0
STOP_TIMEOUT_S = 10.0

#: Gateways of other hosts prepare the media: such a store needs no processor of the model.
_FLAGS = ("--stage", "url", "--preparers", "1")


@asynccontextmanager
async def host_store(config: Config, model: str, address: str) -> AsyncIterator[None]:
    """Keep a store running at `address`, a unix socket, during the block. If workers of one host use the same address,
    the first of them starts the store, and another one when that has stopped."""
    async with WatchedTask(partial(_keep_running, config, model, address), "what keeps the host's store running"):
        yield


async def _keep_running(config: Config, model: str, address: str) -> None:
    backoff = Backoff(initial_s=CHECK_S, max_s=MAX_BACKOFF_S)
    loop = asyncio.get_running_loop()
    while True:
        started, was_missing = loop.time(), True
        try:
            with _turn(address) as is_ours:
                was_missing = is_ours and not has_listener(parse_unix(address).path)
                if was_missing:
                    await _run_once(command(model, address), config, model)
        except OSError as error:
            logger.error("the store of this host cannot be started: %s", error.strerror)
        if not was_missing or loop.time() - started > MAX_BACKOFF_S:
            backoff.reset()
        await asyncio.sleep(backoff.next() if was_missing else CHECK_S)


@contextmanager
def _turn(address: str) -> Iterator[bool]:
    """Yield whether this worker may start the store: one of several that try at once. Raises OSError."""
    descriptor = os.open(f"{address.removeprefix('unix:')}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        yield try_lock(descriptor)
    finally:
        os.close(descriptor)


async def _run_once(argv: Sequence[str], config: Config, model: str) -> None:
    """Run a store until it ends. Raises OSError if it cannot be started."""
    environ = child_environ(config, "store", model, (), on_gpu=False, environ=process_environ())
    process = ChildProcess.spawn(argv, environ, sys.stderr.fileno())
    logger.info("started the store of this host, pid %d", process.pid)
    try:
        await process.wait()
    except asyncio.CancelledError:
        await process.stop(STOP_TIMEOUT_S)
        raise
    logger.warning("the store of this host has ended: %s", process.describe_exit())


def command(model: str, address: str) -> list[str]:
    return [*INTERPRETER, "store", model, "--listen", address, *_FLAGS]
