"""Removes the arena files of owners that are gone.

An owner holds an exclusive flock on its file for as long as it lives; the kernel drops it with the owner's last
descriptor, kill -9 included. So whoever obtains the lock has found a file without an owner. Holding the lock until the
file is gone keeps an owner that is just creating it from believing that it has one (file.py tells the other half).
Readers keep what they have mapped: the memory is freed with the last mapping.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import msgspec

from medialane.arena.layout import FILE_MAGIC, FILE_NAME

#: Gone meanwhile; another user's; a link; a socket. Whatever its name, that is no file of ours.
_NOT_OURS = {errno.ENOENT, errno.EACCES, errno.EPERM, errno.ELOOP, errno.ENXIO}


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
    path = os.path.join(directory, name)
    descriptor = _open(path)
    if descriptor is None:
        yield None
        return
    try:
        yield _lock(descriptor, path)
    finally:
        os.close(descriptor)


def _open(path: str) -> int | None:
    try:
        return os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        if error.errno in _NOT_OURS:
            return None
        raise


def _lock(descriptor: int, path: str) -> int | None:
    """Lock the file if it is one of ours without an owner. Returns the memory it occupies."""
    found = os.fstat(descriptor)
    if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid():
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return None
    # A file that had no header yet was never more than a temporary name.
    head = os.pread(descriptor, len(FILE_MAGIC), 0)
    if head.strip(b"\0") and head != FILE_MAGIC:
        return None
    with suppress(FileNotFoundError):  # renamed or removed since it was opened
        if os.path.samestat(os.stat(path, follow_symlinks=False), os.fstat(descriptor)):
            return found.st_blocks * 512
    return None
