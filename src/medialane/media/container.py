"""The containers of encoded video and audio: their types, references to other files, and how decoders read them.

Types are detected on the event loop, from a file's first 64 bytes. Demuxers follow references to other files and
streams (HLS, DASH, SDP, concat lists), so only files with the magic bytes of a listed container reach one, and the
demuxer is named explicitly instead of probed. The rest runs inside a preparer, where FFmpeg and libsndfile read size,
duration and tracks (`video`, `audio`).
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Iterator
from itertools import islice
from typing import TYPE_CHECKING, Literal

from medialane.media.config import MediaConfig
from medialane.types.errors import EmptyMedia, MediaTooLarge, UnsupportedMediaType

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

VideoType = Literal["video/mp4", "video/webm", "video/x-matroska", "video/jpeg"]

AudioType = Literal[
    "audio/wav",
    "audio/flac",
    "audio/mpeg",
    "audio/aac",
    "audio/ogg",
    "audio/mp4",
    "video/mp4",
    "video/webm",
    "video/x-matroska",
]

#: Number of bytes inspected. An EBML header names its document type within about 40 bytes.
_HEAD_BYTES = 64

#: Base64 of the first three bytes of every JPEG: vLLM's JPEG frame list, base64 strings joined by commas.
_JPEG_LIST_START = b"/9j/"

#: Brands of ISO media files (ISO/IEC 14496-12): audio only (phones write 3gp), and still images.
_AUDIO_BRANDS = (b"M4A ", b"M4B ", b"M4P ", b"3gp", b"3g2")
_IMAGE_BRANDS = (
    b"avif", b"avis", b"mif1", b"msf1", b"heic", b"heix", b"hevc", b"hevx", b"heim", b"heis", b"crx ",
)  # fmt: skip

Bytes = bytes | bytearray | memoryview


def sniff_video(data: Bytes, config: MediaConfig) -> VideoType:
    """Return the container type of an encoded video. Raises EmptyMedia, MediaTooLarge, UnsupportedMediaType."""
    head = _head(data)
    _check_bytes(len(data), config.max_video_bytes, "video")
    if _is_mp4(head):
        return "video/mp4"
    if _is_matroska(head, b"webm"):
        return "video/webm"
    if _is_matroska(head, b"matroska"):
        return "video/x-matroska"
    if head.startswith(_JPEG_LIST_START):
        return "video/jpeg"
    raise UnsupportedMediaType("the media is not an MP4, WebM or Matroska video")


def sniff_audio(data: Bytes, config: MediaConfig) -> AudioType:
    """Return the type of an encoded audio item. Raises EmptyMedia, MediaTooLarge, UnsupportedMediaType.

    Videos are accepted for their audio track (`use_audio_in_video` sends the video itself), up to the size of a video.
    """
    head = _head(data)
    media_type = next((media_type for is_type, media_type in _AUDIO_TYPES if is_type(head)), None)
    if media_type is None:
        raise UnsupportedMediaType("the media is not a WAV, FLAC, MP3, AAC, Ogg, MP4, WebM or Matroska audio file")
    max_bytes = config.max_video_bytes if media_type.startswith("video/") else config.max_audio_bytes
    _check_bytes(len(data), max_bytes, "audio")
    return media_type


def _head(data: Bytes) -> bytes:
    if not data:
        raise EmptyMedia("the media is empty")
    return bytes(memoryview(data)[:_HEAD_BYTES])


def _check_bytes(num_bytes: int, max_bytes: int, what: str) -> None:
    if num_bytes > max_bytes:
        raise MediaTooLarge(f"the {what} has {num_bytes} bytes, more than {max_bytes}")


def _is_mp4(head: bytes) -> bool:
    return head[4:8] == b"ftyp" and not head[8:12].startswith(_IMAGE_BRANDS)


def _is_matroska(head: bytes, doctype: bytes) -> bool:
    return head.startswith(b"\x1a\x45\xdf\xa3") and doctype in head


def _is_frame(head: bytes, layers: tuple[int, ...]) -> bool:
    """Match an MPEG audio frame header (ISO/IEC 11172-3, 2.4.1.3) of one of these layers, with valid fields."""
    if len(head) < 4 or head[0] != 0xFF or head[1] & 0xE0 != 0xE0:
        return False
    version, layer = head[1] >> 3 & 3, head[1] >> 1 & 3
    return version != 1 and layer in layers and head[2] >> 4 != 0xF and head[2] >> 2 & 3 != 3


def _is_adts(head: bytes) -> bool:
    """Match an AAC ADTS header (ISO/IEC 13818-7, 6.2): sync word, layer 0 and a valid sampling frequency."""
    return len(head) >= 7 and head[0] == 0xFF and head[1] & 0xF6 == 0xF0 and head[2] >> 2 & 0xF < 13


#: Layer I is omitted: it is not in use, and its sync word is also the byte order mark of UTF-16 text.
_AUDIO_TYPES: tuple[tuple[Callable[[bytes], bool], AudioType], ...] = (
    (lambda head: head.startswith(b"RIFF") and head[8:12] == b"WAVE", "audio/wav"),
    (lambda head: head.startswith(b"fLaC"), "audio/flac"),
    (lambda head: head.startswith(b"OggS\0"), "audio/ogg"),
    (lambda head: head.startswith(b"ID3") and len(head) >= 10, "audio/mpeg"),
    (lambda head: _is_frame(head, layers=(1, 2)), "audio/mpeg"),
    (_is_adts, "audio/aac"),
    (lambda head: _is_mp4(head) and head[8:12].startswith(_AUDIO_BRANDS), "audio/mp4"),
    (_is_mp4, "video/mp4"),
    (lambda head: _is_matroska(head, b"webm"), "video/webm"),
    (lambda head: _is_matroska(head, b"matroska"), "video/x-matroska"),
)


_DREF = re.compile(rb"dref")

#: Entry types, so that `dref` occurring by chance in media data causes no rejection.
_REFERENCE_KINDS = (b"url ", b"urn ", b"alis", b"rsrc", b"imdt", b"snim")
_SELF_CONTAINED = 1

#: A track has one table of one entry. Further ones are not checked, which is safe: FFmpeg opens no references.
_MAX_TABLES = 1024
_MAX_REFERENCES = 64


def check_references(data: memoryview) -> None:
    """Raise UnsupportedMediaType if the MP4 references media in another file (`dref`, ISO/IEC 14496-12, 8.7.2).

    FFmpeg, as built for PyAV and OpenCV, does not open such references: it reads the samples from the file itself, at
    the other file's offsets, which gives garbage. The box is searched by its name, anywhere in the file.
    """
    for table in islice(_DREF.finditer(data), _MAX_TABLES):
        if not all(flags & _SELF_CONTAINED for flags in _entries(data, table.end())):
            raise UnsupportedMediaType("the video refers to another file")


def _entries(data: memoryview, offset: int) -> Iterator[int]:
    """Yield the flags of the entries of the `dref` whose content starts at `offset`."""
    num_entries = int.from_bytes(data[offset + 4 : offset + 8], "big")
    offset += 8
    for _ in range(min(num_entries, _MAX_REFERENCES)):
        size, kind = int.from_bytes(data[offset : offset + 4], "big"), bytes(data[offset + 4 : offset + 8])
        if size < 12 or kind not in _REFERENCE_KINDS:
            return
        yield int.from_bytes(data[offset + 9 : offset + 12], "big")
        offset += size


class MemoryFile(io.RawIOBase):
    """A file over bytes in memory that copies only what is read; it ignores a `seek` to before the start.

    Libraries seek to invalid offsets from damaged files; an exception inside their callbacks would be printed.
    """

    def __init__(self, data: memoryview) -> None:
        super().__init__()
        self._data = data
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def readinto(self, buffer: WriteableBuffer) -> int:
        into = memoryview(buffer)
        part = self._data[self._position : self._position + len(into)]
        into[: len(part)] = part
        self._position += len(part)
        return len(part)

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: len(self._data)}[whence]
        if start + offset >= 0:
            self._position = start + offset
        return self._position
