"""Whether the engine is stalled: it hangs, and is not merely in a long step.

An engine replies to a ping between two of its steps. While it does not, it is either in a step (a long prefill, the
first compilation, an adapter being loaded), and its processes compute, or it hangs: stopped, swapped out, waiting for
a lock or a device. So an engine is stalled after a time without a reply in which its processes have used no CPU time to
speak of. One that computes for ever is found by the ping's own timeout. It is no longer stalled with its next reply.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Coroutine
from typing import Any

from medialane.worker.engine import Engine

logger = logging.getLogger(__name__)

#: How often an engine that does not reply is looked at, at most, in seconds.
TICK_S = 1.0
#: Share of a core that is work: idle threads and timers use less.
MIN_CPU_SHARE = 0.02


class StallWatch:
    """Watches calls of the engine. Intervals in which this process itself did not run are not counted."""

    def __init__(self, engine: Engine, *, timeout_s: float) -> None:
        self._engine = engine
        self._timeout_s = timeout_s
        self._tick_s = min(TICK_S, timeout_s / 5)
        self._replied_at = time.monotonic()
        self.is_stalled = False

    async def watch(self, call: Coroutine[Any, Any, None]) -> None:
        """Await a call to which the engine replies between two steps. Raises what it raises."""
        calling = asyncio.create_task(call)
        try:
            await self._until_done(calling)
        finally:
            calling.cancel()
            await asyncio.wait((calling,))
        calling.result()
        self._replied()

    async def _until_done(self, calling: asyncio.Task[None]) -> None:
        silent_s = min(time.monotonic() - self._replied_at, self._timeout_s / 2)
        cpu_s: float | None = None
        while not (await asyncio.wait((calling,), timeout=self._tick_s))[0]:
            before_s, cpu_s = cpu_s, await self._engine.used_cpu_s()
            works = before_s is not None and cpu_s is not None and cpu_s - before_s >= MIN_CPU_SHARE * self._tick_s
            silent_s = 0.0 if works else silent_s + self._tick_s
            if silent_s >= self._timeout_s and not self.is_stalled:
                self.is_stalled = True
                logger.error("the engine is stalled: no reply and no work of its processes for %g s", silent_s)

    def _replied(self) -> None:
        self._replied_at = time.monotonic()
        if self.is_stalled:
            logger.warning("the engine is no longer stalled")
        self.is_stalled = False
