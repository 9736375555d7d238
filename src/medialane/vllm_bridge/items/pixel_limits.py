"""Limits of the pixels per item: clients may request fewer than the operator allows, never more.

Some families (Qwen-VL and its successors) scale an image until its number of pixels is between two limits, vLLM's
`min_pixels` and `max_pixels`. Other families have none: an item's options are then ignored, as in vLLM.

Theory of operation. A processor that declares `max_pixels` may still have the limit somewhere else, in another unit
(`longest_edge` counts pixels in some families, and is a side in others). So the declared limit is tried with a sample:
given as an option, it must change nothing, or no more than a limit that is far larger than the sample. (Qwen-Omni has
other defaults for videos, which any such option replaces.)

vLLM applies a request's options to all of its items; medialane also has pixel limits of single items, applied when an
item is processed. The prompt is then expanded without them: that is right only if the family derives an item's tokens
from its feature (a grid), not from its size and the options (`accepts_item_options`).
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from typing import Any

from transformers.image_utils import SizeDict
from vllm.multimodal.processing.processor import BaseMultiModalProcessor

from medialane.types.feature import MediaPayload
from medialane.types.hashing import canonical_options
from medialane.types.media import Modality
from medialane.vllm_bridge.items.header_values import NO_OPTIONS
from medialane.vllm_bridge.items.placeholder_layout import PlaceholderLayouts, PlaceholderSource
from medialane.vllm_bridge.items.preparation import PREPARATION_ERRORS, VllmProcessor
from medialane.vllm_bridge.items.trial_items import TrialItem, TrialItems, without_warnings
from medialane.vllm_bridge.seams.multimodal import accepted_modalities, hf_processor_of

logger = logging.getLogger(__name__)

_PROCESSORS: tuple[tuple[Modality, str], ...] = (("image", "image_processor"), ("video", "video_processor"))

#: No sample has as many.
_FAR_PIXELS = 1 << 26


def learn_max_pixels(processor: BaseMultiModalProcessor, trial: TrialItems) -> Mapping[Modality, int]:
    """Return the operator's `max_pixels` (`--mm-processor-kwargs`), or else the model's own; empty if it has none."""
    accepted = accepted_modalities(processor)
    hf_processor = hf_processor_of(processor)
    # Only families with image support have an image processor; it declares whether it has pixel limits.
    image_processor = getattr(hf_processor, "image_processor", None) if "image" in accepted else None
    declared = getattr(image_processor, "valid_kwargs", None)
    if "max_pixels" not in getattr(declared, "__annotations__", {}):
        return {}
    operators = processor.info.ctx.get_merged_mm_kwargs({})
    limits = {m: declared_limit(m, getattr(hf_processor, name, None), operators) for m, name in _PROCESSORS}
    return {
        modality: limit
        for modality, limit in limits.items()
        if limit is not None
        and (items := trial.by_modality.get(modality))
        and is_pixel_limit(processor, items[-1], limit)
    }


def declared_limit(modality: Modality, part: Any, operators: Mapping[str, Any]) -> int | None:
    """Return the limit that the operator's options or a Hugging Face processor (None if the family has none) declare
    for items of this modality."""
    if part is None:
        return None
    own = operators.get(f"{modality}s_kwargs")
    settings = {name: getattr(part, name, None) for name in ("max_pixels", "size")}
    candidates = (own if isinstance(own, Mapping) else {}, operators, settings)
    return next((limit for options in candidates for limit in _limits(options)), None)


def _limits(options: Mapping[str, Any]) -> Iterator[int]:
    """Yield the limits in `options`; these families call it `longest_edge` in their files, though it counts pixels. A
    `size` may also be missing, a number, or the two sides."""
    size = options.get("size")
    sides = dict(size) if isinstance(size, Mapping | SizeDict) else {}
    for value in (options.get("max_pixels"), sides.get("max_pixels"), sides.get("longest_edge")):
        if isinstance(value, int | float) and not isinstance(value, bool) and value >= 1:
            yield int(value)


@without_warnings()
def is_pixel_limit(processor: BaseMultiModalProcessor, item: TrialItem, limit: int) -> bool:
    """Return whether the processor makes the same of a sample with `limit` as its `max_pixels` as without a limit."""
    heavy = VllmProcessor(processor)
    try:
        given = heavy.process(item.media, canonical_options({"max_pixels": limit})).specs
        far = canonical_options({"max_pixels": _FAR_PIXELS})
        is_limit = given == item.specs or given == heavy.process(item.media, far).specs
    except PREPARATION_ERRORS as error:
        logger.warning(
            "max_pixels and min_pixels of %ss are ignored: the processor refuses them: %r", item.modality, error
        )
        return False
    if not is_limit:
        message = "max_pixels and min_pixels of %ss are ignored: %d is not the number of pixels that it looks like"
        logger.warning(message, item.modality, limit)
    return is_limit


def learn_accepts_item_options(
    processor: BaseMultiModalProcessor, trial: TrialItems, max_pixels: Mapping[Modality, int]
) -> bool:
    """Return whether an item's tokens are the same with and without the options with which it was processed, for all
    modalities with pixel limits. False if there is none."""
    follow = []
    for modality, limit in max_pixels.items():
        try:
            follow.append(_tokens_follow_feature(processor, trial.by_modality[modality][-1], limit))
        except PREPARATION_ERRORS as error:
            logger.info("pixel limits of single %ss are not accepted: %r", modality, error.__cause__ or error)
        else:
            if not follow[-1]:
                logger.info("pixel limits of single %ss are not accepted: their tokens do not follow them", modality)
    return bool(follow) and all(follow)


@without_warnings()
def _tokens_follow_feature(processor: BaseMultiModalProcessor, item: TrialItem, limit: int) -> bool:
    layouts = PlaceholderLayouts(processor)

    def tokens(source: PlaceholderSource, options: bytes) -> list[list[int]]:
        (updates,) = layouts.find([source], options).updates[item.modality]
        return [list(update.content.full) for update in updates]

    # A quarter of an image's pixels, or of a frame's; some families count those of all frames.
    fewer = min(limit, item.size.width * item.size.height) // 4
    options = canonical_options({"min_pixels": min(4096, fewer), "max_pixels": fewer})
    made = VllmProcessor(processor).process(item.media, options)
    lower = MediaPayload(item.modality, "", made.header, (), made.size)
    return tokens(lower, NO_OPTIONS) == tokens(lower, options) != tokens(item, NO_OPTIONS)
