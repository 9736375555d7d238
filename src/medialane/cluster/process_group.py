"""Ends a part's process group: for the supervisor, and for the guard, which runs this file as a script.

A group has one kind of member that must outlive the others by a moment: the resource trackers of Python's
multiprocessing. They remove the shared memory of processes that were killed, vLLM's of some hundred MB among it, once
nobody else holds their pipe. So the others are killed first, and the trackers only if they do not end by themselves.

As a script, this is the guard. Standard input carries lines: `+123` watch process group 123, `-123` it has ended. The
end of the input is the end of the supervisor, kill -9 included: every group still watched gets SIGTERM, a few seconds,
and is killed. The standard library alone keeps the guard small, and the supervisor's troubles away from it.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from contextlib import suppress

#: What parts have, after the guard's SIGTERM, to stop by themselves.
GRACE_S = 5.0
#: What resource trackers have to clean up.
CLEANUP_S = 2.0
POLL_S = 0.05


def members(group: int) -> list[int]:
    """The processes of a group that run; not its zombies."""
    return [int(entry) for entry in os.listdir("/proc") if entry.isdigit() and _group_of_running(entry) == group]


def kill_members(group: int) -> None:
    """Kill every member but resource trackers."""
    for pid in members(group):
        if not _is_resource_tracker(pid):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def send(group: int, number: int) -> None:
    """Signal every member."""
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
    """Watch until the input ends, then end what is left."""
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
    reap_orphans()
