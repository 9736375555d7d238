"""When a client that is refused with 503 is to try again: the value of Retry-After."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Hashable
from typing import Final

MAX_RETRY_AFTER_S: Final = 120

#: Weight of the newest in the moving mean of how long a permit is held: about the last twenty count.
_NEWEST: Final = 0.1


def retry_after(seconds: float) -> int:
    """Return `seconds` in whole ones, at least 1 and at most two minutes."""
    return max(1, math.ceil(min(seconds, MAX_RETRY_AFTER_S)))


class Outage:
    """The times in which something is missing, beginning with now. An outage is expected to be as long as the last one;
    one that is longer, to last again as long as it has exceeded that."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._since: float | None = clock()
        self._last_s = 0.0

    def begin(self) -> None:
        """Idempotent."""
        if self._since is None:
            self._since = self._clock()

    def end(self) -> None:
        """Idempotent."""
        if self._since is not None:
            self._last_s, self._since = self._clock() - self._since, None

    @property
    def left_s(self) -> float:
        """The expected rest of the outage; 0 if there is none."""
        return 0.0 if self._since is None else abs(self._last_s - (self._clock() - self._since))

    @property
    def retry_after_s(self) -> int:
        return retry_after(self.left_s)


class Permits:
    """A limited number of permits: who has one, for how long, and so when the next ones become free."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._taken: dict[Hashable, float] = {}
        self._mean_s: float | None = None
        self._promised = float("-inf")

    def take(self, key: Hashable) -> None:
        """Note that `key` has a permit. Idempotent."""
        self._taken.setdefault(key, self._clock())

    def free(self, key: Hashable) -> None:
        """Note that `key` has no permit any more. Idempotent."""
        if (since := self._taken.pop(key, None)) is not None:
            taken_s = self._clock() - since
            self._mean_s = taken_s if self._mean_s is None else self._mean_s + _NEWEST * (taken_s - self._mean_s)

    def withdraw(self, key: Hashable) -> None:
        """Note that `key` was refused after all: how long it had its permit says nothing about others. Idempotent."""
        self._taken.pop(key, None)

    @property
    def retry_after_s(self) -> int:
        """When the next permit is expected to become free."""
        return retry_after(self._interval_s(self._clock()))

    def promise(self) -> int:
        """Return the Retry-After of one who is refused: each is promised the next permit that is expected to become
        free, so that they come back one after the other."""
        now = self._clock()
        next_free = max(now, self._promised) + self._interval_s(now)
        self._promised = min(next_free, now + MAX_RETRY_AFTER_S)
        return retry_after(self._promised - now)

    def _interval_s(self, now: float) -> float:
        """Return the expected time from one permit that becomes free to the next."""
        if not self._taken:
            return 0.0
        oldest_s = now - next(iter(self._taken.values()))
        return (oldest_s if self._mean_s is None else self._mean_s) / len(self._taken)
