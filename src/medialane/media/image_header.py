"""Detects the type and size of an encoded image from its header, before any decoder runs.

Decoders allocate what a header claims (a 691-byte JPEG may claim 10000x10000 pixels), so the claimed size is checked
against the limits here first. Only the six supported types are recognised; other types that a decoder library might
support never reach it.

`oriented_size` also returns the size that an image will have once it is decoded and rotated. Our decoder rotates an
image as Pillow does, by the orientation in its EXIF or XMP metadata, unless Pillow fails at rewriting these. Nothing of
that is imitated here: the size is returned if the metadata certainly do not swap the sides, which is so for nearly all
images that are sent to models. For the others (photos from a telephone in portrait format, GIF, AVIF, odd files), a
preparer asks Pillow (`measure`). All steps are bounded, so this may run on an event loop.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Literal

from medialane.media.config import MediaConfig
from medialane.types.errors import (
    EmptyMedia,
    ImageTooComplex,
    ImageTooLarge,
    InvalidImage,
    MediaTooLarge,
    UnsupportedMediaType,
)
from medialane.types.media import MediaSize

ImageType = Literal["image/jpeg", "image/png", "image/webp", "image/gif", "image/avif", "image/bmp"]

#: Pillow skips junk and padding between JPEG segments, and iterates over segments in Python. Real files have no junk
#: and at most a few hundred segments (a depth map in XMP).
_MAX_JUNK_BYTES = 4096
_MAX_SEGMENTS = 2048

#: Pillow unpacks EXIF value by value (2 s per megabyte), concatenates all EXIF segments of a JPEG, iterates over all
#: chunks of a PNG (20 us each), and concatenates a GIF's comment block by block. Cameras write up to 64 KB of EXIF,
#: encoders PNG data in chunks of several KB.
MAX_EXIF_BYTES = 512 * 1024
_MAX_CHUNKS = 20_000
_MAX_BLOCKS = 16_384

#: Pillow decodes run-length encoded BMPs in Python (4 us per run): this size takes 2 s.
_MAX_RLE_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Sniffed:
    """The contents of a header. `multi_scan` is true for JPEGs that a decoder traverses once per scan, `is_rgb` for
    files that Pillow opens in its mode RGB: three channels, no palette and no alpha."""

    media_type: ImageType
    width: int
    height: int
    multi_scan: bool = False
    is_rgb: bool = True


def sniff_image(data: bytes | bytearray | memoryview, config: MediaConfig) -> Sniffed:
    """Return type and size of an encoded image and check them against the limits; reads headers only.

    Raises EmptyMedia, MediaTooLarge, UnsupportedMediaType, InvalidImage (a truncated or invalid header), ImageTooLarge,
    ImageTooComplex (metadata that is too expensive to decode).
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
            check_limits(sniffed.width, sniffed.height, config)
            return sniffed
    raise UnsupportedMediaType("the media is not a JPEG, PNG, WebP, GIF, AVIF or BMP image")


def image_size(data: bytes | bytearray | memoryview, config: MediaConfig) -> tuple[int, int]:
    """Return (width, height) as stored. Raises what `sniff_image` raises."""
    sniffed = sniff_image(data, config)
    return sniffed.width, sniffed.height


def has_too_many_scans(sniffed: Sniffed, data: bytes | bytearray | memoryview, config: MediaConfig) -> bool:
    """Return whether a decoder would traverse the image more often than is allowed."""
    return sniffed.multi_scan and bytes(data).count(_START_OF_SCAN) > config.max_image_scans


def check_limits(width: int, height: int, config: MediaConfig) -> None:
    """Raise ImageTooLarge or InvalidImage unless an image of this size may be decoded."""
    if width <= 0 or height <= 0:
        raise InvalidImage("the image has no pixels")
    if max(width, height) > config.max_image_side:
        raise ImageTooLarge(f"the image is {width}x{height}; no side may exceed {config.max_image_side} pixels")
    if width * height > config.max_image_pixels:
        raise ImageTooLarge(f"the image is {width}x{height}, more than {config.max_image_pixels} pixels")


