"""A mover copies entries from another store's arena into this store's. Beside tcp (`peers.py`) there is `nixl`.

    destination store                              source store
    open(RemoteEntry)              --->            checks the capability, holds the entry
                                   <---            its value, and what its mover offers
    mover.read(opened, reserved range)             its memory is read
    close                          --->            releases the hold; it fails if the hold had ended before

`Pulls` opens and closes, reserves and publishes; a mover only fills the reserved range. An entry is published only
after a close that succeeded, so bytes that arrive after the end of the source's hold are never used.

The hazard is the *late landing*: bytes that are written to a range after it was given to another entry. So `read` ends
in one of three ways, and only in these:

* it returns: all bytes are there, and nothing writes to the range any more;
* it raises TransferFailed: nothing writes to the range any more, and it can be reused at once;
* it raises StillWriting: the range is quarantined until the mover reports that no write can follow.
"""

from __future__ import annotations

from collections.abc import Awaitable, Mapping
from typing import NamedTuple, Protocol

from medialane.types.feature import MoverName, RemoteEntry
from medialane.types.tensor import ArenaRange


class StillWriting(Exception):
    """The read was given up, but its destination may still be written. `ended` returns when that is impossible; until
    then the range must not be reused. It raises nothing, and may take arbitrarily long.

    Not a MedialaneError, because it never leaves the store: whoever owns the range puts it in quarantine and raises
    TransferTimeout."""

    def __init__(self, ended: Awaitable[None]) -> None:
        super().__init__("the read has not ended in time")
        self.ended = ended


class Destination(NamedTuple):
    """A reserved range of our arena, and the part of it to fill: its payload, after the entry's header.

    The payload begins at `range.offset + ENTRY_HEADER_BYTES` in the arena's file, in both arenas.
    """

    range: ArenaRange
    payload: memoryview


class OpenedEntry(NamedTuple):
    """An entry that its store holds for us, and what the source's movers offer, by name."""

    entry: RemoteEntry
    offers: Mapping[str, bytes]


class Mover(Protocol):
    """Called from the event loop; blocking work belongs into threads or another process."""

    @property
    def name(self) -> MoverName: ...

    def is_ready(self) -> bool:
        """Return whether `read` can start at once. If not, begin to start what it needs."""
        ...

    async def offer(self, *, wait: bool) -> bytes | None:
        """Return what movers of this name on other hosts need to read from our arena, small; None if they cannot.
        Without `wait`, also None if they cannot yet: what they need is then started. Called for each entry."""
        ...

    async def read(self, source: OpenedEntry, destination: Destination, *, deadline_s: float) -> None:
        """Copy the entry's payload into `destination`, within `deadline_s` seconds.

        Raises TransferFailed or StillWriting, see above. When cancelled, it first ensures that nothing writes to the
        destination any more, or raises StillWriting instead of CancelledError.
        """
        ...

    async def close(self) -> None:
        """End all reads. Idempotent."""
        ...
