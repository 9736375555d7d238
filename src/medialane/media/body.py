"""Where the body of a fetch goes while it is read.

A body may be as large as a video and arrives in pieces. Whoever fetches says where the pieces go: shared memory in the
gateway, which fills `Bodies`; the heap in whatever has no such memory, and in tests.
"""

from __future__ import annotations

from typing import Protocol

from medialane.core.media import Modality


class Body(Protocol):
    """One body, written from its beginning to its end. Its owner ends it once, by `finish` or by `abandon`."""

    def expect(self, num_bytes: int) -> None:
        """Its length, where that is declared; told before the first piece. Takes no memory yet."""
        ...

    def write(self, piece: bytes) -> None:
        """Append a piece; it is copied. Raises ArenaFull."""
        ...

    def finish(self, content_hash: str) -> bytearray | None:
        """The body is whole. Its bytes, or None if they are kept where the hash finds them.

        Raises what `sniff` raises where the body is looked at before it is kept; then it is still to be abandoned.
        """
        ...

    def abandon(self) -> None:
        """Give the memory back. Idempotent, and nothing after `finish`."""
        ...


class Bodies(Protocol):
    """Makes bodies. `max_bytes` is the most that will be written; `salt` is the tenant's, as in `MediaRef`."""

    def open(self, modality: Modality, salt: str, max_bytes: int) -> Body: ...


class HeapBody:
    """A body in this process's own memory."""

    def __init__(self) -> None:
        self._data = bytearray()

    def expect(self, num_bytes: int) -> None:
        """A bytearray grows well by itself."""

    def write(self, piece: bytes) -> None:
        self._data += piece

    def finish(self, content_hash: str) -> bytearray:
        return self._data

    def abandon(self) -> None:
        self._data = bytearray()


class HeapBodies:
    def open(self, modality: Modality, salt: str, max_bytes: int) -> HeapBody:
        return HeapBody()
