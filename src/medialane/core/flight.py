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
        self.is_released = False


def _itself(result: T) -> T:
    return result


class SingleFlight(Generic[K, T]):
    """Runs the work of a key once for all who ask while it runs.

    A caller that is cancelled leaves the others' flight alone; when the last one leaves, the flight is cancelled. An
    error reaches every caller. Nothing is remembered after the flight.

    Results that have an end: every caller owns what `share` makes of the flight's result, and the flight's own is given
    to `release` when its last caller has left, whatever became of the callers.
    """

    def __init__(self, *, share: Callable[[T], T] = _itself, release: Callable[[T], None] | None = None) -> None:
        self._flights: dict[K, _Flight[T]] = {}
        self._share = share
        self._release = release

    async def do(self, key: K, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        flight = self._flights.get(key)
        if flight is None:
            flight = self._flights[key] = _Flight(asyncio.get_running_loop().create_task(work()))
            flight.task.add_done_callback(lambda _: self._land(key, flight))
        flight.num_waiters += 1
        try:
            return self._share(await asyncio.shield(flight.task))
        finally:
            flight.num_waiters -= 1
            if not flight.num_waiters:
                self._land(key, flight)
                flight.task.cancel()

    def _land(self, key: K, flight: _Flight[T]) -> None:
        """The work has ended, or nobody waits for it any more; the later of the two ends the flight."""
        if self._flights.get(key) is flight:
            del self._flights[key]
        if not flight.task.done() or flight.task.cancelled():
            return
        # Every waiter has its error; with none left it is nobody's, and not "never retrieved".
        failed = flight.task.exception() is not None
        if not failed and not flight.num_waiters and not flight.is_released and self._release is not None:
            flight.is_released = True
            self._release(flight.task.result())

    def __len__(self) -> int:
        return len(self._flights)
