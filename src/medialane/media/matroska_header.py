"""The header of Matroska and WebM files (RFC 8794, RFC 9559): which of the two it is, what it says of the tracks."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from contextlib import suppress
from typing import Literal

from medialane.core.errors import InvalidVideo, UnsupportedMediaType
from medialane.media.track import Track, TrackKind

MatroskaType = Literal["video/webm", "video/x-matroska"]

EBML = b"\x1a\x45\xdf\xa3"
_DOC_TYPE = 0x4282
_MAX_EBML_HEADER_BYTES = 4096


def matroska_type(view: memoryview) -> MatroskaType:
    """Raises UnsupportedMediaType, InvalidVideo."""
    size, start = _vint(view, 4)
    if size > _MAX_EBML_HEADER_BYTES:
        raise InvalidVideo("the video has a header of an impossible size")
    header, offset = view[start : start + size], 0
    while offset < len(header):
        kind, offset = _vint(header, offset, marker=True)
        nbytes, offset = _vint(header, offset)
        if kind == _DOC_TYPE:
            return _of_doc_type(bytes(header[offset : offset + nbytes]))
        offset += nbytes
    raise InvalidVideo("the video's header does not tell its type")


def _of_doc_type(doc_type: bytes) -> MatroskaType:
    name = doc_type.rstrip(b"\0")
    if name == b"webm":
        return "video/webm"
    if name == b"matroska":
        return "video/x-matroska"
    raise UnsupportedMediaType("the media is not an MP4, WebM or Matroska video")


def _vint(view: memoryview, offset: int, *, marker: bool = False) -> tuple[int, int]:
    """A number of variable length and the offset after it. Identifiers keep the bit that marks their length."""
    first = _big(view, offset, 1)
    nbytes = 9 - first.bit_length()
    if nbytes > 8:
        raise InvalidVideo("the video has a header of an impossible size")
    value = _big(view, offset, nbytes)
    return (value if marker else value & ((1 << 7 * nbytes) - 1)), offset + nbytes


def _big(view: memoryview, offset: int, nbytes: int) -> int:
    part = bytes(view[offset : offset + nbytes])
    if len(part) < nbytes:
        raise InvalidVideo("the video ends within its header")
    return int.from_bytes(part, "big")


# What is said of the tracks, as far as it can be read: FFmpeg has the last word.

_SEGMENT, _CLUSTER = 0x18538067, 0x1F43B675
_INFO, _TICK_NS, _DURATION = 0x1549A966, 0x2AD7B1, 0x4489
_TRACKS, _ENTRY, _TYPE, _CODEC = 0x1654AE6B, 0xAE, 0x83, 0x86
_VIDEO, _WIDTH, _HEIGHT = 0xE0, 0xB0, 0xBA
_AUDIO, _CHANNELS = 0xE1, 0x9F

_KINDS: dict[int, TrackKind] = {1: "video", 2: "audio"}
_PACKED = ("A_PCM/", "A_FLAC")
#: Elements before the first cluster that are looked at, all levels together; real files have some fifty.
_MAX_ELEMENTS = 2048


def matroska_tracks(view: memoryview) -> Iterator[Track]:
    """The tracks that the file's header describes, in their order."""
    tick_ns, duration, entries = 1_000_000, 0.0, []
    left = iter(range(_MAX_ELEMENTS))
    with suppress(InvalidVideo):  # what was read until the damage counts
        for kind, body in _header(view, left):
            if kind == _TICK_NS:
                tick_ns = int.from_bytes(body[:8], "big")
            elif kind == _DURATION:
                duration = _float(body)
            elif kind == _ENTRY:
                entries.append(body)
    for entry in entries:
        yield _track(entry, left, duration * tick_ns / 1e9)


def _header(view: memoryview, left: Iterator[int]) -> Iterator[tuple[int, memoryview]]:
    """Times and tracks of the first segment, up to its first cluster."""
    for kind, body in _elements(view, left):
        if kind != _SEGMENT:
            continue
        for part, content in _elements(body, left):
            if part == _CLUSTER:
                return
            if part in (_INFO, _TRACKS):
                yield from _elements(content, left)


def _elements(view: memoryview, left: Iterator[int]) -> Iterator[tuple[int, memoryview]]:
    """(kind, content) of the elements directly in `view`, until nothing is `left` of what may be looked at.

    One of unknown size, or that is cut, has all that follows.
    """
    offset = 0
    for _ in left:
        if offset >= len(view):
            return
        kind, offset = _vint(view, offset, marker=True)
        start = offset
        size, offset = _vint(view, offset)
        unknown = size == (1 << 7 * (offset - start)) - 1
        end = len(view) if unknown else min(len(view), offset + size)
        yield kind, view[offset:end]
        offset = end


def _track(entry: memoryview, left: Iterator[int], duration_s: float) -> Track:
    said: dict[int, memoryview] = {}
    with suppress(InvalidVideo):
        for kind, body in _elements(entry, left):
            said |= dict(_elements(body, left)) if kind in (_VIDEO, _AUDIO) else {kind: body}

    def number(kind: int, default: int = 0) -> int:
        return int.from_bytes(said[kind][:8], "big") if kind in said else default

    track: TrackKind = _KINDS.get(number(_TYPE), "other")
    if track == "audio":
        codec = bytes(said.get(_CODEC, b"")[:32]).decode("latin-1")
        return Track(track, duration_s, num_channels=number(_CHANNELS, 1), is_packed=codec.startswith(_PACKED))
    return Track(track, duration_s, width=number(_WIDTH), height=number(_HEIGHT))


def _float(body: memoryview) -> float:
    """Four or eight bytes. What is no number is no claim."""
    if len(body) not in (4, 8):
        return 0.0
    (value,) = struct.unpack(">f" if len(body) == 4 else ">d", body)
    return float(value) if 0 <= value < float("inf") else 0.0
