"""Records of names (uuids, URLs, leased media) in an arena's file, for the next process that owns it.

They are beyond the part that is mapped: records of 256 bytes, each written by one pwrite(2), in an order that says
nothing. If the file system is full that is an error, after which no names are kept; a write to a mapping would be a
SIGBUS. A write takes 2 us with the checksum, as the memory of a tmpfs never waits for a disk.

    +0    checksum of the rest and of the record's number, keyed with the nonce of the arena; 16 bytes
    +16   u16 size of the payload, u8 kind, zero
    +20   key, 32 bytes: a hash, since names are secrets of clients
    +52   payload; the rest is zero

A record whose checksum is wrong is free: it is erased, or was torn when its writer was killed. A key has at most one
record, which is erased before the process forgets the key, so that a name cannot come back with an earlier meaning.
"""

from __future__ import annotations

import logging
import os
import struct
from collections.abc import Iterable, Iterator
from typing import Literal

from blake3 import blake3

NameKind = Literal["uuid", "url", "lease"]

RECORD_BYTES = 256
_CHECKSUM_BYTES = 16
_HEAD = struct.Struct("<HBx32s")
#: Longer payloads are not kept.
MAX_PAYLOAD_BYTES = RECORD_BYTES - _CHECKSUM_BYTES - _HEAD.size

_RECORD = struct.Struct(f"<{_CHECKSUM_BYTES}s{RECORD_BYTES - _CHECKSUM_BYTES}s")
_KINDS: dict[NameKind, int] = {"uuid": 1, "url": 2, "lease": 3}
_READ_BYTES = 1 << 20

logger = logging.getLogger(__name__)

_Key = tuple[int, bytes]


class NamesArea:
    """The records in the file at `path` from `first_byte` on, at most `max_records`. One thread; only the arena's owner
    may have one. An area that cannot be used keeps nothing."""

    def __init__(self, path: str | os.PathLike[str], *, first_byte: int, nonce: bytes, max_records: int) -> None:
        self._first_byte = first_byte
        self._checksum_key = blake3(nonce).digest()
        self._max_records = max_records
        self._numbers: dict[_Key, int] = {}
        self._free: list[int] = []
        self._num_used = 0  # numbers from here on were never used
        self._read: dict[_Key, bytes] = {}
        self._descriptor: int | None = None
        try:
            self._descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
            self._load()
        except OSError as error:
            self._give_up(error)

    def records(self, kind: NameKind) -> NameTable:
        return NameTable(self, _KINDS[kind])

    def close(self) -> None:
        """Idempotent. The records stay in the file."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def take(self, kind: int) -> list[tuple[bytes, bytes]]:
        """Return the keys and payloads that were in the file."""
        keys = [key for key in self._read if key[0] == kind]
        return [(key[1], self._read.pop(key)) for key in keys]

    def write(self, key: _Key, payload: bytes) -> None:
        if self._descriptor is None:
            return
        number = self._number(key) if len(payload) <= MAX_PAYLOAD_BYTES else None
        if number is None:
            self.erase(key)
            return
        kind, name = key
        body = (_HEAD.pack(len(payload), kind, name) + payload).ljust(RECORD_BYTES - _CHECKSUM_BYTES, b"\0")
        self._put(number, self._checksum(number, body) + body)

    def erase(self, key: _Key) -> None:
        number = self._numbers.pop(key, None)
        if number is not None:
            self._put(number, bytes(RECORD_BYTES))
            self._free.append(number)

    def _number(self, key: _Key) -> int | None:
        """Return the number of the key's record, a new one if it has none; None if all are used."""
        if (number := self._numbers.get(key)) is not None:
            return number
        if self._free:
            number = self._free.pop()
        elif self._num_used < self._max_records:
            number = self._num_used
            self._num_used += 1
        else:
            return None
        self._numbers[key] = number
        return number

    def _put(self, number: int, record: bytes) -> None:
        if self._descriptor is None:
            return
        try:
            if os.pwrite(self._descriptor, record, self._first_byte + number * RECORD_BYTES) != RECORD_BYTES:
                raise OSError("a record was written in part")
        except OSError as error:
            self._give_up(error)

    def _give_up(self, error: OSError) -> None:
        """Keep nothing, and leave nothing that is not kept up to date."""
        logger.warning("names of media are not kept for the next store: %s", error.strerror or error)
        self._read.clear()
        if self._descriptor is not None:
            os.ftruncate(self._descriptor, self._first_byte)
            self.close()

    def _load(self) -> None:
        for number, body in self._bodies():
            num_bytes, kind, name = _HEAD.unpack_from(body)
            key = kind, name
            if num_bytes > MAX_PAYLOAD_BYTES or key in self._numbers:
                raise OSError("records that no store has written")
            self._numbers[key] = number
            self._read[key] = body[_HEAD.size : _HEAD.size + num_bytes]
            self._free += range(self._num_used, number)
            self._num_used = number + 1

    def _bodies(self) -> Iterator[tuple[int, bytes]]:
        """Yield the valid records, and cut off those beyond the limit, which another configuration has allowed."""
        if self._descriptor is None:
            return
        size = os.fstat(self._descriptor).st_size
        end = min(size, self._first_byte + self._max_records * RECORD_BYTES)
        if size > end:
            os.ftruncate(self._descriptor, end)
        number = 0
        for offset in range(self._first_byte, end, _READ_BYTES):
            piece = os.pread(self._descriptor, min(_READ_BYTES, end - offset), offset)
            whole = len(piece) // RECORD_BYTES * RECORD_BYTES
            for checksum, body in _RECORD.iter_unpack(memoryview(piece)[:whole]):
                if any(checksum) and self._checksum(number, body) == checksum:
                    yield number, body
                number += 1

    def _checksum(self, number: int, body: bytes) -> bytes:
        hasher = blake3(number.to_bytes(8, "little"), key=self._checksum_key)
        return hasher.update(body).digest(length=_CHECKSUM_BYTES)


class NameTable:
    """The records of one kind: `media.http_cache.NameRecords`."""

    def __init__(self, area: NamesArea, kind: int) -> None:
        self._area = area
        self._kind = kind

    def read(self) -> Iterable[tuple[bytes, bytes]]:
        return self._area.take(self._kind)

    def write(self, key: bytes, payload: bytes) -> None:
        self._area.write((self._kind, key), payload)

    def erase(self, key: bytes) -> None:
        self._area.erase((self._kind, key))
