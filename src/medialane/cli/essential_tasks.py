"""Tasks that a process cannot serve without: if one of them ends unexpectedly, the process exits.

Otherwise the server would return 503 forever while its service manager (our supervisor, systemd, Kubernetes) sees a
live process; exiting lets it be restarted.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from contextlib import suppress
from typing import Any, Self, TypeVar

logger = logging.getLogger(__name__)

T = TypeVar("T")


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
    working, stopping = asyncio.ensure_future(work), asyncio.ensure_future(stop.wait())
    try:
        await asyncio.wait((working, stopping), return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
    finally:
        stopping.cancel()
        working.cancel()
    with suppress(asyncio.CancelledError):
        await working
    return None
