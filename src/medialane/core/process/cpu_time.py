"""The CPU time of a process and its descendants, from /proc: tells one that computes from one that hangs."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Final

from medialane.core.process.descendants import descendants

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
    """Return the CPU time that these processes have used so far, without their descendants; those that have exited
    count 0."""
    return sum(_seconds(stat) for pid in pids if (stat := _stat(pid)))


def is_stopped(pid: int) -> bool:
    """Return whether a process was stopped by a signal, debuggers excepted."""
    return state_of(pid) == "T"


def state_of(pid: int) -> str:
    """Return the state of a process (proc(5): R, S, D, T, t, Z); Z if it has exited."""
    return (_stat(pid) or [b"Z"])[_STATE].decode()


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
