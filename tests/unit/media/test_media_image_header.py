import struct
from io import BytesIO

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from medialane.media import MediaConfig, sniff_image
from medialane.types.errors import (
    EmptyMedia,
    ImageTooComplex,
    ImageTooLarge,
    InvalidImage,
    InvalidRequest,
    MediaTooLarge,
    UnsupportedMediaType,
)

CONFIG = MediaConfig()

KINDS = {
    "image/jpeg": ("JPEG", {}),
    "image/png": ("PNG", {}),
    "image/gif": ("GIF", {}),
    "image/bmp": ("BMP", {}),
    "image/avif": ("AVIF", {}),
    "image/webp": ("WEBP", {}),
}


def encode(kind: str, size=(37, 21), mode="RGB", **options) -> bytes:
    out = BytesIO()
    Image.new(mode, size, 9).save(out, kind, **options)
    return out.getvalue()


@pytest.mark.parametrize("size", [(1, 1), (37, 21), (640, 480), (3, 3000)], ids=str)
@pytest.mark.parametrize("media_type", KINDS)
def test_type_and_size_come_from_the_header(media_type, size):
    kind, options = KINDS[media_type]
    found = sniff_image(encode(kind, size, **options), CONFIG)
    assert (found.media_type, found.width, found.height) == (media_type, *size)


@pytest.mark.parametrize("buffer", [bytes, bytearray, memoryview])
def test_any_buffer_type_is_accepted(buffer):
    assert sniff_image(buffer(encode("PNG")), CONFIG).width == 37


@pytest.mark.parametrize(
    "data",
    [
        encode("WEBP", lossless=True),
        encode("WEBP", mode="RGBA"),
        encode("WEBP", exif=b"Exif\0\0II*\0\x08\0\0\0\0\0"),
        encode("WEBP", save_all=True, append_images=[Image.new("RGB", (37, 21), 200)]),
        encode("AVIF", mode="RGBA"),
        encode("AVIF", save_all=True, append_images=[Image.new("RGB", (37, 21), 200)]),
        encode("GIF", save_all=True, append_images=[Image.new("P", (37, 21), 2)]),
        encode("JPEG", exif=b"Exif\0\0II*\0\x08\0\0\0\0\0", icc_profile=b"x" * 200_000),
        b"\xff\xd8\xff\xff" + encode("JPEG")[3:],
        b"\xff\xd8\xff\xfe\x00\x02junk\x00" + encode("JPEG")[2:],
    ],
    ids=["lossless", "alpha", "exif", "animated", "avif-alpha", "avif-animated", "gif", "segments", "fill", "junk"],
)
def test_variants(data):
    found = sniff_image(data, CONFIG)
    assert (found.width, found.height) == (37, 21)


@pytest.mark.parametrize(("progressive", "multi_scan"), [(False, False), (True, True)])
def test_scans_of_a_jpeg(progressive, multi_scan):
    assert sniff_image(encode("JPEG", progressive=progressive), CONFIG).multi_scan is multi_scan


def test_top_down_bmp():
    data = bytearray(encode("BMP"))
    data[22:26] = struct.pack("<i", -21)
    assert sniff_image(data, CONFIG).height == 21


def test_bmp_with_core_header():
    data = b"BM" + bytes(12) + struct.pack("<IHHHH", 12, 37, 21, 1, 24) + bytes(100)
    assert (sniff_image(data, CONFIG).width, sniff_image(data, CONFIG).height) == (37, 21)


@pytest.mark.parametrize(
    "data",
    [
        b"<html><body>not found</body></html>",
        b'<?xml version="1.0"?><svg xmlns="http://www.w3.org/2000/svg"/>',
        b"%!PS-Adobe-3.0 EPSF-3.0",
        b"%PDF-1.7",
        b"8BPS\x00\x01",
        b"SIMPLE  =                    T",
        b"II*\x00\x08\x00\x00\x00",
        b"PK\x03\x04",
        b"RIFF\x00\x00\x00\x00WAVEfmt ",
        b"\x00\x00\x00\x18ftypheic\x00\x00\x00\x00mif1heic",
        b"\x00\x00\x00\x18ftypisom\x00\x00\x00\x00isommp42",
        b"\x00\x00\x00\x0cjP  \r\n\x87\n",
        b"\x00\x00\x01\x00\x01\x00",
        b"\x1a\x45\xdf\xa3",
        b"a",
    ],
    ids=repr,
)
def test_other_types_are_rejected(data):
    with pytest.raises(UnsupportedMediaType):
        sniff_image(data + bytes(64), CONFIG)


def test_empty_input_is_empty_media():
    with pytest.raises(EmptyMedia):
        sniff_image(b"", CONFIG)


def test_too_many_bytes_are_rejected():
    with pytest.raises(MediaTooLarge):
        sniff_image(encode("PNG"), MediaConfig(max_image_bytes=50))


@pytest.mark.parametrize(
    ("kind", "shortest", "whole"),
    [("JPEG", 3, 170), ("PNG", 8, 33), ("GIF", 6, 13), ("BMP", 2, 26), ("WEBP", 12, 30), ("AVIF", 12, 150)],
)
def test_truncated_header_is_invalid(kind, shortest, whole):
    data = encode(kind)
    for length in range(shortest, whole):
        with pytest.raises(InvalidImage):
            sniff_image(data[:length], CONFIG)


def jpeg_claiming(width: int, height: int) -> bytes:
    frame = struct.pack(">BHHB", 8, height, width, 1) + b"\x01\x11\x00"
    scan = b"\x01\x01\x00\x00\x3f\x00"
    return b"\xff\xd8\xff\xc0" + struct.pack(">H", len(frame) + 2) + frame + b"\xff\xda\x00\x08" + scan


