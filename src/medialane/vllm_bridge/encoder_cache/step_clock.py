"""How long our code takes of each step of the engine's scheduler, which must never be blocked."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from resource import RUSAGE_THREAD, getrusage


class StepClock:
    """`longest_s` is the longest sum of one step. Calls in which the kernel ran another thread instead are left out:
    how long that lasts depends on the machine's load. Those that wait for something are counted."""

    def __init__(self) -> None:
        self.longest_s = 0.0
        self._step_s = 0.0

    @contextmanager
    def measure(self) -> Iterator[None]:
        num_preempted, started = getrusage(RUSAGE_THREAD).ru_nivcsw, time.perf_counter()
        try:
            yield
        finally:
            spent = time.perf_counter() - started
            if getrusage(RUSAGE_THREAD).ru_nivcsw == num_preempted:
                self._step_s += spent

    def end_step(self) -> None:
        self.longest_s = max(self.longest_s, self._step_s)
        self._step_s = 0.0
