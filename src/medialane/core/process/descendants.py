"""The processes below a process, from /proc."""

from __future__ import annotations

import os
from collections.abc import Iterator


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
