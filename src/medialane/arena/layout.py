"""Layout and name of an arena file.

    directory/medialane-<32 hex digits>.arena

    0        file header: magic, version, offset of the first entry, size of what follows up to the index, arena id,
             nonce, lineage (whose arena it is), checksum
    2048     keeper: path of a file that is locked by the process for which this file is kept
    4096     entries, aligned to 64, with holes between them:
               +0   u64 magic
               +8   u64 generation   0: freed, the rest is invalid
               +16  u64 nbytes       size of the entry, including this header
               +24  u64 completed    `completed_mark`, once another process has written the payload (`fill`); else zero
               +64  payload: tensors one after another, each aligned to 64
    size     index of the entries, for the next owner (`index`); what follows belongs to whoever uses the arena

Offsets of entries are relative to the start of the file, offsets of tensors to the start of their entry. Only the owner
writes headers, except for `completed`; a payload is written by the process that got the range from the owner. Every
word of an entry header is one aligned 8-byte store in native byte order (the file never leaves the host), so a reader
sees the old or the new word.

Generations are never reused in an arena, and arena ids are never reused at all. So a range with both is either valid,
or detected as invalid by reading one word, however old it is.
"""

from __future__ import annotations

import os
import re
import struct
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from medialane.types.tensor import ALIGNMENT, ArenaRange, TensorDescriptor, TensorSpec, align

PAGE_BYTES = 4096
KEEPER_AT = 2048
ENTRY_HEADER_BYTES = 64
NONCE_BYTES = 16
#: Words of an entry's header: zero when it is freed; set by a writer of the payload.
GENERATION_WORD, COMPLETED_WORD = 1, 3
#: So that no single flipped bit completes an entry.
_COMPLETED = 0x5AA5_C33C_0FF0_9669

#: Names of arena files; one that is being created ends in .tmp.
FILE_NAME = re.compile(r"medialane-(?P<id>[0-9a-f]{32})\.arena(?:\.tmp)?")
FILE_GLOB = "medialane-*.arena"
ARENA_ID = re.compile(r"[0-9a-f]{32}")

FILE_MAGIC = b"medialan"
VERSION = 3
ENTRY_MAGIC = 0x4D4C_454E  # "MLEN"

LINEAGE_BYTES = 16
_HEADER = struct.Struct(f"<8sIIQ16s{NONCE_BYTES}s{LINEAGE_BYTES}s{LINEAGE_BYTES}s")
_CHECKSUM = struct.Struct("<I")
_KEEPER = struct.Struct("<II")
_MAX_KEEPER_BYTES = PAGE_BYTES - KEEPER_AT - _KEEPER.size


class Lineage(NamedTuple):
    """Whose arena a file is: digests of 16 bytes. The next arena with this `owner` takes over the file of an earlier
    one, if `settings`, which decide what entries mean, are the same, and replaces it otherwise."""

    owner: bytes = bytes(LINEAGE_BYTES)
    settings: bytes = bytes(LINEAGE_BYTES)


class FileHeader(msgspec.Struct, frozen=True):
    """The header of an arena file. Only processes that map the file know `nonce`, so it proves a shared host."""

    arena: str
    size_bytes: int
    nonce: bytes
    lineage: Lineage = Lineage()

    def encode(self) -> bytes:
        arena = bytes.fromhex(self.arena)
        data = _HEADER.pack(FILE_MAGIC, VERSION, PAGE_BYTES, self.size_bytes, arena, self.nonce, *self.lineage)
        return data + _CHECKSUM.pack(zlib.crc32(data))

    @classmethod
    def decode(cls, data: bytes) -> FileHeader:
        """Decode a header. Raises ValueError if it is not a header of this version."""
        if len(data) < _HEADER.size + _CHECKSUM.size:
            raise ValueError("the file is too short for an arena")
        magic, version, first, size_bytes, arena, nonce, *lineage = _HEADER.unpack_from(data)
        if magic != FILE_MAGIC:
            raise ValueError("the file is not an arena")
        if version != VERSION or first != PAGE_BYTES:
            raise ValueError(f"the arena has version {version}, not {VERSION}")
        if _CHECKSUM.unpack_from(data, _HEADER.size)[0] != zlib.crc32(data[: _HEADER.size]):
            raise ValueError("the file's header is damaged")
        return cls(arena.hex(), size_bytes, nonce, Lineage(*lineage))


