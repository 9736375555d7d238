"""How plain vLLM loads media: for comparisons, not for requests."""

from __future__ import annotations

from typing import Any

from vllm.config import ModelConfig
from vllm.multimodal.media import MEDIA_CONNECTOR_REGISTRY
from vllm.transformers_utils.processor import get_video_processor_cls_name

from medialane.types.media import Modality


def load_as_plain(model_config: ModelConfig, modality: Modality, url: str) -> Any:
    """Return an item as plain vLLM's connector loads it: with its own decoders, and the operator's options."""
    connector = MEDIA_CONNECTOR_REGISTRY.load("http", media_io_kwargs=model_config.multimodal_config.media_io_kwargs)
    if modality == "video":
        return connector.fetch_video(url, video_processor=get_video_processor_cls_name(model_config))
    return connector.fetch_audio(url) if modality == "audio" else connector.fetch_image(url)
