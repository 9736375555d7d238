"""Decodes images to pixels with exactly the values of vLLM's own chain.

vLLM opens with Pillow, applies the EXIF or XMP orientation, composites alpha on white and converts to RGB
(`vllm/multimodal/media/image.py`). We do the same, with one fast path: 8-bit JPEGs are decoded by simplejpeg, which
gives the same values in less time. Whatever the fast path does not support or rejects is left to Pillow.
`tests/contract/test_image_exactness.py` compares arrays with vLLM's chain.

Runs inside a preparer: synchronously, in one thread, on untrusted bytes.
"""

from __future__ import annotations

import contextlib
import struct
import warnings
import zlib
from collections.abc import Iterator
from io import BytesIO

import numpy as np
import simplejpeg
from numpy.typing import NDArray
from PIL import (
    AvifImagePlugin,
    BmpImagePlugin,
    GifImagePlugin,
    ImageOps,
    JpegImagePlugin,
    PngImagePlugin,
    WebPImagePlugin,
)
from PIL import Image as PILImage

from medialane.media.config import MediaConfig
from medialane.media.image_header import ImageType, check_exif, check_limits, has_too_many_scans, sniff_image
from medialane.types.errors import ImageTooComplex, ImageTooLarge, InvalidImage, own_fault
from medialane.types.media import Image, MediaSize

#: The only plugin allowed to open each type; importing it here also loads it before preparers are forked.
_FORMATS: dict[ImageType, str] = {
    "image/jpeg": JpegImagePlugin.JpegImageFile.format,
    "image/png": PngImagePlugin.PngImageFile.format,
    "image/webp": WebPImagePlugin.WebPImageFile.format,
    "image/gif": GifImagePlugin.GifImageFile.format,
    "image/avif": AvifImagePlugin.AvifImageFile.format,
    "image/bmp": BmpImagePlugin.BmpImageFile.format,
}

#: Types whose size Pillow knows once it has opened a file; a GIF's first frame may be larger than its canvas.
_SIZED: frozenset[ImageType] = frozenset(("image/jpeg", "image/png", "image/webp", "image/avif", "image/bmp"))

#: Preparers have one thread each; the pixel values do not depend on it.
AvifImagePlugin.DEFAULT_MAX_THREADS = 1

#: What Pillow raises for damaged files: OSError, and uncaught errors of its parsers.
_PILLOW_ERRORS = (
    OSError,
    SyntaxError,
    ValueError,
    TypeError,
    LookupError,
    ArithmeticError,
    RuntimeError,
    AttributeError,
    EOFError,
    struct.error,
    zlib.error,
)

#: Of zlib: takes half the time of its default for pages of text.
_PNG_LEVEL = 1

_UNDECODABLE = "the image is damaged and cannot be decoded"

_Pixels = NDArray[np.generic]


def decode_image(encoded: bytes | bytearray | memoryview, config: MediaConfig) -> Image:
    """Decode one image (of an animation, the first frame) to RGB. `encoded` is not needed afterwards.

    Raises InvalidImage, ImageTooLarge, ImageTooComplex, and what `sniff_image` raises.
    """
    with _opened(encoded, config) as (image_file, data, media_type):
        image = _fast_jpeg(data, image_file) if media_type == "image/jpeg" else None
        return image or Image(_pillow(image_file))


def check_image(encoded: bytes | bytearray | memoryview, config: MediaConfig) -> None:
    """Raise what `decode_image` raises for the file's header; decodes no pixels."""
    with _opened(encoded, config):
        pass


def measure_image(encoded: bytes | bytearray | memoryview, config: MediaConfig) -> MediaSize:
    """Return the size that `decode_image` gives. Raises what `check_image` raises, and what decoding raises for a type
    whose size Pillow does not know before."""
    with _opened(encoded, config) as (image_file, _, media_type):
        if media_type in _SIZED:
            width, height = image_file.size
            if (rotation := _rotation_of(image_file)) is not None and rotation[0] % 2:
                width, height = height, width
            return MediaSize(width=width, height=height)
    return decode_image(encoded, config).size


def png_of(pixels: NDArray[np.uint8]) -> bytes:
    """Return a file from which any decoder reads these RGB pixels."""
    file = BytesIO()
    PILImage.fromarray(pixels).save(file, PngImagePlugin.PngImageFile.format, compress_level=_PNG_LEVEL)
    return file.getvalue()


