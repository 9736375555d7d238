"""Limits the pixels per item: clients may request fewer than the operator allows, never more.

Some families (Qwen-VL and its successors) scale an image until its number of pixels is between two limits, vLLM's
`min_pixels` and `max_pixels`. Other families have none: an item's options are then ignored, as in vLLM.

Theory of operation. A processor that declares `max_pixels` may still have the limit somewhere else, in another unit
(`longest_edge` counts pixels in some families, and is a side in others). So what is found is tried with a sample: given
as an option, the limit must change nothing, or no more than a limit that is far larger than the sample. (Qwen-Omni has
other defaults for videos, which any such option replaces.)
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Any

import msgspec
from transformers.image_utils import SizeDict
from vllm.multimodal.processing.processor import BaseMultiModalProcessor

from medialane.core.errors import InvalidRequest
from medialane.core.hashing import canonical_options
from medialane.core.media import Decoded, Modality
from medialane.vllm_bridge.items.header_values import NO_OPTIONS
from medialane.vllm_bridge.items.preparation import REFUSED, VllmProcessor, trial_image, trial_video
from medialane.vllm_bridge.seams.multimodal import accepted_modalities, hf_processor_of

logger = logging.getLogger(__name__)

_PROCESSORS: tuple[tuple[Modality, str], ...] = (("image", "image_processor"), ("video", "video_processor"))

#: Samples that a limit is tried with: they have more pixels than a side has.
_SAMPLES: Mapping[Modality, Decoded] = {"image": trial_image(448, 448), "video": trial_video(224, 224)}

#: No sample has as many.
_FAR_PIXELS = 1 << 26


@lru_cache(maxsize=2)  # a process has one processor
def max_pixels_of(processor: BaseMultiModalProcessor) -> Mapping[Modality, int]:
    """Return the operator's `max_pixels` (`--mm-processor-kwargs`), or else the model's own; empty if it has none.
    Processes some samples at the first call."""
    accepted = accepted_modalities(processor)
    hf_processor = hf_processor_of(processor)
    # Only families with image support have an image processor; it declares whether it has pixel limits.
    image_processor = getattr(hf_processor, "image_processor", None) if "image" in accepted else None
    declared = getattr(image_processor, "valid_kwargs", None)
    if "max_pixels" not in getattr(declared, "__annotations__", {}):
        return {}
    operators = processor.info.ctx.get_merged_mm_kwargs({})
    parts = {m: getattr(hf_processor, name, None) for m, name in _PROCESSORS if m in accepted}
    found = {m: _max_pixels(m, part, operators) for m, part in parts.items() if part is not None}
    return {m: limit for m, limit in found.items() if limit is not None and _is_limit(processor, m, limit)}


def _max_pixels(modality: Modality, part: Any, operators: Mapping[str, Any]) -> int | None:
    own = operators.get(f"{modality}s_kwargs")
    candidates = (own if isinstance(own, Mapping) else {}, operators, _own_settings(part))
    return next((limit for options in candidates for limit in _limits(options)), None)


def _own_settings(part: Any) -> Mapping[str, Any]:
    return {name: getattr(part, name, None) for name in ("max_pixels", "size")}


def _limits(options: Mapping[str, Any]) -> Iterator[int]:
    """Yield the limits in `options`; these families call it `longest_edge` in their files, though it counts pixels. A
    `size` may also be missing, a number, or the two sides."""
    size = options.get("size")
    sides = dict(size) if isinstance(size, Mapping | SizeDict) else {}
    for value in (options.get("max_pixels"), sides.get("max_pixels"), sides.get("longest_edge")):
        if isinstance(value, int | float) and not isinstance(value, bool) and value >= 1:
            yield int(value)


def _is_limit(processor: BaseMultiModalProcessor, modality: Modality, limit: int) -> bool:
    """Return whether the processor makes the same of a sample with `limit` as its `max_pixels` as without a limit."""
    heavy, sample = VllmProcessor(processor), _SAMPLES[modality]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # transformers', about this option
            given, far = (heavy.process(sample, _option(pixels)).specs for pixels in (limit, _FAR_PIXELS))
            is_limit = given == far or given == heavy.process(sample, NO_OPTIONS).specs
    except REFUSED as error:
        logger.warning("max_pixels and min_pixels of %ss are ignored: the processor refuses them: %r", modality, error)
        return False
    if not is_limit:
        message = "max_pixels and min_pixels of %ss are ignored: %d is not the number of pixels that it looks like"
        logger.warning(message, modality, limit)
    return is_limit


def _option(limit: int) -> bytes:
    return canonical_options({"max_pixels": limit})


def item_options(item: bytes, max_pixels: int | None, param: str) -> bytes:
    """Return an item's processor options (`MediaRef.options`), as far as the model has them and within `max_pixels`.

    Raises InvalidRequest naming the option.
    """
    if max_pixels is None or item == b"{}":
        return b"{}"
    options = msgspec.json.decode(item, type=dict[str, int])
    if "max_pixels" in options:
        options["max_pixels"] = max_pixels = min(options["max_pixels"], max_pixels)
    if options.get("min_pixels", 0) > max_pixels:
        raise InvalidRequest(f"min_pixels must be at most {max_pixels} for this model", param=f"{param}.min_pixels")
    return canonical_options(options)
