"""Where the body of a fetch is stored while it is read: it may be as large as a video, and arrives in chunks."""

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

    def finish(self, content_hash: str) -> None:
        """Store the body under its hash. Raises what `sniff` raises: then it must still be abandoned."""
        ...

    def abandon(self) -> None:
        """Release the memory. Idempotent; no effect after `finish`."""
        ...
