"""Small Python scripts replacing gateways and workers, and a recording observer."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from medialane.cluster import ProcessSpec, Supervisor
from medialane.config import ClusterConfig
from medialane.runtime.phase import Phase

HEADER = """
import os, signal, subprocess, sys, time
def ready():
    open(sys.argv[1], "w").close()
def beat():
    os.write(int(os.environ["MEDIALANE_HEARTBEAT_FD"]), b"+")
def stay():
    time.sleep(60)  # time: a leftover of a failed test ends by itself
def child():
    return subprocess.Popen(["sleep", "60"]).pid
"""


@dataclass(frozen=True)
class PathExists:
    path: Path

    def reset(self) -> None:
        self.path.unlink(missing_ok=True)

    async def passes(self) -> bool:
        return self.path.exists()


@dataclass
class Recorder:
    events: list[tuple[str, ...]] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)
    phases: list[tuple[str, str]] = field(default_factory=list)
    pauses: list[float | None] = field(default_factory=list)

    def starting(self, part: str) -> None:
        self.events.append(("starting", part))

    def ready(self, part: str, seconds: float) -> None:
        self.events.append(("ready", part))

    def ended(self, part: str, how: str, restart_in_s: float | None) -> None:
        self.events.append(("ended", part, how))
        self.pauses.append(restart_in_s)

    def stopping(self, part: str) -> None:
        self.events.append(("stopping", part))

    def entered(self, part: str, phase: Phase) -> None:
        self.phases.append((part, str(phase)))

    def printed(self, part: str, lines: Sequence[str]) -> None:
        self.lines.extend(f"{part}: {line}" for line in lines)

    def ends(self, part: str) -> list[str]:
        return [event[2] for event in self.events if event[:2] == ("ended", part)]

    def count(self, *event: str) -> int:
        return sum(e[: len(event)] == event for e in self.events)


def script_part(folder: Path, name: str, script: str, **options) -> ProcessSpec:
    """A process that is ready when its script has called `ready`."""
    argv = (sys.executable, "-I", "-S", "-c", HEADER + script, str(folder / f"{name}.ready"))
    return ProcessSpec(name, argv, {}, PathExists(folder / f"{name}.ready"), **{"stop_timeout_s": 2.0, **options})


def make_supervisor(folder: Path, observer: Recorder, parts: Sequence[ProcessSpec], **settings) -> Supervisor:
    config = ClusterConfig(**{"restart_initial_s": 0.05, "restart_max_s": 0.2, "start_timeout_s": 10.0, **settings})
    return Supervisor(parts, config=config, logs=folder, observer=observer)


def is_running(pid: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return stat.rpartition(b")")[2].split()[0] not in (b"Z", b"X")


def number_in(path: Path) -> int:
    """The process id that a script left in a file; 0 while it has not."""
    return int(path.read_text() or 0) if path.exists() else 0
