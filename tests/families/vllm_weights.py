"""A program that has vLLM create the model in a folder, and saves random weights under the names of its parameters."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from safetensors.torch import save_file
from vllm import LLM
from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader

from medialane.vllm_bridge.tiny_model import random_weights


def main(folder: Path, embeddings: float) -> None:
    def save(_loader: DummyModelLoader, model: torch.nn.Module, _config: object) -> None:
        """Replace what fills the model, before its layers change the weights' layouts for this machine."""
        generator = torch.Generator().manual_seed(0)
        found = {}
        for name, parameter in model.named_parameters():
            drawn = random_weights(name, parameter.detach().float(), generator)
            scaled = drawn * embeddings if "embed_tokens" in name else drawn
            found[name] = scaled.to(parameter.dtype).contiguous()
        save_file(found, folder / "model.safetensors", {"format": "pt"})
        sys.exit(0)  # an engine is not needed

    DummyModelLoader.load_weights = save
    LLM(
        str(folder),
        load_format="dummy",
        trust_remote_code=True,
        enforce_eager=True,
        skip_mm_profiling=True,
        max_model_len=4096,
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]), float(sys.argv[2]))
