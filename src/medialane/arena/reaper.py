"""Removes the arena files of owners that are gone (`core.owner_lock`).

Holding the lock until the file is gone keeps an owner that is just creating it from believing that it has one (file.py
tells the other half). Readers keep what they have mapped: the memory is freed with the last mapping.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import msgspec

from medialane.arena.layout import FILE_MAGIC, FILE_NAME
from medialane.core.owner_lock import abandoned


class Reaped(msgspec.Struct, frozen=True):
    """A file that was removed, and the memory it occupied."""

    path: str
    num_bytes: int


def reap(directory: str) -> list[Reaped]:
    """Remove every arena file in `directory` whose owner is gone, unfinished ones included; return what was removed.

    Files of live owners, of other users and of other programs are left alone. Raises OSError if the directory cannot
    be read.
    """
    removed = []
    for name in os.listdir(directory):
        with _abandoned(directory, name) as num_bytes:
            if num_bytes is not None:
                path = os.path.join(directory, name)
                with suppress(FileNotFoundError):  # an owner that lost the race for its lock cleans up too
                    os.unlink(path)
                    removed.append(Reaped(path, num_bytes))
    return removed


def reclaimable_bytes(directory: str) -> int:
    """How much memory `reap` would free in `directory`."""
    total = 0
    for name in os.listdir(directory):
        with _abandoned(directory, name) as num_bytes:
            total += num_bytes or 0
    return total


@contextmanager
def _abandoned(directory: str, name: str) -> Iterator[int | None]:
    """Yield the memory that an abandoned arena file occupies, its lock held; None for anything else."""
    if not FILE_NAME.fullmatch(name):
        yield None
        return
    with abandoned(os.path.join(directory, name)) as descriptor:
        yield os.fstat(descriptor).st_blocks * 512 if descriptor is not None and _is_arena(descriptor) else None


def _is_arena(descriptor: int) -> bool:
    head = os.pread(descriptor, len(FILE_MAGIC), 0)
    # A file that had no header yet was never more than a temporary name.
    return head == FILE_MAGIC or not head.strip(b"\0")
