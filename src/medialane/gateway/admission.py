"""Limits the number of concurrent requests with media."""

from __future__ import annotations

from medialane.core.errors import PreparersBusy


class Admission:
    """Counts the admitted requests. One event loop."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self.num_in_flight = 0

    def enter(self) -> None:
        """Admit a request, which calls `leave` at its end. Raises PreparersBusy if there is no free slot."""
        if self.num_in_flight >= self._limit:
            raise PreparersBusy("too many concurrent requests with media")
        self.num_in_flight += 1

    def leave(self) -> None:
        self.num_in_flight -= 1
