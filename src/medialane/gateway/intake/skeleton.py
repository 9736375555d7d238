"""Bodies: in UTF-8, without the base64 payloads in their strings (the skeleton), and with ranges replaced (edits); and
the raw values in them."""

from __future__ import annotations

import codecs
import json
import mmap
from bisect import bisect_left
from collections.abc import Iterator

import msgspec
import numpy as np

from medialane.types.errors import BodyTooLarge, InvalidMediaUrl

#: The value of a missing member: a sentinel, compared with `is`.
ABSENT = msgspec.Raw()
NULL = msgspec.Raw(b"null")
EMPTY_STRING = msgspec.Raw(b'""')

#: What msgspec raises for bytes that are not JSON of the expected type, invalid UTF-8 and deep nesting included.
UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)

#: First bytes of JSON strings, objects and arrays.
QUOTE, BRACE, BRACKET = b'"{['

#: These raise the exceptions in UNREADABLE.
decode_string = msgspec.json.Decoder(str).decode
decode_values = msgspec.json.Decoder(list[msgspec.Raw]).decode
decode_members = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode

#: The memory of a body.
Buffer = bytes | bytearray | mmap.mmap

#: (start, end, replacement): bytes [start, end) of the body are replaced.
Edit = tuple[int, int, bytes]

NOT_TEXT = "the media URL is not valid text"

_MARKER = b";base64,"
#: Shorter payloads are not worth cutting.
_MIN_CUT_BYTES = 1024
#: Most markers that are examined in a body, to bound the time for malicious ones.
_MAX_MARKERS = 256

#: Bytes converted to UTF-8 at a time, a few milliseconds, so that other threads get the GIL in between.
_PIECE_BYTES = 1 << 20


def as_utf8(body: bytes | bytearray | memoryview) -> bytes | None:
    """Return a body in another encoding that Python's JSON parser, and so vLLM's app, accepts (UTF-8 with a byte order
    mark, UTF-16, UTF-32) in UTF-8; None if it is UTF-8 already or invalid in its encoding.

    Lone surrogates are preserved, like in `json.loads`.
    """
    encoding = json.detect_encoding(bytes(body[:4]))
    if encoding == "utf-8":
        return None
    if encoding == "utf-8-sig":
        return bytes(body[len(codecs.BOM_UTF8) :])
    decoder = codecs.getincrementaldecoder(encoding)("surrogatepass")
    view = memoryview(body)
    parts = []
    try:
        for start in range(0, len(view), _PIECE_BYTES):
            piece = view[start : start + _PIECE_BYTES]
            parts.append(decoder.decode(piece, final=start + _PIECE_BYTES >= len(view)).encode(errors="surrogatepass"))
    except UnicodeDecodeError:
        return None
    return b"".join(parts)


def apply_edits(body: memoryview, edits: list[Edit], max_bytes: int, *, without: str = "its media") -> bytes:
    """Return the body with its edits applied, which must not overlap. Raises BodyTooLarge if it has more bytes."""
    size = len(body) + sum(len(replacement) - (end - start) for start, end, replacement in edits)
    if size > max_bytes:
        raise BodyTooLarge(f"the request body has {size} bytes besides {without}, more than {max_bytes}")
    parts: list[bytes | memoryview] = []
    at = 0
    for start, end, replacement in sorted(edits):
        parts += [body[at:start], replacement]
        at = end
    return b"".join([*parts, body[at:]])


class Located(msgspec.Struct, frozen=True, gc=False):
    """A JSON value and its range [start, end) in the body, quotes included. `payload` is what was cut from a string."""

    start: int
    end: int
    raw: memoryview
    payload: memoryview
    escaped: bool

    def head(self) -> bytes | memoryview:
        """Return the string's UTF-8 without the payload. Raises InvalidMediaUrl."""
        if not self.escaped:
            return self.raw[1:-1]
        try:
            return decode_string(self.raw).encode()
        except UNREADABLE as error:
            raise InvalidMediaUrl(NOT_TEXT) from error

    def text(self) -> bytes | memoryview:
        """Return the whole string's UTF-8. Raises InvalidMediaUrl."""
        return bytes(self.head()) + bytes(self.payload) if self.payload else self.head()


