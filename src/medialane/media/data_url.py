"""`data:` URLs (RFC 2397) and the base64 in them."""

from __future__ import annotations

import re
import string
from binascii import Error as Base64Error

import pybase64

from medialane.types.errors import EmptyMedia, InvalidBase64, InvalidDataUrl, MediaTooLarge

#: Maximum length before the comma. Media types with parameters have tens of characters.
_MAX_HEADER_CHARS = 1024

_MEDIA_TYPE = re.compile(r"[\w.+-]+/[\w.+-]+", re.ASCII)

_FRAMES_ALPHABET = string.ascii_letters.encode() + string.digits.encode() + b"+/=,"


def split_data_url(url: bytes | bytearray | memoryview) -> tuple[bytes, memoryview]:
    """Split a data: URL at its comma into header and a view of the payload. Raises InvalidDataUrl."""
    view = memoryview(url)
    head = bytes(view[: _MAX_HEADER_CHARS + 1])
    comma = head.find(b",")
    if comma < 0:
        raise InvalidDataUrl("a data: URL needs a comma between its media type and its data")
    return head[:comma], view[comma + 1 :]


def parse_header(header: bytes) -> str | None:
    """Return the media type in a data: URL's header, None if it has none that is valid: as in vLLM, the bytes decide.
    Raises InvalidDataUrl.

    Like in vLLM, base64 must be the last parameter. It and the scheme are case-insensitive (RFC 2397, 2045).
    """
    declared, _, encoding = header.decode("latin-1").lower().rpartition(";")
    if len(header) > _MAX_HEADER_CHARS or not declared.startswith("data:") or encoding.strip() != "base64":
        raise InvalidDataUrl("a data: URL must have the form data:<media type>;base64,<data>")
    media_type = declared.removeprefix("data:").partition(";")[0]
    return media_type if _MEDIA_TYPE.fullmatch(media_type) else None


def read_jpeg_frames(payload: bytes | bytearray | memoryview, max_bytes: int) -> bytes:
    """Return the payload of a `video/jpeg` URL unchanged: base64 frames joined by commas (vLLM's own format).

    Frames are not decoded here; only the characters of base64 and commas are accepted.
    Raises MediaTooLarge, EmptyMedia, InvalidBase64.
    """
    _check_length(payload, max_bytes)
    text = bytes(payload)
    if text.translate(None, _FRAMES_ALPHABET):
        raise InvalidBase64("the frames are not valid base64, joined by commas")
    return text


def decode_base64(payload: bytes | bytearray | memoryview, max_bytes: int) -> bytes:
    """Decode standard base64 (RFC 4648, section 4) with padding and no other characters.

    Raises MediaTooLarge (before decoding), EmptyMedia, InvalidBase64.
    """
    _check_length(payload, max_bytes)
    try:
        return pybase64.b64decode(payload, validate=True)
    except Base64Error as error:
        raise InvalidBase64(
            "the media is not valid base64: standard alphabet, padded, without white space and percent-encoding"
        ) from error


def _check_length(payload: bytes | bytearray | memoryview, max_bytes: int) -> None:
    if len(payload) > max_bytes:
        raise MediaTooLarge(f"the encoded media has {len(payload)} bytes, more than {max_bytes}")
    if not payload:
        raise EmptyMedia("the media is empty")
