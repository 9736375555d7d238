"""A limited number of turns, which those who have waited longest in all get first."""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections.abc import Callable


class OldestFirst:
    """At most `limit()` turns are taken at a time; the next one goes to whoever has the least `since`. One event
    loop."""

    def __init__(self, limit: Callable[[], int]) -> None:
        self._limit = limit
        self._num_taken = 0
        self._waiting: list[tuple[float, int, asyncio.Future[None]]] = []
        self._numbers = itertools.count()

    async def take(self, since: float) -> Callable[[], None]:
        """Wait for a turn. Return what ends it; idempotent."""
        turn = asyncio.get_running_loop().create_future()
        heapq.heappush(self._waiting, (since, next(self._numbers), turn))
        self._give()
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self._end()
            raise
        is_taken = True

        def end() -> None:
            nonlocal is_taken
            if is_taken:
                is_taken = False
                self._end()

        return end

    def _end(self) -> None:
        self._num_taken -= 1
        self._give()

    def _give(self) -> None:
        while self._waiting and (self._num_taken < max(1, self._limit()) or self._waiting[0][2].cancelled()):
            turn = heapq.heappop(self._waiting)[2]
            if not turn.cancelled():
                self._num_taken += 1
                turn.set_result(None)
