"""Removes the arena files of processes that have exited (`runtime.private_files`), unless the next owner may take them
over: while a client of theirs lives, or the process that they are kept for.

The lock is held until the file is unlinked, so that a process that is just creating this file notices its removal (see
file.py). Readers keep their mappings: the memory is freed with the last one.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import msgspec

from medialane.arena.layout import FILE_MAGIC, FILE_NAME, KEPT, PAGE_BYTES, FileHeader, decode_keeper
from medialane.arena.locks import live_slots
from medialane.runtime.private_files import abandoned


class Reaped(msgspec.Struct, frozen=True):
    """A removed file, and the memory that it occupied."""

    path: str
    num_bytes: int


def reap(directory: str, *, successor: bytes = b"") -> list[Reaped]:
    """Remove every arena file in `directory` whose owner has exited, unfinished ones included; return the removed
    files. Files that an owner of the lineage `successor` is about to take over are spared.

    Files of live owners, other users and other programs are not touched. Raises OSError if the directory cannot be
    read.
    """
    removed = []
    for name in os.listdir(directory):
        with _abandoned(directory, name, successor) as num_bytes:
            if num_bytes is not None:
                path = os.path.join(directory, name)
                with suppress(FileNotFoundError):  # a creator that lost the race for the lock unlinks it too
                    os.unlink(path)
                    removed.append(Reaped(path, num_bytes))
    return removed


def kept_arenas(directory: str) -> list[Reaped]:
    """Return the files that nobody uses at present, and `reap` spares (`--keep-arena`). Raises OSError if the directory
    cannot be read."""
    kept = []
    for name in filter(FILE_NAME.fullmatch, os.listdir(directory)):
        path = os.path.join(directory, name)
        with abandoned(path) as descriptor:
            if descriptor is None or not _is_arena(descriptor) or live_slots(descriptor):
                continue
            if decode_keeper(os.pread(descriptor, PAGE_BYTES, 0)) == KEPT:
                kept.append(Reaped(path, os.fstat(descriptor).st_blocks * 512))
    return kept


def reclaimable_bytes(directory: str) -> int:
    """Return how many bytes of memory `reap` would free in `directory`."""
    total = 0
    for name in os.listdir(directory):
        with _abandoned(directory, name) as num_bytes:
            total += num_bytes or 0
    return total


@contextmanager
def _abandoned(directory: str, name: str, successor: bytes = b"") -> Iterator[int | None]:
    """Yield the memory occupied by an abandoned arena file, with its lock held; None for other files."""
    if not FILE_NAME.fullmatch(name):
        yield None
        return
    with abandoned(os.path.join(directory, name)) as descriptor:
        is_reapable = descriptor is not None and _is_arena(descriptor) and not _is_awaited(descriptor, successor)
        yield os.fstat(descriptor).st_blocks * 512 if descriptor is not None and is_reapable else None


def _is_awaited(descriptor: int, successor: bytes) -> bool:
    """Return whether the file may be taken over."""
    page = os.pread(descriptor, PAGE_BYTES, 0)
    try:
        header = FileHeader.decode(page)
    except ValueError:
        return False  # never finished, or of another version
    keeper = decode_keeper(page)
    if header.lineage.owner == successor or keeper == KEPT:
        return True
    if not keeper:
        return bool(live_slots(descriptor))
    if not os.path.exists(keeper):  # it starts no further store, whoever still reads this one's arena
        return False
    with abandoned(keeper) as lock:
        return lock is None


def _is_arena(descriptor: int) -> bool:
    head = os.pread(descriptor, len(FILE_MAGIC), 0)
    # A file without a header was abandoned during creation.
    return head == FILE_MAGIC or not head.strip(b"\0")
