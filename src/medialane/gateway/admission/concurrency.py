"""Limits the number of concurrent requests with media."""

from __future__ import annotations

import time
from collections.abc import Callable

from medialane.core.errors import MediaOverloaded
from medialane.core.retry_after import Places
from medialane.gateway.scope import RequestScope


class Admission:
    """The admitted requests, at most `limit`. One event loop."""

    def __init__(self, limit: int, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.limit = limit
        self._admitted: set[RequestScope] = set()
        self._places = Places(clock=clock)

    @property
    def num_in_flight(self) -> int:
        return len(self._admitted)

    def admit(self, scope: RequestScope) -> None:
        """Admit a request until its scope ends; again for the same one has no effect. Raises MediaOverloaded if no
        slot is free."""
        if scope in self._admitted:
            return
        if len(self._admitted) >= self.limit:
            message = "too many concurrent requests with media"
            raise MediaOverloaded(message, retry_after_s=self._places.promise())
        self._admitted.add(scope)
        self._places.take(scope)
        scope.defer(lambda: self._end(scope))

    def _end(self, scope: RequestScope) -> None:
        self._admitted.discard(scope)
        self._places.free(scope)
