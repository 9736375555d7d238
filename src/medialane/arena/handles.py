"""Handles on an entry: a reservation while it is written, pins while it is read. Each ends exactly once."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Generic, NamedTuple, Self, TypeVar

from medialane.arena.entries import Entry, EntryTable
from medialane.arena.layout import ENTRY_HEADER_BYTES, stamp
from medialane.arena.view import ArenaView
from medialane.types.feature import EntryKind, Feature
from medialane.types.media import EncodedMedia
from medialane.types.tensor import ArenaRange

T = TypeVar("T")

#: The value of a cached entry: EncodedMedia for encoded bytes, Feature for decoded and processed media and
#: for embeddings.
Cached = EncodedMedia | Feature


class Reservation:
    """A range that its owner fills; ended by `Arena.publish` or `abandon`.

    As a context manager it is abandoned at the end of the block unless it has ended. If it is garbage collected
    instead, its range stays allocated (a process may still be writing there) and a ResourceWarning is issued.
    """

    def __init__(
        self,
        table: EntryTable[Cached],
        entry: Entry,
        view: ArenaView,
        on_trim: Callable[[Entry], object] = lambda _: None,
    ) -> None:
        self._table = table
        self._entry = entry
        self._view = view
        self._on_trim = on_trim
        self._ended = True  # until the next line has succeeded
        range_ = entry.range  # its header is not valid any more if it was revoked by an earlier owner
        self._buffer = view.memory[range_.offset : range_.offset + range_.nbytes][ENTRY_HEADER_BYTES:]
        self._ended = False
        if (log := table.log) is not None:
            log.add(self, entry)

    @property
    def range(self) -> ArenaRange:
        """The entry's range, for the process that writes it."""
        return self._entry.range

    @property
    def buffer(self) -> memoryview:
        """The payload, writable, of the requested size. Raises ValueError if the reservation has ended."""
        return self._buffer[:]

    @property
    def entry(self) -> Entry:
        """For the arena. Raises RuntimeError if the reservation has ended."""
        if self._ended:
            raise RuntimeError(f"the reservation of {self.range} has ended")
        return self._entry

    @property
    def kind(self) -> EntryKind:
        return self._entry.kind

    def trim(self, num_bytes: int) -> None:
        """Shrink the payload to `num_bytes`, which replaces `range` and `buffer`.

        The range must not have been given to another process. Raises ValueError if the payload is shorter or the
        reservation has ended.
        """
        self._buffer[:0]  # raises if it has ended
        self._table.trim(self._entry, ENTRY_HEADER_BYTES + num_bytes)
        self._on_trim(self._entry)
        stamp(self._view.words, self.range)
        self._buffer.release()
        self._buffer = self._view.entry(self.range, writable=True)[ENTRY_HEADER_BYTES:]

    def take(self) -> Entry:
        """End the reservation without freeing the entry; for the arena. Raises RuntimeError if it has ended."""
        entry = self.entry
        self._ended = True
        if (log := self._table.log) is not None:
            log.remove(self)
        self._buffer.release()
        return entry

    def abandon(self) -> None:
        """Free the range, to which no process may be writing any more. No effect if the reservation has ended."""
        if not self._ended:
            self._table.abandon(self.take())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.abandon()

    def __del__(self) -> None:
        if not self._ended:
            warnings.warn(f"reservation of {self.range} was dropped", ResourceWarning, source=self, stacklevel=2)

    def __repr__(self) -> str:
        return f"Reservation({self.range}, {'ended' if self._ended else 'open'})"


class Unfinished(NamedTuple):
    """A range that the client with the slot `writer` was writing when the earlier owner ended.

    `value` is what is to be cached once it is completed (`FillWriter`), unless it `is_revoked`; None for a range that
    the owner would have described once it was written.
    """

    reservation: Reservation
    writer: int
    value: Feature | None = None
    is_revoked: bool = False


class Pin(Generic[T]):
    """One pin on one entry: its bytes stay in place until `release`. `value` describes the entry.

    If a pin is garbage collected instead, the entry stays pinned (a process may still be reading) and a
    ResourceWarning is issued.
    """

    def __init__(self, table: EntryTable[Cached], entry: Entry, value: T) -> None:
        """Adopt a pin that `entry` already has."""
        self._table = table
        self._entry = entry
        self._released = False
        self.value = value
        if (log := table.log) is not None:
            log.add(self, entry)

    @property
    def range(self) -> ArenaRange:
        return self._entry.range

    def release(self) -> None:
        """End the pin. Raises RuntimeError the second time: a pin must have one owner."""
        if self._released:
            raise RuntimeError(f"the pin on {self.range} was already released")
        self._released = True
        if (log := self._table.log) is not None:
            log.remove(self)
        self._table.unpin(self._entry)

    def duplicate(self) -> Pin[T]:
        """Return a second, independent pin on the same entry. Raises RuntimeError after `release`."""
        if self._released:
            raise RuntimeError(f"the pin on {self.range} was already released")
        self._table.pin(self._entry)
        return Pin(self._table, self._entry, self.value)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def __del__(self) -> None:
        if not self._released:
            warnings.warn(f"pin on {self.range} was dropped unreleased", ResourceWarning, source=self, stacklevel=2)

    def __repr__(self) -> str:
        return f"Pin({self.range}, {'released' if self._released else 'held'})"