def check_exif(num_bytes: int) -> None:
    """Raise ImageTooComplex for more EXIF than a decoder should read."""
    if num_bytes > MAX_EXIF_BYTES:
        raise ImageTooComplex(f"the image has more than {MAX_EXIF_BYTES} bytes of EXIF")


# JPEG (ITU-T T.81, annex B)

SOS, APP1 = 0xDA, 0xE1
#: A scan begins with this marker (ITU-T T.81, B.2.3); compressed data never contains it.
_START_OF_SCAN = b"\xff\xda"
_STANDALONE = {0x01, *range(0xD0, 0xD8)}
_FRAMES = {*range(0xC0, 0xD0)} - {0xC4, 0xC8, 0xCC}
_PROGRESSIVE = {0xC2, 0xC6, 0xCA, 0xCE}


def _read_jpeg(view: memoryview) -> Sniffed:
    """Read the last frame header before the first scan, which is the one that Pillow reports."""
    frame: tuple[int, int, int, int] | None = None
    num_exif = 0
    for marker, offset in jpeg_segments(view):
        if marker in _FRAMES:
            frame = (marker, _big(view, offset + 5, 2), _big(view, offset + 3, 2), _big(view, offset + 7, 1))
        elif marker == SOS:
            if frame is None:
                break
            kind, width, height, num_components = frame
            # libjpeg decodes scan by scan if the file is progressive or its first scan lacks a component.
            multi_scan = kind in _PROGRESSIVE or _big(view, offset + 2, 1) < num_components
            return Sniffed("image/jpeg", width, height, multi_scan, is_rgb=num_components == 3)
        elif marker == APP1 and bytes(view[offset + 2 : offset + 8]) == b"Exif\0\0":
            num_exif += _big(view, offset, 2)
            check_exif(num_exif)
    raise InvalidImage("the image has no frame header")


def jpeg_segments(view: memoryview) -> Iterator[tuple[int, int]]:
    """Yield (marker, offset of its length) of the segments up to the first scan, as Pillow traverses them."""
    offset, num_junk, num_bytes = 2, 0, len(view)
    for _ in range(_MAX_SEGMENTS):
        while offset + 2 <= num_bytes and (view[offset] != 0xFF or view[offset + 1] in (0x00, 0xFF)):
            offset, num_junk = offset + 1, num_junk + 1
            if num_junk > _MAX_JUNK_BYTES:
                raise InvalidImage("the image has invalid data in its header")
        marker = _bytes_at(view, offset, 2)[1]
        offset += 2
        if marker in _STANDALONE:
            continue
        yield marker, offset
        offset += max(_big(view, offset, 2), 2)
    raise InvalidImage("the image has too many segments in its header")


# PNG (https://www.w3.org/TR/png-3/), GIF89a, BMP


_CHUNK_LENGTH = struct.Struct(">I")
_PNG_TRUECOLOUR = 2
#: BI_RLE8, BI_RLE4
_RLE_COMPRESSIONS = (b"\1\0\0\0", b"\2\0\0\0")
_BITFIELDS = b"\3\0\0\0"


def _read_png(view: memoryview) -> Sniffed:
    if _bytes_at(view, 8, 8) != b"\x00\x00\x00\x0dIHDR":
        raise InvalidImage("the image has no header")
    _bytes_at(view, 24, 9)
    _check_chunks(view)
    return Sniffed("image/png", _big(view, 16, 4), _big(view, 20, 4), is_rgb=view[25] == _PNG_TRUECOLOUR)


def _check_chunks(view: memoryview) -> None:
    """Limit the number of chunks. Invalid chunks are left to Pillow."""
    offset, num_bytes = 8, len(view)
    for _ in range(_MAX_CHUNKS):
        if offset + 12 > num_bytes:
            return
        (length,) = _CHUNK_LENGTH.unpack_from(view, offset)
        offset += 12 + length
    raise ImageTooComplex(f"the image has more than {_MAX_CHUNKS} chunks")


