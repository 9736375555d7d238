"""Whether the pixels of features are normalised, and by what."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vllm.multimodal.processing.processor import BaseMultiModalProcessor

from medialane.core.media import Modality

#: Attributes of Hugging Face's image processors; those of videos have the same.
_NUMBERS = ("image_mean", "image_std", "rescale_factor")


def normalization_of(processor: BaseMultiModalProcessor, modality: Modality) -> Mapping[str, object]:
    """Return `normalized` of an image's or a video's pixels, and with what the processor or, if they are not, the
    engine normalises them: (pixels * rescale_factor - image_mean) / image_std. Empty for other modalities."""
    if modality == "audio":
        return {}
    hf_processor = processor.info.get_hf_processor()
    part = getattr(hf_processor, f"{modality}_processor", None) or getattr(hf_processor, "image_processor", None)
    is_left_to_engine = bool(processor.info.ctx.model_config.multimodal_config.mm_device_do_normalize)
    numbers = {name: _plain(getattr(part, name, None)) for name in _NUMBERS}
    does_normalize = bool(getattr(part, "do_normalize", False))
    return {
        "normalized": does_normalize and not is_left_to_engine,
        **{name: value for name, value in numbers.items() if value is not None},
    }


def _plain(value: Any) -> float | list[float] | None:
    if isinstance(value, int | float):
        return float(value)
    return [float(one) for one in value] if isinstance(value, list | tuple) else None
