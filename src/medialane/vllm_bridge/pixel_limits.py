"""Limits the pixels per item: clients may request fewer than the operator allows, never more.

Some families (Qwen-VL and its successors) scale an image until its number of pixels is between two limits, vLLM's
`min_pixels` and `max_pixels`. Other families have none: an item's options are then ignored, as in vLLM.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
from vllm.multimodal.processing.processor import BaseMultiModalProcessor

from medialane.core.errors import InvalidRequest
from medialane.core.hashing import canonical_options
from medialane.core.media import Modality

_PROCESSORS: tuple[tuple[Modality, str], ...] = (("image", "image_processor"), ("video", "video_processor"))


def max_pixels_of(processor: BaseMultiModalProcessor) -> dict[Modality, int]:
    """Return the operator's `max_pixels` (`--mm-processor-kwargs`), or else the model's own; empty if it has none."""
    limits = processor.info.get_supported_mm_limits()
    hf_processor = processor.info.get_hf_processor()
    # Only families with image support have an image processor; it declares whether it has pixel limits.
    image_processor = getattr(hf_processor, "image_processor", None) if "image" in limits else None
    declared = getattr(image_processor, "valid_kwargs", None)
    if "max_pixels" not in getattr(declared, "__annotations__", {}):
        return {}
    operators = processor.info.ctx.get_merged_mm_kwargs({})
    parts = {m: getattr(hf_processor, name, None) for m, name in _PROCESSORS if m in limits}
    found = {m: _max_pixels(m, part, operators) for m, part in parts.items() if part is not None}
    return {m: limit for m, limit in found.items() if limit is not None}


def _max_pixels(modality: Modality, part: Any, operators: Mapping[str, Any]) -> int | None:
    """Return the limit; these families call it `longest_edge` in their files, though it counts pixels."""
    for options in (operators.get(f"{modality}s_kwargs") or {}, operators):
        limit = options.get("max_pixels") or (options.get("size") or {}).get("longest_edge")
        if limit is not None:
            return int(limit)
    limit = part.size["longest_edge"]
    return None if limit is None else int(limit)


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
