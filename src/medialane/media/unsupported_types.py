"""Distinguishes rejected files of an unsupported type (415) from invalid or damaged data (400).

OpenAI's clients have an exception class for 400, but none for 415, which is therefore reserved for intact files of
another type, recognised by their magic bytes. Everything else that no decoder here would open is invalid.
"""

from __future__ import annotations

from medialane.core.errors import InvalidAudio, InvalidImage, InvalidRequest, InvalidVideo
from medialane.core.media import Modality

#: How many of a file's first bytes `is_other_file_type` needs.
HEAD_BYTES = 64

_INVALID: dict[Modality, type[InvalidRequest]] = {"image": InvalidImage, "video": InvalidVideo, "audio": InvalidAudio}

#: Magic bytes of supported types by modality: a rejected file with these is damaged, or of another modality.
_OWN: dict[Modality, tuple[bytes, ...]] = {
    "image": (b"\xff\xd8\xff", b"\x89PNG\r\n", b"GIF8", b"BM"),
    "video": (b"\x1a\x45\xdf\xa3",),
    "audio": (b"fLaC", b"OggS", b"ID3", b"\x1a\x45\xdf\xa3"),
}
_RIFF: dict[Modality, bytes] = {"image": b"WEBP", "audio": b"WAVE"}

#: Magic bytes of unsupported types: other images, documents, archives, audio, videos, playlists, web pages.
_OTHERS = (
    b"II*\0", b"MM\0*", b"II+\0", b"MM\0+", b"DDS ", b"\xd7\xcd\xc6\x9a", b"P4\n", b"P5\n", b"P6",
    b"\x89HDF", b"\x80\4\x95", b"8BPS", b"SIMPLE  =", b"\0\0\0\x0cjP", b"\0\0\0\x0cJXL", b"\xff\x0a", b"\0\0\1\0",
    b"\0\0\2\0", b"%PDF", b"%!PS", b"\x93NUMPY", b"PK\3\4", b"\x1f\x8b", b"BZh", b"\xfd7zXZ", b"7z\xbc\xaf", b"Rar!",
    b"FORM", b"#!AMR", b"caff", b"MThd", b".snd", b"FLV\1", b"\0\0\1\xba", b"\0\0\1\xb3", b"\x30\x26\xb2\x75",
    b"G\x40\0\x10", b"G\x40\x11\x10",  # the first packet of an MPEG transport stream
    b"#EXTM3U", b"ffconcat", b"v=0\r\n", b"v=0\n", b"<",
)  # fmt: skip


def is_other_file_type(head: bytes, modality: Modality) -> bool:
    """Return whether bytes rejected as `modality` have the magic bytes of another file type."""
    if head[4:8] == b"ftyp":  # rejected ones have another brand: HEIC, or audio sent as an image
        return True
    if head.startswith(b"RIFF"):
        return head[8:12] in (b"AVI ", b"WEBP", b"WAVE") and head[8:12] != _RIFF.get(modality)
    if head.startswith(_OWN[modality]):
        return False
    others = tuple(start for starts in _OWN.values() for start in starts)
    return head.startswith(others) or head.lstrip(b"\xef\xbb\xbf \t\r\n").startswith(_OTHERS)


def invalid(modality: Modality, message: str) -> InvalidRequest:
    return _INVALID[modality](message)
