"""When a process that has exited is started again; the same rule for this host's processes and those of others."""

from __future__ import annotations

import time
from collections.abc import Callable

from medialane.config.cluster import ClusterConfig
from medialane.runtime.tasks import Backoff

#: Longest delay for a process that had become ready: what it needs is there, and its users wait for it.
MAX_READY_S = 4.0


class RestartDelay:
    """The delays of one process. One that has ever become ready is restarted at once, but for its second and further
    exits within `restart_reset_s`. One that has not is the more likely to fail again, and waits longer."""

    def __init__(self, config: ClusterConfig, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._config = config
        self._clock = clock
        self._backoff = Backoff(initial_s=config.restart_initial_s, max_s=config.restart_max_s)
        self._exited_at = float("-inf")

    def next(self, *, had_become_ready: bool) -> float:
        """Return the delay after an exit, in seconds."""
        now = self._clock()
        is_first = now - self._exited_at >= self._config.restart_reset_s
        self._exited_at = now
        if is_first:
            self._backoff.reset()
        if not had_become_ready:
            return self._backoff.next()
        return 0.0 if is_first else min(self._backoff.next(), MAX_READY_S)
