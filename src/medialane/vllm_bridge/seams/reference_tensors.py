"""How plain vLLM loads media, and what its engine does to raw pixels: for comparisons, not for requests."""

from __future__ import annotations

from typing import Any

from vllm.config import ModelConfig
from vllm.model_executor.layers.fusion.mm_input_norm import _load_norm_params
from vllm.multimodal.media import MEDIA_CONNECTOR_REGISTRY
from vllm.transformers_utils.processor import get_video_processor_cls_name

from medialane.core.media import Modality
from medialane.core.tensor_comparison import PixelNormalisation


def load_as_plain(model_config: ModelConfig, modality: Modality, url: str) -> Any:
    """Return an item as plain vLLM's connector loads it: with its own decoders, and the operator's options."""
    connector = MEDIA_CONNECTOR_REGISTRY.load("http", media_io_kwargs=model_config.multimodal_config.media_io_kwargs)
    if modality == "video":
        return connector.fetch_video(url, video_processor=get_video_processor_cls_name(model_config))
    return connector.fetch_audio(url) if modality == "audio" else connector.fetch_image(url)


def device_normalisation(model_config: ModelConfig) -> PixelNormalisation | None:
    """Return what the engine does to pixels on its device; None if items have them normalised."""
    if not model_config.multimodal_config.mm_device_do_normalize:
        return None
    params = _load_norm_params(model_config)
    return PixelNormalisation(params.rescale_factor, tuple(params.image_mean), tuple(params.image_std))
