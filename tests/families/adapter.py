"""A LoRA adapter for a tiny model."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

RANK = 4
_TARGET = "q_proj"


def write_adapter(folder: Path, model: Path, *, among: str = "language_model") -> None:
    """Write an adapter of the queries of the layers whose names contain `among`; its weights are large enough to change
    every answer."""
    tensors = {}
    with safe_open(model / "model.safetensors", "pt") as weights:
        for name in weights.keys():  # noqa: SIM118 - not a dict
            if among in name and name.endswith(f"{_TARGET}.weight"):
                num_out, num_in = weights.get_slice(name).get_shape()
                layer = f"base_model.model.{name.removesuffix('.weight')}"
                generator = torch.Generator().manual_seed(len(tensors))
                tensors[f"{layer}.lora_A.weight"] = torch.randn(RANK, num_in, generator=generator).bfloat16()
                tensors[f"{layer}.lora_B.weight"] = torch.randn(num_out, RANK, generator=generator).bfloat16()
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": 2 * RANK, "target_modules": [_TARGET], "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(config))
