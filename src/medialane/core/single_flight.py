"""Deduplicates concurrent work by key (singleflight)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Hashable
from typing import Any, Generic, TypeVar

K = TypeVar("K", bound=Hashable)


class _Flight(Generic[T]):
    def __init__(self, task: asyncio.Task[T]) -> None:
        self.task = task
        self.num_waiters = 0
        self.is_released = False


def _itself(result: T) -> T:
    return result


class SingleFlight(Generic[K, T]):
    """Runs the work of a key once for all callers that arrive while it runs.

    Cancelling one caller does not affect the others; when the last one is cancelled, so is the work. An error is raised
    in every caller. Results are not cached after the flight.

    For results that must be released: each caller owns what `share` returns for the flight's result, and the flight's
    own result is passed to `release` after its last caller has left, however it left.
    """

    def __init__(self, *, share: Callable[[T], T] = _itself, release: Callable[[T], None] | None = None) -> None:
        self._flights: dict[K, _Flight[T]] = {}
        self._share = share
        self._release = release

    async def do(self, key: K, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Return the result of `work`, or of the work already running for `key`."""
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
        """Called when the work is done and when the last caller leaves; the later of the two releases the result."""
        if self._flights.get(key) is flight:
            del self._flights[key]
        if not flight.task.done() or flight.task.cancelled():
            return
        # Every waiter has received the error. Retrieve it here for the case that none is left, or asyncio logs
        # "exception was never retrieved".
        failed = flight.task.exception() is not None
        if not failed and not flight.num_waiters and not flight.is_released and self._release is not None:
            flight.is_released = True
            self._release(flight.task.result())

    def __contains__(self, key: K) -> bool:
        return key in self._flights

    def __len__(self) -> int:
        return len(self._flights)
