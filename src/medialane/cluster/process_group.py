"""Ends process groups: a module of the supervisor, and the script of the orphan reaper.

A group has one kind of member that must outlive the others: the resource trackers of Python's multiprocessing. They
remove the shared memory of processes that were killed, some hundred MB of vLLM's included, once no other process holds
their pipe open. So the others are killed first, and the trackers only if they do not exit on their own.

As a script, this is the orphan reaper. It reads lines from standard input: `+123` watch process group 123, `-123` it
has ended. End of file means that the supervisor has exited, kill -9 included: every group still watched gets SIGTERM, a
few seconds to exit, then SIGKILL. It uses only the standard library, so that it is small and independent of the
supervisor's faults; for its title it gets the folder of a library as argument.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from contextlib import suppress

#: Time that processes have to exit after the orphan reaper's SIGTERM.
GRACE_S = 5.0
#: Time that resource trackers have to clean up.
CLEANUP_S = 2.0
POLL_S = 0.05


def members(group: int) -> list[int]:
    """Return the running processes of a group, without zombies."""
    return [int(entry) for entry in os.listdir("/proc") if entry.isdigit() and _group_of_running(entry) == group]


def kill_members(group: int) -> None:
    """Kill every member except resource trackers."""
    for pid in members(group):
        if not _is_resource_tracker(pid):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def send(group: int, number: int) -> None:
    """Send a signal to every member."""
    with suppress(ProcessLookupError):
        os.killpg(group, number)


def _group_of_running(pid: str) -> int | None:
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            state, _parent, group, *_ = file.read().rpartition(b")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if state in (b"Z", b"X") else int(group)


def _is_resource_tracker(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            return b"multiprocessing.resource_tracker" in file.read()
    except (FileNotFoundError, ProcessLookupError):
        return False


def reap_orphans() -> None:
    """Watch groups until end of file, then end those that are left."""
    groups: set[int] = set()
    for line in sys.stdin:
        group = int(line[1:])
        if line.startswith("+"):
            groups.add(group)
        else:
            groups.discard(group)
    for group in groups:
        send(group, signal.SIGTERM)
    _wait(groups, GRACE_S)
    for group in groups:
        kill_members(group)
    _wait(groups, CLEANUP_S)
    for group in groups:
        send(group, signal.SIGKILL)


def _wait(groups: set[int], timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while any(map(members, groups)) and time.monotonic() < deadline:
        time.sleep(POLL_S)


if __name__ == "__main__":
    sys.path += sys.argv[1:]
    with suppress(ImportError):
        import setproctitle

        setproctitle.setproctitle("medialane orphan reaper")
    reap_orphans()