def png_claiming(width: int, height: int) -> bytes:
    return encode("PNG")[:16] + struct.pack(">II", width, height) + encode("PNG")[24:]


def gif_claiming(width: int, height: int) -> bytes:
    return b"GIF89a" + struct.pack("<HH", width, height) + encode("GIF")[10:]


def webp_claiming(width: int, height: int) -> bytes:
    canvas = (width - 1).to_bytes(3, "little") + (height - 1).to_bytes(3, "little")
    return b"RIFF\x00\x00\x00\x00WEBPVP8X\x0a\x00\x00\x00\x00\x00\x00\x00" + canvas


def bmp_claiming(width: int, height: int) -> bytes:
    return encode("BMP")[:18] + struct.pack("<ii", width, height) + encode("BMP")[26:]


def avif_claiming(width: int, height: int) -> bytes:
    data = encode("AVIF")
    at = data.index(b"ispe") + 8
    return data[:at] + struct.pack(">II", width, height) + data[at + 8 :]


CLAIMS = [jpeg_claiming, png_claiming, gif_claiming, webp_claiming, bmp_claiming, avif_claiming]


@pytest.mark.parametrize("claim", CLAIMS, ids=lambda claim: claim.__name__)
def test_claimed_size_is_limited(claim):
    assert sniff_image(claim(7000, 7000), CONFIG).width == 7000
    for size in ((10_000, 10_000), (16_385, 1), (1, 16_385)):
        with pytest.raises(ImageTooLarge):
            sniff_image(claim(*size), CONFIG)


@pytest.mark.parametrize("claim", [c for c in CLAIMS if c is not webp_claiming], ids=lambda claim: claim.__name__)
def test_zero_pixels_are_invalid(claim):
    with pytest.raises(InvalidImage):
        sniff_image(claim(0, 5), CONFIG)


@pytest.mark.parametrize(
    "data",
    [
        b"\xff\xd8\xff\xfe\x00\x02" + b"x" * 10_000,
        b"\xff\xd8" + b"\xff\xfe\x00\x02" * 10_000,
        b"\xff\xd8" + b"\xff\xfe\x00\x00" * 10_000,
        b"\xff\xd8\xff" + b"\xff" * 10_000,
        b"\xff\xd8\xff\xd0" + b"\xff\xd0" * 10_000,
    ],
    ids=["junk", "segments", "no length", "fill", "standalone"],
)
def test_endless_headers_are_rejected(data):
    with pytest.raises(InvalidImage):
        sniff_image(data, CONFIG)


PNG_CHUNK = b"\x00\x00\x00\x00abCd\x00\x00\x00\x00"
GIF = encode("GIF")
GIF_HEAD = 13 + (3 << (GIF[10] & 7) + 1)
EXIF_SEGMENT = b"\xff\xe1\xff\xffExif\0\0" + bytes(65_527)


@pytest.mark.parametrize(
    "data",
    [
        encode("PNG")[:33] + PNG_CHUNK * 20_001,
        encode("PNG")[:-12] + PNG_CHUNK * 20_001,
        GIF[:GIF_HEAD] + b"!\xfe" + b"\x01x" * 20_000 + b"\0" + GIF[GIF_HEAD:],
        GIF[:GIF_HEAD] + b"!\x01\0" * 10_000 + GIF[GIF_HEAD:],
        GIF[:GIF_HEAD] + b"x" * 20_000 + GIF[GIF_HEAD:],
        encode("JPEG")[:2] + EXIF_SEGMENT * 9 + encode("JPEG")[2:],
        encode("AVIF")[:24] + b"\x00\x00\x00\x08free" * 50_000,
        b"BM" + bytes(12) + struct.pack("<IiiHHI", 40, 9, 9, 1, 8, 1) + bytes(1 << 20),
    ],
    ids=["chunks", "last chunks", "comment", "extensions", "no extensions", "EXIF", "boxes", "runs"],
)
def test_expensive_images_are_too_complex(data):
    with pytest.raises(ImageTooComplex):
        sniff_image(data, CONFIG)


def test_largest_size_in_an_avif_counts():
    """A grid's own size stands among its tiles' sizes."""
    data = encode("AVIF", (500, 300))
    at = data.index(b"ispe") + 16
    assert (
        sniff_image(data[:at] + b"\0\0\0\x14ispe\0\0\0\0" + struct.pack(">II", 900, 400) + data[at:], CONFIG).width
        == 900
    )


@pytest.mark.parametrize("options", [{}, {"quality": 100}, {"subsampling": "4:0:0"}, {"tile_rows": 1, "tile_cols": 1}])
@pytest.mark.parametrize("mode", ["RGB", "RGBA", "L"])
def test_avif_of_any_codec_is_identified(mode, options):
    assert sniff_image(encode("AVIF", (300, 200), mode, **options), CONFIG).width == 300


MAGIC = st.sampled_from(
    [b"\xff\xd8\xff", b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR", b"GIF89a", b"BM", b"RIFF0000WEBPVP8X", encode("AVIF")[:40]]
)


@settings(max_examples=300, deadline=None)
@given(MAGIC, st.binary(max_size=300))
def test_any_bytes_are_identified_or_rejected(magic, rest):
    try:
        found = sniff_image(magic + rest, CONFIG)
    except InvalidRequest:
        return
    assert 0 < found.width <= CONFIG.max_image_side
    assert 0 < found.height <= CONFIG.max_image_side
