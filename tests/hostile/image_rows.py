"""Rows 45 to 57: images. That unusual valid ones give vLLM's pixels is in `tests/contract/test_image_exactness.py`."""

from __future__ import annotations

from functools import partial

import media_files as m
from corpus import Row, sent
from PIL import Image

_TOO_LARGE = {
    "45 PNG 20000x20000": partial(m.png_of_zeros, 20_000),
    "46 PNG 65000x65000": partial(m.png_claiming, 65_000, 65_000),
    "+ PNG 2^31-1 wide": partial(m.png_claiming, (1 << 31) - 1, 1, rows=0),
    "+ PNG of one row": partial(m.png_claiming, 16_385, 1),
    "+ PNG of 16 bits": partial(m.png_claiming, 10_000, 10_000, 16, 6, 0),
    "47 PNG 13000x13000, grey": partial(m.png_of_zeros, 13_000),
    "50 GIF 65535x65535": lambda: m.gif(m.gif_frame(), (65_535, 65_535)),
    "+ GIF whose frame is larger than itself": lambda: m.gif(m.gif_frame(65_000, 65_000)),
    "52 JPEG 65500x65500": partial(m.jpeg_claiming, 65_500, 65_500),
    "+ JPEG 10000x10000": partial(m.jpeg_claiming, 10_000, 10_000),
    "+ WebP 16777216x16777216": partial(m.webp_claiming, 1 << 24, 1 << 24),
    "+ BMP 2^31-1 wide": lambda: m.bmp((1 << 31) - 1, 1, b""),
    "+ BMP 100000 high, from the top": lambda: m.bmp(1, -100_000, b""),
    "+ AVIF 65535x65535": partial(m.avif_claiming, 65_535, 65_535),
    "+ AVIF 2^32-1 wide": partial(m.avif_claiming, (1 << 32) - 1, 1),
}

_COMPLEX = {
    "53 JPEG of 5009 scans": partial(m.jpeg_of_scans, 5000),
    "+ JPEG of 65 scans": partial(m.jpeg_of_scans, 65),
    "+ baseline JPEG of 5000 scans": partial(m.baseline_of_scans, 5000),
    "+ PNG of 1.5 million chunks": lambda: m.png_with(m.chunk(b"abCd") * 1_200_000),
    "+ PNG of 1.5 million chunks after its data": lambda: m.png_with(m.chunk(b"abCd") * 1_200_000, last=True),
    "+ PNG of a million texts": lambda: m.png_with(m.chunk(b"tEXt", b"a\0b") * 900_000),
    "+ PNG of a million empty IDAT": lambda: m.png_with(m.chunk(b"IDAT") * 1_000_000, last=True),
    "+ GIF with a comment in 7 million pieces": lambda: m.gif_commented(b"x", 7_000_000),
    "+ GIF with a comment of 15 MB": lambda: m.gif_commented(b"x" * 255, 58_000),
    "+ BMP of 7 million runs": partial(m.run_coded_bmp, 7_000_000),
    "+ EXIF of 14 MB, rationals": lambda: m.png_with(
        m.chunk(b"eXIf", m.tiff([m.UPSIDE_DOWN, (0x9000, 5, 1_700_000, 8)], 14_000_000))
    ),
    "+ EXIF of 14 MB in a JPEG": lambda: m.jpeg_with(
        m.exif_segment(m.tiff([m.UPSIDE_DOWN, (0x9000, 5, 1_700_000, 8)], 60_000)) + m.exif_segment(bytes(60_000)) * 230
    ),
    "+ EXIF of 14 MB in a WebP": lambda: m.webp_with_exif(
        m.tiff([m.UPSIDE_DOWN, (0x9000, 5, 1_700_000, 8)], 14_000_000)
    ),
    "+ EXIF of 10 MB in an AVIF": lambda: m.encode("AVIF", exif=m.tiff([(0x9000, 5, 1_200_000, 8)], 10_000_000)),
    "+ AVIF of millions of boxes": m.avif_of_boxes,
}

