"""The fork server in use, and a spare for the moment when it dies.

The spare is a fork of the one in use: warm at once, for the memory that it writes to. When the one in use dies, the
spare takes its place and forks a spare of its own. Only when both die together is a processor built anew.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from medialane.core.backoff import Backoff
from medialane.prepare.forkserver_process import ForkserverLost, ForkserverProcess

logger = logging.getLogger(__name__)

#: First and last pause before a spare that has died is replaced; it doubles in between.
INITIAL_BACKOFF_S = 1.0
MAX_BACKOFF_S = 60.0


class Forkservers:
    """Owns the spare. `start` builds a fork server from nothing."""

    def __init__(self, start: Callable[[], Awaitable[ForkserverProcess]]) -> None:
        self._start = start
        self._spare: ForkserverProcess | None = None

    @property
    def has_spare(self) -> bool:
        return self._spare is not None and not self._spare.lost.is_set()

    async def take(self) -> ForkserverProcess:
        """The spare if there is one, else a new one; the caller owns it. Raises StartupFailed."""
        if (spare := self._spare) is not None and self.has_spare:
            self._spare = None
            logger.info("spare fork server (pid %d) takes over", spare.pid)
            return spare
        await self.close()
        return await self._start()

    async def keep_spare(self, used: ForkserverProcess) -> None:
        """Keep a spare of `used`, until that is lost."""
        backoff = Backoff(initial_s=INITIAL_BACKOFF_S, max_s=MAX_BACKOFF_S)
        while not used.lost.is_set():
            try:
                self._spare = await used.fork_spare()
            except ForkserverLost as error:
                logger.warning("no spare fork server: %s", error)
            else:
                await _first(self._spare.lost.wait(), used.lost.wait())
            if used.lost.is_set():
                return
            await self.close()
            await _first(used.lost.wait(), asyncio.sleep(backoff.next()))

    async def close(self) -> None:
        """End the spare. Idempotent."""
        spare, self._spare = self._spare, None
        if spare is not None:
            await spare.close(grace_s=1.0)


async def _first(*waits: Awaitable[object]) -> None:
    """Wait for one of them and cancel the others."""
    tasks = [asyncio.ensure_future(wait) for wait in waits]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
