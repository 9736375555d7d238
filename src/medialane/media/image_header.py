"""What encoded bytes are, from their first bytes, before any decoder sees them.

Decoders allocate what a header claims (a 691-byte JPEG may claim 10000x10000 pixels), so the claim is read and held
against the limits here first. Only the six types that the product takes are known; every other kind of file that a
decoder library might recognise is refused unseen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

from medialane.core.errors import EmptyMedia, ImageTooLarge, InvalidImage, MediaTooLarge, UnsupportedMediaType
from medialane.media.config import MediaConfig

ImageType = Literal["image/jpeg", "image/png", "image/webp", "image/gif", "image/avif", "image/bmp"]

#: Pillow skips junk and padding between JPEG segments, and walks segments and boxes one by one in Python. Real files
#: have no junk, at most some hundreds of segments (a depth map in XMP) and some tens of boxes.
_MAX_JUNK_BYTES = 4096
_MAX_SEGMENTS = 2048
_MAX_BOXES = 1024


@dataclass(frozen=True, slots=True)
class Sniffed:
    """What a header says. `multi_scan` is true of JPEGs that a decoder goes over once for each of their scans."""

    media_type: ImageType
    width: int
    height: int
    multi_scan: bool = False


def sniff_image(data: bytes | bytearray | memoryview, config: MediaConfig) -> Sniffed:
    """Tell type and size of an encoded image, within the limits; reads headers only.

    Raises EmptyMedia, MediaTooLarge, UnsupportedMediaType, InvalidImage (a header that ends early or makes no sense),
    ImageTooLarge.
    """
    if not data:
        raise EmptyMedia("the media is empty")
    if len(data) > config.max_image_bytes:
        raise MediaTooLarge(f"the image has {len(data)} bytes, more than {config.max_image_bytes}")
    view = memoryview(data)
    head = bytes(view[:64])
    for is_type, read in _TYPES:
        if is_type(head):
            sniffed = read(view)
            check_size(sniffed.width, sniffed.height, config)
            return sniffed
    raise UnsupportedMediaType("the media is not a JPEG, PNG, WebP, GIF, AVIF or BMP image")


def check_size(width: int, height: int, config: MediaConfig) -> None:
    """Raise ImageTooLarge or InvalidImage unless an image of this size may be decoded."""
    if width <= 0 or height <= 0:
        raise InvalidImage("the image has no pixels")
    if max(width, height) > config.max_image_side:
        raise ImageTooLarge(f"the image is {width}x{height}; no side may exceed {config.max_image_side} pixels")
    if width * height > config.max_image_pixels:
        raise ImageTooLarge(f"the image is {width}x{height}, more than {config.max_image_pixels} pixels")


def _take(view: memoryview, offset: int, nbytes: int) -> bytes:
    part = bytes(view[offset : offset + nbytes])
    if len(part) < nbytes:
        raise InvalidImage("the image ends within its header")
    return part


def _big(view: memoryview, offset: int, nbytes: int) -> int:
    return int.from_bytes(_take(view, offset, nbytes), "big")


def _little(view: memoryview, offset: int, nbytes: int) -> int:
    return int.from_bytes(_take(view, offset, nbytes), "little")


# JPEG (ITU-T T.81, annex B)

_SOS = 0xDA
_STANDALONE = {0x01, *range(0xD0, 0xD8)}
_FRAMES = {*range(0xC0, 0xD0)} - {0xC4, 0xC8, 0xCC}
_PROGRESSIVE = {0xC2, 0xC6, 0xCA, 0xCE}


def _read_jpeg(view: memoryview) -> Sniffed:
    """The last frame header before the first scan is the one that Pillow reports."""
    frame: tuple[int, int, int, int] | None = None
    for marker, offset in _segments(view):
        if marker in _FRAMES:
            frame = (marker, _big(view, offset + 5, 2), _big(view, offset + 3, 2), _big(view, offset + 7, 1))
        elif marker == _SOS:
            if frame is None:
                break
            kind, width, height, num_components = frame
            # libjpeg goes over a file scan by scan if it is progressive or its first scan lacks a component.
            multi_scan = kind in _PROGRESSIVE or _big(view, offset + 2, 1) < num_components
            return Sniffed("image/jpeg", width, height, multi_scan)
    raise InvalidImage("the image has no frame header")


def _segments(view: memoryview) -> Iterator[tuple[int, int]]:
    """(marker, offset of its length) of the segments up to the first scan, as Pillow walks them."""
    offset, num_junk = 2, 0
    for _ in range(_MAX_SEGMENTS):
        while _big(view, offset, 1) != 0xFF or _big(view, offset + 1, 1) in (0x00, 0xFF):
            offset, num_junk = offset + 1, num_junk + 1
            if num_junk > _MAX_JUNK_BYTES:
                raise InvalidImage("the image has junk in its header")
        marker = view[offset + 1]
        offset += 2
        if marker in _STANDALONE:
            continue
        yield marker, offset
        offset += max(_big(view, offset, 2), 2)
    raise InvalidImage("the image has too many segments in its header")


# PNG (https://www.w3.org/TR/png-3/), GIF89a, BMP


def _read_png(view: memoryview) -> Sniffed:
    if _take(view, 8, 8) != b"\x00\x00\x00\x0dIHDR":
        raise InvalidImage("the image has no header")
    _take(view, 24, 9)
    return Sniffed("image/png", _big(view, 16, 4), _big(view, 20, 4))


def _read_gif(view: memoryview) -> Sniffed:
    _take(view, 0, 13)
    return Sniffed("image/gif", _little(view, 6, 2), _little(view, 8, 2))


def _read_bmp(view: memoryview) -> Sniffed:
    """Height is negative in files whose rows go from top to bottom."""
    if _little(view, 14, 4) == 12:
        return Sniffed("image/bmp", _little(view, 18, 2), _little(view, 20, 2))
    width, height = (int.from_bytes(_take(view, offset, 4), "little", signed=True) for offset in (18, 22))
    return Sniffed("image/bmp", width, abs(height))


# WebP (RFC 9649)


def _read_webp(view: memoryview) -> Sniffed:
    kind = _take(view, 12, 4)
    if kind == b"VP8 ":
        if _take(view, 23, 3) != b"\x9d\x01\x2a":
            raise InvalidImage("the image has no frame header")
        return Sniffed("image/webp", _little(view, 26, 2) & 0x3FFF, _little(view, 28, 2) & 0x3FFF)
    if kind == b"VP8L":
        bits = _little(view, 21, 4)
        return Sniffed("image/webp", (bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1)
    if kind == b"VP8X":
        return Sniffed("image/webp", _little(view, 24, 3) + 1, _little(view, 27, 3) + 1)
    raise InvalidImage("the image has no frame header")


# AVIF (ISO/IEC 14496-12, 23008-12): the size is the largest of the image's parts, which is the whole of a grid.


def _is_avif(head: bytes) -> bool:
    if head[4:8] != b"ftyp":
        return False
    brands = head[8 : max(12, min(int.from_bytes(head[:4], "big"), len(head)))]
    major = brands[:4]
    return major in (b"avif", b"avis") or (major in (b"mif1", b"msf1") and (b"avif" in brands or b"avis" in brands))


def _read_avif(view: memoryview) -> Sniffed:
    sizes = [
        (_big(ispe, 4, 4), _big(ispe, 8, 4))
        for meta in _boxes(view, b"meta")
        for iprp in _boxes(meta[4:], b"iprp")
        for ipco in _boxes(iprp, b"ipco")
        for ispe in _boxes(ipco, b"ispe")
    ]
    if not sizes:
        raise InvalidImage("the image has no size in its header")
    width, height = max(sizes, key=lambda size: size[0] * size[1])
    return Sniffed("image/avif", width, height)


def _boxes(view: memoryview, kind: bytes) -> Iterator[memoryview]:
    """Contents of the boxes of one kind that lie directly in `view`."""
    offset = 0
    for _ in range(_MAX_BOXES):
        if offset + 8 > len(view):
            return
        size, start = _big(view, offset, 4), 8
        if size == 1:
            size, start = _big(view, offset + 8, 8), 16
        end = len(view) if size == 0 else offset + size
        if end < offset + start or end > len(view):
            raise InvalidImage("the image ends within its header")
        if view[offset + 4 : offset + 8] == kind:
            yield view[offset + start : end]
        offset = end
    raise InvalidImage("the image has too many parts")


_TYPES: tuple[tuple[Callable[[bytes], bool], Callable[[memoryview], Sniffed]], ...] = (
    (lambda head: head.startswith(b"\xff\xd8\xff"), _read_jpeg),
    (lambda head: head.startswith(b"\x89PNG\r\n\x1a\n"), _read_png),
    (lambda head: head.startswith(b"RIFF") and head[8:12] == b"WEBP", _read_webp),
    (lambda head: head.startswith((b"GIF87a", b"GIF89a")), _read_gif),
    (_is_avif, _read_avif),
    (lambda head: head.startswith(b"BM"), _read_bmp),
)
