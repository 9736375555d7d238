"""Reads the size that an encoded image will have once it is decoded and rotated, from its header alone.

Theory of operation. Our decoder rotates an image as Pillow does, by the orientation in its EXIF or XMP metadata, unless
Pillow fails at rewriting these. Nothing of that is imitated here: the size is returned if the metadata certainly do not
swap the sides, which is so for nearly all images that are sent to models. For the others (photos from a telephone in
portrait format, GIF, AVIF, odd files), a preparer asks Pillow (`measure`). The limits on steps are those of
`image_header`, which reads the same bytes before; so this may run on an event loop.
"""

from __future__ import annotations

import re
import struct

from medialane.media.config import MediaConfig
from medialane.media.image_header import APP1, MAX_EXIF_BYTES, SOS, has_too_many_scans, jpeg_segments, sniff_image
from medialane.types.media import MediaSize

#: EXIF's tag of the orientation (TIFF 6.0, section 8), a SHORT. Values above 4 swap width and height.
_ORIENTATION = 0x0112
_SHORT = 3
_MAX_UNSWAPPED = 4

_EXIF = b"Exif\0\0"
_BYTE_ORDERS = {b"II*\0": "<", b"MM\0*": ">"}

#: The attribute or element that Pillow searches in XMP if EXIF has no orientation (`Image.getexif`).
_XMP_ORIENTATION = re.compile(rb'tiff:Orientation(="|>)([0-9])')

#: Application data with further images, of which Pillow makes another kind of file.
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
    }.get(sniffed.media_type, _is_unknown)(view)
    return MediaSize(width=sniffed.width, height=sniffed.height) if is_stored else None


def _is_unknown(_view: memoryview) -> bool:
    return False


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
