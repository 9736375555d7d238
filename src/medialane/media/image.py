"""Encoded images to pixels, the same values as vLLM's own chain gives.

vLLM opens with Pillow, turns the picture as its EXIF or XMP orientation says, puts alpha on white and converts to RGB
(`vllm/multimodal/media/image.py`). We do the same, with one shortcut: the pixels of an 8-bit JPEG come from simplejpeg,
which gives the same values in less time. Whatever the shortcut does not take, or finds odd, is Pillow's to judge.
`tests/contract/test_image_exactness.py` compares arrays with vLLM's chain.

This runs inside a preparer: synchronously, in one thread, over bytes from strangers.
"""

from __future__ import annotations

import contextlib
import struct
import warnings
import zlib
from collections.abc import Callable, Iterator
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

from medialane.core.errors import ImageTooComplex, ImageTooLarge, InvalidImage
from medialane.core.media import Image
from medialane.media.config import MediaConfig
from medialane.media.image_header import ImageType, check_exif, check_limits, sniff_image
from medialane.media.jpeg_scale import ScaledImage, scaled_size
from medialane.media.model_choices import Size, SizeCheck, SizeChooser

#: The plugin that may open each type; naming it here also loads it before preparers are forked.
_FORMATS: dict[ImageType, str] = {
    "image/jpeg": JpegImagePlugin.JpegImageFile.format,
    "image/png": PngImagePlugin.PngImageFile.format,
    "image/webp": WebPImagePlugin.WebPImageFile.format,
    "image/gif": GifImagePlugin.GifImageFile.format,
    "image/avif": AvifImagePlugin.AvifImageFile.format,
    "image/bmp": BmpImagePlugin.BmpImageFile.format,
}

#: Preparers have one thread each; the values do not depend on it.
AvifImagePlugin.DEFAULT_MAX_THREADS = 1

#: What Pillow raises for damaged files. Besides its own OSError, its readers let the errors of parsing through.
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

_UNDECODABLE = "the image is damaged and cannot be decoded"

#: A scan begins with this marker (ITU-T T.81, B.2.3); compressed data never contains it.
_START_OF_SCAN = b"\xff\xda"

_Pixels = NDArray[np.generic]


def decode_image(
    encoded: bytes | bytearray | memoryview,
    config: MediaConfig,
    chooser: SizeChooser | None = None,
    check_size: SizeCheck | None = None,
) -> Image:
    """Decode one image, the first frame of an animation, to RGB. `encoded` is not needed afterwards.

    A JPEG may be decoded at a smaller size, where `chooser` chooses one; nothing else is.

    Raises what `sniff_image` raises, and InvalidImage, ImageTooLarge, ImageTooComplex, and what `check_size` raises.
    """
    with _opened(encoded, config) as (picture, data, media_type):
        if check_size is not None:
            check_size(picture.size)
        image = _fast_jpeg(data, picture, chooser) if media_type == "image/jpeg" else None
        return image or Image(_pillow(picture))


def check_image(encoded: bytes | bytearray | memoryview, config: MediaConfig) -> None:
    """Raise what `decode_image` raises for what the file says of itself; no pixel is decoded."""
    with _opened(encoded, config):
        pass


@contextlib.contextmanager
def _opened(
    encoded: bytes | bytearray | memoryview, config: MediaConfig
) -> Iterator[tuple[PILImage.Image, bytes, ImageType]]:
    """The image as Pillow opens it, within the limits; Pillow's errors inside the block become ours."""
    sniffed = sniff_image(encoded, config)
    data = bytes(encoded)
    if sniffed.multi_scan and data.count(_START_OF_SCAN) > config.max_image_scans:
        raise ImageTooComplex(f"the image has more than {config.max_image_scans} scans")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Pillow warns about odd files; a client must not be able to write our logs
        try:
            with PILImage.open(BytesIO(data), formats=(_FORMATS[sniffed.media_type],)) as picture:
                check_limits(*picture.size, config)
                _check_exif(picture)
                yield picture, data, sniffed.media_type
        except PILImage.DecompressionBombError as error:
            raise ImageTooLarge("the image has too many pixels") from error
        except _PILLOW_ERRORS as error:
            raise InvalidImage(_UNDECODABLE) from error


