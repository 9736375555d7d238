"""How many requests with media may be under way at once."""

from __future__ import annotations

from medialane.core.errors import PreparersBusy


class Admission:
    """Counts those that have entered and not left. One event loop."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self.num_in_flight = 0

    def enter(self) -> Admitted:
        """Let one in; the caller owns its place and releases it. Raises PreparersBusy when there is none."""
        if self.num_in_flight >= self._limit:
            raise PreparersBusy("too many concurrent requests with media")
        self.num_in_flight += 1
        return Admitted(self)


class Admitted:
    """One place. `release` gives it back; idempotent."""

    def __init__(self, admission: Admission) -> None:
        self._admission: Admission | None = admission

    def release(self) -> None:
        admission, self._admission = self._admission, None
        if admission is not None:
            admission.num_in_flight -= 1
