"""Ends process groups: of processes that are to stop, and of a supervisor that was killed. For these there is the
orphan reaper, a process of its own, whose script is this file.

A group has one kind of member that must outlive the others: the resource trackers of Python's multiprocessing. They
remove the shared memory of processes that were killed, some hundred MB of vLLM's included, once no other process holds
their pipe open. So the others are killed first, and the trackers only if they do not exit on their own.

The script reads lines from standard input: `+123` watch process group 123, `-123` it has ended. End of file means that
the supervisor has exited, kill -9 included: every group still watched gets SIGTERM, a few seconds to exit, SIGKILL. It
uses only the standard library, and little of it, so that it is small and independent of the supervisor's faults; for
its title it gets the folder of a library as argument.
"""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

logger = logging.getLogger(__name__)

#: Time that processes have to exit after the orphan reaper's SIGTERM.
GRACE_S = 5.0
#: Time that resource trackers have to clean up.
CLEANUP_S = 2.0
POLL_S = 0.05
#: Exit timeout of an orphan reaper that has nothing left to do.
_END_S = 10


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


class OrphanReaper:
    """Registers the process groups that must not outlive this process. Created by the supervisor, ended by `close`."""

    def __init__(self) -> None:
        import setproctitle  # imported lazily: the script has to find it first

        self._groups: set[int] = set()
        reader, self._pipe = os.pipe()
        # -I -S: no startup files, and site-packages only for the title; this takes 25 ms and 11 MB.
        packages = Path(setproctitle.__file__).parents[1]
        self._process = subprocess.Popen(  # noqa: S603 - our own script, no shell
            [sys.executable, "-I", "-S", __file__, str(packages)],
            stdin=reader,
            stdout=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C in the terminal must not reach it
        )
        os.close(reader)

    @property
    def pid(self) -> int | None:
        """None once it has exited."""
        return self._process.pid if self._process.poll() is None else None

    def watch(self, group: int) -> None:
        self._groups.add(group)
        self._send(f"+{group}\n")

    def forget(self, group: int) -> None:
        self._groups.discard(group)
        self._send(f"-{group}\n")

    def close(self) -> None:
        """End the orphan reaper, after every group has exited or been killed. Takes milliseconds."""
        for group in list(self._groups):
            self.forget(group)
        os.close(self._pipe)
        self._process.wait(_END_S)

    def _send(self, line: str) -> None:
        try:
            # A few bytes, and the reader does nothing else: this does not block.
            os.write(self._pipe, line.encode())
        except BrokenPipeError:
            logger.warning("the orphan reaper has exited: children may survive a kill -9 of this process")


def reap_orphans() -> None:
    """Watch groups until end of file, then end the remaining ones."""
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
