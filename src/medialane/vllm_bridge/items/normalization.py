"""Whether the pixels of features are normalised, and by what."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vllm.multimodal.processing.processor import BaseMultiModalProcessor

from medialane.types.media import Modality
from medialane.vllm_bridge.seams.device_normalisation import device_normalisation
from medialane.vllm_bridge.seams.multimodal import hf_processor_of

#: Attributes of Hugging Face's image processors; those of videos have the same.
_NUMBERS = ("image_mean", "image_std", "rescale_factor")


def normalization_of(processor: BaseMultiModalProcessor, modality: Modality) -> Mapping[str, object]:
    """Return `normalized` of an image's or a video's pixels, and with what the processor or, if they are not, the
    engine normalises them: (pixels * rescale_factor - image_mean) / image_std. Empty for other modalities. Reads files:
    not for the event loop."""
    if modality == "audio":
        return {}
    if (by_engine := device_normalisation(processor.info.ctx.model_config)) is not None:
        return {
            "normalized": False,
            "image_mean": list(by_engine.mean),
            "image_std": list(by_engine.std),
            "rescale_factor": by_engine.rescale_factor,
        }
    hf_processor = hf_processor_of(processor)
    part = getattr(hf_processor, f"{modality}_processor", None) or getattr(hf_processor, "image_processor", None)
    numbers = {name: _plain(getattr(part, name, None)) for name in _NUMBERS}
    return {
        "normalized": bool(getattr(part, "do_normalize", False)),
        **{name: value for name, value in numbers.items() if value is not None},
    }


def _plain(value: Any) -> float | list[float] | None:
    if isinstance(value, int | float):
        return float(value)
    return [float(one) for one in value] if isinstance(value, list | tuple) else None
