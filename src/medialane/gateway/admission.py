"""Limits the number of concurrent requests with media."""

from __future__ import annotations

from medialane.core.errors import PreparersBusy


class Admission:
    """Counts the admitted requests. One event loop."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self.num_in_flight = 0

    def enter(self) -> Admitted:
        """Admit a request; the caller releases the returned slot. Raises PreparersBusy if there is no free slot."""
        if self.num_in_flight >= self._limit:
            raise PreparersBusy("too many concurrent requests with media")
        self.num_in_flight += 1
        return Admitted(self)


class Admitted:
    """One slot. `release` frees it; idempotent."""

    def __init__(self, admission: Admission) -> None:
        self._admission: Admission | None = admission

    def release(self) -> None:
        admission, self._admission = self._admission, None
        if admission is not None:
            admission.num_in_flight -= 1
