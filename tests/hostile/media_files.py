"""Hostile and harmless images, made by code."""

from __future__ import annotations

import io
import struct
import zlib
from functools import cache

import numpy as np
from PIL import Image

SIZE = (96, 64)


@cache
def pixels(seed: int = 0, size: tuple[int, int] = SIZE) -> Image.Image:
    width, height = size
    coarse = np.random.default_rng(seed).integers(0, 256, (height // 8 + 1, width // 8 + 1, 3), dtype=np.uint8)
    return Image.fromarray(coarse).resize(size, Image.Resampling.NEAREST)


def encode(kind: str, image: Image.Image | None = None, **options: object) -> bytes:
    file = io.BytesIO()
    (image or pixels()).save(file, kind, **options)
    return file.getvalue()


def picture(seed: int, size: tuple[int, int] = SIZE) -> bytes:
    return encode("JPEG", pixels(seed, size))


# PNG


def chunk(kind: bytes, data: bytes = b"") -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png_claiming(width: int, height: int, depth: int = 8, colour: int = 2, rows: int = 1) -> bytes:
    """Only the first `rows` rows of the declared size."""
    header = struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, 0)
    data = zlib.compress(bytes(rows * (1 + width * {0: 1, 2: 3, 3: 1, 4: 2, 6: 4}[colour] * depth // 8)), 9)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", data) + chunk(b"IEND")


def png_of_zeros(side: int) -> bytes:
    """A whole grey PNG of this size, black."""
    header = struct.pack(">IIBBBBB", side, side, 8, 0, 0, 0, 0)
    packer = zlib.compressobj(9)
    data = b"".join(packer.compress(bytes(side + 1)) for _ in range(side)) + packer.flush()
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", data) + chunk(b"IEND")


def png_with(extra: bytes, *, last: bool = False) -> bytes:
    """A valid PNG with more chunks, after its header or before its end."""
    data = encode("PNG")
    at = len(data) - 12 if last else 33
    return data[:at] + extra + data[at:]


def inflating(num_bytes: int) -> bytes:
    """A zlib stream of so many zeros."""
    packer = zlib.compressobj(9)
    return b"".join(packer.compress(bytes(1 << 20)) for _ in range(num_bytes >> 20)) + packer.flush()


def apng(num_frames: int) -> bytes:
    first, *rest = (pixels(seed, (16, 16)) for seed in range(num_frames))
    return encode("PNG", first, save_all=True, append_images=rest)


# JPEG


def segment(marker: int, data: bytes) -> bytes:
    return bytes((0xFF, marker)) + struct.pack(">H", len(data) + 2) + data


def jpeg_with(extra: bytes) -> bytes:
    """A valid JPEG with more segments after its start."""
    data = picture(0)
    return data[:2] + extra + data[2:]


def jpeg_claiming(width: int, height: int) -> bytes:
    """Of some hundred bytes, with a scan that ends at once."""
    data = encode("JPEG", Image.new("L", (16, 16)))
    at = data.index(b"\xff\xc0") + 5
    return data[:at] + struct.pack(">HH", height, width) + data[at + 4 :]


def jpeg_of_scans(num_scans: int, side: int = 2048) -> bytes:
    """A progressive JPEG whose last scan is repeated."""
    data = encode("JPEG", Image.new("L", (side, side)), progressive=True)
    last = data.rindex(b"\xff\xda")
    return data[:last] + data[last:-2] * num_scans + b"\xff\xd9"


def baseline_of_scans(num_scans: int) -> bytes:
    data = picture(0)
    start = data.index(b"\xff\xda")
    return data[:start] + (b"\xff\xda\x00\x08\x01\x01\x00\x00\x3f\x00" + bytes(16)) * num_scans + b"\xff\xd9"


def tiff(entries: list[tuple[int, int, int, int]], size: int, following: int = 0) -> bytes:
    """A TIFF structure of one directory: (tag, type, count, offset or value)."""
    packed = b"".join(struct.pack("<HHLL", *entry) for entry in entries)
    found = b"II*\0\x08\0\0\0" + struct.pack("<H", len(entries)) + packed + struct.pack("<L", following)
    return found.ljust(size, b"\1")


UPSIDE_DOWN = (0x112, 3, 1, 3)
#: Values that all lie on the same bytes; types 1 (byte), 4 (long), 5 (rational), 7 (undefined).
OVERLAPPING = tiff([UPSIDE_DOWN, *((tag, 4, 15_000, 8) for tag in range(0x1000, 0x1000 + 5000))], 65_000)
#: A sub-directory that is the directory itself.
LOOPING = tiff([UPSIDE_DOWN, (0x8769, 4, 1, 8), (0x8825, 4, 1, 8), (0xA005, 4, 1, 8)], 300, following=8)


def exif_segment(data: bytes) -> bytes:
    return segment(0xE1, b"Exif\0\0" + data)


# GIF


def gif(frames: bytes, size: tuple[int, int] = (16, 16), head: bytes = b"") -> bytes:
    palette = bytes(range(256)) * 3
    return b"GIF89a" + struct.pack("<HH", *size) + b"\xf7\0\0" + palette + head + frames + b";"


def gif_frame(width: int = 16, height: int = 16) -> bytes:
    """An image with only its first pixels."""
    return b"," + struct.pack("<HHHH", 0, 0, width, height) + b"\0\x08\x04\x00\x01\x04\x18\x00"


def good_gif() -> tuple[bytes, bytes]:
    """A GIF before its first frame, and from there on."""
    data = encode("GIF", pixels(0, (16, 16)))
    at = 13 + (3 << (data[10] & 7) + 1)
    return data[:at], data[at:]


def gif_of_frames(num_frames: int) -> bytes:
    head, frame = good_gif()
    tiny = b"!\xf9\x04\0\0\0\0\0,\0\0\0\0\x01\0\x01\0\0\x02\x02\x44\x01\0"
    return head + frame[:-1] + tiny * num_frames + b";"


def gif_commented(block: bytes, num_blocks: int) -> bytes:
    head, frame = good_gif()
    return head + b"!\xfe" + (bytes((len(block),)) + block) * num_blocks + b"\0" + frame


# WebP, BMP, AVIF


def webp_claiming(width: int, height: int) -> bytes:
    canvas = (width - 1).to_bytes(3, "little") + (height - 1).to_bytes(3, "little")
    inner = b"WEBPVP8X\x0a\0\0\0\x10\0\0\0" + canvas
    return b"RIFF" + struct.pack("<I", len(inner)) + inner


def webp_with_exif(exif: bytes) -> bytes:
    """A WebP whose EXIF is not validated by the encoder."""
    plain = encode("WEBP")
    picture = plain[12:] + bytes(len(plain) % 2)
    canvas = (SIZE[0] - 1).to_bytes(3, "little") + (SIZE[1] - 1).to_bytes(3, "little")
    inner = b"WEBPVP8X\x0a\0\0\0\x08\0\0\0" + canvas + picture + b"EXIF" + struct.pack("<I", len(exif)) + exif
    return b"RIFF" + struct.pack("<I", len(inner)) + inner


def webp_whose_canvas_lies(width: int, height: int) -> bytes:
    """An animation whose frame exceeds its canvas."""
    data = bytearray(webp_of_frames(2))
    at = data.index(b"VP8X") + 12
    data[at : at + 6] = (width - 1).to_bytes(3, "little") + (height - 1).to_bytes(3, "little")
    return bytes(data)


def webp_of_frames(num_frames: int) -> bytes:
    frames = [Image.new("RGB", (16, 16), (n * 37 % 256, n % 2 * 255, 0)) for n in range(num_frames)]
    return encode("WEBP", frames[0], save_all=True, append_images=frames[1:], duration=1, method=0, quality=0)


def avif_of_frames(num_frames: int) -> bytes:
    frames = [Image.new("RGB", (16, 16), (n % 256, n // 256, 0)) for n in range(num_frames)]
    return encode("AVIF", frames[0], save_all=True, append_images=frames[1:], duration=1, speed=10)


def box(kind: bytes, data: bytes = b"") -> bytes:
    return struct.pack(">I", len(data) + 8) + kind + data


def avif_claiming(width: int, height: int, image: Image.Image | None = None) -> bytes:
    """An AVIF with this size property, whatever its image's size."""
    data = encode("AVIF", image, speed=10)
    at = data.index(b"ispe") + 8
    return data[:at] + struct.pack(">II", width, height) + data[at + 8 :]


def avif_of_boxes() -> bytes:
    """Boxes in boxes in boxes, each with as many as fit."""
    data = encode("AVIF")
    properties = box(b"iprp", box(b"ipco", box(b"free") * 1000) * 2)
    return data[: int.from_bytes(data[:4], "big")] + box(b"meta", bytes(4) + properties * 700)


def bmp(width: int, height: int, data: bytes, *, bits: int = 8, compression: int = 1, colours: int = 256) -> bytes:
    palette = b"".join(bytes((n, n, n, 0)) for n in range(256))
    start = 54 + len(palette)
    info = struct.pack("<IiiHHIIiiII", 40, width, height, 1, bits, compression, len(data), 0, 0, colours, 0)
    return b"BM" + struct.pack("<IHHI", start + len(data), 0, 0, start) + info + palette + data


def run_coded_bmp(num_runs: int, width: int = 8000, height: int = 6000) -> bytes:
    """One pixel per run."""
    return bmp(width, height, b"\x01\x05" * num_runs)
