"""The processor settings of a feature, which must be equal in store, gateway and worker for features to be compatible.

They include everything that changes the values of a processed item, by value or by digest, but not paths and build tags
of libraries: the same model may have another path on another host, and a gateway with a CPU build of torch serves a
worker with a CUDA build.
"""

from __future__ import annotations

import json
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import transformers
import vllm
from vllm.config import ModelConfig
from vllm.multimodal.processing.processor import BaseMultiModalProcessor
from vllm.renderers import BaseRenderer

from medialane.core.hashing import canonical_options, content_hash, digest

#: Files of a model from which its processor or tokenizer is built.
_FILES = (
    "config.json",
    "preprocessor_config.json",
    "processor_config.json",
    "video_preprocessor_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "added_tokens.json",
    "tekken.json",
    "params.json",
)

#: Components of a Hugging Face processor that convert media to tensors.
_PARTS = ("image_processor", "video_processor", "feature_extractor")


def processor_settings(model_config: ModelConfig, processor: BaseMultiModalProcessor | None) -> dict[str, str]:
    """Return the settings with which this process computes features; `processor` is None for a text-only model. Reads
    the model's small files; call it once."""
    return {
        "model": _model(model_config),
        "dtype": str(model_config.dtype).removeprefix("torch."),
        "vllm": _release(vllm.__version__),
        "transformers": _release(transformers.__version__),
        "torch": _release(torch.__version__),
        "torchvision": _release(version("torchvision")),
        **(_media_settings(model_config, processor) if processor is not None else {}),
    }


def _model(model_config: ModelConfig) -> str:
    folder = Path(model_config.model)
    if not folder.is_dir():
        return f"{model_config.model}@{model_config.revision or 'main'}"
    found = {name: content_hash((folder / name).read_bytes()) for name in _FILES if (folder / name).is_file()}
    return f"files {digest(found)[:16]}"


def _media_settings(model_config: ModelConfig, processor: BaseMultiModalProcessor) -> dict[str, str]:
    config = model_config.multimodal_config
    parts = _parts(processor.info.get_hf_processor())
    return {
        "processor": type(processor).__qualname__,
        "device_normalize": str(bool(config.mm_device_do_normalize)),
        "processor_kwargs": canonical_options(config.mm_processor_kwargs or {}).decode(),
        **{name: f"{type(part).__qualname__} {_digest_of(part)}" for name, part in parts.items()},
    }


def _parts(hf_processor: Any) -> dict[str, Any]:
    """Return the components of a family's processor; only its class knows which it has."""
    found = {name: getattr(hf_processor, name, None) for name in _PARTS}
    return {name: part for name, part in found.items() if part is not None}


def _digest_of(part: Any) -> str:
    """Return a digest of the effective settings (sizes, means, flags), from whatever file or default."""
    settings = {k: v for k, v in part.to_dict().items() if k not in ("_name_or_path", "name_or_path")}
    return content_hash(json.dumps(settings, sort_keys=True, default=str).encode())[:16]


def _release(found: str) -> str:
    """2.13.0+cpu -> 2.13.0"""
    return found.partition("+")[0]


def settings_of(model_config: ModelConfig, renderer: BaseRenderer) -> dict[str, str]:
    """Return `processor_settings` of a process that has vLLM's renderer."""
    takes_media = model_config.supports_multimodal_inputs  # false with --language-model-only, too
    return processor_settings(model_config, renderer.get_mm_processor() if takes_media else None)
