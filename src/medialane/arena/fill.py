"""Writing the payload of an entry from a process that may be killed, or come too late.

The owner (the store) reserves a range for a writer, a process of which it knows nothing else: requests are aborted,
processes killed, and the writer may act much later. So byte-range locks of the file (open file description locks, see
fcntl_locking(2)) say whether a range is being written; the kernel drops those of a process that has exited.

    writer                                          owner, to free the range
    lock its bytes, or fail                         header: generation = 0
    header: generation as expected, or fail         lock its bytes; if that fails, try again later
    write the payload                               unlock them, reuse them
    header: completed
    unlock

If the writer's lock comes first, the owner sees it, and waits. Otherwise the writer sees that the generation is gone.
A range is written once: the owner publishes it only if it is completed.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from medialane.arena.layout import (
    COMPLETED_WORD,
    ENTRY_HEADER_BYTES,
    PAGE_BYTES,
    completed_mark,
    is_header,
    is_well_formed,
)
from medialane.arena.view import open_file, read_header
from medialane.types.errors import HandoverFailed
from medialane.types.tensor import ArenaRange

#: struct flock of 64-bit Linux: type, whence, start, length, pid (0 for locks of an open file description).
_FLOCK = struct.Struct("hhqqi4x")


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
