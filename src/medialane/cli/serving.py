"""What the processes that serve have in common: their environment, tasks that they cannot serve without, the HTTP
server's socket, and settings of CPython and glibc for event loops that handle payloads of megabytes.

If an essential task ends unexpectedly, its process exits. Otherwise the server would return 503 forever while its
service manager (our supervisor, systemd, Kubernetes) sees a live process; exiting lets it be restarted.
"""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import logging
import platform
import socket
import sys
from collections.abc import Coroutine, Mapping
from pathlib import Path
from typing import Any, Self, TypeVar

from medialane.cluster.placement import find_hardware
from medialane.cluster.preflight import check_start
from medialane.config import Config, RoleName, ServerConfig, enter_environ, process_environ
from medialane.runtime.tasks import first_of
from medialane.wire.listener import bind_http, bind_unix, inherited

logger = logging.getLogger(__name__)

T = TypeVar("T")

#: Longest time that a thread running Python code may keep the event loop waiting for the GIL; Python's default is 5 ms.
SWITCH_INTERVAL_S = 0.0005

#: mallopt(3), with the parameters' numbers in malloc.h. Freed media of up to 32 MiB stay in one heap, and memory
#: returns to the kernel when 512 MiB at its end are free. By default an item of 7.5 MB takes new pages, and freeing it
#: takes 3 ms of the event loop.
_M_ARENA_MAX, _M_MMAP_THRESHOLD, _M_TRIM_THRESHOLD = -8, -3, -1
_MALLOC = ((_M_ARENA_MAX, 1), (_M_MMAP_THRESHOLD, 32 << 20), (_M_TRIM_THRESHOLD, 512 << 20))


class EssentialTasks:
    """Tasks that run until the context manager's exit, which cancels and awaits them.

    If one ends earlier, for whatever reason, it is logged, `failed` becomes true, and `stop` is set.
    """

    def __init__(self, stop: asyncio.Event) -> None:
        self.failed = False
        self._stop = stop
        self._tasks: set[asyncio.Task[Any]] = set()
        self._closing = False

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self._closing = True
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)

    def start(self, work: Coroutine[Any, Any, object], name: str) -> None:
        """Run `work`, which must not end before it is cancelled here."""
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def fail(self, name: str, error: BaseException | None = None) -> None:
        """Record that `name` has ended, and stop this process."""
        logger.critical("%s exited unexpectedly: this process stops", name, exc_info=error)
        self.failed = True
        self._stop.set()

    def _ended(self, task: asyncio.Task[Any]) -> None:
        error = None if task.cancelled() else task.exception()
        if not self._closing:
            self.fail(task.get_name(), error)
        elif error is not None:
            logger.error("%s failed while it was stopped", task.get_name(), exc_info=error)


async def unless_set(stop: asyncio.Event, work: Coroutine[Any, Any, T]) -> T | None:
    """Return or raise the result of `work`; if `stop` is set first, cancel it and return None."""
    working = asyncio.ensure_future(work)
    await first_of(working, stop.wait())
    return None if working.cancelled() else working.result()


def enter_role(config: Config, role: RoleName, args: argparse.Namespace, own: Mapping[str, str]) -> None:
    """Check the model and vLLM's flags, and reduce this process's environment to its role's, with the variables
    `own` (`enter_environ`). Raises StartupFailed."""
    environ = process_environ()
    check_start(args.model, args.vllm_args, environ)
    on_gpu = bool(find_hardware(environ).gpus)
    enter_environ(config, role, args.model, args.vllm_args, on_gpu=on_gpu, own=own)


def http_listener(config: ServerConfig, inherited_fd: int | None, path: Path | None = None) -> socket.socket:
    """Return the socket of an HTTP server: an inherited one, that at the unix `path`, or one bound to the configured
    address. Raises StartupFailed."""
    if inherited_fd is not None:
        return inherited(inherited_fd)
    return bind_http(config.host, config.port) if path is None else bind_unix(str(path))


def tune_process() -> None:
    """Shorten how long the event loop waits for other threads and for memory."""
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    if platform.libc_ver()[0] == "glibc":
        for parameter, value in _MALLOC:
            ctypes.CDLL(None).mallopt(parameter, value)
