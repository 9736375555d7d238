"""Whether the kernel has killed processes for lack of memory.

It does not report that to the parent, which sees SIGKILL, or, if the process was a child of its child, an exit status
only. But it counts its kills: those of a cgroup's processes, and, where these cannot be read, those of the whole host.
The counters are polled, so that a kill of an hour ago explains no exit of today.
"""

from __future__ import annotations

import asyncio
import signal
import time
from pathlib import Path

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
