"""Decoded pixels equal vLLM's, value for value."""

import importlib.resources
import warnings
from io import BytesIO

import numpy as np
import pytest
from PIL import Image, features

from decoded_media import decode_image, decode_pixmap
from medialane.media import MediaConfig, pixmap_header
from medialane.types.errors import InvalidImage

SIZES = [(1, 1), (7, 5), (17, 33), (64, 48), (101, 67)]
ORIENTATIONS = [None, 1, 2, 3, 4, 5, 6, 7, 8, 9, 0]
ORIENTATION_TAG = 0x0112


def by_vllm(data: bytes) -> np.ndarray:
    from vllm.multimodal.media import ImageMediaIO

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Pillow's about odd files
        return np.asarray(ImageMediaIO().load_bytes(data).media)


def ours(data: bytes) -> np.ndarray:
    pixels = decode_image(memoryview(data), MediaConfig()).pixels
    assert pixels.flags.c_contiguous
    return pixels


def assert_exact(data: bytes) -> None:
    expected = by_vllm(data)
    assert np.array_equal(ours(data), expected)


#: Real photographs and scans, from the sample data of scikit-image.
PHOTOGRAPHS = [
    "rocket.jpg",
    "retina.jpg",
    "hubble_deep_field.jpg",
    "astronaut.png",
    "camera.png",
    "logo.png",
    "no_time_for_that_tiny.gif",
]


@pytest.mark.parametrize("name", PHOTOGRAPHS)
def test_real_photographs_match_vllm_exactly(name):
    data = importlib.resources.files("skimage").joinpath("data", name).read_bytes()
    assert_exact(data)
    assert ours(data).std() > 10  # it shows something


def picture(mode: str, size: tuple[int, int], seed: int = 0) -> Image.Image:
    """Smooth colours with some noise, so that chroma upsampling and blending matter."""
    rng = np.random.default_rng(seed)
    width, height = size
    y, x = np.mgrid[0:height, 0:width]
    channels = [(x * (3 + c) + y * (5 - c)) % 256 for c in range(4)]
    rgba = np.stack(channels, axis=-1).astype(np.uint8)
    rgba = (rgba + rng.integers(0, 40, rgba.shape)).astype(np.uint8)
    if mode == "I;16":
        return Image.fromarray(rgba[..., 0].astype(np.uint16) * 257)
    image = Image.fromarray(rgba, "RGBA") if mode in ("RGBA", "LA") else Image.fromarray(rgba[..., :3], "RGB")
    return image if image.mode == mode else image.convert(mode)


def encode(image: Image.Image, kind: str, orientation: int | None = None, **options) -> bytes:
    if orientation is not None:
        exif = Image.Exif()
        exif[ORIENTATION_TAG] = orientation
        options["exif"] = exif
    out = BytesIO()
    image.save(out, kind, **options)
    return out.getvalue()


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("orientation", ORIENTATIONS)
@pytest.mark.parametrize("mode", ["RGB", "L", "CMYK"])
def test_jpeg_matches_vllm(mode, orientation, size):
    assert_exact(encode(picture(mode, size), "JPEG", orientation))


@pytest.mark.parametrize("orientation", ORIENTATIONS)
@pytest.mark.parametrize("size", [(1001, 601), (601, 1001)], ids=str)
def test_large_jpeg_matches_vllm(size, orientation):
    """Quarter turns of large images use our code, of small ones Pillow's."""
    assert_exact(encode(picture("RGB", size), "JPEG", orientation))


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("subsampling", [0, 1, 2])
@pytest.mark.parametrize("quality", [5, 60, 95, 100])
@pytest.mark.parametrize("progressive", [False, True])
def test_jpeg_codings_match_vllm(progressive, quality, subsampling, size):
    image = picture("RGB", size)
    assert_exact(encode(image, "JPEG", quality=quality, subsampling=subsampling, progressive=progressive))


@pytest.mark.parametrize("options", [{"keep_rgb": True}, {"optimize": True}, {"restart_marker_rows": 1}], ids=str)
def test_jpeg_variants_match_vllm(options):
    assert_exact(encode(picture("RGB", (101, 67)), "JPEG", **options))


@pytest.mark.parametrize("orientation", [None, 6])
def test_multi_picture_format_jpeg_matches_vllm(orientation):
    data = encode(picture("RGB", (64, 48)), "MPO", save_all=True, append_images=[picture("RGB", (32, 24), 1)])
    if orientation is not None:
        exif = Image.Exif()
        exif[ORIENTATION_TAG] = orientation
        segment = exif.tobytes()
        data = data[:2] + b"\xff\xe1" + (len(segment) + 2).to_bytes(2, "big") + segment + data[2:]
    assert Image.open(BytesIO(data)).format == "MPO"
    assert_exact(data)


