"""How many pixels of an item a model is given: clients may ask for fewer, never for more.

Some families (Qwen-VL and those after it) scale a picture until its pixels lie between two numbers, which vLLM takes as
`min_pixels` and `max_pixels`. Others have no such numbers: for them an item's own mean nothing, as in vLLM.
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
    """The operator's `max_pixels` (`--mm-processor-kwargs`), or else the model's own; empty where it has none."""
    limits = processor.info.get_supported_mm_limits()
    hf_processor = processor.info.get_hf_processor()
    # Only families that take pictures have the part; which of its options count pixels, its own declaration tells.
    image_processor = getattr(hf_processor, "image_processor", None) if "image" in limits else None
    declared = getattr(image_processor, "valid_kwargs", None)
    if "max_pixels" not in getattr(declared, "__annotations__", {}):
        return {}
    operators = processor.info.ctx.get_merged_mm_kwargs({})
    parts = {m: getattr(hf_processor, name, None) for m, name in _PROCESSORS if m in limits}
    found = {m: _most(m, part, operators) for m, part in parts.items() if part is not None}
    return {m: most for m, most in found.items() if most is not None}


def _most(modality: Modality, part: Any, operators: Mapping[str, Any]) -> int | None:
    """`longest_edge` is what these families call it in their files, though it counts pixels."""
    for options in (operators.get(f"{modality}s_kwargs") or {}, operators):
        most = options.get("max_pixels") or (options.get("size") or {}).get("longest_edge")
        if most is not None:
            return int(most)
    most = part.size["longest_edge"]
    return None if most is None else int(most)


def item_options(item: bytes, most: int | None, param: str) -> bytes:
    """An item's processor options (`MediaRef.options`), as far as this model takes them and the operator allows.

    Raises InvalidRequest naming the option.
    """
    if most is None or item == b"{}":
        return b"{}"
    options = msgspec.json.decode(item, type=dict[str, int])
    if "max_pixels" in options:
        options["max_pixels"] = most = min(options["max_pixels"], most)
    if options.get("min_pixels", 0) > most:
        raise InvalidRequest(f"min_pixels must be at most {most} for this model", param=f"{param}.min_pixels")
    return canonical_options(options)
