"""Locks of bytes of an arena's file, which say who lives, and who writes; and the removal of files whose owner has
exited.

They belong to an open file description (fcntl_locking(2)): the kernel drops them with the last process that has the
description, in whatever PID namespace that is.

Slots: each client has the lock of one byte of the file, far beyond its data, while it lives (`ClientSlot`). So an
owner, and the next one that takes over the file, knows who may still read and write.

Ranges: the owner (the store) reserves a range for a writer, a process that it knows nothing else about: requests are
aborted, processes killed, and the writer may act much later. So locks of the bytes of a range say whether it is being
written (`FillWriter`).

    writer                                          owner, to free the range
    lock its bytes, or fail                         header: generation = 0
    header: generation as expected, or fail         lock its bytes; if that fails, try again later
    write the payload                               unlock them, reuse them
    header: completed
    unlock

If the writer's lock comes first, the owner sees it, and waits. Otherwise the writer sees that the generation is gone.
A range is written once: the owner publishes it only if it is completed.

Files: those of owners that have exited (`runtime.private_files`) are removed (`reap`), unless the next owner may take
them over: while a client of theirs lives, or the process that they are kept for. The lock of the whole file is held
until it is unlinked, so that a process that is just creating this file notices its removal (see file.py). Readers keep
their mappings: the memory is freed with the last one.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import secrets
import struct
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import msgspec

from medialane.arena.layout import (
    COMPLETED_WORD,
    ENTRY_HEADER_BYTES,
    FILE_MAGIC,
    FILE_NAME,
    KEPT,
    PAGE_BYTES,
    FileHeader,
    completed_mark,
    decode_keeper,
    is_header,
    is_well_formed,
)
from medialane.arena.view import open_file, read_header
from medialane.runtime.private_files import abandoned
from medialane.types.errors import HandoverFailed
from medialane.types.tensor import ArenaRange

#: struct flock of 64-bit Linux: type, whence, start, length, pid (0 for locks of an open file description).
_FLOCK = struct.Struct("hhqqi4x")

_FIRST_BYTE = 1 << 62

_MAX_SLOT = 1 << 40


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
    """Return a random slot: slots of an earlier owner's clients need not be known."""
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


class FillWriter:
    """Writes the payload of one entry, once."""

    @classmethod
    @contextmanager
    def open(cls, range: ArenaRange, directory: str) -> Iterator[memoryview]:  # noqa: A002 - the types' own name
        """Yield the payload of `range`, writable until the end of the block; the entry is completed unless that raises.

        `directory` is the arena's. Only the pages of the entry are mapped. Raises HandoverFailed if there is no such
        entry (any more), it has been written, or another process is writing it.
        """
        if not is_well_formed(range):
            raise HandoverFailed(f"not a range of an arena: {range}")
        descriptor = open_file(range.arena, directory, writable=True)
        try:
            with _locked(descriptor, range), _mapped(descriptor, range) as (header, payload):
                if not is_header(header, range) or header[COMPLETED_WORD]:
                    raise HandoverFailed(f"no such entry to write: {range}")
                yield payload
                header[COMPLETED_WORD] = completed_mark(range)
        finally:
            os.close(descriptor)


def lock_range(descriptor: int, entry: ArenaRange) -> bool:
    """Lock the bytes of `entry` without waiting. Return False if they are locked through another descriptor."""
    try:
        _set_lock(descriptor, entry, fcntl.F_WRLCK)
    except OSError as error:
        if error.errno in (errno.EAGAIN, errno.EACCES):
            return False
        raise
    return True


def unlock_range(descriptor: int, entry: ArenaRange) -> None:
    _set_lock(descriptor, entry, fcntl.F_UNLCK)


def _set_lock(descriptor: int, entry: ArenaRange, kind: int) -> None:
    fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, _FLOCK.pack(kind, os.SEEK_SET, entry.offset, entry.nbytes, 0))


@contextmanager
def _locked(descriptor: int, entry: ArenaRange) -> Iterator[None]:
    """Raises HandoverFailed."""
    try:
        is_locked = lock_range(descriptor, entry)
    except (OSError, struct.error) as error:
        raise HandoverFailed(f"the range {entry} cannot be locked: {error}") from error
    if not is_locked:
        raise HandoverFailed(f"another process is writing {entry}")
    try:
        yield
    finally:
        unlock_range(descriptor, entry)  # closing would not suffice: a mapping has a duplicate of the descriptor


@contextmanager
def _mapped(descriptor: int, entry: ArenaRange) -> Iterator[tuple[memoryview, memoryview]]:
    """Yield the words of the header of `entry`, and its payload, writable. Raises HandoverFailed."""
    start = entry.offset % PAGE_BYTES
    end = start + entry.nbytes
    try:
        read_header(descriptor, entry.arena)
        # All pages at once: faults, one for each page, would take longer than writing them.
        flags = mmap.MAP_SHARED | mmap.MAP_POPULATE
        mapping = mmap.mmap(descriptor, end + -end % PAGE_BYTES, flags=flags, offset=entry.offset - start)
    except (OSError, ValueError, OverflowError) as error:
        raise HandoverFailed(f"the range {entry} cannot be mapped: {error}") from error
    payload = memoryview(mapping)[start + ENTRY_HEADER_BYTES : end]
    header = memoryview(mapping)[start : start + ENTRY_HEADER_BYTES].cast("Q")
    try:
        yield header, payload
    finally:
        header.release()
        with suppress(BufferError):  # arrays over the payload exist: the last one unmaps it
            payload.release()
            mapping.close()


# Files


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
    """Return how many bytes of memory in `directory` arenas have whose owners have exited: the next owner takes them
    over, or `reap` frees them."""
    total = 0
    for name in filter(FILE_NAME.fullmatch, os.listdir(directory)):
        with abandoned(os.path.join(directory, name)) as descriptor:
            if descriptor is not None and _is_arena(descriptor):
                total += os.fstat(descriptor).st_blocks * 512
    return total


@contextmanager
def _abandoned(directory: str, name: str, successor: bytes) -> Iterator[int | None]:
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
