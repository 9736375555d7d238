"""Where the files of a model lie, which its processor may be loaded from again."""

from __future__ import annotations

import os

from huggingface_hub import constants
from vllm.config import ModelConfig


def model_files(config: ModelConfig) -> tuple[str, ...]:
    """The model's own folders where it is local; the hub's cache, without the token that lies beside it, where not."""
    named = (config.model, config.tokenizer, config.hf_config_path)
    local = tuple(os.path.abspath(path) for path in named if path and os.path.exists(path))
    return (*local, constants.HF_HUB_CACHE)


def use_no_network() -> None:
    """Have the hub's library take what is in its cache from now on, and not ask whether there is something newer."""
    constants.HF_HUB_OFFLINE = True
