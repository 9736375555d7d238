"""JPEGs decoded at a fraction of their size: chosen sizes, results, and exceptions."""

from io import BytesIO

import numpy as np
import pytest
from PIL import Image as PILImage
from PIL import ImageOps

from medialane.core.errors import InvalidImage
from medialane.core.media import MediaSize
from medialane.media import MediaConfig
from medialane.media.image import decode_image
from medialane.media.jpeg_scale import EIGHTHS, scaled_size

CONFIG = MediaConfig(jpeg_scaled_decode=True)
LARGE = (2001, 1502)


class Chooser:
    """Takes the first size whose sides are all at least `least`, and writes down what it was asked."""

    def __init__(self, least):
        self.least, self.asked = least, []

    def smaller_size(self, size, smaller):
        self.asked.append((size, list(smaller)))
        return next((found for found in smaller if min(found) >= self.least), None)


def picture(size=LARGE):
    """Smooth, as photographs are when looked at closely."""
    coarse = np.random.default_rng(0).integers(0, 256, (12, 16, 3), dtype=np.uint8)
    return PILImage.fromarray(coarse).resize(size, PILImage.Resampling.BICUBIC)


def encode(image, kind="JPEG", **options):
    out = BytesIO()
    image.save(out, kind, **options)
    return out.getvalue()


def test_requested_sizes_are_those_libjpeg_supports():
    chooser = Chooser(10**6)
    assert scaled_size(LARGE, chooser) is None
    ((size, smaller),) = chooser.asked
    assert size == LARGE
    assert smaller == [(-(-2001 * k // 8), -(-1502 * k // 8)) for k in EIGHTHS]
    for least in (one[1] for one in smaller):
        image = decode_image(encode(picture()), CONFIG, Chooser(least))
        assert image.pixels.shape[:2] == next(s for s in smaller if min(s) >= least)[::-1]


def test_small_images_are_not_scaled():
    chooser = Chooser(1)
    assert scaled_size((1600, 1200), chooser) is None
    assert decode_image(encode(picture((1600, 1200))), CONFIG, chooser).pixels.shape == (1200, 1600, 3)
    assert chooser.asked == []


@pytest.mark.parametrize("options", [{}, {"progressive": True}, {"subsampling": 0}], ids=str)
def test_scaled_pixels_are_close_to_those_of_the_resized_image(options):
    data = encode(picture(), quality=92, **options)
    image = decode_image(data, CONFIG, Chooser(700))
    assert image.size == MediaSize(width=2001, height=1502)
    whole = PILImage.fromarray(decode_image(data, CONFIG).pixels)
    height, width = image.pixels.shape[:2]
    assert (width, height) == (1001, 751)
    wanted = np.asarray(whole.resize((width, height), PILImage.Resampling.BOX), np.int16)
    assert np.abs(image.pixels.astype(np.int16) - wanted).mean() < 1.5


@pytest.mark.parametrize("orientation", range(1, 9))
def test_rotated_image_is_scaled_in_display_orientation(orientation):
    exif = PILImage.Exif()
    exif[0x0112] = orientation
    data = encode(picture(), exif=exif, quality=92)
    shown = ImageOps.exif_transpose(PILImage.open(BytesIO(data)))
    chooser = Chooser(370)
    image = decode_image(data, CONFIG, chooser)
    assert chooser.asked[0][0] == shown.size
    assert (image.size.width, image.size.height) == shown.size
    height, width = image.pixels.shape[:2]
    assert width * 3 < shown.size[0]
    wanted = np.asarray(shown.resize((width, height), PILImage.Resampling.BOX), np.int16)
    assert np.abs(image.pixels.astype(np.int16) - wanted).mean() < 1.5


@pytest.mark.parametrize("kind", ["PNG", "WEBP", "BMP"])
def test_other_formats_are_decoded_at_full_size(kind):
    chooser = Chooser(1)
    assert decode_image(encode(picture((501, 302)), kind), CONFIG, chooser).pixels.shape == (302, 501, 3)
    assert chooser.asked == []


def test_cmyk_is_decoded_at_full_size():
    data = encode(picture().convert("CMYK"))
    assert decode_image(data, CONFIG, Chooser(1)).pixels.shape == (1502, 2001, 3)


def test_damaged_image_is_invalid_at_any_size():
    data = encode(picture(), quality=92)
    with pytest.raises(InvalidImage):
        decode_image(data[: len(data) // 2], CONFIG, Chooser(1))
