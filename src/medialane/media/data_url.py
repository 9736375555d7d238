"""`data:` URLs (RFC 2397), the base64 in them, and images that are published by one.

Instead of sending encoded bytes, a client may publish an image's decoded pixels for RDMA reads: it sends a data: URL of
type RDMA_TYPE, whose content is a `PublishedImage` as JSON. The store reads the pixels and caches them like encoded
bytes, as a binary PPM image, which vLLM in a worker (stage `url`) decodes as well. Clients cannot send PPM images
otherwise.
"""

from __future__ import annotations

import re
import string
from binascii import Error as Base64Error
from typing import Literal

import msgspec
import numpy as np
import pybase64

from medialane.media.config import MediaConfig
from medialane.media.image_header import check_limits
from medialane.types.errors import (
    EmptyMedia,
    InvalidBase64,
    InvalidDataUrl,
    InvalidImage,
    MediaTooLarge,
    MediaUrlForbidden,
    UnsupportedMediaType,
)
from medialane.types.media import Image, Modality

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


# Published images

RDMA_TYPE = "application/x-rdma-metadata+json"
PIXMAP_TYPE = "image/x-portable-pixmap"

#: The pixels follow, aligned like tensors in the arena.
PIXMAP_HEADER_BYTES = 64

#: Base64 in the URL. The largest part are the metadata of the client's NIXL agent: 0.5 KB, more with many devices.
MAX_URL_BYTES = 256 * 1024

_PIXMAP_HEADER = re.compile(rb"P6\n# *\n([0-9]{1,5}) ([0-9]{1,5})\n255\n")


class PublishedImage(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An RGB image: `rdma_metadata` has one descriptor, of its pixels in rows from top to bottom; see
    `transfer.nixl.RdmaMetadata`. `shape` is (height, width, 3)."""

    rdma_metadata: msgspec.Raw
    shape: tuple[int, int, Literal[3]]
    dtype: Literal["uint8"] = "uint8"

    @property
    def num_bytes(self) -> int:
        height, width, num_channels = self.shape
        return height * width * num_channels


def check_published(modality: Modality, config: MediaConfig) -> None:
    """Raise MediaUrlForbidden or UnsupportedMediaType if a client may not publish an item."""
    if not config.allow_rdma:
        raise MediaUrlForbidden("this server does not read published images (--allow-media-rdma)")
    if modality != "image":
        raise UnsupportedMediaType("only images can be published")


def is_published(url: str) -> bool:
    """Return whether a URL contains a `PublishedImage`."""
    return url[: len("data:") + len(RDMA_TYPE)].lower() == f"data:{RDMA_TYPE}"


def read_published(url: str, config: MediaConfig) -> PublishedImage:
    """Return the image in a URL, whose size is within the limits.

    Raises InvalidDataUrl, InvalidBase64, MediaTooLarge, EmptyMedia, InvalidImage, ImageTooLarge.
    """
    header, payload = split_data_url(url.encode())
    parse_header(header)
    try:
        image = msgspec.json.decode(decode_base64(payload, MAX_URL_BYTES), type=PublishedImage)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidImage(f"the description of the published image is invalid: {error}") from error
    height, width, _ = image.shape
    check_limits(width, height, config)
    return image


def pixmap_header(width: int, height: int) -> bytes:
    """Return the header of a PPM image, padded by a comment to PIXMAP_HEADER_BYTES."""
    size = b"\n%d %d\n255\n" % (width, height)
    return (b"P6\n#").ljust(PIXMAP_HEADER_BYTES - len(size)) + size


def pixmap_size(data: memoryview) -> tuple[int, int]:
    """Return (width, height) of an image with `pixmap_header`. Raises InvalidImage."""
    match = _PIXMAP_HEADER.fullmatch(bytes(data[:PIXMAP_HEADER_BYTES]))
    if match is None:
        raise InvalidImage("the published image has an invalid header")
    return int(match[1]), int(match[2])


def decode_pixmap(data: memoryview) -> Image:
    """Return a copy of the pixels. Raises InvalidImage."""
    width, height = pixmap_size(data)
    pixels = np.frombuffer(data, np.uint8, offset=PIXMAP_HEADER_BYTES)
    if pixels.size != height * width * 3:
        raise InvalidImage("the published image is truncated")
    return Image(pixels.reshape(height, width, 3).copy())
