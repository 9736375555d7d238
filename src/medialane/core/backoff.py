"""Pauses before something that failed is tried again."""

from __future__ import annotations


class Backoff:
    """Pauses that double from `initial_s` up to `max_s`. The owner measures the time, and calls `reset` after what it
    counts as a success."""

    def __init__(self, *, initial_s: float, max_s: float) -> None:
        self._initial_s = initial_s
        self._max_s = max_s
        self._next_s = initial_s

    def next(self) -> float:
        """The pause before the next attempt."""
        pause_s = self._next_s
        self._next_s = min(2 * pause_s, self._max_s)
        return pause_s

    def reset(self) -> None:
        self._next_s = self._initial_s
