"""A process's mapping of an arena, with validation of descriptors."""

from __future__ import annotations

import mmap
import os
from contextlib import suppress

from medialane.arena.layout import ENTRY_HEADER_BYTES, PAGE_BYTES, FileHeader, file_path, is_valid
from medialane.types.errors import HandoverFailed
from medialane.types.tensor import ArenaRange, TensorDescriptor

#: Neighbouring pieces of a mapping differ in their advice, and are walked one by one when this process's memory use is
#: read (`runtime.resources`): its mmap and munmap wait for a piece then, and not for the whole arena. Worst of them
#: during reads of 4 GiB: 430 ms without pieces, 37 ms with. The advice is about reading ahead, which has no use here.
PIECE_BYTES = 16 << 20
#: A process may have 65,530 mappings (vm.max_map_count).
MAX_PIECES = 8192


class ArenaView:
    """One mapping of an arena; created by `ArenaView.open`.

    Memoryviews of entries stay readable after `close` and after the owner has exited, but their content is undefined
    once the pin under which they were obtained has ended.
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
    def open(cls, arena: str, directory: str, *, nonce: bytes | None = None, writable: bool = False) -> ArenaView:
        """Map the arena with the id `arena` in `directory`. The caller owns the view and closes it.

        Raises HandoverFailed if there is no such arena on this host, the file's header does not match its name, or it
        has another `nonce` than is given: then it is not the file that others of this name have mapped.
        """
        descriptor = open_file(arena, directory, writable=writable)
        try:
            header = read_header(descriptor, arena)
            if nonce not in (None, header.nonce):
                raise HandoverFailed("the store's arena is not in our shared memory (--arena-directory)")
            protection = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
            mapping = mmap.mmap(descriptor, header.size_bytes, flags=mmap.MAP_SHARED, prot=protection)
            _split(mapping)
        except (OSError, ValueError) as error:
            raise HandoverFailed(f"the arena {arena!r} cannot be mapped: {error}") from error
        finally:
            os.close(descriptor)
        return cls(header, mapping, writable=writable)

    @property
    def max_payload_bytes(self) -> int:
        """The largest payload that fits into an empty arena."""
        return self.size_bytes - PAGE_BYTES - ENTRY_HEADER_BYTES

    @property
    def memory(self) -> memoryview:
        """The whole file. Raises ValueError after `close`."""
        return self._memory[:]

    @property
    def words(self) -> memoryview:
        """The whole file as native 8-byte words. Raises ValueError after `close`."""
        return self._words[:]

    def entry(self, range: ArenaRange, writable: bool = False) -> memoryview:  # noqa: A002 - the types' own name
        """Return the bytes of an entry including its header, so that offsets of descriptors are indices.

        Raises HandoverFailed for a range of another arena, outside this one, or whose entry was freed; ValueError if
        `writable` is requested from a read-only mapping.
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
        """Return the bytes of a tensor. Raises like `entry`, and HandoverFailed if it overlaps its entry's header."""
        first = descriptor.offset
        if first < ENTRY_HEADER_BYTES:
            raise HandoverFailed(f"a tensor cannot begin in its entry's header: {descriptor}")
        return self.entry(descriptor.range, writable)[first : first + descriptor.spec.nbytes]

    def close(self) -> None:
        """Unmap the file. Idempotent. While memoryviews of entries exist, the memory stays mapped."""
        mapping, self._mapping = self._mapping, None
        self._words.release()
        self._memory.release()
        if mapping is not None:
            with suppress(BufferError):  # memoryviews exist: the last one unmaps the file
                mapping.close()


def _split(mapping: mmap.mmap) -> None:
    piece = max(PIECE_BYTES, len(mapping) // MAX_PIECES // PAGE_BYTES * PAGE_BYTES)
    for start in range(0, len(mapping), 2 * piece):
        mapping.madvise(mmap.MADV_RANDOM, start, min(piece, len(mapping) - start))


def open_file(arena: str, directory: str, *, writable: bool) -> int:
    """Return a descriptor of an arena's file. Raises HandoverFailed if it cannot be opened."""
    try:
        path = file_path(directory, arena)
        flags = os.O_RDWR if writable else os.O_RDONLY
        return os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC)
    except (OSError, ValueError) as error:
        raise HandoverFailed(f"the arena {arena!r} cannot be opened: {error}") from error


def read_header(descriptor: int, arena: str) -> FileHeader:
    """Return the header of an arena's file. Raises ValueError if it belongs to another arena than `arena`."""
    header = FileHeader.decode(os.pread(descriptor, PAGE_BYTES, 0))
    if header.arena != arena:
        raise ValueError("the file's header names another arena")
    if header.size_bytes > os.fstat(descriptor).st_size or header.size_bytes % PAGE_BYTES:
        raise ValueError("the file's size does not match its header")
    return header
