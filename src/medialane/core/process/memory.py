"""The memory of processes, as proportional set size (PSS): a page that n processes have mapped counts 1/n in each.

Forks share most of their pages with the process that they were forked from: a sum of resident sizes would count these
many times, a sum of PSS counts them once. Shared memory is left out: the arena has figures of its own.

The kernel computes PSS by walking all page tables of the process: 4 ms for one that has imported vLLM, and 12 ms for
each GiB of the arena that it has touched. The process's own mmap and munmap wait while one of its mappings is walked
(`arena.view.PIECE_BYTES`). Hence memory is read in threads, and the more rarely the longer it takes.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import Literal

#: What a process is for, as in its title. `engine` are the processes below a worker or an encoder.
ProcessKind = Literal["gateway", "worker", "encoder", "engine", "store", "forkserver", "preparer", "warm"]

#: Of two reads, at least.
INTERVAL_S = 10.0
#: The interval is at least so many times the CPU time of a read.
MIN_PAUSE = 200

_KIB = 1024


class MemoryUse:
    """The memory of some processes, by kind; `pids` is called in a thread. What cannot be read is left out."""

    def __init__(
        self,
        pids: Callable[[], Mapping[ProcessKind, Iterable[int]]],
        *,
        clock: Callable[[], float] = time.monotonic,
        cpu_clock: Callable[[], float] = time.thread_time,  # on a busy machine a read takes longer, but costs no more
    ) -> None:
        self._pids = pids
        self._clock = clock
        self._cpu_clock = cpu_clock
        self._lock = threading.Lock()
        self._due = float("-inf")
        #: Bytes, as of the last read; kinds without a process are missing.
        self.latest: Mapping[ProcessKind, int] = {}

    def read(self) -> Mapping[ProcessKind, int]:
        """Return the bytes by kind; not read again if the last read was a moment ago, or another thread is reading. Not
        for the event loop."""
        if self._lock.acquire(blocking=False):
            try:
                if self._clock() >= self._due:
                    began = self._cpu_clock()
                    self.latest = _by_kind(self._pids())
                    self._due = self._clock() + max(INTERVAL_S, MIN_PAUSE * (self._cpu_clock() - began))
            finally:
                self._lock.release()
        return self.latest

    async def refresh(self, timeout_s: float) -> None:
        """Update `latest`, if that takes no longer than `timeout_s`."""
        await asyncio.wait([asyncio.get_running_loop().run_in_executor(None, self.read)], timeout=timeout_s)

    async def run(self) -> None:
        """Update `latest` again and again. Never returns."""
        while True:
            await self.refresh(INTERVAL_S)
            await asyncio.sleep(INTERVAL_S)


def pss_bytes(pid: int) -> int:
    """Return the PSS of a process without shared memory. Not for the event loop. Raises OSError if it has exited, or
    may not be read."""
    with open(f"/proc/{pid}/smaps_rollup") as file:
        sizes = dict(line.split(":", 1) for line in file.readlines()[1:])
    return sum(int(sizes[name].split()[0]) for name in ("Pss_Anon", "Pss_File")) * _KIB


def _by_kind(pids: Mapping[ProcessKind, Iterable[int]]) -> dict[ProcessKind, int]:
    sizes: dict[ProcessKind, int] = {}
    for kind, of_kind in pids.items():
        for pid in of_kind:
            with suppress(OSError):  # it has exited
                sizes[kind] = sizes.get(kind, 0) + pss_bytes(pid)
    return sizes
