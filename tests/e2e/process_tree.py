"""Processes as /proc shows them: parents, command lines, mapped arenas."""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_CLOCK_TICKS = os.sysconf("SC_CLK_TCK")


@contextmanager
def suspended(*pids: int) -> Iterator[None]:
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)


def command_of(pid: int) -> str:
    """The command line or the process title; "" if it has exited."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    return ""


def descendants(pid: int) -> list[int]:
    """Children of `pid`, their children, and so on, in the order of their ids."""
    children: dict[int, list[int]] = {}
    for child, fields in _stats():
        children.setdefault(int(fields[1]), []).append(child)
    found, todo = [], [pid]
    while todo:
        below = children.get(todo.pop(), [])
        found += below
        todo += below
    return sorted(found)


def is_alive(pid: int) -> bool:
    """Whether it runs; a zombie does not."""
    return any(found == pid and fields[0] not in "ZX" for found, fields in _stats())


def zombies(pid: int) -> list[int]:
    """Descendants that have exited, and for which nobody has waited."""
    exited = {found for found, fields in _stats() if fields[0] == "Z"}
    return [found for found in descendants(pid) if found in exited]


def all_pids() -> list[int]:
    return sorted(pid for pid, _ in _stats())


def num_filters(pid: int) -> int:
    """How many seccomp filters are installed in the process; 0 if it has exited."""
    with suppress(OSError):
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        return next((int(line.split()[1]) for line in lines if line.startswith("Seccomp_filters:")), 0)
    return 0


def parent_of(pid: int) -> int:
    """0 when it is gone."""
    return next((int(fields[1]) for found, fields in _stats() if found == pid), 0)


def cpu_s(pid: int) -> float:
    """CPU time of the process; 0 if it has exited."""
    return next((sum(map(int, fields[11:13])) / _CLOCK_TICKS for found, fields in _stats() if found == pid), 0.0)


def arenas_of(pid: int) -> set[Path]:
    """The arena files that the process has mapped, removed ones left out."""
    return {path for path in _mapped_files(pid, ".arena") if path.name.startswith("medialane-")}


def removed_arenas_of(pid: int) -> set[Path]:
    """The arena files that the process has mapped although they are removed."""
    return _mapped_files(pid, ".arena (deleted)")


def resident_bytes_of_arenas(pid: int) -> int:
    """How much of its arenas the process has read, or the kernel has mapped around that."""
    num_bytes, is_arena = 0, False
    with suppress(OSError):
        for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
            if line.endswith(".arena"):
                is_arena = True
            elif line.startswith("Rss:") and is_arena:
                num_bytes += int(line.split()[1]) << 10
                is_arena = False
    return num_bytes


def shared_memory_of(pid: int) -> set[str]:
    """The names of the files in /dev/shm that the process has mapped or open."""
    found = {str(path) for path in _mapped_files(pid, "")}
    with suppress(OSError):
        for entry in os.scandir(f"/proc/{pid}/fd"):
            with suppress(OSError):  # closed since the listing
                found.add(os.readlink(entry.path))
    return {path.removeprefix("/dev/shm/") for path in found if path.startswith("/dev/shm/")}


def _mapped_files(pid: int, ending: str) -> set[Path]:
    with suppress(OSError):
        lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
        return {Path(line.split(maxsplit=5)[5]) for line in lines if "/" in line and line.endswith(ending)}
    return set()


def _stats() -> list[tuple[int, list[str]]]:
    """(pid, fields of /proc/pid/stat from the state on) of every process."""
    found = []
    for name in os.listdir("/proc"):
        if name.isdecimal():
            with suppress(OSError):  # exited since the listing
                found.append((int(name), Path("/proc", name, "stat").read_text().rpartition(")")[2].split()))
    return found
