"""Code on the event loop: it takes milliseconds for any bytes of any size."""

import base64
import struct
import time
from contextlib import suppress

import pytest

from audio_maker import FILES
from medialane.media import MediaConfig, needs_probe, sniff
from medialane.types.errors import MedialaneError

MIB = 1 << 20
CONFIG = MediaConfig(max_image_bytes=128 * MIB, max_audio_bytes=128 * MIB)
LOOP_S = 0.010


def box(kind: bytes, body: bytes) -> bytes:
    return struct.pack(">I4s", 8 + len(body), kind) + body


def filled(start: bytes, pattern: bytes, num_bytes: int = 20 * MIB) -> bytes:
    return start + pattern * (num_bytes // len(pattern))


def references() -> bytes:
    """The file of the issue: `dref` boxes in a legal MP4, each with thousands of entries."""
    table = box(b"dref", bytes(8) + box(b"url ", b"\0\0\0\1") * 16_000)
    return box(b"ftyp", b"isom\0\0\0\0isom") + box(b"moov", table * (20 * MIB // len(table)))


_PNG = b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR\0\0\0\x09\0\0\0\x09\x08\2\0\0\0\0\0\0\0"
_GIF = b"GIF89a\x09\0\x09\0\0\0\0"
_AVIF = box(b"ftyp", b"avif\0\0\0\0avifmif1")

FILES_OF_20_MIB = {
    "references": references,
    "boxes": lambda: filled(box(b"ftyp", b"isom\0\0\0\0isom"), box(b"free", b"")),
    "tracks": lambda: filled(b"\x1a\x45\xdf\xa3\x84\x42\x82\x84webm\x18\x53\x80\x67\xff", b"\xae\x80"),
    "JPEG list": lambda: filled(b"/9j/", base64.b64encode(b"\xff\xd8\xff\xe0" * 3) + b",/9j/"),
    "WAV parts": lambda: filled(b"RIFF\0\0\0\0WAVE", b"junk\0\0\0\0"),
    "Ogg pages": lambda: filled(b"", b"OggS\0\2" + bytes(40)),
    "MPEG frames": lambda: filled(b"", b"\xff\xfb\x90\x64"),
    "ID3": lambda: filled(b"ID3\4\0\0\x7f\x7f\x7f\x7f", b"TXXX\0\0\0\0\0\0"),
    "JPEG segments": lambda: filled(b"\xff\xd8", b"\xff\xfe\0\2"),
    "JPEG fill": lambda: filled(b"\xff\xd8", b"\xff\xff\xff\xfe\0\2"),
    "JPEG EXIF": lambda: filled(b"\xff\xd8", b"\xff\xe1\0\x08Exif\0\0"),
    "JPEG junk": lambda: filled(b"\xff\xd8\xff\xfe\0\2", b"x\xff\xfe\0\2"),
    "PNG chunks": lambda: filled(_PNG, b"\0\0\0\0abCd\0\0\0\0"),
    "GIF extensions": lambda: filled(_GIF, b"!\1\0"),
    "GIF junk": lambda: filled(_GIF, b"x"),
    "GIF comment": lambda: filled(_GIF + b"!\xfe", b"\1x"),
    "AVIF boxes": lambda: filled(_AVIF, box(b"free", b"")),
    "AVIF sizes": lambda: filled(_AVIF, b"ispe\0\0\0\0\0\0\0\1\0\0\0\1"),
    "AVIF of nothing": lambda: filled(_AVIF, b"i"),
    "zeros": lambda: bytes(20 * MIB),
}


@pytest.mark.parametrize("modality", ["image", "video", "audio"])
@pytest.mark.parametrize("make", FILES_OF_20_MIB.values(), ids=FILES_OF_20_MIB)
def test_sniffing_a_large_file_takes_milliseconds(make, modality):
    data = make()
    with suppress(MedialaneError):
        sniff(data[:1000], modality, CONFIG)  # what is imported on first use
    assert min(_seconds(data, modality) for _ in range(3)) < LOOP_S


def _seconds(data: bytes, modality: str) -> float:
    started = time.thread_time()
    with suppress(MedialaneError):
        sniff(data, modality, CONFIG)
    return time.thread_time() - started


def test_list_of_large_jpegs_is_not_decoded_by_sniffing():
    """24 MB of base64 took 48 ms of the loop."""
    frame = base64.b64encode(b"\xff\xd8\xff" + bytes(1_500_000))
    data = b",".join([frame] * 12)
    assert sniff(data, "video", CONFIG) == "video/jpeg"
    assert min(_seconds(data, "video") for _ in range(3)) < LOOP_S / 10


def test_library_formats_are_left_to_a_probe():
    assert [needs_probe(f"image/{name}") for name in ("jpeg", "png", "webp", "gif", "bmp")] == [False] * 5
    assert needs_probe("image/avif")
    assert all(needs_probe(sniff(FILES[kind](), "audio", CONFIG)) for kind in FILES)