@contextlib.contextmanager
def _opened(
    encoded: bytes | bytearray | memoryview, config: MediaConfig
) -> Iterator[tuple[PILImage.Image, bytes, ImageType]]:
    """Open an image with Pillow and check the limits; Pillow's errors inside the block are converted to ours."""
    sniffed = sniff_image(encoded, config)
    data = bytes(encoded)
    if has_too_many_scans(sniffed, data, config):
        raise ImageTooComplex(f"the image has more than {config.max_image_scans} scans")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Pillow warns about odd files; clients must not be able to write to our logs
        try:
            with PILImage.open(BytesIO(data), formats=(_FORMATS[sniffed.media_type],)) as image_file:
                check_limits(*image_file.size, config)
                _check_exif(image_file)
                yield image_file, data, sniffed.media_type
        except PILImage.DecompressionBombError as error:
            raise ImageTooLarge("the image has too many pixels") from error
        except _PILLOW_ERRORS as error:
            if own_fault(error) is not None:
                raise
            raise InvalidImage(_UNDECODABLE) from error


def _check_exif(image_file: PILImage.Image) -> None:
    """Raise ImageTooComplex for more EXIF than Pillow should read, in either of the places where it may be."""
    check_exif(len(image_file.info.get("exif", b"")))
    check_exif(len(image_file.info.get("Raw profile type exif", "")) // 2)  # hexadecimal, in a PNG text chunk


def _fast_jpeg(data: bytes, image_file: PILImage.Image) -> Image | None:
    """Decode and rotate a plain JPEG; None if Pillow has to decode or reject it."""
    width, height = image_file.size
    rotation = _rotation_of(image_file)
    is_quarter_turn = rotation is not None and rotation[0] % 2 == 1
    if image_file.mode not in ("RGB", "L") or (is_quarter_turn and width * height < _MIN_QUARTER_TURN_PIXELS):
        return None
    try:
        pixels = simplejpeg.decode_jpeg(data, "RGB", fastdct=False, fastupsample=False, strict=True)
    except ValueError:  # strict turns warnings into errors; Pillow decodes some of these files
        return None
    if pixels.shape != (height, width, 3):
        return None
    return Image(pixels if rotation is None else _rotated(pixels, rotation))


def _pillow(image_file: PILImage.Image) -> NDArray[np.uint8]:
    """Decode with vLLM's chain: `normalize_image`, `load`, `convert_image_mode` to RGB on white."""
    image = _transposed(image_file)
    image.load()
    if image.mode != "RGB":
        image = _to_rgb(image)
    return np.ascontiguousarray(image)


def _to_rgb(image: PILImage.Image) -> PILImage.Image:
    if image.mode not in ("RGBA", "LA", "PA") and "transparency" not in image.info:
        return image.convert("RGB")
    rgba = image if image.mode == "RGBA" else image.convert("RGBA")
    white = PILImage.new("RGB", rgba.size, (255, 255, 255))
    white.paste(rgba, mask=rgba.getchannel("A"))
    return white


def _transposed(image: PILImage.Image) -> PILImage.Image:
    # vLLM continues with the unrotated image if its orientation cannot be read, for any reason.
    with contextlib.suppress(Exception):
        return ImageOps.exif_transpose(image)
    return image


# Orientation without decoding by Pillow

_UPRIGHT = np.arange(6, dtype=np.uint8).reshape(2, 3)


#: Counterclockwise quarter turns, and whether the image is mirrored before.
_Orientation = tuple[int, bool]

#: All orientations but the upright one.
_ORIENTATIONS: list[_Orientation] = [(turns, mirrored) for turns in range(4) for mirrored in (False, True)][1:]

#: For small images, Pillow's own quarter turn is faster (measured: break-even at 1024x768).
_MIN_QUARTER_TURN_PIXELS = 600_000


def _oriented(pixels: _Pixels, orientation: _Orientation) -> _Pixels:
    turns, is_mirrored = orientation
    return np.rot90(pixels[:, ::-1] if is_mirrored else pixels, turns)


def _rotation_of(image_file: PILImage.Image) -> _Orientation | None:
    """Return the rotation that Pillow would apply to `image_file`; None if it would not rotate it.

    This depends on more than the orientation tag: Pillow also has to rewrite the metadata, which fails for some files.
    So we let Pillow transpose six pixels with the image's metadata and compare the result.
    """
    probe = PILImage.fromarray(_UPRIGHT)
    probe.info = image_file.info.copy()
    probe.getexif = image_file.getexif  # type: ignore[method-assign]  # includes what the file's reader has parsed so far
    probed = np.asarray(_transposed(probe))
    return next(
        (orientation for orientation in _ORIENTATIONS if np.array_equal(_oriented(_UPRIGHT, orientation), probed)), None
    )


def _rotated(pixels: NDArray[np.uint8], rotation: _Orientation) -> NDArray[np.uint8]:
    whole = np.ascontiguousarray(
        _oriented(pixels.view("V3")[..., 0], rotation)
    )  # by whole pixels: twice as fast as by channel
    return whole.view(np.uint8).reshape(*whole.shape, 3)
