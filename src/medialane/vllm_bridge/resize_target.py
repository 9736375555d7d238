"""The size to which a model's processor resizes images, learned by having it process images that have no content.

Theory of operation. No family's name is looked at. A black image of the true size goes through the processor, and the
shapes of what comes out tell the size it was resized to, in two cases: there is a grid of patches (`*_grid_thw`, whose
patches the processor says the side of), or there is one picture and it was not cropped. Tiles do not tell (only the
family knows how they were cut), nor do several pictures. And an image may be decoded smaller only if a black one of the
smaller size comes out with the same shapes and the same small fields: the same number of tokens, and no trace of the
true size in the feature. What is learned of a size is kept, since cameras make pictures of few sizes.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from math import prod
from typing import Any, NamedTuple

import numpy as np
import torch
from vllm.multimodal.processing.processor import BaseMultiModalProcessor

from medialane.core.errors import MedialaneError
from medialane.core.media import Decoded, Image
from medialane.core.tensor import TensorSpec
from medialane.prepare.processor import ProcessedItem
from medialane.vllm_bridge.features import decode_item_without_tensors

#: (width, height)
Size = tuple[int, int]

#: Sizes and options that are remembered; each takes some KiB.
MAX_REMEMBERED = 256

#: Pixels of a side that the decoded image has for each that the model is given (facts/media.md 3: 53 dB).
MARGIN = 2


class Outcome(NamedTuple):
    """What a processor makes of every image of one size: all but the large tensors' content."""

    header: bytes
    specs: tuple[TensorSpec, ...]


class ResizeTargets:
    """Asks `process` and remembers. Not thread-safe."""

    def __init__(
        self, process: Callable[[Decoded, bytes], ProcessedItem], *, patch_side: int | None, crops: bool
    ) -> None:
        self._process = process
        self._patch_side = patch_side
        self._crops = crops
        self._outcomes: OrderedDict[tuple[Size, bytes], Outcome | None] = OrderedDict()

    @classmethod
    def of(
        cls, processor: BaseMultiModalProcessor, process: Callable[[Decoded, bytes], ProcessedItem]
    ) -> ResizeTargets:
        """For vLLM's processor, whose heavy half is `process`."""
        # Only families that take pictures have the part.
        image_processor = getattr(processor.info.get_hf_processor(), "image_processor", None)
        settings: dict[str, Any] = {} if image_processor is None else image_processor.to_dict()
        patch_side = settings.get("patch_size")
        return cls(
            process,
            patch_side=patch_side if isinstance(patch_side, int) else None,
            crops=bool(settings.get("do_center_crop")),
        )

    def smaller_size(self, size: Size, smaller: Sequence[Size], options: bytes) -> Size | None:
        """As `media.model_choices.SizeChooser`, for these options of the processor."""
        target = self.target(size, options)
        if target is None:
            return None
        for found in smaller:
            if all(side >= MARGIN * wanted for side, wanted in zip(found, target, strict=True)):
                same = self._outcome(found, options) == self._outcome(size, options)
                return found if same else None
        return None

    def target(self, size: Size, options: bytes) -> Size | None:
        """The (width, height) that an image of `size` is resized to; None where that cannot be told."""
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
        return None if self._crops else _by_picture(list(tensors.values()))

    def _by_grid(self, grids: Sequence[torch.Tensor]) -> Size | None:
        if self._patch_side is None or len(grids) != 1 or grids[0].numel() != 3:
            return None
        _, rows, columns = (int(n) for n in grids[0].flatten())
        return columns * self._patch_side, rows * self._patch_side

    def _outcome(self, size: Size, options: bytes) -> Outcome | None:
        """None where the processor refuses such an image: with the image itself it will say why."""
        key = (size, options)
        if key not in self._outcomes:
            self._outcomes[key] = self._tried(size, options)
            if len(self._outcomes) > MAX_REMEMBERED:
                self._outcomes.popitem(last=False)
        self._outcomes.move_to_end(key)
        return self._outcomes[key]

    def _tried(self, size: Size, options: bytes) -> Outcome | None:
        width, height = size
        try:
            item = self._process(Image(np.zeros((height, width, 3), np.uint8)), options)
        except MedialaneError:
            return None
        return Outcome(item.header, item.specs)


def _by_picture(tensors: Sequence[torch.Tensor]) -> Size | None:
    """The size of the one picture among the tensors of an item; None for tiles, or none, or several."""
    pictures = [t.shape for t in tensors if t.ndim >= 3 and t.shape[-3] == 3]
    if len(pictures) != 1 or prod(pictures[0][:-3]) != 1:
        return None
    *_, height, width = pictures[0]
    return int(width), int(height)
