"""The size of an image from its header: that of the decoded image, or None."""

import struct
from io import BytesIO

import numpy as np
import pytest
from PIL import Image as PILImage
from PIL import PngImagePlugin

from decoded_media import decode_image, measure_image
from medialane.media import MediaConfig, oriented_size
from medialane.types.errors import ImageTooLarge, InvalidImage, UnsupportedMediaType
from medialane.types.media import MediaSize

CONFIG = MediaConfig()
SIZE = (37, 21)
ORIENTATION = 0x0112


def encode(kind: str, **options) -> bytes:
    out = BytesIO()
    pixels = np.random.default_rng(0).integers(0, 256, (SIZE[1], SIZE[0], 3), dtype=np.uint8)
    PILImage.fromarray(pixels).save(out, kind, **options)
    return out.getvalue()


def turned(orientation: int, **tags) -> bytes:
    exif = PILImage.Exif()
    exif[ORIENTATION] = orientation
    exif[0x010F] = "a camera"
    return exif.tobytes()


def raw_exif(order: str, *entries: tuple, start: int = 8) -> bytes:
    """An EXIF block with these entries: tag, type, count, value."""
    magic = {"<": b"II*\0", ">": b"MM\0*"}[order]
    body = b"".join(struct.pack(f"{order}HHIHxx", *entry) for entry in entries)
    return (
        b"Exif\0\0" + magic + struct.pack(f"{order}I", start) + struct.pack(f"{order}H", len(entries)) + body + bytes(4)
    )


def xmp(orientation: int, *, is_element: bool = False) -> bytes:
    value = f">{orientation}</tiff:Orientation>" if is_element else f'="{orientation}"'
    return f"<x:xmpmeta><tiff:Orientation{value}</x:xmpmeta>".encode()


def text(key: str, value: str) -> PngImagePlugin.PngInfo:
    info = PngImagePlugin.PngInfo()
    info.add_text(key, value)
    return info


def after_pixels(png: bytes, chunk: bytes) -> bytes:
    """The PNG with an eXIf chunk before its end."""
    import zlib

    body = b"eXIf" + chunk
    end = png.index(b"IEND") - 4
    return png[:end] + struct.pack(">I", len(chunk)) + body + struct.pack(">I", zlib.crc32(body)) + png[end:]


#: Options of a second picture; in an animation it has the size of the first.
ANIMATED = {"save_all": True, "append_images": [PILImage.new("RGB", SIZE)]}

