"""How long to wait before something that died is started again."""

from __future__ import annotations


class Backoff:
    """Doubling pauses up to a cap; a life of `stable_s` or longer starts over. No clock inside."""

    def __init__(self, *, initial_s: float, max_s: float, stable_s: float) -> None:
        self._initial_s = initial_s
        self._max_s = max_s
        self._stable_s = stable_s
        self._next_s = initial_s

    def after(self, lifetime_s: float) -> float:
        """The pause after a life of `lifetime_s`."""
        if lifetime_s >= self._stable_s:
            self._next_s = self._initial_s
        pause = self._next_s
        self._next_s = min(2 * pause, self._max_s)
        return pause
