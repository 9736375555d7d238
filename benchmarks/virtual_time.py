"""An event loop in virtual time."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable
from typing import Any


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """Skips to the time of the next callback, and stops when there is none. Does no I/O."""

    def __init__(self) -> None:
        self._skip = _Skip(self.stop)
        super().__init__(self._skip)

    def time(self) -> float:
        return self._skip.now


class _Skip(selectors.SelectSelector):
    def __init__(self, stop: Callable[[], None]) -> None:
        super().__init__()
        self.now = 0.0
        self._stop = stop

    def select(self, timeout: float | None = None) -> list[Any]:
        if timeout is None:
            self._stop()
        else:
            self.now += max(0.0, timeout)
        return []
