"""Slots: each client has the lock of one byte of the arena's file, far beyond its data, while it lives.

The lock is that of an open file description (fcntl_locking(2)): the kernel drops it with the last process that has the
description, in whatever PID namespace that is. So an owner, and the next one that takes over the file, knows who may
still read and write.
"""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
import struct
from typing import NamedTuple

from medialane.arena.lease import Reservation
from medialane.arena.view import open_file
from medialane.types.errors import HandoverFailed
from medialane.types.feature import Feature

#: struct flock of 64-bit Linux: type, whence, start, length, pid (0 for locks of an open file description).
_FLOCK = struct.Struct("hhqqi4x")
_FIRST_BYTE = 1 << 62
_MAX_SLOT = 1 << 40


class Unfinished(NamedTuple):
    """A range that the client with the slot `writer` was writing when the earlier owner ended.

    `value` is what is to be cached once it is completed (`FillWriter`), unless it `is_revoked`; None for a range that
    the owner would have described once it was written.
    """

    reservation: Reservation
    writer: int
    value: Feature | None = None
    is_revoked: bool = False


class ClientSlot:
    """The lock of one client, until `release` or the end of its process."""

    def __init__(self, number: int, descriptor: int) -> None:
        self.number = number
        self._descriptor: int | None = descriptor

    @classmethod
    def take(cls, arena: str, directory: str, number: int) -> ClientSlot:
        """Lock the slot. Where there are no such locks (gVisor), it is not locked, and the arena cannot be taken over.

        Raises HandoverFailed if there is no such arena on this host.
        """
        descriptor = open_file(arena, directory, writable=False)
        try:
            fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, _pack(fcntl.F_RDLCK, number, number + 1))
        except OSError as error:
            if error.errno != errno.EINVAL:
                os.close(descriptor)
                raise HandoverFailed(f"the slot of arena {arena} cannot be locked: {error.strerror}") from error
        return cls(number, descriptor)

    @property
    def is_removed(self) -> bool:
        """Whether the arena's file has been removed: no other owner can take it over."""
        return self._descriptor is None or os.fstat(self._descriptor).st_nlink == 0

    def release(self) -> None:
        """Idempotent."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)


def new_slot() -> int:
    """Return a random slot: those of an earlier owner's clients need not be known."""
    return 1 + secrets.randbelow(_MAX_SLOT - 1)


def live_slots(descriptor: int) -> set[int]:
    """Return the slots that are locked through other descriptions of the file."""
    live, intervals = set(), [(0, _MAX_SLOT)]
    while intervals:
        start, end = intervals.pop()
        slot = _any_locked(descriptor, start, end) if start < end else None
        if slot is not None:  # not always the lowest
            live.add(slot)
            intervals += [(start, slot), (slot + 1, end)]
    return live


def _any_locked(descriptor: int, start: int, end: int) -> int | None:
    """Return a slot of [start, end) that is locked, if there is one."""
    try:
        lock = fcntl.fcntl(descriptor, fcntl.F_OFD_GETLK, _pack(fcntl.F_WRLCK, start, end))
    except OSError as error:
        if error.errno == errno.EINVAL:
            return None
        raise
    kind, _, first, _, _ = _FLOCK.unpack(lock)
    return None if kind == fcntl.F_UNLCK else first - _FIRST_BYTE


def _pack(kind: int, start: int, end: int) -> bytes:
    return _FLOCK.pack(kind, os.SEEK_SET, _FIRST_BYTE + start, end - start, 0)
