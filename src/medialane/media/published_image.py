"""Decoded images whose pixels a client has published for RDMA reads, instead of sending encoded bytes.

The client sends a data: URL of type RDMA_TYPE, whose content is a `PublishedImage` as JSON. The store reads the pixels
and caches them like encoded bytes, as a binary PPM image, which vLLM in a worker (stage `url`) decodes as well. Clients
cannot send PPM images otherwise.
"""

from __future__ import annotations

import re
from typing import Literal

import msgspec
import numpy as np

from medialane.media.config import MediaConfig
from medialane.media.data_url import decode_base64, parse_header, split_data_url
from medialane.media.image_header import check_limits
from medialane.types.errors import InvalidImage, MediaUrlForbidden, UnsupportedMediaType
from medialane.types.media import Image, Modality

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
