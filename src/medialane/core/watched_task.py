"""A background task that must live: whatever ends it, it is logged, reported, and started again."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Self

logger = logging.getLogger(__name__)

PAUSE_S = 1.0
#: How long after its last end a task is reported as failing.
FAILING_S = 60.0

#: Of this process.
_tasks: set[WatchedTask] = set()


def has_failing_tasks() -> bool:
    """Whether a watched task of this process has ended by itself lately."""
    return any(task.is_failing for task in _tasks)


class WatchedTask:
    """Calls `work`, which must not end by itself, until `close`; again PAUSE_S after an end. Also a context manager."""

    def __init__(
        self,
        work: Callable[[], Awaitable[object]],
        name: str,
        *,
        pause_s: float = PAUSE_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._work = work
        self._name = name
        self._pause_s = pause_s
        self._clock = clock
        self._failed_at: float | None = None
        _tasks.add(self)
        self._task = asyncio.get_running_loop().create_task(self._run(), name=name)

    @property
    def is_failing(self) -> bool:
        """Whether it has ended by itself lately."""
        return self._failed_at is not None and self._clock() - self._failed_at < FAILING_S

    async def close(self) -> None:
        """Cancel it, and wait until it has ended. Idempotent."""
        _tasks.discard(self)
        self._task.cancel()
        await asyncio.wait([self._task])

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def _run(self) -> None:
        while True:
            ended: BaseException | None = None
            try:
                await self._work()
            except Exception as error:  # noqa: BLE001 - the supervisor of a task: it must live whatever fails
                ended = error
            self._failed_at = self._clock()
            logger.error("%s has ended unexpectedly, and is started again", self._name, exc_info=ended)
            await asyncio.sleep(self._pause_s)
