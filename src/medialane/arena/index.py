"""The index of an arena's entries in its file, from which the next owner rebuilds the table.

It follows the entries in the file; only owners map it. Rows of 64 bytes, one for each entry:

    +0   u64 generation    0: free. Written last, and erased first: it makes the rest valid
    +8   u64 offset, nbytes   as in the entry's range
    +24  u64 size          bytes that are allocated for the entry: the range, and behind it the record
    +32  u64 state         and kind
    +40  u64 writer        slot of the client that writes the range (`locks`)
    +48  u64 nbytes of the record
    +56  u32 checksum of the record, u32 checksum of all of this and of the arena's id

A row is never changed, but replaced: the new one is valid before the old one is erased. So wherever an owner is
killed, each entry has a valid row, or two: then the later state counts. A row that is there and has a wrong
checksum was damaged: then nothing in the file can be trusted, since the range of an entry that is missing would be
reused.

The first row has words of the whole arena: no generation above its *ceiling* was ever used, so that none is used
twice; the first `usable` bytes of the file have been allocated by the kernel. Both contain a checksum.

What an earlier owner has left is checked entry by entry (`read_entries`). A *record* describes what is cached: the key
and the `Feature` or `EncodedMedia`, behind the range of its entry. What was damaged must not be used, and what may be
in use must not be missed: both are a reason not to use the file at all.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import msgspec

from medialane.arena.entries import KINDS, Entry, State
from medialane.arena.handles import Cached
from medialane.arena.layout import ENTRY_HEADER_BYTES, GENERATION_WORD, PAGE_BYTES, is_valid, is_well_formed
from medialane.arena.view import ArenaView
from medialane.types.feature import EntryKind, Feature
from medialane.types.media import EncodedMedia
from medialane.types.tensor import ALIGNMENT, ArenaRange, TensorSpec, align

#: An arena has as many rows as entries of this size, up to a limit, and no more entries than rows: however small an
#: entry is, it takes 1 KB of the owner's memory, and the next owner 15 to 30 us (2-core machine, noisy).
BYTES_PER_ROW = 16 << 10

MAX_ROWS = 1 << 18

ROW_BYTES = 64

_WORDS = ROW_BYTES // 8

_CHECKED = struct.Struct(f"={_WORDS}Q")

_BEHIND_GENERATION = struct.Struct(f"={_WORDS - 1}Q")

_CEILING, _USABLE = 0, 1

#: The ceiling is raised in such steps.
_GENERATIONS = 4096

#: Room for a record without a feature's header and tensors.
RECORD_BYTES = 512

#: Of a tensor's descriptor in a record.
_DESCRIPTOR_BYTES = 384

_ENCODER = msgspec.msgpack.Encoder()

_ENCODED = msgspec.msgpack.Decoder(tuple[str, EncodedMedia])

_FEATURE = msgspec.msgpack.Decoder(tuple[str, Feature])


class Indexed(NamedTuple):
    """One entry. `record` is where its record is in the file, and its checksum; empty if it has none."""

    range: ArenaRange
    size: int
    kind: EntryKind
    state: State
    writer: int = 0
    record_bytes: int = 0
    record_checksum: int = 0


def index_bytes(size_bytes: int) -> int:
    """Return the size of the index of an arena of this size, whole pages."""
    num_bytes = min(1 + size_bytes // BYTES_PER_ROW, MAX_ROWS) * ROW_BYTES
    return num_bytes + -num_bytes % PAGE_BYTES


class Index:
    """The owner's mapping of the index, as native 8-byte words."""

    def __init__(self, words: memoryview, arena: str) -> None:
        self._words = words
        self._arena = arena
        self._seed = zlib.crc32(bytes.fromhex(arena))
        self._rows: dict[int, int] = {}
        self._free: list[int] = []
        self._num_used = 1  # rows from here on were never used
        self._num_rows = words.nbytes // ROW_BYTES
        self._ceiling = 0
        #: The first row belongs to no entry, and another one must be free while an entry is replaced.
        self.max_entries = self._num_rows - 2

    def use_generation(self, generation: int) -> None:
        """Call it before an entry of this generation is stamped."""
        if generation > self._ceiling:
            self._ceiling = generation + _GENERATIONS
            self._words[_CEILING] = self._checked(_CEILING, self._ceiling // _GENERATIONS + 1)

    def set_usable(self, num_bytes: int) -> None:
        self._words[_USABLE] = self._checked(_USABLE, num_bytes // PAGE_BYTES)

    def put(self, entry: Indexed) -> None:
        """Enter an entry, in place of what was entered of it before; of others there are fewer than `max_entries`."""
        generation = entry.range.generation
        row, earlier = self._free_row(), self._rows.get(generation)
        _BEHIND_GENERATION.pack_into(self._words, row * ROW_BYTES + 8, *self._encode(entry))
        self._words[row * _WORDS] = generation
        self._rows[generation] = row
        if earlier is not None:
            self._erase(earlier)

    def remove(self, generation: int) -> None:
        """Before the bytes of the entry are reused. No effect if it is not entered."""
        if (row := self._rows.pop(generation, None)) is not None:
            self._erase(row)

    def load(self) -> tuple[int, int, list[Indexed]]:
        """Return the ceiling of generations, the usable bytes, and all entries, sorted by offset, of an earlier owner.

        Raises ValueError if anything in the index is damaged, or an entry is missing.
        """
        self._ceiling = self._read(_CEILING) * _GENERATIONS
        usable = self._read(_USABLE) * PAGE_BYTES
        entries: dict[int, tuple[int, Indexed]] = {}
        used = set()
        for row in self._nonzero():
            entry = self._decode(row)
            used.add(row)
            other = entries.get(entry.range.generation)
            if other is not None and (other[1].range.offset, other[1].kind) != (entry.range.offset, entry.kind):
                raise ValueError("two entries have one generation")
            if other is None or _is_later(entry, other[1]):
                entries[entry.range.generation] = row, entry
        self._rows = {generation: row for generation, (row, _) in entries.items()}
        self._num_used = max(used, default=0) + 1
        kept = set(self._rows.values())
        for row in range(1, self._num_used):
            if row not in kept:
                self._erase(row)
        return self._ceiling, usable, sorted((entry for _, entry in entries.values()), key=lambda e: e.range.offset)

    def close(self) -> None:
        self._words.release()

    def _nonzero(self) -> Iterator[int]:
        """Yield the rows in use. Unused pages of the file read as zero."""
        for row, generation in enumerate(self._words[::_WORDS].tolist()):
            if row and generation:
                yield row

    def _free_row(self) -> int:
        if self._free:
            return self._free.pop()
        if self._num_used == self._num_rows:
            raise RuntimeError("more entries than the index has rows")
        self._num_used += 1
        return self._num_used - 1

    def _erase(self, row: int) -> None:
        self._words[row * _WORDS] = 0
        self._free.append(row)

    def _encode(self, entry: Indexed) -> list[int]:
        """Return the words behind the generation."""
        range_ = entry.range
        what = entry.state | KINDS.index(entry.kind) << 8
        words = [range_.offset, range_.nbytes, entry.size, what, entry.writer, entry.record_bytes]
        checksum = self._checksum(range_.generation, words, entry.record_checksum)
        return [*words, entry.record_checksum << 32 | checksum]

    def _decode(self, row: int) -> Indexed:
        generation, *words, checksums = self._words[row * _WORDS : (row + 1) * _WORDS]
        offset, nbytes, size, what, writer, record_bytes = words
        if checksums & 0xFFFF_FFFF != self._checksum(generation, words, checksums >> 32):
            raise ValueError("a row of its index is damaged")
        if not 0 < generation <= self._ceiling or what >> 8 >= len(KINDS) or not what & 0xFF:
            raise ValueError("a row of its index is impossible")
        range_ = ArenaRange(self._arena, offset, nbytes, generation)
        return Indexed(range_, size, KINDS[what >> 8], State(what & 0xFF), writer, record_bytes, checksums >> 32)

    def _checksum(self, generation: int, words: list[int], record_checksum: int) -> int:
        return zlib.crc32(_CHECKED.pack(generation, *words, record_checksum), self._seed)

    def _checked(self, position: int, value: int) -> int:
        return value << 32 | zlib.crc32(value.to_bytes(8, "little"), self._seed + position)

    def _read(self, position: int) -> int:
        word = self._words[position]
        if word and word != self._checked(position, word >> 32):
            raise ValueError("the first row of its index is damaged")
        return int(word >> 32)


def _is_later(entry: Indexed, other: Indexed) -> bool:
    """Return which of two rows of one entry counts, between which an owner was killed: the one with the higher state,
    and of two that are being written the one that was trimmed."""
    return (entry.state, -entry.range.nbytes) > (other.state, -other.range.nbytes)


class Writing(NamedTuple):
    """An entry that the client with the slot `writer` was writing; `value` is what it is to become, if known."""

    entry: Entry
    writer: int
    value: Feature | None
    is_revoked: bool


class AdoptedEntries(NamedTuple):
    """`published` are with key and value, the least recently created first; entries that were not cached have none.
    `freed` were about to be freed, or had not been handed out yet."""

    writing: Sequence[Writing]
    published: Sequence[tuple[Entry, str, Cached | None]]
    freed: Sequence[ArenaRange]


def header_bytes(header: bytes, specs: Sequence[TensorSpec]) -> int:
    """Return how much of a feature's record depends on its header and tensors, for `Arena.reserve`."""
    return len(header) + len(specs) * _DESCRIPTOR_BYTES


def encode_record(key: str, value: Cached) -> bytes:
    return _ENCODER.encode((key, value))


def read_entries(view: ArenaView, indexed: Sequence[Indexed]) -> AdoptedEntries:
    """Check all entries, which are sorted by offset. Raises ValueError if anything is damaged."""
    _check_places(view, indexed)
    writing: list[Writing] = []
    published: list[tuple[Entry, str, Cached | None]] = []
    freed: list[ArenaRange] = []
    for each in sorted(indexed, key=lambda each: each.range.generation):
        is_stamped = is_valid(view.words, each.range)
        entry = Entry(each.range, each.size, each.kind, writer=each.writer)
        if each.state is not State.PUBLISHED:
            # Its header is cleared if it was to be freed, and not written yet if it was to be reserved.
            value = _value(view, each, _read(view, each)) if each.state is State.NOTED else None
            known = value[1] if value is not None and isinstance(value[1], Feature) else None
            writing.append(Writing(entry, each.writer, known, not is_stamped))
        elif not is_stamped:
            if view.words[each.range.offset // 8 + GENERATION_WORD]:
                raise ValueError(f"the header of {each.range} is damaged")
            freed.append(each.range)
        elif not each.record_bytes:
            published.append((entry, "", None))
        else:
            record = _value(view, each, _read(view, each))
            if record is None:
                raise ValueError(f"the record of {each.range} is damaged")
            published.append((entry, *record))
    return AdoptedEntries(writing, published, freed)


def _check_places(view: ArenaView, indexed: Sequence[Indexed]) -> None:
    end = 0
    for each in indexed:
        range_ = each.range
        if not is_well_formed(range_) or range_.offset < end:
            raise ValueError(f"{range_} overlaps another entry")
        if each.size % ALIGNMENT or each.size < align(range_.nbytes) + each.record_bytes:
            raise ValueError(f"{range_} and its record do not fit into {each.size} bytes")
        end = range_.offset + each.size
        if end > view.size_bytes:
            raise ValueError(f"{range_} is outside the file")


def _read(view: ArenaView, each: Indexed) -> bytes:
    start = each.range.offset + align(each.range.nbytes)
    with view.memory as memory:
        return bytes(memory[start : start + each.record_bytes])


def _value(view: ArenaView, each: Indexed, record: bytes) -> tuple[str, Cached] | None:
    """Return key and value; None if the record is not what was written. Raises ValueError for one that describes
    another entry."""
    if zlib.crc32(record) != each.record_checksum:
        return None
    try:
        key, value = _ENCODED.decode(record) if each.kind == "encoded" else _FEATURE.decode(record)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"the record of {each.range} is unreadable: {error}") from error
    if not _is_of(value, each):
        raise ValueError(f"the record of {each.range} describes another entry")
    return key, value


def _is_of(value: Cached, each: Indexed) -> bool:
    if isinstance(value, EncodedMedia):
        is_inside = ENTRY_HEADER_BYTES <= value.data_offset <= each.range.nbytes - value.num_bytes
        return value.range == each.range and is_inside and value.num_bytes >= 0
    if (value.embedding is not None) != (each.kind == "embedded"):
        return False
    tensors = value.tensors if value.embedding is None else (value.embedding.tensor,)
    return all(tensor.range == each.range and tensor.offset >= ENTRY_HEADER_BYTES for tensor in tensors)
