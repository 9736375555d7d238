"""The owner's interface to an arena: reserve, write, publish, look up, release.

Single-threaded: one process owns an arena and calls it from one thread (except `prefault`). Other processes map it with
`ArenaView` and receive ranges and descriptors; they never allocate.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from threading import Event
from typing import Literal, TypeVar, cast, overload

from medialane.arena.config import ArenaConfig
from medialane.arena.entries import EntryTable
from medialane.arena.entry_log import (
    EntryLog,
    Freed,
    LoggedArena,
    Prefaulted,
    Reserved,
    describe_entry,
    read_log,
)
from medialane.arena.file import ArenaFile
from medialane.arena.layout import (
    ENTRY_HEADER_BYTES,
    FILE_NAME,
    PAGE_BYTES,
    clear,
    is_completed,
    is_valid,
    is_well_formed,
    log_path,
    stamp,
)
from medialane.arena.lease import Cached, Lease, Reservation
from medialane.arena.slots import Unfinished, new_slot
from medialane.arena.view import ArenaView
from medialane.core.errors import ArenaFull, MediaTooLarge, StartupFailed
from medialane.core.feature import Feature
from medialane.core.media import EncodedMedia
from medialane.core.remote_entry import EntryKind
from medialane.core.stats import ArenaStats
from medialane.core.tensor import ArenaRange

logger = logging.getLogger(__name__)

T = TypeVar("T")
C = TypeVar("C", bound=Cached)


class Arena:
    """The owner of an arena file and its entries; created by `open` or `create`, ended by `close` or `leave`.

    What the file holds is written to a log (`entry_log`), by which the next owner takes it over.
    """

    def __init__(self, file: ArenaFile, config: ArenaConfig, *, grows: bool, log: EntryLog) -> None:
        self._file = file
        self._log = log
        self._closed = False
        #: That of the owner's own processes which write to the arena.
        self.slot = new_slot()
        #: Whether the file was that of an earlier owner.
        self.was_adopted = False
        self._may_reserve = True
        self._unfinished: list[Unfinished] = []
        self._table: EntryTable[Cached] = EntryTable(
            self.id,
            PAGE_BYTES,
            file.view.size_bytes - PAGE_BYTES,
            self._clear,
            shares=config.shares,
            usable_bytes=0 if grows else None,
        )

    @classmethod
    def create(cls, config: ArenaConfig, *, grows: bool = False) -> Arena:
        """Create and lock the file. Raises StartupFailed, leaving no file behind. Call `reap` first.

        If it `grows`, only memory that was reported to `prefaulted` is used.
        """
        return cls._create(config, b"", grows=grows)

    @classmethod
    def open(cls, config: ArenaConfig, *, lineage: bytes, grows: bool = False) -> Arena:
        """Take over the arena of an owner of the same `lineage` which has exited; create one if there is none. Entries
        that were cached are cached again, and not evicted before `end_takeover`; nothing is reserved before
        `allow_reserving`.

        A file that is damaged is removed. Raises StartupFailed.
        """
        return cls.adopt(config, lineage=lineage, grows=grows) or cls._create(config, lineage, grows=grows)

    @classmethod
    def adopt(cls, config: ArenaConfig, *, lineage: bytes, grows: bool = False) -> Arena | None:
        """As `open`; None if there is nothing to take over."""
        paths = [path for path in Path(config.directory).glob("medialane-*.arena") if FILE_NAME.fullmatch(path.name)]
        for file in filter(None, map(ArenaFile.adopt, paths)):
            if (arena := cls._adopt(file, config, lineage, grows=grows)) is not None:
                return arena
        return None

    @classmethod
    def _create(cls, config: ArenaConfig, lineage: bytes, *, grows: bool) -> Arena:
        file = ArenaFile.create(config)
        try:
            log = EntryLog.create(log_path(file.path), arena=file.view.id, lineage=lineage, nonce=file.view.nonce)
        except OSError as error:
            file.close()
            raise StartupFailed(f"cannot create the arena in {config.directory}: {error.strerror}") from error
        return cls(file, config, grows=grows, log=log)

    @classmethod
    def _adopt(cls, file: ArenaFile, config: ArenaConfig, lineage: bytes, *, grows: bool) -> Arena | None:
        """Take over a file. None if it is left to others, or is damaged: then it is removed. Owns `file`."""
        path = log_path(file.path)
        try:
            logged = read_log(path, arena=file.view.id, nonce=file.view.nonce)
            is_wanted = logged.began.lineage == lineage and file.view.size_bytes == config.file_bytes
            if not lineage or not is_wanted:
                file.leave()
                return None
            file.num_prefaulted = logged.num_prefaulted
            arena = cls(file, config, grows=grows, log=EntryLog.resume(path, logged, file.view.nonce))
            try:
                arena._resume(logged)
            except BaseException:
                arena._log.close()
                raise
        except FileNotFoundError:
            file.leave()
            return None
        except (OSError, ValueError) as error:
            logger.warning("the arena of an earlier store is not taken over: %s: %s", file.path, error)
            path.unlink(missing_ok=True)
            file.close()
            return None
        return arena

    def _resume(self, logged: LoggedArena) -> None:
        """Raises ValueError if the log and the file contradict each other."""
        words, known = self._file.view.words, []
        if not 0 <= logged.num_prefaulted <= self.size_bytes or logged.num_prefaulted % PAGE_BYTES:
            raise ValueError(f"{logged.num_prefaulted} bytes are said to have pages")
        if self._table.is_growing and logged.num_prefaulted:
            self._table.extend(logged.num_prefaulted - PAGE_BYTES)
        freed = []
        for entry in logged.entries.values():
            if not is_well_formed(entry.range) or entry.range.offset + entry.range.nbytes > words.nbytes:
                raise ValueError(f"the entry {entry.range} is outside of the arena")
            is_there = is_valid(words, entry.range)
            if entry.is_published and not is_there:
                if words[entry.range.offset // 8 + 1]:
                    raise ValueError(f"the header of {entry.range} is another one")
                freed.append(entry.range)  # its record was the next one
                continue
            cached = (entry.key, entry.value) if entry.is_published and entry.key and entry.value else None
            if cached is not None and not _describes(cached[1], entry.kind):
                raise ValueError(f"the description of {entry.range} is of another kind")
            known.append((entry.range, entry.kind, cached))
        for writing in self._table.adopt(known, logged.generation):
            entry = logged.entries[writing.range.generation]
            value = entry.value if isinstance(entry.value, Feature) else None
            is_revoked = not is_valid(words, writing.range)
            reservation = Reservation(self._table, writing, self._file.view)
            self._unfinished.append(Unfinished(reservation, entry.writer, value, is_revoked))
        for range_ in freed:
            self._log.append(Freed(range_.generation))
        self.was_adopted = True
        self._may_reserve = self._table.may_evict = False

    @property
    def id(self) -> str:
        return self._file.view.id

    @property
    def path(self) -> Path:
        return self._file.path

    @property
    def nonce(self) -> bytes:
        """The random value in the file's header, by which a process proves that it maps this file."""
        return self._file.view.nonce

    @property
    def size_bytes(self) -> int:
        """Size of the file, including one page for its header."""
        return self._file.view.size_bytes

    @property
    def max_payload_bytes(self) -> int:
        """The largest payload that fits into an empty arena."""
        return self._file.view.max_payload_bytes

    @property
    def view(self) -> ArenaView:
        """The owner's mapping, to read entries in this process. It is closed with the arena."""
        return self._file.view

    def prefault(self, stop: Event, on_progress: Callable[[int], object] = lambda _: None) -> int:
        """Allocate all pages; call it in a thread, and join that before `close`. See `ArenaFile.prefault`.

        `on_progress` is called in that thread with the number for `prefaulted`.
        """
        return self._file.prefault(stop, on_progress)

    @property
    def is_growing(self) -> bool:
        """Whether `prefaulted` can still add memory."""
        return self._table.is_growing

    def prefaulted(self, num_bytes: int) -> None:
        """Use the first `num_bytes` of the file of an arena that grows."""
        if num_bytes > self._file.num_prefaulted:
            self._file.num_prefaulted = num_bytes
            self._log.append(Prefaulted(num_bytes))
            if self._table.is_growing:
                self._table.extend(num_bytes - PAGE_BYTES)

    def new_slot(self) -> int:
        """Return a slot that no client has."""
        return new_slot()

    def live_slots(self) -> set[int]:
        """Return the slots whose clients live (`ClientSlot`)."""
        return self._file.live_slots()

    def unfinished(self) -> list[Unfinished]:
        """Return the ranges that clients of an earlier owner were writing. The caller owns the reservations."""
        unfinished, self._unfinished = self._unfinished, []
        return unfinished

    def allow_reserving(self) -> None:
        """Reserve memory from now on: `reserve` of an adopted arena raises ArenaFull before."""
        self._may_reserve = True

    def end_takeover(self) -> None:
        """Evict entries from now on: all that is held is leased."""
        self._table.may_evict = True

    def note(self, reservation: Reservation, key: str, value: Cached) -> None:
        """Note for the next owner what is to be cached once the range is completed (`FillWriter`)."""
        self._log.append(describe_entry(reservation.range, key, value, is_published=False))

    def set_aside(self) -> None:
        """Remove the file: no other owner is to take it over. Mappings stay valid."""
        self._log.remove()
        self._file.path.unlink(missing_ok=True)

    def claim(self, range: ArenaRange) -> Lease[Cached] | None:  # noqa: A002 - the types' own name
        """Lease the cached entry at this range, which a client of an earlier owner holds. None if there is none."""
        pinned = self._table.pin_range(range)
        return None if pinned is None else Lease(self._table, *pinned)

    def reserve(self, num_bytes: int, kind: EntryKind = "processed", *, writer: int | None = None) -> Reservation:
        """Reserve a range for a payload of `num_bytes`, evicting cached entries that are not held if necessary.

        `kind` is the share of the arena to which it counts, `writer` the slot of the client that is to write the range,
        None for the owner itself and its own processes. The caller owns the reservation. Raises ArenaFull if held
        entries leave no space, and MediaTooLarge if it would not fit into an empty arena; nothing was evicted then.
        """
        if num_bytes < 0:
            raise ValueError(f"a payload of {num_bytes} bytes")
        if num_bytes > self.max_payload_bytes:
            raise MediaTooLarge(f"the item needs {num_bytes} bytes, more than this server can store")
        self._check_open()
        if not self._may_reserve:
            raise ArenaFull("the store is taking over the media of an earlier one", retry_after_s=1)
        entry = self._table.reserve(ENTRY_HEADER_BYTES + num_bytes, kind)
        range_ = entry.range
        self._log.append(
            Reserved(range_.generation, range_.offset, range_.nbytes, kind, self.slot if writer is None else writer)
        )
        stamp(self._file.view.words, entry.range)
        return Reservation(self._table, entry, self._file.view)

    def publish(self, reservation: Reservation, key: str, value: C) -> Lease[C]:
        """Cache the written entry under `key` and the reservation's kind, and lease it.

        Raises TypeError unless `value` is `EncodedMedia` for an encoded entry, `Feature` for others, which has an
        embedding for an embedded one. If the key exists, the new range is freed and the lease is on the existing entry,
        with its value. Features whose embedding is cached are evicted first (`demote`). The caller owns the lease.
        Raises RuntimeError if the reservation has ended.
        """
        self._check_open()
        if not _describes(value, reservation.kind):
            raise TypeError(f"a {type(value).__name__} does not describe an entry of kind {reservation.kind}")
        written = reservation.range
        entry, found = self._table.publish(reservation.take(), key, value)
        if entry.range == written:
            self._log.append(describe_entry(written, key, value, is_published=True))
        if isinstance(value, Feature) and value.embedding is not None:
            self._table.demote(value.mm_hash)
        return Lease(self._table, entry, cast("C", found))

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

    def keep(self, reservation: Reservation, value: T) -> Lease[T]:
        """Lease the written entry without caching it: it is freed when its last lease ends."""
        self._check_open()
        entry = reservation.take()
        self._table.keep(entry)
        return Lease(self._table, entry, value)

    @overload
    def lookup(
        self, key: str, kind: Literal["decoded", "processed", "embedded"] = "processed"
    ) -> Lease[Feature] | None: ...
    @overload
    def lookup(self, key: str, kind: Literal["encoded"]) -> Lease[EncodedMedia] | None: ...
    def lookup(self, key: str, kind: EntryKind = "processed") -> Lease[Feature] | Lease[EncodedMedia] | None:
        """Lease the entry of `key` and `kind`, if it exists. The caller owns the lease."""
        found = self._table.lookup(key, kind)
        return None if found is None else cast("Lease[Feature]", Lease(self._table, *found))

    def lease_cached(self, key: str, kind: EntryKind) -> Lease[Cached] | None:
        """Lease the entry of `key` and any `kind`, like `lookup`."""
        found = self._table.lookup(key, kind)
        return None if found is None else Lease(self._table, *found)

    def share(self, range: ArenaRange) -> Lease[None] | None:  # noqa: A002 - the types' own name
        """Return another lease on an entry that is leased already; None if it is not. The caller owns the lease."""
        entry = self._table.pin_held(range)
        return None if entry is None else Lease(self._table, entry, None)

    def share_cached(self, range: ArenaRange, key: str, kind: EntryKind) -> Lease[Cached] | None:  # noqa: A002 - as above
        """Lease the entry of `key` if it is the one at `range`. The caller owns the lease."""
        found = self._table.pin_cached(range, key, kind)
        return None if found is None else Lease(self._table, *found)

    def key_of(self, range: ArenaRange) -> tuple[EntryKind, str] | None:  # noqa: A002 - as above
        """Return the kind and key of a cached entry that is leased; None if there is none at `range`."""
        entry = self._table.held(range)
        return None if entry is None or entry.key is None else (entry.kind, entry.key)

    def contains(self, key: str, kind: EntryKind = "processed") -> bool:
        """Return whether `key` is cached, without counting as a use of the entry."""
        return self._table.contains(key, kind)

    def demote(self, key: str, kind: EntryKind = "processed") -> None:
        """Evict the entry of `key`, if there is one, before others; if it is leased, when its leases have ended. It
        counts as used again when it is looked up."""
        self._table.demote(key, kind)

    def evict(self, key: str, kind: EntryKind = "processed") -> bool:
        """Free the entry of `key`. Return False if there is none, or it is held."""
        return self._table.evict(key, kind)

    def clear(self) -> int:
        """Free every cached entry that is not held; return their number."""
        return self._table.clear()

    def stats(self) -> ArenaStats:
        return self._table.stats()

    def close(self) -> None:
        """Remove the file. Idempotent. Leases and reservations may still end, but none can be created.

        Mappings in other processes stay valid; so do entries that a client may hold unknown to this owner.
        """
        self._log.remove()
        self._table.clear()
        self._closed = True
        self._file.close()

    def leave(self) -> None:
        """Leave the file, and all that is in it, to the next owner. Leases and reservations may still end here, which
        changes nothing in it."""
        self._closed = True
        self._log.close()
        self._file.leave()

    def _check_open(self) -> None:
        if self._closed:
            raise RuntimeError("the arena is closed")

    def _clear(self, entry: ArenaRange) -> None:
        if not self._closed:  # later there is no mapping, and the memory is not reused
            clear(self._file.view.words, entry)
            self._log.append(Freed(entry.generation))


def _describes(value: Cached, kind: EntryKind) -> bool:
    if isinstance(value, EncodedMedia):
        return kind == "encoded"
    return kind != "encoded" and (value.embedding is not None) == (kind == "embedded")
