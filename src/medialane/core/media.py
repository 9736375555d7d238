"""Media on their way from a reference in a request to decoded pixels."""

from __future__ import annotations

from typing import Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from medialane.core.tensor import ArenaRange

Modality = Literal["image", "video", "audio"]


class MediaRef(msgspec.Struct, frozen=True):
    """One media item as a request names it: a URL, or bytes that came inside the request.

    `param` is the item's field in the request, for errors. `salt` separates tenants: the same content under another
    salt is another entry.
    """

    modality: Modality
    param: str
    url: str | None = None
    data: bytes | None = None
    media_type: str | None = None
    salt: str = ""

    def __post_init__(self) -> None:
        if (self.url is None) == (self.data is None):
            raise ValueError("a media reference has either a URL or data")

    def __repr__(self) -> str:
        what = f"url={self.url!r}" if self.data is None else f"data={len(self.data)} bytes"
        return f"MediaRef({self.modality}, {self.param}, {what})"


class EncodedMedia(msgspec.Struct, frozen=True):
    """Encoded bytes in the arena. `media_type` is sniffed from the bytes, `content_hash` is their blake3-256 in hex.

    The bytes are [range.offset + data_offset, + num_bytes).
    """

    modality: Modality
    content_hash: str
    media_type: str
    range: ArenaRange
    data_offset: int
    num_bytes: int


class MediaSize(msgspec.Struct, frozen=True, omit_defaults=True):
    """The media's true size, which prompt assembly needs in place of the pixels. Zero where it does not apply."""

    width: int = 0
    height: int = 0
    num_frames: int = 0
    num_samples: int = 0


class Image:
    """Decoded pixels: uint8 of shape (height, width, 3), RGB, C-contiguous."""

    __slots__ = ("pixels",)

    def __init__(self, pixels: NDArray[np.uint8]) -> None:
        if pixels.dtype != np.uint8 or pixels.ndim != 3 or pixels.shape[2] != 3:
            raise ValueError(f"pixels must be uint8 of shape (height, width, 3), not {pixels.dtype} {pixels.shape}")
        self.pixels = pixels

    @property
    def size(self) -> MediaSize:
        return MediaSize(width=self.pixels.shape[1], height=self.pixels.shape[0])

    def __repr__(self) -> str:
        return f"Image({self.pixels.shape[1]}x{self.pixels.shape[0]})"
