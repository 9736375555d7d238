"""The log of an arena: what its file holds, for the owner that takes it over.

    directory/medialane-<32 hex digits>.entries

    u32 size of the body, its checksum (16 bytes, keyed with the nonce of the arena), body: a record as msgpack

A record is appended by one write(2) before what it says may be relied on: `Reserved` before the range is given to a
writer, `Published` before the entry is leased, `Freed` before its bytes are reused. The memory of a tmpfs is as durable
as the arena itself: kill -9 loses nothing, and can only tear the last record, of something that nobody has been given.
Any other record with a wrong checksum, or that contradicts those before it, is damage: the arena is not taken over.

A log that has grown to several times what is live is written anew, and replaced by rename(2). If the file system is
full, the log is removed: the arena cannot be taken over any more, and nothing else changes.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import msgspec
from blake3 import blake3

from medialane.core.feature import Feature
from medialane.core.media import EncodedMedia
from medialane.core.remote_entry import EntryKind
from medialane.core.tensor import ArenaRange

logger = logging.getLogger(__name__)

#: Changed with the records, and with what they mean.
FORMAT: Final = 1

_CHECKSUM_BYTES = 16
_HEAD_BYTES = 4 + _CHECKSUM_BYTES
#: The log is written anew when it is larger than this and _MAX_GROWTH times what is live.
_MIN_REWRITE_BYTES = 4 << 20
_MAX_GROWTH = 4


class Began(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The first record. Generations up to `generation` have been used, and `num_prefaulted` bytes have pages."""

    format: int
    arena: str
    lineage: bytes
    generation: int = 0
    num_prefaulted: int = 0


class Prefaulted(msgspec.Struct, frozen=True, array_like=True, tag=True):
    num_bytes: int


class Reserved(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The process with the slot `writer` may write the range."""

    generation: int
    offset: int
    nbytes: int
    kind: EntryKind
    writer: int


class Described(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """What a reserved range is once it is completed, or what it is: then it `is_published`."""

    generation: int
    nbytes: int
    key: str
    is_published: bool
    feature: Feature | None = None
    encoded: EncodedMedia | None = None


class Freed(msgspec.Struct, frozen=True, array_like=True, tag=True):
    generation: int


Record = Began | Prefaulted | Reserved | Described | Freed

_DECODER: msgspec.msgpack.Decoder[Record] = msgspec.msgpack.Decoder(Record)


class LoggedEntry(msgspec.Struct):
    """An entry as its records describe it."""

    range: ArenaRange
    kind: EntryKind
    writer: int
    key: str | None = None
    value: Feature | EncodedMedia | None = None
    is_published: bool = False


class LoggedArena(msgspec.Struct):
    """What a log says. `size` is that of its whole records."""

    began: Began
    entries: dict[int, LoggedEntry]
    generation: int
    num_prefaulted: int
    size: int = 0


class EntryLog:
    """The log of an arena's owner. A log that could not be written is removed, and stays so."""

    def __init__(self, path: Path, began: Began, nonce: bytes, descriptor: int) -> None:
        self._path = path
        self._began = began
        self._key = _checksum_key(nonce)
        self._descriptor: int | None = descriptor
        self._generation = began.generation
        self._num_prefaulted = began.num_prefaulted
        self._live: dict[int, list[bytes]] = {}
        self._num_live_bytes = self._num_bytes = 0

    @classmethod
    def create(cls, path: Path, *, arena: str, lineage: bytes, nonce: bytes) -> EntryLog:
        """Raises OSError."""
        began = Began(FORMAT, arena, lineage)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC, 0o600)
        log = cls(path, began, nonce, descriptor)
        log.append(began)
        return log

    @classmethod
    def resume(cls, path: Path, logged: LoggedArena, nonce: bytes) -> EntryLog:
        """Continue a log that was read, without a torn record. Raises OSError."""
        descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW)
        os.ftruncate(descriptor, logged.size)
        began = msgspec.structs.replace(
            logged.began, generation=logged.generation, num_prefaulted=logged.num_prefaulted
        )
        log = cls(path, began, nonce, descriptor)
        log._num_bytes = logged.size
        for entry in logged.entries.values():
            for record in _records(entry):
                log._keep(record, log._frame(record))
        return log

    def append(self, record: Record) -> None:
        if self._descriptor is None:
            return
        frame = self._frame(record)
        self._keep(record, frame)
        try:
            self._write(self._descriptor, frame)
            self._num_bytes += len(frame)
            if self._num_bytes > max(_MIN_REWRITE_BYTES, _MAX_GROWTH * self._num_live_bytes):
                self._rewrite()
        except OSError as error:
            logger.warning("the next store cannot take over this arena: %s", error.strerror or error)
            self.remove()

    def remove(self) -> None:
        """Idempotent."""
        if self._descriptor is not None:
            self._path.unlink(missing_ok=True)
        self.close()

    def close(self) -> None:
        """Leave the log as it is. Idempotent."""
        descriptor, self._descriptor = self._descriptor, None
        self._live.clear()
        if descriptor is not None:
            os.close(descriptor)

    def _keep(self, record: Record, frame: bytes) -> None:
        """Note what would be written anew."""
        match record:
            case Prefaulted(num_bytes):
                self._num_prefaulted = num_bytes
            case Reserved(generation):
                self._generation = max(self._generation, generation)
                self._live[generation] = [frame]
                self._num_live_bytes += len(frame)
            case Described(generation):
                old = self._live[generation]
                self._num_live_bytes += len(frame) - sum(map(len, old[1:]))
                old[1:] = [frame]
            case Freed(generation):
                self._num_live_bytes -= sum(map(len, self._live.pop(generation)))

    def _rewrite(self) -> None:
        began = msgspec.structs.replace(self._began, generation=self._generation, num_prefaulted=self._num_prefaulted)
        temporary = self._path.with_name(self._path.name + ".tmp")
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW
        descriptor = os.open(temporary, flags, 0o600)
        data = b"".join([self._frame(began), *(frame for frames in self._live.values() for frame in frames)])
        try:
            self._write(descriptor, data)
            os.rename(temporary, self._path)
        except OSError:
            os.close(descriptor)
            temporary.unlink(missing_ok=True)
            raise
        if self._descriptor is not None:
            os.close(self._descriptor)
        self._descriptor, self._num_bytes = descriptor, len(data)

    def _frame(self, record: Record) -> bytes:
        body = msgspec.msgpack.encode(record)
        return len(body).to_bytes(4, "little") + _checksum(self._key, body) + body

    @staticmethod
    def _write(descriptor: int, data: bytes) -> None:
        if os.write(descriptor, data) != len(data):
            raise OSError("a record was written in part")


