"""JPEGs decoded at a fraction of their size (`--jpeg-scaled-decode`), where a model's processor shrinks them anyway.

libjpeg can leave out the high frequencies of each block and give a picture of k/8 of the size. That saves little of the
decoding and most of the resizing, which goes over far fewer pixels. The pixels that the model is given are not those
that it would be given otherwise (facts of 12 MP to 1152x864: 53 dB), so the answers are not token-identical.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from medialane.core.media import Image, MediaSize
from medialane.media.model_choices import Size, SizeChooser

#: Eighths of the size. At 6 and 7 libjpeg takes longer than for the whole picture; at 5 decoding and processing take
#: together 0.95 of the time, at 4 and less two thirds (12 MP, the tiny Qwen2.5-VL's processor).
EIGHTHS = (1, 2, 3, 4)

#: Smaller pictures are decoded and resized in some ms.
MIN_PIXELS = 2_000_000


class ScaledImage(Image):
    """Pixels of an image that was decoded at less than its size; `size` is the true one."""

    __slots__ = ("_size",)

    def __init__(self, pixels: NDArray[np.uint8], size: Size) -> None:
        super().__init__(pixels)
        self._size = MediaSize(width=size[0], height=size[1])

    @property
    def size(self) -> MediaSize:
        return self._size


def scaled_size(size: Size, chooser: SizeChooser | None) -> Size | None:
    """The (width, height) to decode a JPEG of `size` at; None for its own."""
    width, height = size
    if chooser is None or width * height < MIN_PIXELS:
        return None
    return chooser.smaller_size(size, [(-(-width * k // 8), -(-height * k // 8)) for k in EIGHTHS])
