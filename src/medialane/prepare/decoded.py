"""Stage `decoded`: decoded media in the form of a processed item."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from medialane.core.media import AudioSamples, Decoded, Image
from medialane.core.tensor import TensorSpec
from medialane.prepare.processor import ProcessedItem


def decoded_item(media: Decoded) -> ProcessedItem:
    """Return the array of decoded media as one tensor, laid out as in `core.media`, with an empty header."""
    array = np.ascontiguousarray(_array(media))
    spec = TensorSpec("float32" if isinstance(media, AudioSamples) else "uint8", array.shape)
    return ProcessedItem(header=b"", specs=(spec,), buffers=(array.data,), size=media.size)


def _array(media: Decoded) -> NDArray[np.uint8] | NDArray[np.float32]:
    if isinstance(media, Image):
        return media.pixels
    return media.samples if isinstance(media, AudioSamples) else media.frames