_INVALID = {
    "48 zTXt of 200 MB": lambda: m.png_with(m.chunk(b"zTXt", b"x\0\0" + m.inflating(200 << 20))),
    "48 iCCP of 200 MB": lambda: m.png_with(m.chunk(b"iCCP", b"x\0\0" + m.inflating(200 << 20))),
    "+ iTXt of 200 MB": lambda: m.png_with(m.chunk(b"iTXt", b"x\0\1\0\0\0" + m.inflating(200 << 20))),
    "+ 100 iTXt of 1 MB": lambda: m.png_with(m.chunk(b"iTXt", b"x\0\1\0\0\0" + m.inflating(1 << 20)[:-20]) * 100),
    "+ PNG whose chunk ends behind its end": lambda: m.png_with(b"\x7f\xff\xff\xffabCd"),
    "+ PNG without data": lambda: m.encode("PNG")[:33] + m.chunk(b"IEND"),
    "+ JPEG 49 MP, nothing of it": lambda: m.jpeg_claiming(7000, 7000)[:-6],
    "54 truncated JPEG": lambda: m.picture(30)[:700],
    "54 truncated PNG": lambda: m.encode("PNG")[:60],
    "54 truncated WebP": lambda: m.encode("WEBP")[:-100],
    "54 truncated AVIF": lambda: m.encode("AVIF")[:-200],
    "+ JPEG of junk": lambda: b"\xff\xd8\xff\xfe\x00\x02" + b"x" * 100_000,
    "+ JPEG of empty segments": lambda: b"\xff\xd8" + b"\xff\xfe\x00\x02" * 1_000_000,
    "+ JPEG of restart markers": lambda: b"\xff\xd8\xff" + b"\xd0\xff" * 1_000_000,
    "+ JPEG of fill bytes": lambda: b"\xff\xd8" + b"\xff" * 1_000_000,
    "+ JPEG without pixels": partial(m.jpeg_claiming, 0, 10),
    "+ GIF without a frame": lambda: m.gif(b""),
    "+ GIF without an end": lambda: m.good_gif()[0] + b"!\xfe" + b"\x01x" * 10_000,
    "+ GIF of 60 million pixels that are not there": lambda: m.gif(m.gif_frame(7000, 7000), (7000, 7000)),
    "+ WebP whose canvas is too small": partial(m.webp_whose_canvas_lies, 4, 4),
    "+ WebP without a frame": partial(m.webp_claiming, 64, 64),
    "+ BMP of 30 million pixels that are not there": lambda: m.bmp(6000, 5000, b""),
    "+ BMP with 2^31 colours": lambda: m.bmp(16, 16, b"", colours=1 << 31),
    "+ BMP of an unknown compression": lambda: m.bmp(16, 16, bytes(256), compression=9),
    # libavif scales what it decodes to the size that the file says, where it can.
    "+ AVIF whose picture is larger than itself": lambda: m.avif_claiming(64, 64, Image.new("L", (16_400, 16))),
    "+ AVIF without items": lambda: m.box(b"ftyp", b"avif\0\0\0\0avifmif1") + m.box(b"meta", bytes(4)),
    "+ AVIF whose box ends behind its end": lambda: m.box(b"ftyp", b"avif\0\0\0\0") + b"\x7f\xff\xff\xffmeta",
}

#: No magic bytes of any kind of file: treated as a damaged image.
_NO_FILE = {
    "+ one byte": b"\xff",
    "+ byte order mark before a JPEG": b"\xef\xbb\xbf" + m.picture(31),
    "+ text": b"this is a picture",
    "+ JPEG without its beginning": bytes(3) + m.picture(48)[3:],
}

_UNSUPPORTED = {
    "56 SVG": b'<?xml version="1.0"?><svg xmlns="http://www.w3.org/2000/svg"><image href="http://127.0.0.1/"/></svg>',
    "56 SVG without a prologue": b'<svg xmlns="http://www.w3.org/2000/svg"/>',
    "56 EPS": b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n",
    "56 PDF": b"%PDF-1.7\n",
    "56 PSD": b"8BPS\0\1" + bytes(20),
    "56 FITS": b"SIMPLE  =                    T".ljust(2880),
    "56 TIFF": b"II*\0\x08\0\0\0" + bytes(100),
    "56 big TIFF": b"MM\0+\0\x08\0\0" + bytes(100),
    "56 HEIC": m.box(b"ftyp", b"heic\0\0\0\0mif1heic") + bytes(100),
    "+ HEIC that says it may be an AVIF": m.box(b"ftyp", b"heic\0\0\0\0avif") + bytes(100),
    "+ JPEG 2000": b"\0\0\0\x0cjP  \r\n\x87\n" + bytes(100),
    "+ JPEG XL": b"\xff\x0a" + bytes(100),
    "+ TGA": bytes(2) + b"\x02" + bytes(100),
    "+ ICO": b"\0\0\1\0\1\0" + bytes(100),
    "+ WMF": b"\xd7\xcd\xc6\x9a" + bytes(100),
    "+ HDF5": b"\x89HDF\r\n\x1a\n" + bytes(100),
    "+ DDS": b"DDS " + bytes(124),
    "+ PPM": b"P6 10000 10000 255\n",
    "+ pickle": b"\x80\x04\x95" + bytes(100),
    "+ ZIP": b"PK\3\4" + bytes(100),
    "+ gzip": b"\x1f\x8b\x08" + bytes(100),
    "+ MP4": m.box(b"ftyp", b"isom\0\0\0\0isommp42") + bytes(100),
    "+ WAV": b"RIFF\x24\0\0\0WAVEfmt " + bytes(100),
    "57 HTML as JPEG": b"<html><body>not found</body></html>",
    "+ ZIP before a JPEG": b"PK\3\4" + m.picture(31),
}