def _read_gif(view: memoryview) -> Sniffed:
    _bytes_at(view, 0, 13)
    _check_extensions(view)
    return Sniffed("image/gif", _little(view, 6, 2), _little(view, 8, 2), is_rgb=False)


def _check_extensions(view: memoryview) -> None:
    for number, _ in enumerate(_blocks(view), 1):
        if number > _MAX_BLOCKS:
            raise ImageTooComplex(f"the image has more than {_MAX_BLOCKS} blocks before its first frame")


def _blocks(view: memoryview) -> Iterator[int]:
    """Yield the offsets of blocks before the first frame, as Pillow traverses them: unknown bytes are skipped."""
    flags, num_bytes = view[10], len(view)
    offset = 13 + (3 << (flags & 7) + 1 if flags & 0x80 else 0)
    while offset < num_bytes and view[offset] not in b",;":
        yield offset
        is_extension = view[offset] == 0x21
        offset += 2 if is_extension else 1
        while is_extension and offset < num_bytes:
            yield offset
            is_extension = view[offset] != 0
            offset += view[offset] + 1


def _read_bmp(view: memoryview) -> Sniffed:
    """Read the size; the height is negative in files with rows from top to bottom."""
    if _little(view, 14, 4) == 12:
        return Sniffed("image/bmp", _little(view, 18, 2), _little(view, 20, 2), is_rgb=_little(view, 24, 2) > 8)
    width, height = (int.from_bytes(_bytes_at(view, offset, 4), "little", signed=True) for offset in (18, 22))
    if view[30:34] in _RLE_COMPRESSIONS and len(view) > _MAX_RLE_BYTES:
        raise ImageTooComplex(f"the image is run-length encoded and has more than {_MAX_RLE_BYTES} bytes")
    has_alpha = view[30:34] == _BITFIELDS and len(view) >= 70 and any(view[66:70])
    return Sniffed("image/bmp", width, abs(height), is_rgb=_little(view, 28, 2) > 8 and not has_alpha)


# WebP (RFC 9649)

_WEBP_ANIMATION, _WEBP_ALPHA = 0x02, 0x10


