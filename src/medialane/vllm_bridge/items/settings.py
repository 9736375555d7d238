"""The processor settings of a feature, which must be equal in store, gateway and worker for features to be compatible.

They include everything that changes the values of a processed item, by value or by digest, but not paths and build tags
of libraries: the same model may have another path on another host, and a gateway with a CPU build of torch serves a
worker with a CUDA build.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import transformers
import vllm
from huggingface_hub import constants
from vllm.config import ModelConfig

from medialane.types.hashing import canonical_options, content_hash, digest
from medialane.vllm_bridge.items.processor_profile import ProcessorProfile
from medialane.vllm_bridge.items.stable_description import Description, attributes, describe, is_component
from medialane.vllm_bridge.seams.multimodal import load_hf_processor

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

#: Raised for a model whose family processes media by itself, without the files of a Hugging Face processor.
_NO_PROCESSOR = (OSError, ValueError, TypeError, LookupError, AttributeError, RuntimeError, ImportError)

logger = logging.getLogger(__name__)


def processor_settings(model_config: ModelConfig, profile: ProcessorProfile | None) -> dict[str, str]:
    """Return the settings with which this process computes features; `profile` is None for a text-only model. Reads
    the model's small files; call it once."""
    return {
        "model": _model(model_config),
        "dtype": str(model_config.dtype).removeprefix("torch."),
        "vllm": _release(vllm.__version__),
        "transformers": _release(transformers.__version__),
        "torch": _release(torch.__version__),
        "torchvision": _release(version("torchvision")),
        **(_media_settings(model_config, profile) if profile is not None else {}),
    }


def _model(model_config: ModelConfig) -> str:
    folder = Path(model_config.model)
    if not folder.is_dir():
        return f"{model_config.model}@{model_config.revision or 'main'}"
    hashes = {name: content_hash((folder / name).read_bytes()) for name in _FILES if (folder / name).is_file()}
    return f"files {digest(hashes)[:16]}"


def _media_settings(model_config: ModelConfig, profile: ProcessorProfile) -> dict[str, str]:
    config = model_config.multimodal_config
    return {
        "processor": type(profile.processor).__qualname__,
        "device_normalize": str(bool(config.mm_device_do_normalize)),
        "processor_kwargs": canonical_options(config.mm_processor_kwargs or {}).decode(),
        "no_features": " ".join(profile.unfit),
        **compared_settings(lambda: load_hf_processor(profile.processor), _folders(model_config)),
    }


def compared_settings(load: Callable[[], Any], folders: Sequence[str] = ()) -> dict[str, str]:
    """Return the effective settings (sizes, means, flags) of the Hugging Face processor that `load` makes, from
    whatever file or default. Paths in `folders` are described relatively to them.

    Two new ones are compared: neither has been changed by use, and what differs between them is not a setting. A model
    without one has no such settings.
    """
    try:
        one, two = (_described(load(), folders) for _ in range(2))
    except _NO_PROCESSOR as error:
        logger.warning("the model has no Hugging Face processor whose settings could be compared: %r", error)
        return {}
    changing = sorted(name for name in one.keys() | two.keys() if one.get(name) != two.get(name))
    if changing:
        names = ", ".join(changing)
        logger.warning("not compared, because each time the model's processor is loaded they differ: %s", names)
    compared = {name: description for name, description in one.items() if name not in changing}
    unknown = sorted({f"{name}{path}" for name, description in compared.items() for path in description.unknown})
    if unknown:
        logger.warning("settings of the model's processor of which only the type is compared: %s", ", ".join(unknown))
    return {name: description.text for name, description in compared.items()}


def _described(hf_processor: Any, folders: Sequence[str]) -> dict[str, Description]:
    """Describe a processor and its components (image processor, feature extractor) by their attributes, so that one
    that differs can be named."""
    described = {"hf_processor": describe(type(hf_processor))}
    for attribute, part in (attributes(hf_processor) or {}).items():
        if attribute.endswith("tokenizer"):  # compared as files of the model
            continue
        name = f"hf_processor.{attribute}"
        members = attributes(part) if is_component(part) else None
        described[name] = describe(part if members is None else type(part), folders=folders)
        for member, value in (members or {}).items():
            described[f"{name}.{member}"] = describe(value, folders=folders)
    return described


def _folders(model_config: ModelConfig) -> list[str]:
    named = (model_config.model, model_config.tokenizer, model_config.hf_config_path)
    return [*[str(path) for path in named if path and Path(path).is_absolute()], constants.HF_HUB_CACHE]


def _release(full: str) -> str:
    """2.13.0+cpu -> 2.13.0"""
    return full.partition("+")[0]
