"""Names of weights as in the hub's checkpoints, for loaders of vLLM that do not accept vLLM's own names."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import wraps
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

#: By a weight of vLLM's model, the names that checkpoints have for it.
Parts = Callable[[str, torch.Tensor], Iterator[tuple[str, torch.Tensor]]]


def with_hub_names(write: Callable[[Path], None], parts: Parts) -> Callable[[Path], None]:
    """Return a `write` that saves the parts of each weight in its stead."""

    @wraps(write)
    def write_all(folder: Path) -> None:
        write(folder)
        path = folder / "model.safetensors"
        found = {name: part for whole, tensor in load_file(path).items() for name, part in parts(whole, tensor)}
        save_file(found, path, {"format": "pt"})

    return write_all


def whisper_layers(name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """Without the level that vLLM has around the two linear layers of Whisper's feed-forward part."""
    yield name.replace(".mlp.fc", ".fc"), tensor


def deepseek_layers(name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """Gates apart from what they multiply, and each expert by itself."""
    start, routed, weight = name.partition("routed_experts.")
    if routed:
        for n, expert in enumerate(tensor):
            yield from _gated(f"{start}{n}.{'gate_up' if weight.startswith('w13') else 'down'}_proj.weight", expert)
    else:
        yield from _gated(name, tensor)


def _gated(name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    if "gate_up_proj" not in name:
        yield name, tensor.contiguous()
        return
    for part, half in zip(("gate_proj", "up_proj"), tensor.chunk(2), strict=True):
        yield name.replace("gate_up_proj", part), half.contiguous()
