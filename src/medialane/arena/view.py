"""A process's mapping of an arena, and the checks that stand between a descriptor and its bytes."""

from __future__ import annotations

import mmap
import os
from contextlib import suppress

from medialane.arena.layout import ENTRY_HEADER_BYTES, PAGE_BYTES, FileHeader, file_path, is_valid
from medialane.core.errors import HandoverFailed
from medialane.core.tensor import ArenaRange, TensorDescriptor


class ArenaView:
    """One mapping of an arena; made by `ArenaView.open`.

    Views of entries borrow from it: they stay readable after `close` and after the owner's death, but say nothing
    about what the bytes mean once the lease under which they were taken has ended.
    """

    def __init__(self, header: FileHeader, mapping: mmap.mmap, *, writable: bool) -> None:
        self.id = header.arena
        self.nonce = header.nonce
        self.size_bytes = header.size_bytes
        self.writable = writable
        self._mapping: mmap.mmap | None = mapping
        self._memory = memoryview(mapping)
        self._words = self._memory.cast("Q")

    @classmethod
    def open(cls, arena: str, directory: str, *, writable: bool = False) -> ArenaView:
        """Map the arena `arena` of `directory`. The caller owns the view and closes it.

        Raises HandoverFailed if there is no such arena here, or the file is not what its name says.
        """
        try:
            path = file_path(directory, arena)
            flags = os.O_RDWR if writable else os.O_RDONLY
            descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC)
        except (OSError, ValueError) as error:
            raise HandoverFailed(f"the arena {arena!r} cannot be opened: {error}") from error
        try:
            header = _read_header(descriptor, arena)
            protection = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
            mapping = mmap.mmap(descriptor, header.size_bytes, flags=mmap.MAP_SHARED, prot=protection)
        except (OSError, ValueError) as error:
            raise HandoverFailed(f"the arena {arena!r} cannot be mapped: {error}") from error
        finally:
            os.close(descriptor)
        return cls(header, mapping, writable=writable)

    @property
    def memory(self) -> memoryview:
        """The whole file. Raises ValueError after `close`."""
        return self._memory[:]

    @property
    def words(self) -> memoryview:
        """The whole file as native 8-byte words. Raises ValueError after `close`."""
        return self._words[:]

    def entry(self, range: ArenaRange, writable: bool = False) -> memoryview:  # noqa: A002 - the types' own name
        """The bytes of an entry, its header included, so that descriptors' offsets index them.

        Raises HandoverFailed for a range of another arena, outside this one, or whose entry is no longer there;
        ValueError if `writable` is asked of a read-only mapping.
        """
        if self._mapping is None:
            raise HandoverFailed("the arena's mapping is closed")
        if writable and not self.writable:
            raise ValueError("the arena is mapped read-only")
        if range.arena != self.id or not is_valid(self._words, range):
            raise HandoverFailed(f"no such entry in arena {self.id}: {range}")
        found = self._memory[range.offset : range.offset + range.nbytes]
        return found if writable else found.toreadonly()

    def tensor(self, descriptor: TensorDescriptor, writable: bool = False) -> memoryview:
        """The bytes of a tensor. Raises as `entry`, and HandoverFailed for one that overlaps its entry's header."""
        first = descriptor.offset
        if first < ENTRY_HEADER_BYTES:
            raise HandoverFailed(f"a tensor cannot begin in its entry's header: {descriptor}")
        return self.entry(descriptor.range, writable)[first : first + descriptor.spec.nbytes]

    def close(self) -> None:
        """Drop the mapping. Idempotent. While views of entries live, the memory stays mapped until the last ends."""
        mapping, self._mapping = self._mapping, None
        self._words.release()
        self._memory.release()
        if mapping is not None:
            with suppress(BufferError):  # views live: theirs are now the only references
                mapping.close()


def _read_header(descriptor: int, arena: str) -> FileHeader:
    header = FileHeader.decode(os.pread(descriptor, PAGE_BYTES, 0))
    if header.arena != arena:
        raise ValueError("the file's header names another arena")
    if header.size_bytes != os.fstat(descriptor).st_size or header.size_bytes % PAGE_BYTES:
        raise ValueError("the file does not have the size that its header says")
    return header
