"""The index of MP4 (ISO/IEC 14496-12) and QuickTime files: whether it makes sense, and what it says of the tracks."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from itertools import islice

import numpy as np

from medialane.core.errors import InvalidVideo, UnsupportedMediaType
from medialane.media.track import Track, TrackKind

#: A fragmented hour of one-second pieces has some 7200 boxes at the top level. Each takes a microsecond of the loop.
_MAX_BOXES = 16_384

#: Tracks that are looked at; films have some twenty, most of them subtitles.
_MAX_TRACKS = 64

_BOX = struct.Struct(">I4s")

_PARENTS = {b"trak", b"mdia", b"minf", b"dinf", b"stbl", b"edts", b"mvex"}

#: Bytes of an entry of the tables whose entries are counted, after version, flags and count.
_ENTRY_BYTES = {b"stts": 8, b"ctts": 8, b"stsc": 12, b"stco": 4, b"co64": 8, b"stss": 4, b"elst": 12}

_SELF_CONTAINED = 1


def check_mp4(view: memoryview) -> None:
    """Raise InvalidVideo unless the file has a whole `moov` whose tables hold what they claim."""
    moov = next((body for kind, body in _boxes(view, cut=True) if kind == b"moov"), None)
    if moov is None:
        raise InvalidVideo("the video has no index (moov)")
    for kind, body in _tree(moov):
        if kind == b"cmov":
            raise InvalidVideo("the video's index is compressed")
        if kind == b"dref":
            _check_references(body)
        elif kind in (b"stsz", b"stz2"):
            _check_sample_sizes(kind, body, len(view))
        elif kind in _ENTRY_BYTES and _number(body, 4) * _ENTRY_BYTES[kind] > len(body) - 8:
            raise InvalidVideo("the video's index claims more than it holds")


def _boxes(view: memoryview, *, cut: bool = False) -> Iterator[tuple[bytes, memoryview]]:
    """(kind, content) of the boxes directly in `view`. With `cut` the last one may end early, if it is media data."""
    offset = 0
    for _ in range(_MAX_BOXES):
        if len(view) - offset < 8:
            return
        (size, kind), header = _BOX.unpack_from(view, offset), 8
        if size == 1:
            size, header = _number(view, offset + 8, 8), 16
        elif size == 0:
            size = len(view) - offset
        if size < header:
            raise InvalidVideo("the video has a box of an impossible size")
        if offset + size > len(view) and not (cut and kind in (b"mdat", b"moof", b"mfra", b"free", b"skip")):
            raise InvalidVideo("the video ends within its header")
        yield kind, view[offset + header : offset + size]
        offset += size
    raise InvalidVideo("the video has too many boxes in its header")


def _tree(view: memoryview) -> Iterator[tuple[bytes, memoryview]]:
    """Every box beneath `view` that is told of by its kind and content."""
    todo, num_boxes = [view], 0
    while todo:
        for kind, body in _boxes(todo.pop()):
            num_boxes += 1
            if num_boxes > _MAX_BOXES:
                raise InvalidVideo("the video has too many boxes in its header")
            if kind in _PARENTS:
                todo.append(body)
            yield kind, body


def _check_references(body: memoryview) -> None:
    for _kind, entry in _boxes(body[8:]):
        if not _number(entry, 0) & _SELF_CONTAINED:
            raise UnsupportedMediaType("the video refers to another file")


def _check_sample_sizes(kind: bytes, body: memoryview, file_bytes: int) -> None:
    """Each sample has a size in the table, or all have the same one; either way there is a byte of it in the file."""
    count = _number(body, 8)
    entry_bits = _number(body, 4) & 0xFF if kind == b"stz2" else 0 if _number(body, 4) else 32
    needed = count * entry_bits // 8
    if needed > len(body) - 12 or count > file_bytes:
        raise InvalidVideo("the video's index claims more than it holds")


def _number(view: memoryview, offset: int, nbytes: int = 4) -> int:
    part = bytes(view[offset : offset + nbytes])
    if len(part) < nbytes:
        raise InvalidVideo("the video ends within its header")
    return int.from_bytes(part, "big")


# What is said of the tracks. A number that is not there, or cut off, is none: FFmpeg has the last word.

_KINDS: dict[bytes, TrackKind] = {b"vide": "video", b"soun": "audio"}

#: PCM, A-law, u-law, FLAC: what FFmpeg gives interleaved.
_PACKED = {
    b"sowt", b"twos", b"lpcm", b"ipcm", b"fpcm", b"raw ", b"NONE", b"in24", b"in32", b"fl32", b"fl64", b"alaw", b"ulaw",
    b"fLaC",
}  # fmt: skip

#: Channels by the configuration of AAC (ISO/IEC 14496-3, table 1.19).
_AAC_CHANNELS = {1: 1, 2: 2, 3: 3, 4: 4, 5: 5, 6: 6, 7: 8, 11: 7, 12: 8, 14: 8}

#: A run has at least one frame: with more of them there are too many frames.
_MAX_RUNS = 1 << 20

#: An esds box is some 40 bytes into its sample entry.
_MAX_ENTRY_BYTES = 1024


def mp4_tracks(view: memoryview) -> Iterator[Track]:
    """The tracks of a file that `check_mp4` took, in their order."""
    moov = next(body for kind, body in _boxes(view, cut=True) if kind == b"moov")
    traks = (body for kind, body in _boxes(moov) if kind == b"trak")
    for body in islice(traks, _MAX_TRACKS):
        boxes: dict[bytes, memoryview] = {}
        for kind, content in _tree(body):
            boxes.setdefault(kind, content)  # QuickTime has a second `hdlr`, of something else
        yield _track(boxes)


def _track(boxes: dict[bytes, memoryview]) -> Track:
    empty = memoryview(b"")
    kind: TrackKind = _KINDS.get(bytes(boxes.get(b"hdlr", empty)[8:12]), "other")
    entry = boxes.get(b"stsd", empty)[8:]
    duration_s = _duration_s(boxes.get(b"mdhd", empty))
    if kind == "audio":
        packed = bytes(entry[4:8]) in _PACKED
        return Track(kind, duration_s, num_channels=_num_channels(entry), is_packed=packed)
    width, height = _said(entry, 32, 2), _said(entry, 34, 2)
    return Track(kind, duration_s, _num_frames(boxes.get(b"stts", empty)), width, height)


def _duration_s(mdhd: memoryview) -> float:
    long = _said(mdhd, 0, 1) == 1
    ticks, duration = (_said(mdhd, 20, 4), _said(mdhd, 24, 8)) if long else (_said(mdhd, 12, 4), _said(mdhd, 16, 4))
    if not ticks or duration == (1 << 64 if long else 1 << 32) - 1:  # all ones: not known
        return 0.0
    return duration / ticks


def _num_frames(stts: memoryview) -> int:
    """Runs of frames: how many, how long each."""
    runs = min(_said(stts, 4, 4), _MAX_RUNS, len(stts[8:]) // 8)
    return int(np.frombuffer(stts[8 : 8 + 8 * runs], ">u4")[::2].sum(dtype=np.uint64))


def _num_channels(entry: memoryview) -> int:
    """Of a sound's sample entry: AAC's own configuration has the last word, as in FFmpeg."""
    said = _said(entry, 48, 4) if _said(entry, 16, 2) == 2 else _said(entry, 24, 2)  # QuickTime's second version
    return _aac_channels(bytes(entry[:_MAX_ENTRY_BYTES])) or said


def _aac_channels(entry: bytes) -> int:
    """By the AudioSpecificConfig in the descriptors of `esds` (ISO/IEC 14496-1, 7.2.6)."""
    start = entry.find(b"esds")
    if start < 0:
        return 0
    at = start + 8
    #: What is in a descriptor before those that it holds.
    heads = {3: 3, 4: 13}
    while at + 1 < len(entry):
        tag, at = entry[at], _after_length(entry, at + 1)
        if tag == 5:
            return _AAC_CHANNELS.get(_aac_configuration(entry[at : at + 8]), 0)
        if tag not in heads:
            break
        at += heads[tag]
    return 0


def _after_length(entry: bytes, at: int) -> int:
    """A length has up to four bytes, all but the last with their first bit set."""
    for _ in range(3):
        if at < len(entry) and entry[at] & 0x80:
            at += 1
    return at + 1


def _aac_configuration(config: bytes) -> int:
    """The channel configuration of an AudioSpecificConfig (ISO/IEC 14496-3, 1.6.2.1)."""
    bits, left = int.from_bytes(config, "big"), 8 * len(config)

    def take(count: int) -> int:
        nonlocal left
        left -= count
        return bits >> left & (1 << count) - 1 if left >= 0 else 0

    if take(5) == 31:
        take(6)
    if take(4) == 15:
        take(24)
    return take(4)


def _said(view: memoryview, offset: int, nbytes: int) -> int:
    return int.from_bytes(view[offset : offset + nbytes], "big") if len(view) >= offset + nbytes else 0