#: In place of a keeper's path: the file is kept until its owner's operator removes it.
KEPT = "kept"


def encode_keeper(path: str) -> bytes:
    """Return the block at KEEPER_AT, for the path of a file; empty for none. Raises ValueError if it is too long."""
    data = os.fsencode(path)
    if len(data) > _MAX_KEEPER_BYTES:
        raise ValueError(f"the path has {len(data)} bytes, more than {_MAX_KEEPER_BYTES}")
    return _KEEPER.pack(len(data), zlib.crc32(data)) + data


def decode_keeper(page: bytes) -> str:
    """Return the path in the first page of a file; empty if there is none, or it is damaged."""
    length, checksum = _KEEPER.unpack_from(page, KEEPER_AT)
    data = page[KEEPER_AT + _KEEPER.size :][:length]
    return os.fsdecode(data) if length == len(data) and checksum == zlib.crc32(data) else ""


def file_path(directory: str, arena: str) -> Path:
    """Return the path of an arena's file. Raises ValueError if the id is not 32 lower-case hex digits, so that no
    message can inject a path."""
    if not ARENA_ID.fullmatch(arena):
        raise ValueError("an arena id is 32 hex digits")
    return Path(directory) / f"medialane-{arena}.arena"


def arena_of(path: Path) -> str:
    """Return the id in the name of an arena's file. Raises ValueError for any other name."""
    found = FILE_NAME.fullmatch(path.name)
    if found is None:
        raise ValueError(f"{path.name} is not the name of an arena's file")
    return found["id"]


def stamp(words: memoryview, entry: ArenaRange) -> None:
    """Write the header of `entry`; the last of the four stores makes it valid."""
    first = entry.offset // 8
    words[first] = ENTRY_MAGIC
    words[first + 2] = entry.nbytes
    words[first + COMPLETED_WORD] = 0
    words[first + 1] = entry.generation


def clear(words: memoryview, entry: ArenaRange) -> None:
    """Invalidate all descriptors of `entry`, before its bytes are reused."""
    words[entry.offset // 8 + 1] = 0


def is_well_formed(entry: ArenaRange) -> bool:
    """Return whether `entry` may be in an arena that is large enough."""
    is_aligned = entry.offset >= PAGE_BYTES and entry.offset % ALIGNMENT == 0
    return is_aligned and entry.nbytes >= ENTRY_HEADER_BYTES and entry.generation > 0


def is_valid(words: memoryview, entry: ArenaRange) -> bool:
    """Return whether `entry` is inside the file mapped as `words` and matches the current header at its offset."""
    if not is_well_formed(entry) or entry.offset + entry.nbytes > words.nbytes:
        return False
    first = entry.offset // 8
    return is_header(words[first : first + 3], entry)


def is_completed(words: memoryview, entry: ArenaRange) -> bool:
    """Return whether the payload of the valid `entry` has been written by another process."""
    return bool(words[entry.offset // 8 + COMPLETED_WORD] == completed_mark(entry))


def completed_mark(entry: ArenaRange) -> int:
    """Return the word by which a writer of the payload completes `entry`."""
    return entry.generation ^ _COMPLETED


def is_header(words: memoryview, entry: ArenaRange) -> bool:
    """Return whether `words` begin with the header of `entry`."""
    return (words[0], words[1], words[2]) == (ENTRY_MAGIC, entry.generation, entry.nbytes)


def layout(specs: Sequence[TensorSpec]) -> tuple[tuple[int, ...], int]:
    """Lay out tensors one after another in an entry.

    Return the offset of each from the start of the entry (the first is at 64), and the payload's size in bytes.
    """
    offsets = []
    end = ENTRY_HEADER_BYTES
    for spec in specs:
        offset = align(end)
        offsets.append(offset)
        end = offset + spec.nbytes
    return tuple(offsets), end - ENTRY_HEADER_BYTES


def describe(entry: ArenaRange, specs: Sequence[TensorSpec]) -> tuple[TensorDescriptor, ...]:
    """Return descriptors of the tensors of `layout(specs)` in `entry`. Raises ValueError if they do not fit."""
    offsets, _ = layout(specs)
    return tuple(TensorDescriptor(spec, entry, offset) for spec, offset in zip(specs, offsets, strict=True))
