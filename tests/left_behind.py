"""What a test leaves: descriptors of this process, arena files, and files of this run's processes.

A file without a live owner may be that of another run on this machine (another checkout's tests, a benchmark), whose
tests kill owners: it is only counted while no process of medialane runs that is not below this run's first process.
"""

from __future__ import annotations

import fcntl
import os
import re
import socket
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

SHARED_MEMORY = Path("/dev/shm")

_NUMBER = re.compile(r":\[\d+\]$")
#: Start of the name of a socket that reserves a port for as long as the process lives (check.server_process).
_RESERVED = b"\0medialane-port-"
#: What libraries open once and keep: devices, files of packages, and the kernel's own files.
_KEPT = ("/dev/null", "/dev/urandom", "/dev/pts/", "/proc/", "/sys/", "/usr/")


def descriptors() -> dict[int, str]:
    """Return the open descriptors of this process and what they refer to."""
    links = {}
    for entry in os.scandir("/proc/self/fd"):
        try:
            links[int(entry.name)] = os.readlink(entry.path)
        except FileNotFoundError:  # the descriptor of this listing
            continue
    return {fd: "kept" if link.startswith("socket:") and _reserves_port(fd) else link for fd, link in links.items()}


def new_descriptors(before: dict[int, str]) -> list[str]:
    """Return what there are more descriptors of than there were: of sockets, pipes, memory, and of each file.

    Others may have taken the place of those before: uvloop opens its own two again each time that it runs.
    """
    more = Counter(map(_kind, descriptors().values())) - Counter(map(_kind, before.values()))
    return sorted(kind for kind in more.elements() if kind != "kept")


def _kind(link: str) -> str:
    return "kept" if link.startswith(_KEPT) else _NUMBER.sub("", link)


def _reserves_port(fd: int) -> bool:
    try:
        with socket.socket(fileno=os.dup(fd)) as found:
            name = found.getsockname()
    except OSError:
        return False
    return isinstance(name, bytes) and name.startswith(_RESERVED)


def arena_files() -> dict[str, str]:
    """Return arena files held by this process or by none.

    Of a mapped file Python's mmap keeps a descriptor, so that /proc/self/maps need not be read: where torch is loaded
    that takes 5 ms, twice for each of thousands of tests.
    """
    links = map(Path, descriptors().values())
    held = {link.name: "open" for link in links if link.parent == SHARED_MEMORY and link.name.startswith("medialane-")}
    for path in SHARED_MEMORY.glob("medialane-*"):
        if path.name not in held and _is_abandoned(path):
            held[path.name] = "abandoned"
    return held


def _is_abandoned(path: Path) -> bool:
    """The owner of an arena file holds its lock for as long as it lives."""
    try:
        with path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:  # locked, removed, a folder, or owned by another user
        return False
    return True


def other_runs() -> list[int]:
    """Return the processes of medialane and of its tests that this run has not started."""
    parents, commands = {}, {}
    for pid, parent, command in _processes():
        parents[pid], commands[pid] = parent, command
    root = os.getpid()
    while "pytest" in commands.get(parents.get(root, 0), ""):
        root = parents[root]

    def is_below(pid: int) -> bool:
        while pid > 1 and pid != root:
            pid = parents.get(pid, 0)
        return pid == root

    return [pid for pid, command in commands.items() if _is_ours(command) and not is_below(pid)]


def _is_ours(command: str) -> bool:
    words = command.split()
    return bool(words) and (
        "medialane" in words[:4] or any(word.endswith(("pytest", "bin/medialane")) for word in words[:3])
    )


def _processes() -> Iterator[tuple[int, int, str]]:
    for entry in os.scandir("/proc"):
        if entry.name.isdigit():
            try:
                fields = Path(entry.path, "stat").read_text().rpartition(")")[2].split()
                command = Path(entry.path, "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            except OSError:  # it has exited
                continue
            yield int(entry.name), int(fields[1]), command
