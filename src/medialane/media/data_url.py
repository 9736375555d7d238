"""`data:` URLs (RFC 2397) and the base64 in them."""

from __future__ import annotations

import re
import string
from binascii import Error as Base64Error
from dataclasses import dataclass

import pybase64

from medialane.core.errors import EmptyMedia, InvalidBase64, InvalidDataUrl, MediaTooLarge

#: Longest part before the comma. Media types with parameters have some tens of characters.
_MAX_HEADER_CHARS = 1024

#: As vLLM has it: base64 must be the last parameter. The scheme and the word are case-insensitive (RFC 2397, 2045).
_HEADER = re.compile(r"data:([\w.+-]+/[\w.+-]+)?(?:;[^;,]*)*;base64", re.ASCII | re.IGNORECASE)

_FRAMES_ALPHABET = string.ascii_letters.encode() + string.digits.encode() + b"+/=,"


@dataclass(frozen=True, slots=True)
class DataUrl:
    """What a data: URL holds. `media_type` is the sender's claim, None where it makes none."""

    media_type: str | None
    data: bytes

    def __repr__(self) -> str:
        return f"DataUrl({self.media_type}, {len(self.data)} bytes)"


def parse_data_url(url: str | bytes | bytearray | memoryview, max_bytes: int) -> DataUrl:
    """Decode a data: URL whose payload has at most `max_bytes` encoded bytes; the payload is not copied on the way.

    Raises InvalidDataUrl, InvalidBase64, MediaTooLarge, EmptyMedia.
    """
    try:
        header, payload = split_data_url(url.encode("ascii") if isinstance(url, str) else url)
    except UnicodeEncodeError as error:
        raise InvalidDataUrl("a data: URL has ASCII characters only") from error
    return DataUrl(parse_header(header), decode_base64(payload, max_bytes))


def split_data_url(url: bytes | bytearray | memoryview) -> tuple[bytes, memoryview]:
    """What stands before the comma of a data: URL, and a view of what stands after it. Raises InvalidDataUrl."""
    view = memoryview(url)
    head = bytes(view[: _MAX_HEADER_CHARS + 1])
    comma = head.find(b",")
    if comma < 0:
        raise InvalidDataUrl("a data: URL needs a comma between its media type and its data")
    return head[:comma], view[comma + 1 :]


def parse_header(header: bytes) -> str | None:
    """The media type of what stands before the comma of a data: URL. Raises InvalidDataUrl."""
    found = None if len(header) > _MAX_HEADER_CHARS else _HEADER.fullmatch(header.decode("latin-1"))
    if found is None:
        raise InvalidDataUrl("a data: URL must have the form data:<media type>;base64,<data>")
    return found[1].lower() if found[1] else None


def read_jpeg_frames(payload: bytes | bytearray | memoryview, max_bytes: int) -> bytes:
    """The payload of a `video/jpeg` URL as it is: frames in base64, joined by commas (a form of vLLM's own).

    Frames are not decoded here; only what base64 and commas are made of is let through.
    Raises MediaTooLarge, EmptyMedia, InvalidBase64.
    """
    _check_length(payload, max_bytes)
    text = bytes(payload)
    if text.translate(None, _FRAMES_ALPHABET):
        raise InvalidBase64("the frames are not valid base64, joined by commas")
    return text


def decode_base64(payload: bytes | bytearray | memoryview, max_bytes: int) -> bytes:
    """Decode standard base64 (RFC 4648, section 4) with padding and nothing else in it.

    Raises MediaTooLarge (before decoding), EmptyMedia, InvalidBase64.
    """
    _check_length(payload, max_bytes)
    try:
        return pybase64.b64decode(payload, validate=True)
    except Base64Error as error:
        raise InvalidBase64("the media is not valid base64") from error


def _check_length(payload: bytes | bytearray | memoryview, max_bytes: int) -> None:
    if len(payload) > max_bytes:
        raise MediaTooLarge(f"the encoded media has {len(payload)} bytes, more than {max_bytes}")
    if not payload:
        raise EmptyMedia("the media is empty")
