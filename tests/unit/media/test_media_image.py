"""Equality with vLLM is tested in `tests/contract/test_image_exactness.py`; here are limits, errors and edges."""

import errno
import struct
import time
import warnings
import zlib
from io import BytesIO

import numpy as np
import pytest
from PIL import Image as PILImage
from PIL import PngImagePlugin

from decoded_media import check_image, decode_image
from medialane.media import MediaConfig, oriented_size
from medialane.types.errors import (
    EmptyMedia,
    ImageTooComplex,
    ImageTooLarge,
    InvalidImage,
    InvalidRequest,
    UnsupportedMediaType,
)

CONFIG = MediaConfig()


def encode(kind: str, size=(37, 21), **options) -> bytes:
    rng = np.random.default_rng(0)
    out = BytesIO()
    PILImage.fromarray(rng.integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)).save(out, kind, **options)
    return out.getvalue()


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (OSError("image file is truncated"), InvalidImage),
        (OSError(errno.EMFILE, "too many open files"), OSError),
        (SyntaxError("broken PNG file"), InvalidImage),
    ],
    ids=repr,
)
def test_only_the_file_is_the_clients_fault(monkeypatch, error, expected):
    def fail(*_args, **_options):
        raise error

    monkeypatch.setattr(PILImage, "open", fail)
    with pytest.raises(expected):
        decode_image(encode("PNG"), CONFIG)


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "GIF", "AVIF", "BMP"])
@pytest.mark.parametrize("buffer", [bytes, bytearray, memoryview])
def test_pixels_are_rgb(kind, buffer):
    image = decode_image(buffer(encode(kind)), CONFIG)
    assert (image.size.width, image.size.height) == (37, 21)


def test_result_does_not_reference_the_encoded_bytes():
    encoded = bytearray(encode("PNG"))
    image = decode_image(memoryview(encoded), CONFIG)
    before = image.pixels.copy()
    encoded[:] = bytes(len(encoded))
    assert np.array_equal(image.pixels, before)


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "GIF", "AVIF", "BMP"])
def test_truncated_image_is_invalid(kind):
    data = encode(kind, (64, 64))
    with pytest.raises(InvalidImage) as raised:
        decode_image(data[: len(data) * 2 // 3], CONFIG)
    assert raised.value.message in ("the image is damaged and cannot be decoded", "the image header is truncated")


def test_exif_of_an_avif_is_bounded_before_it_is_decoded():
    data = encode("AVIF", exif=b"Exif\0\0II*\0\x08\0\0\0" + bytes(600_000))
    for look in (decode_image, check_image):
        with pytest.raises(ImageTooComplex):
            look(data, CONFIG)


def test_avif_is_returned_at_its_declared_size():
    """As vLLM: libavif decodes the picture, within its own limit of 16384x16384 pixels, and scales it."""
    data = encode("AVIF", (500, 300)).replace(struct.pack(">II", 500, 300), struct.pack(">II", 8, 8))
    assert decode_image(data, CONFIG).pixels.shape == (8, 8, 3)


@pytest.mark.parametrize("data", [b"", b"\0" * 100, b"<html>"], ids=repr)
def test_non_image_is_rejected(data):
    with pytest.raises((EmptyMedia, UnsupportedMediaType)):
        decode_image(data, CONFIG)


def test_limits_are_enforced_before_decoding():
    with pytest.raises(ImageTooLarge):
        decode_image(encode("PNG", (100, 100)), MediaConfig(max_image_pixels=9999))


def test_frame_exceeding_the_claimed_size_is_limited():
    """A GIF's frame may be larger than the GIF says that it is; Pillow then takes the frame's size."""
    data = bytearray(encode("GIF", (64, 64)))
    data[6:10] = struct.pack("<HH", 8, 8)
    assert decode_image(data, CONFIG).size.width == 64
    with pytest.raises(ImageTooLarge):
        decode_image(data, MediaConfig(max_image_side=63))


def bomb_of_scans(num_scans: int) -> bytes:
    """A progressive JPEG whose last scan is repeated."""
    data = encode("JPEG", (512, 512), progressive=True)
    last = data.rindex(b"\xff\xda")
    return data[:last] + data[last:-2] * num_scans + b"\xff\xd9"


def test_many_scans_are_too_complex():
    started = time.perf_counter()
    with pytest.raises(ImageTooComplex):
        decode_image(bomb_of_scans(300), CONFIG)
    assert time.perf_counter() - started < 1


def test_size_of_an_image_with_many_scans_is_left_to_a_preparer_which_refuses_it():
    assert oriented_size(bomb_of_scans(30), CONFIG) is not None
    assert oriented_size(bomb_of_scans(300), CONFIG) is None


def test_scans_of_an_incomplete_baseline_jpeg_are_counted():
    """libjpeg goes over such a file scan by scan, progressive or not."""
    data = encode("JPEG")
    start = data.index(b"\xff\xda")
    scan = b"\xff\xda\x00\x08\x01\x01\x00\x00\x3f\x00" + b"\x00" * 16
    with pytest.raises(ImageTooComplex):
        decode_image(data[:start] + scan * 70 + b"\xff\xd9", CONFIG)


def chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


@pytest.mark.parametrize("kind", [b"zTXt", b"iCCP"])
def test_metadata_decompression_bomb_is_invalid(kind):
    data = encode("PNG")
    bomb = chunk(kind, b"x\0\0" + zlib.compress(bytes(80_000_000), 9))
    started = time.perf_counter()
    with pytest.raises(InvalidImage):
        decode_image(data[:33] + bomb + data[33:], CONFIG)
    assert time.perf_counter() - started < 2


def test_png_text_chunks_are_harmless():
    info = PngImagePlugin.PngInfo()
    info.add_text("comment", "x" * 1000, zip=True)
    assert decode_image(encode("PNG", pnginfo=info), CONFIG).size.width == 37


def test_trailing_data_is_ignored():
    assert decode_image(encode("JPEG") + b"PK\x03\x04" + bytes(1000), CONFIG).size.width == 37


def test_oddities_cause_no_warnings():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        decode_image(encode("JPEG", exif=b"Exif\0\0II*\0\x08\0\0\0\xff\xff"), CONFIG)


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "GIF", "AVIF", "BMP"])
@pytest.mark.parametrize("seed", range(25))
def test_damaged_image_is_decoded_or_rejected(kind, seed):
    rng = np.random.default_rng(seed)
    data = bytearray(encode(kind, (48, 40)))
    for position in rng.integers(0, min(len(data), 400 if seed % 2 else len(data)), 6):
        data[position] = int(rng.integers(0, 256))
    try:
        image = decode_image(data, CONFIG)
    except InvalidRequest as error:
        message = error.message
    else:
        message = str(image)
    assert message.isprintable()