@pytest.mark.parametrize("orientation", [None, 6])
@pytest.mark.parametrize("mode", ["RGB", "RGBA", "L", "LA", "P", "1", "I;16"])
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_png_matches_vllm(size, mode, orientation):
    assert_exact(encode(picture(mode, size), "PNG", orientation))


@pytest.mark.parametrize(
    ("mode", "transparency"), [("P", 3), ("P", bytes(range(256))), ("L", 7), ("RGB", (10, 20, 30)), ("1", 1)], ids=str
)
def test_png_with_a_transparent_colour_matches_vllm(mode, transparency):
    assert_exact(encode(picture(mode, (33, 17)), "PNG", transparency=transparency))


@pytest.mark.parametrize("orientation", [None, 3, 8])
@pytest.mark.parametrize("mode", ["RGB", "RGBA", "L"])
@pytest.mark.parametrize("options", [{}, {"lossless": True}], ids=str)
def test_webp_matches_vllm(options, mode, orientation):
    assert_exact(encode(picture(mode, (37, 21)), "WEBP", orientation, **options))


@pytest.mark.skipif(not features.check("avif"), reason="this Pillow has no AVIF")
@pytest.mark.parametrize("orientation", [None, 2, 6])
@pytest.mark.parametrize("mode", ["RGB", "RGBA"])
def test_avif_matches_vllm(mode, orientation):
    assert_exact(encode(picture(mode, (37, 21)), "AVIF", orientation))


@pytest.mark.parametrize("mode", ["RGB", "L", "P", "1", "RGBA"])
def test_bmp_matches_vllm(mode):
    assert_exact(encode(picture(mode, (37, 21)), "BMP"))


@pytest.mark.parametrize("mode", ["P", "L", "RGB", "RGBA"])
def test_gif_matches_vllm(mode):
    assert_exact(encode(picture(mode, (37, 21)), "GIF"))


@pytest.mark.parametrize("kind", ["GIF", "WEBP", "PNG", "AVIF"])
def test_first_frame_of_an_animation_matches_vllm(kind):
    frames = [picture("RGB", (20, 30), seed) for seed in range(4)]
    assert_exact(encode(frames[0], kind, save_all=True, append_images=frames[1:], duration=50))


def test_orientation_in_xmp_matches_vllm():
    xmp = b'<x:xmpmeta xmlns:x="adobe:ns:meta/"><rdf:Description tiff:Orientation="6"/></x:xmpmeta>'
    data = encode(picture("RGB", (64, 48)), "JPEG", xmp=xmp)
    assert by_vllm(data).shape == (64, 48, 3)
    assert_exact(data)


@pytest.mark.parametrize("orientation", [6, 8])
@pytest.mark.parametrize("damage", range(0, 60, 3))
def test_damaged_exif_matches_vllm(damage, orientation):
    """Pillow gives up on some metadata half-way and leaves the image unrotated."""
    exif = Image.Exif()
    exif[ORIENTATION_TAG] = orientation
    exif[0x010E] = "a description that is not in line"
    exif[0x011A] = 72.0
    good = exif.tobytes()
    raw = bytearray(good)
    position = 8 + damage % (len(raw) - 8)
    raw[position] ^= 0xFF
    out = BytesIO()
    picture("RGB", (1040, 624)).save(out, "JPEG", exif=bytes(raw))
    assert_exact(out.getvalue())


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP"])
def test_files_rejected_by_vllm_are_rejected(kind):
    data = encode(picture("RGB", (64, 48)), kind)
    for length in (len(data) // 2, len(data) * 3 // 4):
        with pytest.raises(ValueError, match="Failed to load image"):
            by_vllm(data[:length])
        with pytest.raises(InvalidImage):
            ours(data[:length])


@pytest.mark.parametrize("seed", range(40))
def test_jpeg_with_flipped_bytes_is_accepted_or_rejected_as_in_vllm(seed):
    rng = np.random.default_rng(seed)
    raw = bytearray(encode(picture("RGB", (64, 48)), "JPEG", progressive=bool(seed % 2), quality=70))
    start = raw.find(b"\xff\xda")
    for position in rng.integers(start, len(raw), 3):
        raw[position] ^= int(rng.integers(1, 256))
    data = bytes(raw)
    try:
        expected = by_vllm(data)
    except ValueError:
        with pytest.raises(InvalidImage):
            ours(data)
    else:
        assert np.array_equal(ours(data), expected)


@pytest.mark.parametrize("size", [*SIZES, (1280, 853)])
def test_published_pixels_are_read_by_vllm_from_the_form_in_which_they_are_cached(size):
    """In stage `url` a worker decodes them."""
    width, height = size
    pixels = np.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=np.uint8)
    pixmap = pixmap_header(width, height) + pixels.tobytes()
    assert np.array_equal(by_vllm(pixmap), pixels)
    assert np.array_equal(decode_pixmap(memoryview(pixmap)).pixels, pixels)