def read_log(path: Path, *, arena: str, nonce: bytes) -> LoggedArena:
    """Read the log of an arena whose owner has exited. Raises OSError, and ValueError if it is damaged."""
    data = path.read_bytes()
    logged: LoggedArena | None = None
    for end, record in _read(data, _checksum_key(nonce)):
        if logged is None:
            if not isinstance(record, Began) or record.arena != arena or record.format != FORMAT:
                raise ValueError("it is not the log of this arena")
            logged = LoggedArena(record, {}, record.generation, record.num_prefaulted)
        else:
            _apply(logged, record, arena)
        logged.size = end
    if logged is None:
        raise ValueError("it is empty")
    return logged


def _read(data: bytes, key: bytes) -> Iterator[tuple[int, Record]]:
    start = 0
    while start + _HEAD_BYTES <= len(data):
        first = start + _HEAD_BYTES
        end = first + int.from_bytes(data[start : start + 4], "little")
        if end > len(data):
            return  # torn
        body = data[first:end]
        if _checksum(key, body) != data[start + 4 : first]:
            raise ValueError(f"the record at {start} has a wrong checksum")
        yield end, _decode(body)
        start = end


def _decode(body: bytes) -> Record:
    try:
        return _DECODER.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"a record is unreadable: {error}") from error


def _apply(logged: LoggedArena, record: Record, arena: str) -> None:
    """Raises ValueError for a record that contradicts those before it."""
    match record:
        case Prefaulted(num_bytes):
            logged.num_prefaulted = num_bytes
        case Reserved(generation, offset, nbytes, kind, writer) if generation not in logged.entries:
            logged.generation = max(logged.generation, generation)
            logged.entries[generation] = LoggedEntry(ArenaRange(arena, offset, nbytes, generation), kind, writer)
        case Described(generation, nbytes, key, is_published) if generation in logged.entries:
            entry = logged.entries[generation]
            old = entry.range
            if not 0 < nbytes <= old.nbytes:
                raise ValueError(f"the entry {old} has {nbytes} bytes")
            entry.range = ArenaRange(arena, old.offset, nbytes, generation)
            entry.key, entry.value, entry.is_published = key, record.feature or record.encoded, is_published
        case Freed(generation) if generation in logged.entries:
            del logged.entries[generation]
        case _:
            raise ValueError(f"{record} contradicts the records before it")


def describe_entry(range_: ArenaRange, key: str, value: Feature | EncodedMedia, *, is_published: bool) -> Described:
    feature = value if isinstance(value, Feature) else None
    encoded = None if isinstance(value, Feature) else value
    return Described(range_.generation, range_.nbytes, key, is_published, feature, encoded)


def _records(entry: LoggedEntry) -> Iterator[Record]:
    range_ = entry.range
    yield Reserved(range_.generation, range_.offset, range_.nbytes, entry.kind, entry.writer)
    if entry.key is not None and entry.value is not None:
        yield describe_entry(range_, entry.key, entry.value, is_published=entry.is_published)


def _checksum_key(nonce: bytes) -> bytes:
    return blake3(nonce).digest()


def _checksum(key: bytes, body: bytes) -> bytes:
    return blake3(body, key=key).digest(length=_CHECKSUM_BYTES)
