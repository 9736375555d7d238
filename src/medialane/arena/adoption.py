"""The entries that an earlier owner has left in an arena's file, checked one by one.

A *record* describes what is cached: the key, and the `Feature` or `EncodedMedia`, behind the range of its entry. What
was damaged must not be used, and what may be in use must not be missed: both are a reason not to use the file at all.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from medialane.arena.entries import Entry
from medialane.arena.index import Indexed, State
from medialane.arena.layout import ENTRY_HEADER_BYTES, GENERATION_WORD, is_valid, is_well_formed
from medialane.arena.lease import Cached
from medialane.arena.view import ArenaView
from medialane.types.feature import Feature
from medialane.types.media import EncodedMedia
from medialane.types.tensor import ALIGNMENT, ArenaRange, TensorSpec, align

#: Room for a record without a feature's header and tensors.
RECORD_BYTES = 512
#: Of a tensor's descriptor in a record.
_DESCRIPTOR_BYTES = 384

_ENCODER = msgspec.msgpack.Encoder()
_ENCODED = msgspec.msgpack.Decoder(tuple[str, EncodedMedia])
_FEATURE = msgspec.msgpack.Decoder(tuple[str, Feature])


class Writing(NamedTuple):
    """An entry that the client with the slot `writer` was writing; `value` is what it is to become, if known."""

    entry: Entry
    writer: int
    value: Feature | None
    is_revoked: bool


class AdoptedEntries(NamedTuple):
    """`published` are with key and value, the least recently created first; those that were not cached have none.
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
