"""A program that has vLLM create the model in a folder, and saves random weights under the names of its parameters, or
with what it has merged (`separate`) under the names in checkpoints."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import save_file
from vllm import LLM
from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader
from vllm.platforms import current_platform

from medialane.testing.tiny_model import random_weights

#: Projections that vLLM's layers compute as one, in the order of their rows.
_MERGED = {"gate_up_proj": ("gate_proj", "up_proj"), "qkv_proj": ("q_proj", "k_proj", "v_proj")}
_EXPERTS = {"w13_weight": ("gate_proj", "up_proj"), "w2_weight": ("down_proj",)}


def _separate(model: torch.nn.Module, found: dict[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    """The weights of each projection of each expert, which old loaders want to merge themselves."""
    for name, tensor in found.items():
        path, _, kind = name.rpartition(".")
        parent, _, layer = path.rpartition(".")
        if kind in _EXPERTS:  # `parent` is the list of experts
            parts = _EXPERTS[kind]
            for number, expert in enumerate(tensor):
                for part, rows in zip(parts, expert.chunk(len(parts)), strict=True):
                    yield f"{parent}.{number}.{part}.weight", rows.contiguous()
        elif layer in _MERGED:
            sizes = model.get_submodule(path).output_sizes
            for part, rows in zip(_MERGED[layer], tensor.split(sizes), strict=True):
                yield f"{parent}.{part}.{kind}", rows.contiguous()
        else:
            yield name, tensor


def main(folder: Path, embeddings: float, separate: bool) -> None:
    def save(_loader: DummyModelLoader, model: torch.nn.Module, _config: object) -> None:
        """Replace what fills the model, before its layers change the weights' layouts for this machine."""
        generator = torch.Generator().manual_seed(0)
        found = {}
        for name, parameter in model.named_parameters():
            drawn = random_weights(name, parameter.detach().float(), generator)
            scaled = drawn * embeddings if "embed_tokens" in name else drawn
            found[name] = scaled.to(parameter.dtype).contiguous()
        if separate:
            found = dict(_separate(model, found))
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
    main(Path(sys.argv[1]), float(sys.argv[2]), "separate" in sys.argv[3:])
