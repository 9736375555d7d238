"""JPEGs decoded at a fraction of their size (`--jpeg-scaled-decode`), where a model's processor shrinks them anyway.

libjpeg can leave out the high frequencies of each block and give a picture of k/8 of the size. That saves little of the
decoding and most of the resizing, which goes over far fewer pixels. The pixels that the model is given are not those
that it would be given otherwise (facts of 12 MP to 1152x864: 53 dB), so the answers are not token-identical.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from medialane.core.media import Image, MediaSize

Size = tuple[int, int]

#: Eighths of the size. At 6 and 7 libjpeg takes longer than for the whole picture, and at 5 as long (measured, 12 MP).
EIGHTHS = (1, 2, 3, 4, 5)

#: Smaller pictures are decoded and resized in some ms.
MIN_PIXELS = 2_000_000


class SizeChooser(Protocol):
    """What the model's processor makes of images of several sizes."""

    def smaller_size(self, size: Size, smaller: Sequence[Size]) -> Size | None:
        """The first of `smaller` that an image of `size` may be decoded at. All are (width, height), as displayed.

        It must have at least twice the width and height that the processor resizes such an image to, and give features
        of the same shapes and the same small values. None if none does, or if the processor does not tell.
        """
        ...


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