class Skeleton:
    """A body without its payloads, and their positions. The body is the first `size` bytes of `buffer`."""

    def __init__(self, buffer: Buffer, size: int) -> None:
        self.body = memoryview(buffer)[:size]
        self._cuts = list(_find_payloads(buffer, size))
        #: Positions in the skeleton at which a payload is missing, and how many bytes are missing before each.
        self._positions: list[int] = []
        self._missing = [0]
        kept, at = [], 0
        for start, end in self._cuts:
            kept.append(self.body[at:start])
            self._positions.append(start - self._missing[-1])
            self._missing.append(self._missing[-1] + end - start)
            at = end
        self.data = _joined([*kept, self.body[at:]])
        self._address: int | None = None
        #: Members or elements of values that `value_at` has passed, by path.
        self._inside: dict[tuple[str, ...], dict[str, msgspec.Raw] | list[msgspec.Raw]] = {}

    def locate(self, value: msgspec.Raw) -> Located:
        """Return the range in the body of a value of the skeleton, and the payload that was cut from it, if any."""
        if self._address is None:
            self._address = _address(self.data)
        raw = memoryview(value)
        start = _address(value) - self._address
        end = start + len(raw)
        first, after = bisect_left(self._positions, start), bisect_left(self._positions, end)
        payload = self.body[slice(*self._cuts[first])] if first < after else self.body[:0]
        escaped = self.data.find(b"\\", start, end) >= 0
        return Located(start + self._missing[first], end + self._missing[after], raw, payload, escaped)

    def value_at(self, path: tuple[str, ...]) -> msgspec.Raw:
        """Return a value by the names and indices that lead to it, of which there must be such members and elements.
        However many are asked for, each object and list is decoded once. Raises the exceptions in UNREADABLE."""
        if not path:
            return msgspec.Raw(self.data)
        *before, last = path
        if (inside := self._inside.get(tuple(before))) is None:
            within = self.value_at(tuple(before))
            inside = decode_values(within) if first_byte(within) == BRACKET else decode_members(within)
            self._inside[tuple(before)] = inside
        return inside[int(last)] if isinstance(inside, list) else inside[last]


def _find_payloads(body: Buffer, size: int) -> Iterator[tuple[int, int]]:
    """Yield the ranges of the body to cut, at most one per string. Reads every byte once."""
    at = 0
    for _ in range(_MAX_MARKERS):
        marker = body.find(_MARKER, at, size)
        if marker < 0:
            return
        start = marker + len(_MARKER)
        end = body.find(b'"', start, size)
        if end < 0:
            return
        if end - start >= _MIN_CUT_BYTES and body.find(b"\\", start, end) < 0:
            yield start, end
        at = end


def _address(data: bytearray | msgspec.Raw) -> int:
    """Return the memory address of the bytes. This is the only way to get the position of a msgspec.Raw, a view."""
    address: int = np.frombuffer(data, np.uint8).__array_interface__["data"][0]
    return address


def _joined(parts: list[memoryview]) -> bytearray:
    """Concatenate the parts. NumPy releases the GIL while copying; `bytes.join` would hold it for milliseconds."""
    copy = bytearray(sum(map(len, parts)))
    into = np.frombuffer(copy, np.uint8)
    at = 0
    for part in parts:
        into[at : at + len(part)] = np.frombuffer(part, np.uint8)
        at += len(part)
    return copy


def first_byte(value: msgspec.Raw) -> int | None:
    return None if value is ABSENT else memoryview(value)[0]


def is_filled(value: msgspec.Raw) -> bool:
    """Return whether the value is a non-empty string."""
    view = memoryview(value)
    return len(view) > 2 and view[0] == QUOTE


def string_or_none(value: msgspec.Raw) -> str | None:
    return decode_string(value) if first_byte(value) == QUOTE else None
