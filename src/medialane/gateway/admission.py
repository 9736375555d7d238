"""Limits the number of concurrent requests with media."""

from __future__ import annotations

from medialane.core.errors import PreparersBusy
from medialane.gateway.scope import RequestScope


class Admission:
    """The admitted requests. One event loop."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._admitted: set[RequestScope] = set()

    @property
    def num_in_flight(self) -> int:
        return len(self._admitted)

    def admit(self, scope: RequestScope) -> None:
        """Admit a request until its scope ends; again for the same one has no effect. Raises PreparersBusy if there is
        no free slot."""
        if scope in self._admitted:
            return
        if len(self._admitted) >= self._limit:
            raise PreparersBusy("too many concurrent requests with media")
        self._admitted.add(scope)
        scope.defer(lambda: self._admitted.discard(scope))
