"""What vLLM's engine does to raw pixels on its device."""

from __future__ import annotations

from vllm.config import ModelConfig
from vllm.model_executor.layers.fusion.mm_input_norm import _load_norm_params

from medialane.types.tensor import PixelNormalisation


def device_normalisation(model_config: ModelConfig) -> PixelNormalisation | None:
    """Return what the engine does to pixels on its device; None if items have them normalised. Reads the
    model's files, of the hub, too."""
    if not model_config.multimodal_config.mm_device_do_normalize:
        return None
    params = _load_norm_params(model_config)
    return PixelNormalisation(params.rescale_factor, tuple(params.image_mean), tuple(params.image_std))
