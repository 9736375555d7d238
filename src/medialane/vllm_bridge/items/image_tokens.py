"""Predicts from an image's size what it takes at least: tokens of the prompt, and bytes of tensors.

Theory of operation. Most of vLLM's families can compute the tokens (`get_num_image_tokens` of their processing info),
from arguments that differ between families; if a family needs one that is not known here, there is no prediction. It is
used only after it has been compared with the placeholders of some processed images: a family may return an upper bound,
or omit the tokens between rows. Too few is safe, since the complete prompt is checked again; too many is not. Bytes are
predicted if those images have an equal number of them per token, as in families whose tensors are patches.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

from vllm.multimodal.processing.processor import BaseMultiModalProcessor

from medialane.prepare.processor import ImageCost
from medialane.vllm_bridge.items.header_values import NO_OPTIONS
from medialane.vllm_bridge.items.placeholder_layout import PlaceholderLayouts, decode_options
from medialane.vllm_bridge.items.preparation import PREPARATION_ERRORS
from medialane.vllm_bridge.items.trial_items import TrialItem, TrialItems, attempt

logger = logging.getLogger(__name__)

#: (width, height)
Size = tuple[int, int]

#: Options that every family that has them takes into account. With others (`do_resize`) the count may be wrong.
_COUNTED_BY = {"min_pixels", "max_pixels", "size"}


class ImageTokens:
    """Predictions of one processor, confirmed by some images that it has processed."""

    def __init__(self, processor: BaseMultiModalProcessor, trial: TrialItems) -> None:
        self._processor = processor
        ratios = self._bytes_per_token(trial)
        #: Whether there are predictions.
        self.is_trusted = bool(ratios)
        self._ratio = ratios[0] if len(set(ratios)) == 1 else Fraction(0)

    def _bytes_per_token(self, trial: TrialItems) -> Sequence[Fraction]:
        """Return the bytes of large tensors per predicted token of each image; none unless every prediction is
        confirmed."""
        ratios = attempt(lambda: [self._ratio_of(item, trial.layouts) for item in trial.by_modality.get("image", ())])
        if isinstance(ratios, Exception):
            logger.warning("images are not rejected by size: their token count cannot be predicted", exc_info=ratios)
            return ()
        return [ratio for ratio in ratios if ratio is not None] if None not in ratios else ()

    def cost(self, size: Size, options: bytes) -> ImageCost | None:
        """Return what an image of this size takes at least; None if there is no prediction. Takes 0.2 to 0.4 ms, and 10
        ms for new options, most of it in vLLM's and transformers' handling of options."""
        num_tokens = self.min_tokens(size, options) if self.is_trusted else None
        return None if num_tokens is None else ImageCost(num_tokens, int(num_tokens * self._ratio))

    def min_tokens(self, size: Size, options: bytes) -> int | None:
        """Return the tokens of an image of this size or rotated by 90 degrees (EXIF orientation is unknown here),
        whichever is fewer; None if there is no prediction."""
        given = decode_options(options)
        if not _COUNTED_BY.issuperset(given):
            return None
        try:
            counts = [self._count(sides, given) for sides in (size, size[::-1])]
        except PREPARATION_ERRORS:  # a family's own code with an untrusted size: its processor decides
            logger.debug("the model's processor cannot predict the tokens of an image of %s", size, exc_info=True)
            return None
        return min((count for count in counts if count is not None), default=None)

    def _count(self, size: Size, options: dict[str, object]) -> int | None:
        info = self._processor.info
        count = getattr(info, "get_num_image_tokens", None)  # not all families have it
        if count is None:
            return None
        arguments: dict[str, Callable[[], Any]] = {
            "image_width": lambda: size[0],
            "image_height": lambda: size[1],
            "mm_kwargs": lambda: options,
            "processor": lambda: info.get_hf_processor(**options),
            "image_processor": lambda: info.get_hf_processor(**options).image_processor,
        }
        parameters = inspect.signature(count).parameters.values()
        if any(p.name not in arguments and p.default is p.empty for p in parameters):
            return None
        return int(count(**{p.name: arguments[p.name]() for p in parameters if p.name in arguments}))

    def _ratio_of(self, item: TrialItem, layouts: PlaceholderLayouts) -> Fraction | None:
        """Return the bytes of the item's large tensors per predicted token; None if the prediction is not confirmed."""
        predicted = self.min_tokens((item.size.width, item.size.height), NO_OPTIONS)
        if predicted is None:
            return None
        (updates,) = layouts.find([item], NO_OPTIONS).updates["image"]
        if predicted > min(len(update.content.full) for update in updates):
            return None
        return Fraction(sum(spec.nbytes for spec in item.specs), predicted)
