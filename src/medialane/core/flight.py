"""One flight per key: callers who want the same thing at the same time share one run of the work."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Hashable
from typing import Any, Generic, TypeVar

K = TypeVar("K", bound=Hashable)
T = TypeVar("T")


class _Flight(Generic[T]):
    def __init__(self, task: asyncio.Task[T]) -> None:
        self.task = task
        self.num_waiters = 0


class SingleFlight(Generic[K, T]):
    """Runs the work of a key once for all who ask while it runs.

    A caller that is cancelled leaves the others' flight alone; when the last one leaves, the flight is cancelled. An
    error reaches every caller. Nothing is remembered after the flight.
    """

    def __init__(self) -> None:
        self._flights: dict[K, _Flight[T]] = {}

    async def do(self, key: K, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        flight = self._flights.get(key)
        if flight is None:
            flight = self._flights[key] = _Flight(asyncio.get_running_loop().create_task(work()))
            flight.task.add_done_callback(lambda _: self._land(key, flight))
        flight.num_waiters += 1
        try:
            return await asyncio.shield(flight.task)
        finally:
            flight.num_waiters -= 1
            if not flight.num_waiters and not flight.task.done():
                self._land(key, flight)
                flight.task.cancel()

    def _land(self, key: K, flight: _Flight[T]) -> None:
        if self._flights.get(key) is flight:
            del self._flights[key]
        if flight.task.done() and not flight.task.cancelled():
            flight.task.exception()  # every waiter has it; with none left it is nobody's, and not "never retrieved"

    def __len__(self) -> int:
        return len(self._flights)
