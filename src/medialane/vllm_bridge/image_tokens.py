"""Predicts an image's token count from its size, before it is decoded.

Theory of operation. Most of vLLM's families can compute it (`get_num_image_tokens` of their processing info), from
arguments that differ between families; if a family needs one that is not known here, there is no prediction. It is used
only after it has been compared with the placeholders of some processed images: a family may return an upper bound, or
omit the tokens between rows. Too few is safe, since the complete prompt is checked again; too many is not.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import Any, NamedTuple

from vllm.multimodal.processing.processor import BaseMultiModalProcessor

from medialane.core.errors import PromptTooLong
from medialane.core.media import MediaSize, Modality
from medialane.prepare.processor import ProcessedItem
from medialane.vllm_bridge.placeholder_layout import PlaceholderLayouts, decode_options
from medialane.vllm_bridge.resize_target import Size

logger = logging.getLogger(__name__)

#: Options that every family that has them takes into account. With others (`do_resize`) the count may be wrong.
_COUNTED_BY = {"min_pixels", "max_pixels", "size"}


class _Trial(NamedTuple):
    modality: Modality
    header: bytes
    size: MediaSize


class ImageTokens:
    """Predictions of one processor. Unused until `verify` has confirmed them against processed images."""

    def __init__(self, processor: BaseMultiModalProcessor, max_model_len: int) -> None:
        self._processor = processor
        self._max_model_len = max_model_len
        self.is_trusted = False
        # Counting takes 0.2-0.4 ms, 4 % of an image, most of it in vLLM's and transformers' handling of options.
        self._cached = lru_cache(maxsize=512)(self.min_tokens)

    def verify(self, items: Iterable[ProcessedItem]) -> None:
        """Compare the predictions for these images with their placeholders in a prompt."""
        layouts = PlaceholderLayouts(self._processor)
        try:
            self.is_trusted = all(self._is_confirmed(item, layouts) for item in items)
        except Exception:  # a family's own code; without a prediction, images are decoded first
            logger.warning("images are not rejected by size: their token count cannot be predicted", exc_info=True)

    def check(self, size: Size, options: bytes) -> None:
        """Raise PromptTooLong, with vLLM's message, if an image of this size alone exceeds the maximum model length."""
        num_tokens = self._cached(size, options) if self.is_trusted else None
        if num_tokens is not None and num_tokens > self._max_model_len:
            raise PromptTooLong(
                f"The decoder prompt (length at least {num_tokens}) is longer than the maximum model length of "
                f"{self._max_model_len}. Make sure that `max_model_len` is no smaller than the number of text tokens "
                "plus multimodal tokens. For image inputs, the number of image tokens depends on the number of images, "
                "and possibly their aspect ratios as well."
            )

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

    def _is_confirmed(self, item: ProcessedItem, layouts: PlaceholderLayouts) -> bool:
        predicted = self.min_tokens((item.size.width, item.size.height), b"{}")
        if predicted is None:
            return False
        (updates,) = layouts.find([_Trial("image", item.header, item.size)], b"{}").updates["image"]
        return predicted <= min(len(update.content.full) for update in updates)
