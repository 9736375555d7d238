"""The owner's interface to an arena: reserve, write, publish, look up, release.

Single-threaded: one process owns an arena and calls it from one thread (except `prefault`). Other processes map it with
`ArenaView` and receive ranges and descriptors; they never allocate.
"""

from __future__ import annotations

import logging
import zlib
from typing import Any, Literal, TypeVar, cast, overload

from medialane.arena.config import ArenaConfig
from medialane.arena.entries import Entry, EntryTable, HoldLog, State
from medialane.arena.file import ArenaFile
from medialane.arena.handles import Cached, Pin, Reservation, Unfinished
from medialane.arena.index import RECORD_BYTES, AdoptedEntries, Indexed, encode_record, read_entries
from medialane.arena.layout import ENTRY_HEADER_BYTES, PAGE_BYTES, Lineage, clear, is_completed, stamp
from medialane.arena.locks import ClientSlot, new_slot
from medialane.types.errors import MediaTooLarge
from medialane.types.feature import EntryKind, Feature
from medialane.types.media import EncodedMedia
from medialane.types.tensor import ALIGNMENT, ArenaRange, align

logger = logging.getLogger(__name__)

C = TypeVar("C", bound=Cached)


class Arena:
    """The owner of an arena file and its entries; created by `Arena.create` or `Arena.open`, ended by `close`."""

    def __init__(self, file: ArenaFile, config: ArenaConfig, *, grows: bool) -> None:
        self._file = file
        #: Its file's id and path, and the random value by which a process proves that it maps this file.
        self.id, self.path, self.nonce = file.view.id, file.path, file.view.nonce
        #: Size of the file with one page for its header, of the largest payload in an empty arena, and offset of what
        #: follows the arena in the file: space of whoever uses it.
        self.size_bytes, self.max_payload_bytes = file.view.size_bytes, file.view.max_payload_bytes
        self.end_bytes = file.end_bytes
        #: How many entries there may be, however small they are.
        self.max_entries = file.index.max_entries
        #: The owner's mapping, to read entries in this process. It is closed with the arena.
        self.view = file.view
        #: Whether the file belonged to an earlier owner.
        self.was_adopted = False
        self._unfinished: list[Unfinished] = []
        self._closed = False
        self._leaving: ClientSlot | None = None
        #: The slot of the owner's own processes which write to the arena.
        self.slot = new_slot()
        self._table: EntryTable[Cached] = EntryTable(
            self.id,
            PAGE_BYTES,
            file.view.size_bytes - PAGE_BYTES,
            self._clear,
            shares=config.shares,
            usable_bytes=max(0, file.usable_bytes - PAGE_BYTES) if grows else None,
            max_entries=file.index.max_entries,
        )
        #: Of the file, and of its entries; what `prefault` reports is for `prefaulted`.
        self.prefault, self.keep_for, self.live_slots = file.prefault, file.keep_for, file.live_slots
        self.contains, self.evict, self.clear = self._table.contains, self._table.evict, self._table.clear
        self.stats = self._table.stats

    @classmethod
    def create(cls, config: ArenaConfig, *, lineage: Lineage = Lineage(), grows: bool = False) -> Arena:  # noqa: B008
        """Create and lock the file. Raises StartupFailed, leaving no file behind. Call `reap` first.

        If it `grows`, only memory that was reported to `prefaulted` is used.
        """
        return cls(ArenaFile.create(config, lineage), config, grows=grows)

    @classmethod
    def open(cls, config: ArenaConfig, *, lineage: Lineage, grows: bool = False) -> Arena:
        """Take over the file of an earlier owner of this lineage, with its entries, if there is one; else as `create`.

        A file that does not check out is removed: its memory is freed when the last process has unmapped it. Clients
        of the earlier owner may be using entries: nothing is reserved before `allow_reserving`, and nothing evicted
        before `end_takeover`.
        """
        while (file := ArenaFile.take_over(config, lineage)) is not None:
            try:
                return cls._adopt(file, config, grows=grows)
            except ValueError as error:
                logger.warning("the arena of an earlier owner is not used: %s: %s", file.path, error)
                file.close()
        return cls.create(config, lineage=lineage, grows=grows)

    @classmethod
    def _adopt(cls, file: ArenaFile, config: ArenaConfig, *, grows: bool) -> Arena:
        """Raises ValueError if the file is damaged."""
        ceiling, file.usable_bytes, entries = file.index.load()
        if file.usable_bytes > file.view.size_bytes:
            raise ValueError("it is smaller than its usable part")
        adopted = read_entries(file.view, entries)
        arena = cls(file, config, grows=grows)
        for range_ in adopted.freed:
            file.index.remove(range_.generation)
        arena._restore(ceiling, adopted)
        return arena

    def _restore(self, ceiling: int, adopted: AdoptedEntries) -> None:
        """Raises ValueError if entries overlap, or two have one key."""
        self.was_adopted = True
        table = self._table
        table.may_evict = table.may_reserve = False
        table.restore(ceiling, [each.entry for each in adopted.writing], adopted.published)
        self._unfinished = [
            Unfinished(self._reservation(each.entry), each.writer, each.value, is_revoked=each.is_revoked)
            for each in adopted.writing
        ]
        for _, _, value in adopted.published:
            if isinstance(value, Feature) and value.embedding is not None:
                table.demote(value.mm_hash)

    @property
    def is_growing(self) -> bool:
        """Whether `prefaulted` can still add memory."""
        return self._table.is_growing

    def prefaulted(self, num_bytes: int) -> None:
        """Use the first `num_bytes` of the file of an arena that grows."""
        self._table.extend(num_bytes - PAGE_BYTES)
        if not self._closed:
            self._file.index.set_usable(num_bytes)

    def unfinished(self) -> list[Unfinished]:
        """Return the ranges that clients of an earlier owner were writing, once: the caller owns the reservations."""
        unfinished, self._unfinished = self._unfinished, []
        return unfinished

    def allow_reserving(self) -> None:
        """Reserve memory from now on: `reserve` of an adopted arena raises ArenaFull before."""
        self._table.may_reserve = True

    def end_takeover(self) -> None:
        """Evict entries from now on: all that is held is pinned."""
        self._table.may_evict = self._table.may_reserve = True
        self._table.free_unclaimed()

    def note(self, reservation: Reservation, key: str, value: Cached) -> None:
        """Note in the file what is to be cached once the range is completed (`FillWriter`)."""
        self._enter(reservation.entry, State.NOTED, key, value)

    def set_aside(self) -> None:
        """Remove the file: no other owner is to take it over. Mappings stay valid."""
        self._file.path.unlink(missing_ok=True)

    def claim(self, range: ArenaRange) -> Pin[Cached | None] | None:  # noqa: A002 - the types' own name
        """Pin the entry at this range, held or not. None if there is none. The caller owns the pin, which has a
        value if the entry is cached."""
        pinned = self._table.pin_range(range)
        return None if pinned is None else Pin(self._table, *pinned)

    def reserve(
        self,
        num_bytes: int,
        kind: EntryKind = "processed",
        *,
        writer: int | None = None,
        header_bytes: int = 0,
    ) -> Reservation:
        """Reserve a range for a payload of `num_bytes`, evicting cached entries that are not held if necessary.

        `kind` is the share of the arena to which it counts, `writer` the slot of the client that is to write the range,
        None for the owner itself and its own processes. `header_bytes` is the size of the `Feature`'s header (see
        `arena.header_bytes`): the next owner of the file finds only entries whose description fits. The caller owns the
        reservation. Raises ArenaFull if held entries leave no space, and MediaTooLarge if it would not fit into an
        empty arena; nothing was evicted then.
        """
        if num_bytes < 0:
            raise ValueError(f"a payload of {num_bytes} bytes")
        if num_bytes > self.max_payload_bytes:
            raise MediaTooLarge(f"the item needs {num_bytes} bytes, more than this server can store")
        self._check_open()
        room = min(RECORD_BYTES + header_bytes, self.max_payload_bytes - num_bytes)
        entry = self._table.reserve(ENTRY_HEADER_BYTES + num_bytes, kind, more_bytes=room - room % ALIGNMENT)
        entry.writer = self.slot if writer is None else writer
        self._file.index.use_generation(entry.range.generation)
        self._enter(entry, State.WRITING)
        stamp(self._file.view.words, entry.range)
        return self._reservation(entry)

    def publish(self, reservation: Reservation, key: str, value: C) -> Pin[C]:
        """Cache the written entry under `key` and the reservation's kind, and pin it.

        Raises TypeError unless `value` is `EncodedMedia` for an encoded entry, `Feature` for others, which has an
        embedding for an embedded one. If the key exists, the new range is freed and the pin is on the existing entry,
        with its value. Features whose embedding is cached are evicted first (`demote`). The caller owns the pin.
        Raises RuntimeError if the reservation has ended.
        """
        self._check_open()
        if not _describes(value, reservation.kind):
            raise TypeError(f"a {type(value).__name__} does not describe an entry of kind {reservation.kind}")
        if not self._table.contains(key, reservation.kind):
            self._enter(reservation.entry, State.PUBLISHED, key, value)
        entry, found = self._table.publish(reservation.take(), key, value)
        if isinstance(value, Feature) and value.embedding is not None:
            self._table.demote(value.mm_hash)
        return Pin(self._table, entry, cast("C", found))

    def is_completed(self, reservation: Reservation) -> bool:
        """Return whether another process has written the range (`FillWriter`): then it writes nothing more."""
        return not self._closed and is_completed(self._file.view.words, reservation.range)

    def revoke(self, reservation: Reservation) -> bool:
        """Free a range that another process may write (`FillWriter`), which is too late from now on. Return False if it
        is writing at the moment: then nothing is freed, and the caller tries again."""
        if not self._closed:
            clear(self._file.view.words, reservation.range)
            if self._file.is_locked(reservation.range):
                return False
        reservation.abandon()
        return True

    @overload
    def lookup(
        self, key: str, kind: Literal["decoded", "processed", "embedded"] = "processed"
    ) -> Pin[Feature] | None: ...
    @overload
    def lookup(self, key: str, kind: Literal["encoded"]) -> Pin[EncodedMedia] | None: ...
    def lookup(self, key: str, kind: EntryKind = "processed") -> Pin[Any] | None:
        """Pin the entry of `key` and `kind`, if it exists. The caller owns the pin."""
        found = self._table.lookup(key, kind)
        return None if found is None else Pin(self._table, *found)

    def share(self, range: ArenaRange) -> Pin[Cached | None] | None:  # noqa: A002 - as above
        """As `claim`, for an entry that is pinned already; None if it is not."""
        pinned = self._table.pin_held(range)
        return None if pinned is None else Pin(self._table, *pinned)

    def key_of(self, range: ArenaRange) -> tuple[EntryKind, str] | None:  # noqa: A002 - as above
        """Return the kind and key of a cached entry that is pinned; None if there is none at `range`."""
        entry = self._table.held(range)
        return None if entry is None or entry.key is None else (entry.kind, entry.key)

    def record_holds(self) -> HoldLog:
        """Record from now on who takes pins and reservations, and return the record."""
        self._table.log = HoldLog()
        return self._table.log

    def close(self, *, keep: bool = False) -> None:
        """Remove the file, or with `keep` leave it for the next owner. Idempotent. Pins and reservations may still
        end, but none can be created.

        Mappings in other processes stay valid.
        """
        if not keep:
            if self._leaving is not None:
                self._leaving.release()
            self._table.clear()
        self._closed = True
        for unfinished in self.unfinished():
            unfinished.reservation.abandon()
        self._file.close(keep=keep)

    def leave(self) -> None:
        """Leave the file to the next owner, which waits with the ranges that this one was writing until `close`, when
        nothing writes there any more, or the end of this process."""
        if not self._closed:
            self._leaving = ClientSlot.take(self.id, str(self.path.parent), self.slot)
            self.close(keep=True)

    def _check_open(self) -> None:
        if self._closed:
            raise RuntimeError("the arena is closed")

    def _clear(self, entry: ArenaRange) -> None:
        if not self._closed:  # later there is no mapping, and the memory is not reused
            clear(self._file.view.words, entry)
            self._file.index.remove(entry.generation)

    def _reservation(self, entry: Entry) -> Reservation:
        return Reservation(self._table, entry, self._file.view, lambda entry: self._enter(entry, State.WRITING))

    def _enter(self, entry: Entry, state: State, key: str = "", value: Cached | None = None) -> None:
        """Enter an entry in the index, with its record, if there is room for that behind its range."""
        record = b"" if value is None else encode_record(key, value)
        start = entry.range.offset + align(entry.range.nbytes)
        if start + len(record) > entry.range.offset + entry.size:
            record = b""
        if record:
            with self._file.view.memory as memory:
                memory[start : start + len(record)] = record
        checksum = zlib.crc32(record)
        kind, writer = entry.kind, entry.writer
        self._file.index.put(Indexed(entry.range, entry.size, kind, state, writer, len(record), checksum))


def _describes(value: Cached, kind: EntryKind) -> bool:
    if isinstance(value, EncodedMedia):
        return kind == "encoded"
    return kind != "encoded" and (value.embedding is not None) == (kind == "embedded")
