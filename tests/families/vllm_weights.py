"""A program that has vLLM create the model in a folder, and saves random weights under the names of its parameters."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from safetensors.torch import save_file
from vllm import LLM
from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader
from vllm.platforms import current_platform

from medialane.vllm_bridge.tiny_model import random_weights


def main(folder: Path) -> None:
    def save(_loader: DummyModelLoader, model: torch.nn.Module, _config: object) -> None:
        """Replace what fills the model, before its layers change the weights' layouts for this machine."""
        generator = torch.Generator().manual_seed(0)
        found = {
            name: random_weights(name, parameter.detach().float(), generator).to(parameter.dtype).contiguous()
            for name, parameter in model.named_parameters()
        }
        save_file(found, folder / "model.safetensors", {"format": "pt"})
        sys.exit(0)  # an engine is not needed

    DummyModelLoader.load_weights = save
    # On a CPU, vLLM searches all modules for kernels to replace, and fails at those of llvmlite: before there are any.
    current_platform.register_triton_kernel_overrides()
    type(current_platform).register_triton_kernel_overrides = classmethod(lambda _: None)
    LLM(
        str(folder),
        load_format="dummy",
        trust_remote_code=True,
        enforce_eager=True,
        skip_mm_profiling=True,
        max_model_len=4096,
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]))
