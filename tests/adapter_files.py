"""LoRA adapters of the tiny model, with random weights that change its answers."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

RANK = 4
#: vLLM's flags for them: the engine keeps one, and reads the others' files again whenever they are named.
FLAGS = ("--enable-lora", f"--max-lora-rank={2 * RANK}", "--max-loras=1", "--max-cpu-loras=1")


def write_adapter(folder: Path, seed: int) -> str:
    """Write an adapter as trainers do, over the one that may be there. Returns the folder."""
    folder.mkdir(exist_ok=True)
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for layer in range(2):
        for module, size in {"q_proj": 128, "o_proj": 128}.items():
            name = f"base_model.model.model.language_model.layers.{layer}.self_attn.{module}"
            tensors[f"{name}.lora_A.weight"] = torch.randn(RANK, 128, generator=generator)
            tensors[f"{name}.lora_B.weight"] = torch.randn(size, RANK, generator=generator) / 8
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "r": RANK,
        "lora_alpha": RANK,
        "target_modules": ["q_proj", "o_proj"],
        "bias": "none",
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return str(folder)
