"""Destinations for the body of a fetch while it is read.

A body may be as large as a video and arrives in chunks. The caller of a fetch chooses their destination: shared memory
in the store; the heap in processes without it, and in tests.
"""

from __future__ import annotations

from typing import Protocol


class Body(Protocol):
    """One body, written sequentially. Its owner ends it once, by `finish` or `abandon`."""

    def expect(self, num_bytes: int) -> None:
        """Announce the declared length, 0 if unknown, before the first chunk. Allocates no memory yet."""
        ...

    def write(self, piece: bytes) -> None:
        """Append a copy of a chunk. Raises ArenaFull."""
        ...

    def finish(self, content_hash: str) -> bytearray | None:
        """Complete the body. Returns its bytes, or None if they are stored under the hash.

        Raises what `sniff` raises if the body is checked before it is stored; then it must still be abandoned.
        """
        ...

    def abandon(self) -> None:
        """Release the memory. Idempotent; no effect after `finish`."""
        ...


class HeapBody:
    """A body on the heap."""

    def __init__(self) -> None:
        self._data = bytearray()

    def expect(self, num_bytes: int) -> None:
        """Do nothing: a bytearray grows efficiently."""

    def write(self, piece: bytes) -> None:
        self._data += piece

    def finish(self, content_hash: str) -> bytearray:
        return self._data

    def abandon(self) -> None:
        self._data = bytearray()
