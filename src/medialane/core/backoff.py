"""Exponential backoff."""

from __future__ import annotations


class Backoff:
    """Delays that double from `initial_s` up to `max_s`. The owner sleeps, and calls `reset` after a success."""

    def __init__(self, *, initial_s: float, max_s: float) -> None:
        self._initial_s = initial_s
        self._max_s = max_s
        self._next_s = initial_s

    def next(self) -> float:
        """Return the delay before the next attempt, in seconds."""
        delay_s = self._next_s
        self._next_s = min(2 * delay_s, self._max_s)
        return delay_s

    def reset(self) -> None:
        self._next_s = self._initial_s
