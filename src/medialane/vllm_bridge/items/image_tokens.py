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
from collections.abc import Callable, Iterable
from fractions import Fraction
from typing import Any, NamedTuple

from vllm.multimodal.processing.processor import BaseMultiModalProcessor

from medialane.core.media import MediaSize, Modality
from medialane.prepare.processor import ImageCost, ProcessedItem
from medialane.vllm_bridge.items.placeholder_layout import PlaceholderLayouts, decode_options
from medialane.vllm_bridge.items.preparation import VllmProcessor, trial_image
from medialane.vllm_bridge.seams.multimodal import accepted_modalities

logger = logging.getLogger(__name__)

#: (width, height)
Size = tuple[int, int]

#: Options that every family that has them takes into account. With others (`do_resize`) the count may be wrong.
_COUNTED_BY = {"min_pixels", "max_pixels", "size"}

#: Sizes of the images that verify predictions: some that processors enlarge, shrink, and split into several tiles.
_TRIAL_SIZES = ((64, 64), (56, 168), (301, 211), (1200, 500))


class _Trial(NamedTuple):
    modality: Modality
    header: bytes
    size: MediaSize


class ImageTokens:
    """Predictions of one processor. Unused until `verify` has confirmed them against processed images."""

    def __init__(self, processor: BaseMultiModalProcessor) -> None:
        self._processor = processor
        self._bytes_per_token = Fraction(0)
        self.is_trusted = False

    @classmethod
    def verified(cls, processor: BaseMultiModalProcessor) -> ImageTokens:
        """Return the predictions of this processor, compared with some images that it processes here."""
        tokens, heavy = cls(processor), VllmProcessor(processor)
        if "image" in accepted_modalities(processor):
            tokens.verify(heavy.process(trial_image(*size), b"{}") for size in _TRIAL_SIZES)
        return tokens

    def verify(self, items: Iterable[ProcessedItem]) -> None:
        """Compare the predictions for these images with their placeholders in a prompt and with their tensors."""
        layouts = PlaceholderLayouts(self._processor)
        try:
            found = [self._bytes_per_token_of(item, layouts) for item in items]
        except Exception:  # a family's own code; without a prediction, images are decoded first
            logger.warning("images are not rejected by size: their token count cannot be predicted", exc_info=True)
            return
        self.is_trusted = None not in found
        if self.is_trusted and len(set(found)) == 1:
            self._bytes_per_token = found[0] or self._bytes_per_token

    def cost(self, size: Size, options: bytes) -> ImageCost | None:
        """Return what an image of this size takes at least; None if there is no prediction. Takes 0.2 to 0.4 ms, and 10
        ms for new options, most of it in vLLM's and transformers' handling of options."""
        num_tokens = self.min_tokens(size, options) if self.is_trusted else None
        return None if num_tokens is None else ImageCost(num_tokens, int(num_tokens * self._bytes_per_token))

    def min_tokens(self, size: Size, options: bytes) -> int | None:
        """Return the tokens of an image of this size or rotated by 90 degrees (EXIF orientation is unknown here),
        whichever is fewer; None if there is no prediction."""
        given = decode_options(options)
        if not _COUNTED_BY.issuperset(given):
            return None
        try:
            counts = [self._count(sides, given) for sides in (size, size[::-1])]
        except Exception:  # a family's own code with an untrusted size: its processor decides
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

    def _bytes_per_token_of(self, item: ProcessedItem, layouts: PlaceholderLayouts) -> Fraction | None:
        """Return the bytes of the item's large tensors per predicted token; None if the prediction is not confirmed."""
        predicted = self.min_tokens((item.size.width, item.size.height), b"{}")
        if predicted is None:
            return None
        (updates,) = layouts.find([_Trial("image", item.header, item.size)], b"{}").updates["image"]
        if predicted > min(len(update.content.full) for update in updates):
            return None
        return Fraction(sum(spec.nbytes for spec in item.specs), predicted)
