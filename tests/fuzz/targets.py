"""Fuzz targets: the functions that first read untrusted bytes, each with samples."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

import msgspec
import numpy as np
from multidict import CIMultiDict
from PIL import Image

from audio_maker import FILES, by_ffmpeg, by_libsndfile, tones
from decoded_media import decode_image
from medialane.gateway import GatewayConfig, References
from medialane.gateway.intake import extract, with_pages
from medialane.media import (
    MediaConfig,
    decode,
    decode_base64,
    measure,
    open_document,
    oriented_size,
    parse_header,
    probe,
    sniff,
    split_data_url,
)
from medialane.media.http_cache import freshness_of
from medialane.media.url_guard import UrlGuard
from medialane.testing.sample_media import pdf_of, sample_pdf
from medialane.types.errors import MedialaneError
from medialane.types.media import (
    PDF_TYPE,
    DocumentOptions,
    DocumentPage,
    FrameBatch,
    Modality,
    OpenedDocument,
    PageIo,
    Video,
)
from video_clips import clip

#: Small enough that no valid image takes long.
CONFIG = MediaConfig(max_image_pixels=500_000, max_image_side=4096)
_GUARD = UrlGuard(CONFIG)


@dataclass(frozen=True)
class Target:
    """`run` returns or raises MedialaneError; everything else is a finding. If it runs on the event loop, over input of
    any size, it returns within `loop_s` of CPU time."""

    name: str
    run: Callable[[bytes], object]
    samples: list[bytes] = field(repr=False)
    tokens: list[bytes] = field(default_factory=list, repr=False)
    loop_s: float = 0.0


def _images() -> list[bytes]:
    """Every supported file type, in the variants with their own code path."""
    noise = np.random.default_rng(0).integers(0, 256, (24, 40, 3), dtype=np.uint8)
    picture = Image.fromarray(noise)
    exif = Image.Exif()
    exif[0x112], exif[0x10F] = 6, "camera"
    kinds: list[tuple[str, Image.Image, dict[str, object]]] = [
        ("JPEG", picture, {}),
        ("JPEG", picture, {"progressive": True, "exif": exif}),
        ("JPEG", picture.convert("CMYK"), {}),
        ("PNG", picture, {}),
        ("PNG", picture.convert("P"), {"exif": exif, "transparency": 3}),
        ("PNG", picture.convert("LA"), {}),
        ("PNG", picture, {"save_all": True, "append_images": [picture.rotate(180)]}),
        ("GIF", picture, {"save_all": True, "append_images": [picture.rotate(180)], "comment": b"x" * 300}),
        ("BMP", picture, {}),
        ("BMP", picture.convert("P"), {}),
        ("WEBP", picture, {"exif": exif}),
        ("WEBP", picture, {"lossless": True}),
        ("WEBP", picture, {"save_all": True, "append_images": [picture.rotate(180)]}),
        ("AVIF", picture, {"exif": exif}),
        ("AVIF", picture, {"save_all": True, "append_images": [picture.rotate(180)]}),
    ]
    return [_encoded(*kind) for kind in kinds]


def _encoded(kind: str, picture: Image.Image, options: dict[str, object]) -> bytes:
    file = io.BytesIO()
    picture.save(file, kind, **options)
    return file.getvalue()


IMAGES = _images()
_IMAGE_TOKENS = [
    b"\xff\xd8\xff", b"\xff\xda", b"\xff\xc2", b"\xff\xd9", b"\xff\xe1", b"Exif\0\0II*\0\x08\0\0\0", b"IHDR", b"IDAT",
    b"IEND", b"acTL", b"fdAT", b"zTXt", b"iCCP", b"eXIf", b"GIF89a", b"!\xf9\4", b"!\xfe", b",", b";", b"RIFF", b"VP8X",
    b"VP8 ", b"VP8L", b"ANIM", b"ftypavif", b"ftypavis", b"meta", b"iprp", b"ipco", b"ispe", b"iloc", b"iinf", b"infe",
    b"idat", b"moov", b"trak", b"stbl", b"stsz", b"BM", b"MPF\0",
]  # fmt: skip

_ADDRESSES = [
    b"127.0.0.1", b"0x7f.1", b"0177.1", b"2130706433", b"[::1]", b"[::ffff:127.0.0.1]", b"[64:ff9b::7f00:1]",
    b"[fe80::1%25a]",    b"8.8.8.8", b"example.com", b"localhost", b"xn--a",
]  # fmt: skip
_URLS = [
    *(b"http://" + address + b"/a" for address in _ADDRESSES),
    b"https://user:pw@example.com:443/a?b=%20#c",
    b"file:///etc/passwd",
    b"//example.com/a",
    b"../a?b",
    b"data:image/png;base64,AAAA",
]
_URL_TOKENS = [
    *_ADDRESSES, b"http:", b"https:", b"//", b"\\", b"@", b"#", b"?", b"%00", b"%2e", b"[", b"]", b":", b".", b":80",
    b":99999", "。".encode(), "①".encode(), "\u00ad".encode(), "ß".encode(), b"\xff", b"\xed\xa0\x80", b"\t", b"\0",
]  # fmt: skip


def _body(url: str, name: str = "image_url") -> bytes:
    part: object = {"data": url, "format": "wav"} if name == "input_audio" else {"url": url}
    return json.dumps({"messages": [{"role": "user", "content": [{"type": name, name: part}]}]}).encode()


def _parts(*parts: object) -> bytes:
    return json.dumps({"messages": [{"role": "user", "content": parts}]}).encode()


def _lift(data: bytes) -> None:
    """Extract the media of a body, and put a page in place of each of its documents."""
    references = References.random()
    found = extract(data, CONFIG, references=references)
    opened = [OpenedDocument("c" * 64, 1, (DocumentPage(PageIo("d", 8, 1, "r", 8), "a"),))] * len(found.documents)
    if opened:
        with_pages(found, opened, CONFIG, GatewayConfig(), references=references)


_PAYLOAD = base64.b64encode(bytes(range(256)) * 6).decode()
_PDF = "data:application/pdf;base64," + base64.b64encode(b"%PDF-1.7" + bytes(900)).decode()
_BODIES = [
    *(_body(f"data:image/png;base64,{_PAYLOAD}", name) for name in ("image_url", "video_url", "audio_url")),
    _body(_PAYLOAD, "input_audio"),
    _body("http://example.com/a").replace(b"/", b"\\/"),
    b'{"input": [{"content": [{"type": "input_image", "image_url": "data:;base64,AAAA"}]}], "cache_salt": "x"}',
    _body(_PDF),
    _parts({"type": "file", "file": {"filename": "a", "file_data": _PDF, "pages": "1-2", "dpi": 9, "text": "none"}}),
    _parts({"type": "input_file", "file_id": f"file-pdf-{'ab' * 32}"}, {"type": "input_file", "file_data": "YQ=="}),
    _parts({"type": "document", "title": "a", "source": {"type": "base64", "data": _PDF.partition(",")[2]}}),
    _parts({"type": "document", "source": {"type": "text", "data": "a"}}),
    _parts({"type": "document", "source": {"type": "content", "content": [{"type": "text", "text": "a"}]}}),
]
_BODY_TOKENS = [
    b'"', b"\\", b"\\u002b", b"\\ud800", b";base64,", b"data:", b'{"', b"}", b"[" * 50, b"]", b",", b":", b"null",
    b"1e999", b'"image_url"', b'"messages"', b'"content"', b'"input"', b'"file"', b'"source"', b"medialane:0",
    b"\xff", b"\xed\xa0\x80",
    b"\0", b"A" * 1100, b"9" * 400,
]  # fmt: skip

_HEADERS = [
    b"Cache-Control: max-age=60, s-maxage=5\nAge: 3",
    b"Expires: Tue, 15 Nov 1994 08:12:31 GMT\nDate: Tue, 15 Nov 1994 08:12:31 GMT",
    b"Vary: *\nCache-Control: no-cache, private",
    b"Expires: 0\nDate: Tue, 15 Nov 94 08:12:31 +0100",
]
_HEADER_TOKENS = [
    b"\n", b": ", b",", b"=", b'"', b"max-age=", b"9" * 30, b"-1", b" +9999999999", b"Tue, ", b" GMT", b"Jan", b":",
    b"0000", b"\xff", b"Expires: ", b"Date: ", b"(", b")",
]  # fmt: skip


def _read_headers(data: bytes) -> object:
    lines = [line.partition(": ") for line in data.decode("latin-1").split("\n")]
    return freshness_of(CIMultiDict((name, value) for name, _, value in lines))


def _data_url(data: bytes) -> None:
    header, payload = split_data_url(data)
    parse_header(header)
    decode_base64(payload, CONFIG.max_data_url_bytes)


def _parse_url(data: bytes) -> None:
    """As a client sends it, and as a redirect does."""
    with suppress(UnicodeDecodeError):
        text = data.decode()
        with suppress(MedialaneError):
            assert _GUARD.parse(text).host
        _GUARD.follow(_GUARD.parse("https://example.com/a/b"), text)


def _sniff(modality: Modality) -> Callable[[bytes], object]:
    return lambda data: sniff(data, modality, CONFIG)


def _probe(data: bytes) -> None:
    """As a preparer opens what a worker is about to decode: each modality that it may be."""
    for modality in ("image", "video", "audio"):
        with suppress(MedialaneError):
            probe(memoryview(data), modality, sniff(data, modality, CONFIG), CONFIG)


class _Sampler:
    """Samples every third frame."""

    def sample(self, video: Video, io: bytes) -> FrameBatch:
        frames, _ = video.read(range(0, video.source.num_frames, 3))
        return FrameBatch(np.ascontiguousarray(frames), b"{}")


def _measure(data: bytes) -> None:
    for modality in ("image", "video", "audio"):
        with suppress(MedialaneError):
            _compare_sizes(data, modality)


def _compare_sizes(data: bytes, modality: Modality) -> None:
    """What is measured has the size that is decoded, unless pixels or frames are damaged, which is not noticed."""
    given = {"media_type": sniff(data, modality, CONFIG), "io": b"{}", "config": CONFIG, "sampler": _Sampler()}
    measured = measure(memoryview(data), modality, **given)
    from_header = oriented_size(data, CONFIG) if modality == "image" else None
    decoded = decode(memoryview(data), modality, **given).size
    if modality == "video":
        assert (measured.width, measured.height) == (decoded.width, decoded.height)
        assert measured.num_frames >= decoded.num_frames
    elif modality == "audio" or not _is_damaged(data):
        assert measured == decoded, f"{measured} is measured, {decoded} is decoded"
    assert from_header in (None, decoded), f"{from_header} is read, {decoded} is decoded"


def _open_document(data: bytes) -> None:
    """Each page has the size that was said before it is rendered."""
    view = memoryview(data)
    sniff(data, "document", CONFIG)
    for page in open_document(view, "", DocumentOptions(max_pixels=20_000, max_pages=4), CONFIG).pages:
        given = {"media_type": PDF_TYPE, "io": msgspec.json.encode(page.io), "config": CONFIG, "sampler": None}
        size = decode(view, "image", **given).size
        assert (size.width, size.height) == (page.io.width, page.io.height)


def _documents() -> list[bytes]:
    """Text, and a page with a drawing, an image, an annotation and a field of a form."""
    drawing = "1 0 0 rg 9 9 m 50 90 90 9 70 20 c h f q 30 0 0 30 50 50 cm BI /W 2 /H 2 /BPC 8 /CS /G ID abcd EI Q"
    field = "<</Type/Annot/Subtype/Widget/FT/Tx/T(a)/V(b)/Rect[9 9 60 30]/DA(/F 9 Tf 0 g)/MK<</BG[1 0 0]>>>>"
    return [
        sample_pdf(["some text", "and\nmore"], width=100, height=80),
        pdf_of(
            [
                "<</Type/Catalog/Pages 2 0 R/AcroForm<</Fields[5 0 R]/NeedAppearances true>>>>",
                "<</Type/Pages/Count 1/Kids[3 0 R]/MediaBox[0 0 100 100]/Rotate 90>>",
                "<</Type/Page/Parent 2 0 R/CropBox[5 5 90 80]/Contents 4 0 R/Annots[5 0 R 6 0 R]>>",
                f"<</Length {len(drawing)}>>\nstream\n{drawing}\nendstream",
                field,
                "<</Type/Annot/Subtype/Square/Rect[20 20 80 80]/C[0 0 1]/Border[0 0 3]>>",
            ]
        ),
    ]


_DOCUMENT_TOKENS = [
    b"obj", b"endobj", b"stream", b"endstream", b"xref", b"trailer", b"startxref", b"/Kids[", b"/Count", b"/Parent",
    b"/MediaBox", b"/Contents", b"/Filter/FlateDecode", b"/Filter/ASCIIHexDecode", b"/Length", b"/Annots", b"/Rect[",
    b"0 R", b"<<", b">>", b"[", b"]", b"(", b")", b"-1", b"9999999999", b"%PDF-", b"BT", b"Tf", b"Tj", b"cm", b"Do",
    b"sh", b"/Type/ObjStm", b"/Encrypt", b"/Root", b"/OCProperties", b"/XFA", b"q ", b"Q ",
]  # fmt: skip


def _is_damaged(data: bytes) -> bool:
    """Whether vLLM decodes what can be decoded of the image, and does not rotate it."""
    try:
        Image.open(io.BytesIO(data)).load()
    except Exception:  # noqa: BLE001 - whatever Pillow says
        return True
    return False


def _audio_and_clips() -> list[bytes]:
    """Truncated audio and video files, and small ones with all header fields;
    their decoders have their own tests."""
    box = b"\0\0\0\x08free"
    return [
        b"RIFF\x2c\0\0\0WAVEfmt \x10\0\0\0\1\0\2\0\x44\xac\0\0\x10\xb1\2\0\4\0\x10\0data\x08\0\0\0" + bytes(8),
        b"fLaC\0\0\0\x22\x10\0\x10\0\0\0\0\0\0\0\x0a\xc4\x42\xf0\0\0\0\0" + bytes(16) + b"\xff\xf8",
        b"OggS\0\2" + bytes(20) + b"\1\x13OpusHead\1\2\x38\1\x80\xbb\0\0\0\0\0" + bytes(40),
        b"ID3\4\0\0\0\0\0\x0a" + bytes(10) + b"\xff\xfb\x90\x64" + bytes(400),
        b"\0\0\0\x14ftypisom\0\0\0\0isom" + box + b"\0\0\0\x10moov\0\0\0\x08mvhd" + b"\0\0\0\x0cmdat" + bytes(4),
        b"\x1a\x45\xdf\xa3\x84\x42\x82\x84webm\x18\x53\x80\x67\xff" + bytes(30),
        b"/9j/4AAQSkZJRgABAQAAAQABAAD,/9j/4AAQSkZJRgABAQAAAQABAAD",
        _index_first(FILES["m4a"]()),
        _index_first(FILES["video"]()),
        FILES["webm"](),
        FILES["opus"](),
        by_ffmpeg(tones(16000), 16000, "adts", "aac"),
    ]


def _index_first(data: bytes) -> bytes:
    """The same MP4 without its media, so that mutations meet its index."""
    return data[: data.index(b"mdat") - 4] + data[data.index(b"moov") - 4 :]


def _clips() -> list[bytes]:
    """Whole videos of a few kilobytes."""
    small = {"size": (32, 24), "num_frames": 7}
    return [
        clip(**small),
        clip(**small, b_frames=2, rotation=90),
        clip(**small, codec="libvpx", container="webm"),
        clip(5, size=(32, 24), pts=[0, 3, 4, 9, 12], ticks=25),
    ]


def _sounds() -> list[bytes]:
    """Whole audio files of a few kilobytes."""
    short = tones(8000, 1, 0.1)
    return [
        *(by_libsndfile(short, 8000, "WAV", subtype) for subtype in ("PCM_16", "PCM_U8", "ULAW", "FLOAT")),
        by_libsndfile(short, 8000, "FLAC"),
        by_ffmpeg(tones(16000, 1, 0.1), 16000, "adts", "aac"),
    ]


_AUDIO_TOKENS = [
    b"moov", b"trak", b"mdia", b"minf", b"stbl", b"stsz", b"stco", b"dref", b"url ", b"mdat", b"ftyp", b"ID3", b"data",
    b"fmt ", b"fLaC", b"OggS", b"#EXTM3U", b"v=0\r\n", b"ffconcat", b"webm", b"matroska", b"\x1a\x45\xdf\xa3", b"/9j/",
    b"esds", b"stsd", b"stts", b"hdlr", b"soun", b"vide", b"mdhd", b"mp4a", b"\3\x19", b"\5\x80\x80\x80\2", b"OpusHead",
    b"\x18\x53\x80\x67", b"\x16\x54\xae\x6b", b"\x15\x49\xa9\x66", b"\x44\x89\x88", b"\xae", b"\xe0", b"\xe1",
    b"\x9f\x81", b"\x01\xff\xff\xff\xff\xff\xff\xff",
]  # fmt: skip

#: Functions that read only headers or text. Each must return within `HEADER_S` of CPU time.
HEADER_TARGETS = [
    Target("lift", _lift, _BODIES, _BODY_TOKENS),
    Target(
        "data_url",
        _data_url,
        [b"data:image/png;a=b;base64,AAAA", b"data:;base64," + _PAYLOAD.encode()],
        [b"data:", b";base64", b",", b";", b"=", b"/", b"image/", b"\xff", b"\n"],
    ),
    Target("url_guard", _parse_url, _URLS, _URL_TOKENS),
    Target("freshness", _read_headers, _HEADERS, _HEADER_TOKENS),
    Target("sniff_image", _sniff("image"), IMAGES, _IMAGE_TOKENS, 0.01),
    Target("sniff_video", _sniff("video"), _audio_and_clips(), _AUDIO_TOKENS, 0.01),
    Target("sniff_audio", _sniff("audio"), _audio_and_clips(), _AUDIO_TOKENS, 0.01),
    Target("header_size", lambda data: oriented_size(data, CONFIG), IMAGES, _IMAGE_TOKENS, 0.02),  # sniffs, too
]
HEADER_S = 0.1

#: Their inputs are grown to `LARGE_BYTES`, by repeating a part of them, to find time proportional to size.
LOOP_TARGETS = [target for target in HEADER_TARGETS if target.loop_s]
LARGE_BYTES = 20 << 20

#: Runs in a separate process, which may crash.
DECODE_IMAGE = Target("decode_image", lambda data: decode_image(data, CONFIG), IMAGES, _IMAGE_TOKENS)
PROBE = Target("probe", _probe, [*_audio_and_clips(), *IMAGES[-2:]], _AUDIO_TOKENS)
MEASURE = Target("measure", _measure, [*IMAGES, *_clips(), *_sounds()], [*_IMAGE_TOKENS, *_AUDIO_TOKENS])
DOCUMENT = Target("document", _open_document, _documents(), _DOCUMENT_TOKENS)
DECODE_TARGETS = {target.name: target for target in (DECODE_IMAGE, PROBE, MEASURE, DOCUMENT)}
DECODE_S = 5.0
DECODE_BYTES = 1 << 30
