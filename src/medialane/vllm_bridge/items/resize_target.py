"""Determines the size to which a model's processor resizes images, by processing images without content.

Theory of operation. This does not depend on the family's name. A black image of the true size is processed, and the
shapes of the results reveal its target size in two cases: there is a grid of patches (`*_grid_thw`; the
processor declares the patch size), or there is one image tensor that was not cropped. Tiles reveal nothing (only the
family knows how they were cut), nor do several image tensors. An image may be decoded at a smaller size only if a black
one of that size gives the same shapes and the same small fields: the same number of tokens, and no trace of the true
size in the feature. Results are cached by size, since cameras produce few sizes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from math import prod
from typing import NamedTuple

import numpy as np
import torch
from vllm.multimodal.processing.processor import BaseMultiModalProcessor

from medialane.core.errors import MedialaneError
from medialane.core.media import Decoded, Image
from medialane.core.tensor import TensorSpec
from medialane.prepare.processor import ProcessedItem
from medialane.vllm_bridge.items.features import decode_item_without_tensors
from medialane.vllm_bridge.items.header_values import UNFIT
from medialane.vllm_bridge.seams.multimodal import hf_processor_of

#: (width, height)
Size = tuple[int, int]

#: Cached combinations of size and options; each takes some KiB.
MAX_REMEMBERED = 256

#: Minimum ratio of the decoded image's sides to those of the model's input (facts/media.md 3: 53 dB).
MARGIN = 2


class Outcome(NamedTuple):
    """A processor's result for all images of one size: everything except the content of large tensors."""

    header: bytes
    specs: tuple[TensorSpec, ...]


class ResizeTargets:
    """Runs `process` and caches its outcomes. Not thread-safe."""

    def __init__(
        self, process: Callable[[Decoded, bytes], ProcessedItem], *, patch_side: int | None, crops: bool
    ) -> None:
        self._process = process
        self._patch_side = patch_side
        self._crops = crops
        self._outcome = lru_cache(maxsize=MAX_REMEMBERED)(self._compute)

    @classmethod
    def of(
        cls, processor: BaseMultiModalProcessor, process: Callable[[Decoded, bytes], ProcessedItem]
    ) -> ResizeTargets:
        """Return an instance for vLLM's processor, whose heavy half is `process`."""
        # Only families with image support have one; not all have these settings.
        image_processor = getattr(hf_processor_of(processor), "image_processor", None)
        patch_side = getattr(image_processor, "patch_size", None)
        return cls(
            process,
            patch_side=patch_side if isinstance(patch_side, int) else None,
            crops=bool(getattr(image_processor, "do_center_crop", None)),
        )

    def smaller_size(self, size: Size, smaller: Sequence[Size], options: bytes) -> Size | None:
        """Implements `media.model_choices.SizeChooser` for these options of the processor."""
        target = self.target(size, options)
        if target is None:
            return None
        for found in smaller:
            if all(side >= MARGIN * needed for side, needed in zip(found, target, strict=True)):
                same = self._outcome(found, options) == self._outcome(size, options)
                return found if same else None
        return None

    def target(self, size: Size, options: bytes) -> Size | None:
        """Return the (width, height) to which an image of `size` is resized; None if it cannot be determined."""
        outcome = self._outcome(size, options)
        if outcome is None:
            return None
        tensors = {
            name: elem.data
            for name, elem in decode_item_without_tensors(outcome.header).items()
            if isinstance(elem.data, torch.Tensor)
        }
        grids = [data for name, data in tensors.items() if name.endswith("grid_thw")]
        if grids:
            return self._by_grid(grids)
        return None if self._crops else _by_image_tensor(list(tensors.values()))

    def _by_grid(self, grids: Sequence[torch.Tensor]) -> Size | None:
        if self._patch_side is None or len(grids) != 1 or grids[0].numel() != 3:
            return None
        _, rows, columns = (int(n) for n in grids[0].flatten())
        return columns * self._patch_side, rows * self._patch_side

    def _compute(self, size: Size, options: bytes) -> Outcome | None:
        """Return the outcome; None if the processor rejects such an image, with an error once it gets the real one."""
        width, height = size
        try:
            item = self._process(Image(np.zeros((height, width, 3), np.uint8)), options)
        except (MedialaneError, *UNFIT):
            return None
        return Outcome(item.header, item.specs)


def _by_image_tensor(tensors: Sequence[torch.Tensor]) -> Size | None:
    """Return the size of the only image among the tensors of an item; None for tiles, no image, or several."""
    shapes = [t.shape for t in tensors if t.ndim >= 3 and t.shape[-3] == 3]
    if len(shapes) != 1 or prod(shapes[0][:-3]) != 1:
        return None
    *_, height, width = shapes[0]
    return int(width), int(height)
