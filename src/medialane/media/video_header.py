"""What an encoded video is, told from its bytes, before any decoder sees them.

Demuxers follow references to other files and streams (HLS, DASH, SDP, concat lists, external data references), and
allocate what a table's header claims. So only three containers are known here, a file that refers to another one is
refused, and the claims of MP4's tables are held against their own size. The fourth form is vLLM's list of JPEG frames:
base64 texts joined by commas.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import pybase64

from medialane.core.errors import (
    EmptyMedia,
    ImageTooLarge,
    InvalidBase64,
    InvalidImage,
    InvalidVideo,
    MediaTooLarge,
    TooManyFrames,
    UnsupportedMediaType,
    VideoTooLarge,
)
from medialane.media.config import MediaConfig
from medialane.media.image_header import Sniffed, sniff_image

VideoType = Literal["video/mp4", "video/webm", "video/x-matroska", "video/jpeg"]

#: A fragmented hour of one-second pieces has some 7200 boxes at the top level.
_MAX_BOXES = 65_536

#: Base64 of the first three bytes of every JPEG.
JPEG_LIST_START = b"/9j/"


def sniff_video(data: bytes | bytearray | memoryview, config: MediaConfig) -> VideoType:
    """Tell the container of an encoded video; reads headers only.

    Raises EmptyMedia, MediaTooLarge, UnsupportedMediaType, InvalidVideo (a header that makes no sense), and of a list
    of JPEG frames also InvalidBase64, TooManyFrames, VideoTooLarge.
    """
    if not data:
        raise EmptyMedia("the media is empty")
    if len(data) > config.max_video_bytes:
        raise MediaTooLarge(f"the video has {len(data)} bytes, more than {config.max_video_bytes}")
    view = memoryview(data)
    if bytes(view[4:8]) == b"ftyp" and bytes(view[8:12]) not in _IMAGE_BRANDS:
        _check_mp4(view)
        return "video/mp4"
    if bytes(view[:4]) == _EBML:
        return _matroska_type(view)
    if bytes(view[:4]) == JPEG_LIST_START:
        split_jpeg_list(view, config)
        return "video/jpeg"
    raise UnsupportedMediaType("the media is not an MP4, WebM or Matroska video")


# MP4 (ISO/IEC 14496-12) and QuickTime

#: Still images and their sequences are in the same kind of file.
_IMAGE_BRANDS = {b"avif", b"avis", b"heic", b"heim", b"heis", b"heix", b"hevc", b"hevx", b"mif1", b"msf1", b"crx "}

_PARENTS = {b"trak", b"mdia", b"minf", b"dinf", b"stbl", b"edts", b"mvex"}

#: Bytes of an entry of the tables whose entries are counted, after version, flags and count.
_ENTRY_BYTES = {b"stts": 8, b"ctts": 8, b"stsc": 12, b"stco": 4, b"co64": 8, b"stss": 4, b"elst": 12}

_SELF_CONTAINED = 1


def _check_mp4(view: memoryview) -> None:
    """Raise InvalidVideo unless the file has a whole `moov` whose tables hold what they claim."""
    moov = next((body for kind, body in _boxes(view, cut=True) if kind == b"moov"), None)
    if moov is None:
        raise InvalidVideo("the video has no index (moov)")
    for kind, body in _tree(moov):
        if kind == b"cmov":
            raise InvalidVideo("the video's index is compressed")
        if kind == b"dref":
            _check_references(body)
        elif kind in (b"stsz", b"stz2"):
            _check_sample_sizes(kind, body, len(view))
        elif kind in _ENTRY_BYTES and _number(body, 4) * _ENTRY_BYTES[kind] > len(body) - 8:
            raise InvalidVideo("the video's index claims more than it holds")


def _boxes(view: memoryview, *, cut: bool = False) -> Iterator[tuple[bytes, memoryview]]:
    """(kind, content) of the boxes directly in `view`. With `cut` the last one may end early, if it is media data."""
    offset = 0
    for _ in range(_MAX_BOXES):
        if len(view) - offset < 8:
            return
        size, header = _number(view, offset), 8
        kind = bytes(view[offset + 4 : offset + 8])
        if size == 1:
            size, header = _number(view, offset + 8, 8), 16
        elif size == 0:
            size = len(view) - offset
        if size < header:
            raise InvalidVideo("the video has a box of an impossible size")
        if offset + size > len(view) and not (cut and kind in (b"mdat", b"moof", b"mfra", b"free", b"skip")):
            raise InvalidVideo("the video ends within its header")
        yield kind, view[offset + header : offset + size]
        offset += size
    raise InvalidVideo("the video has too many boxes in its header")


def _tree(view: memoryview) -> Iterator[tuple[bytes, memoryview]]:
    """Every box beneath `view` that is told of by its kind and content."""
    todo, num_boxes = [view], 0
    while todo:
        for kind, body in _boxes(todo.pop()):
            num_boxes += 1
            if num_boxes > _MAX_BOXES:
                raise InvalidVideo("the video has too many boxes in its header")
            if kind in _PARENTS:
                todo.append(body)
            yield kind, body


def _check_references(body: memoryview) -> None:
    for _kind, entry in _boxes(body[8:]):
        if not _number(entry, 0) & _SELF_CONTAINED:
            raise UnsupportedMediaType("the video refers to another file")


def _check_sample_sizes(kind: bytes, body: memoryview, file_bytes: int) -> None:
    """Each sample has a size in the table, or all have the same one; either way there is a byte of it in the file."""
    count = _number(body, 8)
    entry_bits = _number(body, 4) & 0xFF if kind == b"stz2" else 0 if _number(body, 4) else 32
    needed = count * entry_bits // 8
    if needed > len(body) - 12 or count > file_bytes:
        raise InvalidVideo("the video's index claims more than it holds")


def _number(view: memoryview, offset: int, nbytes: int = 4) -> int:
    part = bytes(view[offset : offset + nbytes])
    if len(part) < nbytes:
        raise InvalidVideo("the video ends within its header")
    return int.from_bytes(part, "big")


# Matroska and WebM (RFC 8794, RFC 9559)

_EBML = b"\x1a\x45\xdf\xa3"
_DOC_TYPE = 0x4282
_MAX_EBML_HEADER_BYTES = 4096


def _matroska_type(view: memoryview) -> VideoType:
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


def _of_doc_type(doc_type: bytes) -> VideoType:
    name = doc_type.rstrip(b"\0")
    if name == b"webm":
        return "video/webm"
    if name == b"matroska":
        return "video/x-matroska"
    raise UnsupportedMediaType("the media is not an MP4, WebM or Matroska video")


def _vint(view: memoryview, offset: int, *, marker: bool = False) -> tuple[int, int]:
    """A number of variable length and the offset after it. Identifiers keep the bit that marks their length."""
    first = _number(view, offset, 1)
    nbytes = 9 - first.bit_length()
    if nbytes > 8:
        raise InvalidVideo("the video has a header of an impossible size")
    value = _number(view, offset, nbytes)
    return (value if marker else value & ((1 << 7 * nbytes) - 1)), offset + nbytes


# Lists of JPEG frames: vLLM's `data:video/jpeg;base64,` followed by base64 texts joined by commas.


def split_jpeg_list(view: memoryview, config: MediaConfig) -> list[bytes]:
    """The JPEG files of a list, within the limits: as many as a model may be given, each an image that may be decoded.

    Raises InvalidBase64, InvalidVideo, TooManyFrames, VideoTooLarge, UnsupportedMediaType.
    """
    parts = bytes(view).split(b",", config.max_sampled_frames)
    if len(parts) > config.max_sampled_frames:
        raise TooManyFrames(f"the video has more than {config.max_sampled_frames} frames")
    frames = [_from_base64(part) for part in parts]
    sizes = {(frame.width, frame.height) for frame in (_sniff_frame(data, config) for data in frames)}
    if len(sizes) > 1:
        raise InvalidVideo("the video's frames are not of one size")
    (width, height) = sizes.pop()
    if len(frames) * width * height * 3 > config.max_video_decoded_bytes:
        raise VideoTooLarge(f"{len(frames)} frames of {width}x{height} take too much memory")
    return frames


def _from_base64(text: bytes) -> bytes:
    try:
        return pybase64.b64decode(text, validate=True)
    except ValueError as error:
        raise InvalidBase64("a frame of the video is not base64") from error


def _sniff_frame(data: bytes, config: MediaConfig) -> Sniffed:
    try:
        sniffed = sniff_image(data, config)
    except (EmptyMedia, InvalidImage) as error:
        raise InvalidVideo("a frame of the video is not a valid JPEG") from error
    except (ImageTooLarge, MediaTooLarge) as error:
        raise VideoTooLarge("a frame of the video is too large") from error
    if sniffed.media_type != "image/jpeg":
        raise UnsupportedMediaType("a frame of the video is not a JPEG")
    if sniffed.width * sniffed.height > config.max_video_pixels:
        raise VideoTooLarge(f"a frame of the video has more than {config.max_video_pixels} pixels")
    return sniffed
