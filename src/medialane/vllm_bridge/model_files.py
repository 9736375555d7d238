"""Locations of a model's files, from which its processor may be loaded again."""

from __future__ import annotations

import os

from huggingface_hub import constants
from vllm.config import ModelConfig


def model_files(config: ModelConfig) -> tuple[str, ...]:
    """Return the model's folders if it is local, and the Hugging Face cache (which does not contain the token)."""
    named = (config.model, config.tokenizer, config.hf_config_path)
    local = tuple(os.path.abspath(path) for path in named if path and os.path.exists(path))
    return (*local, constants.HF_HUB_CACHE)


def use_no_network() -> None:
    """Make huggingface_hub use its cache only from now on, without checking for updates."""
    constants.HF_HUB_OFFLINE = True