def _check_exif(picture: PILImage.Image) -> None:
    """Raise ImageTooComplex for more EXIF than Pillow should read, in either of the places where it looks for some."""
    check_exif(len(picture.info.get("exif", b"")))
    check_exif(len(picture.info.get("Raw profile type exif", "")) // 2)  # in hexadecimal, in a PNG's text


def _fast_jpeg(data: bytes, picture: PILImage.Image, chooser: SizeChooser | None) -> Image | None:
    """A plain JPEG, turned; None if Pillow shall decode it, or say what is wrong with it."""
    width, height = picture.size
    turn = _rotation_of(picture)
    if picture.mode not in ("RGB", "L") or (turn in _QUARTER_TURNS and width * height < _MIN_QUARTER_TURN_PIXELS):
        return None
    shown = (height, width) if turn in _QUARTER_TURNS else (width, height)
    scaled = scaled_size(shown, chooser)
    stored = scaled if scaled is None or turn not in _QUARTER_TURNS else scaled[::-1]
    pixels = _jpeg_pixels(data, (width, height), stored)
    if pixels is None:
        return None
    upright = pixels if turn is None else _rotated(pixels, turn)
    return Image(upright) if scaled is None else ScaledImage(upright, shown)


def _jpeg_pixels(data: bytes, size: Size, scaled: Size | None) -> NDArray[np.uint8] | None:
    """The pixels of a JPEG of `size`, `scaled` if that is given; None where libjpeg says anything about the file."""
    # As minima they choose the scale that gives exactly them; without any, the picture comes whole.
    least = {} if scaled is None else {"min_width": scaled[0], "min_height": scaled[1]}
    try:
        pixels: NDArray[np.uint8] = simplejpeg.decode_jpeg(
            data, "RGB", fastdct=False, fastupsample=False, strict=True, **least
        )
    except ValueError:  # simplejpeg takes no warning for an answer; Pillow decodes some such files
        return None
    width, height = scaled or size
    return pixels if pixels.shape == (height, width, 3) else None


def _pillow(picture: PILImage.Image) -> NDArray[np.uint8]:
    """vLLM's chain: `normalize_image`, `load`, `convert_image_mode` to RGB on white."""
    image = _transposed(picture)
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
    # vLLM goes on with the image as it is when its orientation cannot be read, whatever the reason.
    with contextlib.suppress(Exception):
        return ImageOps.exif_transpose(image)
    return image


# Orientation without Pillow's pixels

_UPRIGHT = np.arange(6, dtype=np.uint8).reshape(2, 3)


def _transpose(pixels: _Pixels) -> _Pixels:
    return pixels.swapaxes(0, 1)


_Rotation = Callable[[_Pixels], _Pixels]

_QUARTER_TURNS: tuple[_Rotation, ...] = (
    _transpose,
    lambda pixels: _transpose(pixels)[:, ::-1],
    lambda pixels: _transpose(pixels)[::-1, ::-1],
    lambda pixels: _transpose(pixels)[::-1],
)
_ROTATIONS: tuple[_Rotation, ...] = (
    *_QUARTER_TURNS,
    lambda pixels: pixels[:, ::-1],
    lambda pixels: pixels[::-1, ::-1],
    lambda pixels: pixels[::-1],
)

#: Pillow's own quarter turn is the faster one of small pictures (measured: even at 1024x768).
_MIN_QUARTER_TURN_PIXELS = 600_000


def _rotation_of(picture: PILImage.Image) -> _Rotation | None:
    """How Pillow would turn `picture`; None if it would not.

    Whether it does depends on more than the orientation's number (it also has to rewrite the metadata, which fails for
    some). So Pillow turns six pixels that have the picture's metadata, and we look at what it did.
    """
    probe = PILImage.fromarray(_UPRIGHT)
    probe.info = picture.info.copy()
    probe.getexif = picture.getexif  # type: ignore[method-assign]  # what the file's own reader has found so far
    probed = np.asarray(_transposed(probe))
    return next((turn for turn in _ROTATIONS if np.array_equal(turn(_UPRIGHT), probed)), None)


def _rotated(pixels: NDArray[np.uint8], turn: _Rotation) -> NDArray[np.uint8]:
    whole = np.ascontiguousarray(turn(pixels.view("V3")[..., 0]))  # whole pixels: twice as fast as by channel
    return whole.view(np.uint8).reshape(*whole.shape, 3)
