"""Decodes JPEGs at a fraction of their size (`--jpeg-scaled-decode`) if the model's processor downscales them anyway.

libjpeg can omit the high frequencies of each block and return an image of k/8 of the size. This saves little of the
decoding, but most of the resizing, which processes far fewer pixels. The model gets slightly different pixels (PSNR for
photos of 12 MP at 1152x864: 53 dB), so its output is not token-identical.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from medialane.core.media import Image, MediaSize
from medialane.media.model_choices import Size, SizeChooser

#: Supported k. At 6 and 7, libjpeg is slower than at full size; at 5, decoding and processing together take 0.95 of
#: the time, at 4 and below two thirds (12 MP, the tiny Qwen2.5-VL's processor).
EIGHTHS = (1, 2, 3, 4)

#: Smaller images are decoded and resized in a few ms anyway.
MIN_PIXELS = 2_000_000


class ScaledImage(Image):
    """An image decoded at a reduced size; `size` is the original one."""

    __slots__ = ("_size",)

    def __init__(self, pixels: NDArray[np.uint8], size: Size) -> None:
        super().__init__(pixels)
        self._size = MediaSize(width=size[0], height=size[1])

    @property
    def size(self) -> MediaSize:
        return self._size


def scaled_size(size: Size, chooser: SizeChooser | None) -> Size | None:
    """Return the (width, height) at which to decode a JPEG of `size`; None for full size."""
    width, height = size
    if chooser is None or width * height < MIN_PIXELS:
        return None
    return chooser.smaller_size(size, [(-(-width * k // 8), -(-height * k // 8)) for k in EIGHTHS])
