"""How many tokens an image becomes, by its size alone: before it is decoded.

Theory of operation. Most families of vLLM say it (`get_num_image_tokens` of their processing info), by arguments that
differ from family to family; a family that needs one that is not known here says nothing. What is said is believed
only after it was compared with what vLLM puts into a prompt for some processed images: a family may count an upper
bound, or leave out the tokens between rows. Too few is safe, since the prompt is checked again when it is whole; too
many is not.
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

#: Options by which every family counts that has them. With others (`do_resize`), what is said may be of another image.
_COUNTED_BY = {"min_pixels", "max_pixels", "size"}


class _Trial(NamedTuple):
    modality: Modality
    header: bytes
    size: MediaSize


class ImageTokens:
    """Asks one processor. Believes nothing before `verify`."""

    def __init__(self, processor: BaseMultiModalProcessor, max_model_len: int) -> None:
        self._processor = processor
        self._max_model_len = max_model_len
        self.is_trusted = False
        # Counting takes 0.2-0.4 ms, 4 % of an image, most of it in vLLM's and transformers' handling of options.
        self._known = lru_cache(maxsize=512)(self.min_tokens)

    def verify(self, items: Iterable[ProcessedItem]) -> None:
        """Compare what is said of the sizes of these images with what stands for them in a prompt."""
        layouts = PlaceholderLayouts(self._processor)
        try:
            self.is_trusted = all(self._is_true(item, layouts) for item in items)
        except Exception:  # a family's own code: without its word images are decoded first, as ever
            logger.warning("images are not refused by their size alone: their tokens cannot be counted", exc_info=True)

    def check(self, size: Size, options: bytes) -> None:
        """Raise PromptTooLong, in vLLM's words, if an image of this size alone has more tokens than a prompt."""
        num_tokens = self._known(size, options) if self.is_trusted else None
        if num_tokens is not None and num_tokens > self._max_model_len:
            raise PromptTooLong(
                f"The decoder prompt (length at least {num_tokens}) is longer than the maximum model length of "
                f"{self._max_model_len}. Make sure that `max_model_len` is no smaller than the number of text tokens "
                "plus multimodal tokens. For image inputs, the number of image tokens depends on the number of images, "
                "and possibly their aspect ratios as well."
            )

    def min_tokens(self, size: Size, options: bytes) -> int | None:
        """Tokens of an image of this size or of its quarter turn (a header does not tell how it is turned), the fewer
        of the two; None where the family does not say."""
        given = decode_options(options)
        if not _COUNTED_BY.issuperset(given):
            return None
        try:
            counts = [self._count(sides, given) for sides in (size, size[::-1])]
        except Exception:  # a family's own code, with a stranger's size: its processor has the last word
            logger.debug("the model's processor does not say the tokens of an image of %s", size, exc_info=True)
            return None
        return min((count for count in counts if count is not None), default=None)

    def _count(self, size: Size, options: dict[str, object]) -> int | None:
        info = self._processor.info
        count = getattr(info, "get_num_image_tokens", None)  # no part of what all families have
        if count is None:
            return None
        makers: dict[str, Callable[[], Any]] = {
            "image_width": lambda: size[0],
            "image_height": lambda: size[1],
            "mm_kwargs": lambda: options,
            "processor": lambda: info.get_hf_processor(**options),
            "image_processor": lambda: info.get_hf_processor(**options).image_processor,
        }
        wanted = inspect.signature(count).parameters.values()
        if any(p.name not in makers and p.default is p.empty for p in wanted):
            return None
        return int(count(**{p.name: makers[p.name]() for p in wanted if p.name in makers}))

    def _is_true(self, item: ProcessedItem, layouts: PlaceholderLayouts) -> bool:
        told = self.min_tokens((item.size.width, item.size.height), b"{}")
        if told is None:
            return False
        (updates,) = layouts.find([_Trial("image", item.header, item.size)], b"{}").updates["image"]
        return told <= min(len(update.content.full) for update in updates)