def _profile(num_segments: int) -> bytes:
    return b"".join(m.segment(0xE2, b"ICC_PROFILE\0\1\1" + bytes(65_000)) for _ in range(num_segments))


_GOOD = {
    "49 GIF of 100 000 frames": partial(m.gif_of_frames, 100_000),
    "51 WebP of 1000 frames": partial(m.webp_of_frames, 1000),
    "51 AVIF of 200 frames": partial(m.avif_of_frames, 200),
    "+ APNG of 100 frames": partial(m.apng, 100),
    "55 CMYK": lambda: m.encode("JPEG", m.pixels(40).convert("CMYK")),
    "55 16 bits": lambda: m.encode("PNG", m.pixels(41).convert("I;16")),
    "55 palette with a transparent colour": lambda: m.encode("PNG", m.pixels(42).convert("P"), transparency=0),
    "55 grey with alpha": lambda: m.encode("PNG", m.pixels(43).convert("LA")),
    "55 1 bit": lambda: m.encode("PNG", m.pixels(44).convert("1")),
    **{
        f"55 orientation {n}": lambda n=n: m.jpeg_with(m.exif_segment(m.tiff([(0x112, 3, 1, n)], 100)))
        for n in (0, *range(1, 10), 65_535)
    },
    "55 EXIF of junk": lambda: m.jpeg_with(m.exif_segment(b"junk" * 100)),
    "+ EXIF that is its own sub-directory": lambda: m.jpeg_with(m.exif_segment(m.LOOPING)),
    "+ EXIF of overlapping values": lambda: m.jpeg_with(m.exif_segment(m.OVERLAPPING)),
    "+ MPF of overlapping values": lambda: m.jpeg_with(m.segment(0xE2, b"MPF\0" + m.OVERLAPPING)),
    "+ EXIF of 60 KB of rationals": lambda: m.jpeg_with(
        m.exif_segment(m.tiff([m.UPSIDE_DOWN, (0x9000, 5, 7400, 8)], 60_000))
    ),
    "+ EXIF of 400 KB of rationals": lambda: m.png_with(
        m.chunk(b"eXIf", m.tiff([m.UPSIDE_DOWN, (0x9000, 5, 49_000, 8)], 400_000))
    ),
    "+ profile of 10 MB": lambda: m.jpeg_with(_profile(160)),
    "+ restart marker after each block": lambda: m.encode("JPEG", m.pixels(45, (1600, 1200)), restart_marker_blocks=1),
    "+ restart markers after the scan": lambda: m.picture(46)[:-2] + b"\xff\xd0" * 1_000_000 + b"\xff\xd9",
    "+ PNG of 10 000 chunks": lambda: m.png_with(m.chunk(b"abCd") * 10_000),
    "+ run-coded BMP": lambda: m.bmp(64, 64, (b"\x40\x05" + bytes(2)) * 64),
    "+ PNG 49 MP, black": partial(m.png_of_zeros, 7000),
    "+ PNG 49 MP, nothing of it": partial(m.png_claiming, 7000, 7000),  # accepted by Pillow, and so by vLLM
    "57 ZIP after a JPEG": lambda: m.picture(47) + b"PK\3\4" + bytes(1000),
    "57 HTML after a PNG": lambda: m.encode("PNG") + b"<script>alert(1)</script>",
}

#: Images of full size need memory for their pixels, and seconds on a busy machine.
_LARGE = {
    "+ PNG 49 MP, nothing of it": (10.0, 1200.0),
    "+ JPEG 49 MP, nothing of it": (10.0, 800.0),
    "+ PNG 49 MP, black": (10.0, 1200.0),
    "+ GIF of 60 million pixels that are not there": (10.0, 800.0),
    "+ BMP of 30 million pixels that are not there": (10.0, 800.0),
}
_SECONDS, _MIB = 4.0, 160.0


def _rows(files: dict[str, object], status: int, code: str | None) -> list[Row]:
    return [Row(name, sent(make), status, code, *_LARGE.get(name, (_SECONDS, _MIB))) for name, make in files.items()]


IMAGE_ROWS = (
    *_rows(_TOO_LARGE, 413, "image_too_large"),
    *_rows(_COMPLEX, 400, "image_too_complex"),
    *_rows(_INVALID, 400, "invalid_image"),
    *_rows({name: lambda data=data: data for name, data in _UNSUPPORTED.items()}, 415, "unsupported_media_type"),
    *_rows({name: lambda data=data: data for name, data in _NO_FILE.items()}, 400, "invalid_image"),
    *_rows(_GOOD, 200, None),
)