def _read_webp(view: memoryview) -> Sniffed:
    kind = _bytes_at(view, 12, 4)
    if kind == b"VP8 ":
        if _bytes_at(view, 23, 3) != b"\x9d\x01\x2a":
            raise InvalidImage("the image has no frame header")
        return Sniffed("image/webp", _little(view, 26, 2) & 0x3FFF, _little(view, 28, 2) & 0x3FFF)
    if kind == b"VP8L":
        bits = _little(view, 21, 4)
        return Sniffed("image/webp", (bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1, is_rgb=not bits >> 28 & 1)
    if kind == b"VP8X":
        return Sniffed("image/webp", _little(view, 24, 3) + 1, _little(view, 27, 3) + 1, is_rgb=not _has_alpha(view))
    raise InvalidImage("the image has no frame header")


def _has_alpha(view: memoryview) -> bool:
    """Return whether libwebp reports alpha of an extended file: as its first image says, of an animation the header."""
    flags, offset = view[20], 30
    for _ in range(_MAX_CHUNKS):
        kind = b"" if flags & _WEBP_ANIMATION else bytes(view[offset : offset + 4])
        if kind == b"VP8L":
            return bool(_little(view, offset + 9, 4) >> 28 & 1)
        if kind in (b"", b"ALPH", b"VP8 "):
            return bool(flags & _WEBP_ALPHA or kind == b"ALPH")
        length = _little(view, offset + 4, 4)
        offset += 8 + length + length % 2
    raise ImageTooComplex(f"the image has more than {_MAX_CHUNKS} chunks")


# AVIF (ISO/IEC 23008-12, 6.5.3). Boxes are not parsed: the property is searched by its name.

#: Writers put the properties first. A colour profile may precede the size.
_MAX_AVIF_HEADER_BYTES = 256 * 1024
_MAX_AVIF_SIZES = 4096
_AVIF_ISPE = re.compile(rb"ispe\0\0\0\0(.{8})", re.DOTALL)
#: Types of auxiliary images that are alpha planes (ISO/IEC 23000-22; HEVC's in older files).
_AVIF_ALPHA = re.compile(rb"auxC\0\0\0\0urn:mpeg:(?:mpegB:cicp:systems:auxiliary:alpha|hevc:2015:auxid:1)\0")
_AVIF_SIZE = struct.Struct(">II")


def _is_avif(head: bytes) -> bool:
    if head[4:8] != b"ftyp":
        return False
    brands = head[8 : max(12, min(int.from_bytes(head[:4], "big"), len(head)))]
    major = brands[:4]
    return major in (b"avif", b"avis") or (major in (b"mif1", b"msf1") and (b"avif" in brands or b"avis" in brands))


def _read_avif(view: memoryview) -> Sniffed:
    """Read the largest `ispe` size, in a grid the whole image's.

    The sizes of the coded images are checked in a preparer (`image`).
    """
    start = bytes(view[:_MAX_AVIF_HEADER_BYTES])
    sizes = [_AVIF_SIZE.unpack(match[1]) for match in islice(_AVIF_ISPE.finditer(start), _MAX_AVIF_SIZES)]
    if not sizes and len(view) > len(start):
        raise ImageTooComplex(f"the image has no size in its first {len(start)} bytes")
    if not sizes or not all(map(all, sizes)):
        raise InvalidImage("the image has no pixels")
    width, height = max(sizes, key=lambda size: int(size[0] * size[1]))
    return Sniffed("image/avif", width, height, is_rgb=_AVIF_ALPHA.search(start) is None)


_TYPES: tuple[tuple[Callable[[bytes], bool], Callable[[memoryview], Sniffed]], ...] = (
    (lambda head: head.startswith(b"\xff\xd8\xff"), _read_jpeg),
    (lambda head: head.startswith(b"\x89PNG\r\n\x1a\n"), _read_png),
    (lambda head: head.startswith(b"RIFF") and head[8:12] == b"WEBP", _read_webp),
    (lambda head: head.startswith((b"GIF87a", b"GIF89a")), _read_gif),
    (_is_avif, _read_avif),
    (lambda head: head.startswith(b"BM"), _read_bmp),
)


def _bytes_at(view: memoryview, offset: int, nbytes: int) -> bytes:
    """Return `nbytes` at `offset`. Raises InvalidImage if the data is shorter, as do `_big` and `_little`."""
    part = bytes(view[offset : offset + nbytes])
    if len(part) < nbytes:
        raise InvalidImage("the image header is truncated")
    return part


def _big(view: memoryview, offset: int, nbytes: int) -> int:
    return int.from_bytes(_bytes_at(view, offset, nbytes), "big")


def _little(view: memoryview, offset: int, nbytes: int) -> int:
    return int.from_bytes(_bytes_at(view, offset, nbytes), "little")


# Orientation

#: EXIF's tag of the orientation (TIFF 6.0, section 8), a SHORT. Values above 4 swap width and height.
_ORIENTATION = 0x0112
_SHORT = 3
_MAX_UNSWAPPED = 4

_EXIF = b"Exif\0\0"
_BYTE_ORDERS = {b"II*\0": "<", b"MM\0*": ">"}

#: The attribute or element that Pillow searches in XMP if EXIF has no orientation (`Image.getexif`).
_XMP_ORIENTATION = re.compile(rb'tiff:Orientation(="|>)([0-9])')

#: Application data with further images, for which Pillow makes another kind of file.
_APP2, _MULTI_PICTURE = 0xE2, b"MPF\0"

#: Chunks of PNG that say nothing about the orientation, besides text under other keywords than these.
_PNG_CHUNKS = frozenset(
    (
        b"IDAT", b"IEND", b"PLTE", b"bKGD", b"cHRM", b"cICP", b"gAMA",
        b"hIST", b"iCCP", b"pHYs", b"sBIT", b"sRGB", b"tIME", b"tRNS",
    )
)  # fmt: skip
_PNG_TEXTS = frozenset((b"tEXt", b"zTXt", b"iTXt"))
_PNG_METADATA = re.compile(rb"exif|xmp", re.IGNORECASE)
_MAX_KEYWORD_BYTES = 80
_PNG_CHUNK = struct.Struct(">I4s")
_PNG_HEADER_BYTES = 33

#: Common writers' chunks have 8 KB or more of pixels.
_MAX_PNG_CHUNKS = 4096

_WEBP_CHUNKS = frozenset((b"VP8X", b"VP8 ", b"VP8L", b"ALPH", b"ICCP"))
_MAX_WEBP_CHUNKS = 64


def oriented_size(data: bytes | bytearray | memoryview, config: MediaConfig) -> MediaSize | None:
    """Return the size of the image as decoded; None if its header does not make that certain. Raises what `sniff_image`
    raises."""
    sniffed = sniff_image(data, config)
    if has_too_many_scans(sniffed, data, config):
        return None
    view = memoryview(data)
    is_stored = {
        "image/jpeg": _is_upright_jpeg,
        "image/png": _is_upright_png,
        "image/webp": _is_upright_webp,
    }.get(sniffed.media_type, lambda _: False)(view)
    return MediaSize(width=sniffed.width, height=sniffed.height) if is_stored else None


def _is_upright_jpeg(view: memoryview) -> bool:
    num_exif, num_bytes = 0, 0
    for marker, offset in jpeg_segments(view):
        if marker == SOS:
            return True
        if marker not in (APP1, _APP2):
            continue
        content = view[offset + 2 : offset + int.from_bytes(view[offset : offset + 2], "big")]
        if marker == _APP2:
            if content[: len(_MULTI_PICTURE)] == _MULTI_PICTURE:
                return False
            continue
        num_bytes += len(content)
        if num_bytes > MAX_EXIF_BYTES:
            return False
        if content[: len(_EXIF)] == _EXIF:
            num_exif += 1
            if num_exif > 1 or not _is_upright_exif(content[len(_EXIF) :]):
                return False
        elif not all(match[2] <= b"%d" % _MAX_UNSWAPPED for match in _XMP_ORIENTATION.finditer(content)):
            return False
    return False


def _is_upright_exif(exif: memoryview) -> bool:
    """Return whether an EXIF block certainly has no orientation that swaps the sides."""
    order = _BYTE_ORDERS.get(bytes(exif[:4]))
    if order is None:
        return False
    try:
        (start,) = struct.unpack_from(f"{order}I", exif, 4)
        (num_entries,) = struct.unpack_from(f"{order}H", exif, start)
        for index in range(num_entries):
            tag, kind, count, value = struct.unpack_from(f"{order}HHIH", exif, start + 2 + 12 * index)
            if tag == _ORIENTATION and (kind != _SHORT or count != 1 or value > _MAX_UNSWAPPED):
                return False
    except struct.error:  # cut off
        return False
    return True


def _is_upright_png(view: memoryview) -> bool:
    """Also metadata after the pixels count: Pillow reads the whole file for them."""
    offset = _PNG_HEADER_BYTES
    for _ in range(_MAX_PNG_CHUNKS):
        if offset + 8 > len(view):
            return True
        length, name = _PNG_CHUNK.unpack_from(view, offset)
        if name in _PNG_TEXTS:
            if _PNG_METADATA.search(view[offset + 8 : offset + 8 + min(length, _MAX_KEYWORD_BYTES)]):
                return False
        elif name not in _PNG_CHUNKS:
            return False
        offset += 12 + length
    return False


def _is_upright_webp(view: memoryview) -> bool:
    offset = 12
    for _ in range(_MAX_WEBP_CHUNKS):
        if offset + 8 > len(view):
            return True
        if bytes(view[offset : offset + 4]) not in _WEBP_CHUNKS:
            return False
        length = int.from_bytes(view[offset + 4 : offset + 8], "little")
        offset += 8 + length + length % 2
    return False