#: Images, and whether their size is known from the header.
CASES = {
    "plain JPEG": (encode("JPEG"), True),
    "progressive JPEG": (encode("JPEG", progressive=True), True),
    "JPEG with a profile": (encode("JPEG", icc_profile=b"p" * 500, comment=b"c"), True),
    **{f"JPEG, EXIF {n}": (encode("JPEG", exif=turned(n)), n < 5) for n in range(1, 9)},
    "JPEG, EXIF 9": (encode("JPEG", exif=turned(9)), False),
    "JPEG, EXIF without orientation": (encode("JPEG", exif=raw_exif("<", (0x0128, 3, 1, 2))), True),
    "JPEG, big-endian EXIF 6": (encode("JPEG", exif=raw_exif(">", (ORIENTATION, 3, 1, 6))), False),
    "JPEG, big-endian EXIF 3": (encode("JPEG", exif=raw_exif(">", (ORIENTATION, 3, 1, 3))), True),
    "JPEG, EXIF with two orientations": (
        encode("JPEG", exif=raw_exif("<", (ORIENTATION, 3, 1, 1), (ORIENTATION, 3, 1, 6))),
        False,
    ),
    "JPEG, orientation of another type": (encode("JPEG", exif=raw_exif("<", (ORIENTATION, 4, 1, 6))), False),
    "JPEG, EXIF cut off": (encode("JPEG", exif=raw_exif("<", (ORIENTATION, 3, 1, 1), start=200)), False),
    "JPEG, EXIF of no byte order": (encode("JPEG", exif=b"Exif\0\0XX*\0" + bytes(20)), False),
    "JPEG, EXIF twice": (encode("JPEG", exif=b"Exif\0\0" + raw_exif("<", (ORIENTATION, 3, 1, 6))), False),
    "JPEG, XMP 6": (encode("JPEG", xmp=xmp(6)), False),
    "JPEG, XMP 8 as an element": (encode("JPEG", xmp=xmp(8, is_element=True)), False),
    "JPEG, XMP 1": (encode("JPEG", xmp=xmp(1)), True),
    "JPEG, XMP without orientation": (encode("JPEG", xmp=b"<x:xmpmeta></x:xmpmeta>"), True),
    "plain PNG": (encode("PNG"), True),
    "PNG with text": (encode("PNG", pnginfo=text("Software", "a program")), True),
    "PNG, eXIf 6": (encode("PNG", exif=turned(6)), False),
    "PNG, eXIf after the pixels": (after_pixels(encode("PNG"), turned(6)[6:]), False),
    "PNG, XMP 6": (encode("PNG", pnginfo=text("XML:com.adobe.xmp", xmp(6).decode())), False),
    "PNG, EXIF as text": (
        encode("PNG", pnginfo=text("Raw profile type exif", f"\nexif\n{99:8}\n{turned(6).hex()}\n")),
        False,
    ),
    "plain WebP": (encode("WEBP"), True),
    "lossless WebP": (encode("WEBP", lossless=True), True),
    "WebP with a profile": (encode("WEBP", icc_profile=b"p" * 500), True),
    "WebP, EXIF 6": (encode("WEBP", exif=turned(6)), False),
    "WebP, XMP 6": (encode("WEBP", xmp=xmp(6)), False),
    "animated WebP": (encode("WEBP", **ANIMATED), False),
    "animated PNG": (encode("PNG", **ANIMATED), False),
    "animated PNG, EXIF 6": (encode("PNG", exif=turned(6), **ANIMATED), False),
    "JPEG of several pictures": (encode("MPO", **ANIMATED), False),
    "JPEG of several pictures, EXIF 6": (encode("MPO", exif=turned(6), **ANIMATED), False),
    "GIF": (encode("GIF"), False),
    "AVIF": (encode("AVIF"), False),
    "AVIF, EXIF 6": (encode("AVIF", exif=turned(6)), False),
    "BMP": (encode("BMP"), False),
}


@pytest.mark.parametrize(("data", "is_known"), CASES.values(), ids=CASES)
def test_size_is_that_of_the_decoded_image_or_unknown(data, is_known):
    decoded = decode_image(data, CONFIG).size
    assert oriented_size(data, CONFIG) == (decoded if is_known else None)
    assert measure_image(data, CONFIG) == decoded


def test_orientations_that_swap_the_sides_are_among_the_cases():
    sizes = {name: decode_image(data, CONFIG).size for name, (data, _) in CASES.items()}
    assert sum(size == MediaSize(*SIZE[::-1]) for size in sizes.values()) >= 10


def test_random_changes_of_metadata_give_no_other_size():
    rng = np.random.default_rng(0)
    sources = [data for name, (data, _) in CASES.items() if "EXIF" in name or "XMP" in name]
    num_known = 0
    for _ in range(1500):
        data = bytearray(sources[rng.integers(len(sources))])
        for place in rng.integers(2, min(len(data), 300), 3):
            data[place] = rng.integers(256)
        try:
            size = oriented_size(data, CONFIG)
            decoded = decode_image(data, CONFIG).size
        except (InvalidImage, ImageTooLarge, UnsupportedMediaType):
            continue
        num_known += size is not None
        assert size in (None, decoded), bytes(data[:300])
    assert num_known > 100


def test_much_metadata_is_left_to_a_preparer():
    """The gateway's loop does not search it."""
    plain = encode("JPEG")
    segment = b"\xff\xe1" + struct.pack(">H", 60_002) + b"http://ns.adobe.com/xap/1.0/\0".ljust(60_000, b" ")
    assert oriented_size(plain[:2] + segment * 8 + plain[2:], CONFIG) == MediaSize(*SIZE)
    assert oriented_size(plain[:2] + segment * 9 + plain[2:], CONFIG) is None


def test_limits_hold():
    with pytest.raises(ImageTooLarge):
        oriented_size(encode("PNG"), MediaConfig(max_image_pixels=100))
