"""Tiny pooling models with media: embeddings, a reranker, a classifier, and embeddings of all tokens (late
interaction). The models of Qwen3-VL's kind are its own checkpoints, served for pooling."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from family import Family, written_by
from qwen_families import VISION, write_qwen3_vl
from safetensors.torch import load_file, save_file
from tiny_recipe import LANGUAGE

_POOLING = ("--runner", "pooling")
_LIMITS = {"image": 3, "video": 1}
_CLASSIFIER = "Qwen3VLForSequenceClassification"
_COLUMNS = 32


def overrides(**fields: object) -> str:
    return f"--hf-overrides={json.dumps(fields)}"


def write_colqwen3(folder: Path) -> None:
    """Qwen3-VL with a projection of each token's hidden state."""
    write_qwen3_vl(folder)
    weights = folder / "model.safetensors"
    drawn = torch.randn((_COLUMNS, LANGUAGE["hidden_size"]), generator=torch.Generator().manual_seed(1))
    save_file(load_file(weights) | {"custom_text_proj.weight": drawn.bfloat16()}, weights, {"format": "pt"})


def _qwen3_vl(name: str, *flags: str) -> Family:
    build = written_by(write_qwen3_vl, __file__)
    return Family(name, _LIMITS, VISION, build, extra_flags=(*_POOLING, *flags))


FAMILIES = (
    # One embedding of each prompt, that of its last token, whose first columns can be used alone.
    _qwen3_vl("qwen3_vl_embedding", overrides(is_matryoshka=True)),
    # The score of a query and a document in one prompt.
    _qwen3_vl(
        "qwen3_vl_reranker",
        overrides(architectures=[_CLASSIFIER], classifier_from_token=["0", "1"], is_original_qwen3_reranker=True),
    ),
    _qwen3_vl(
        "qwen3_vl_classifier",
        "--convert=classify",
        overrides(text_config={"classifier_from_token": ["0", "1", "2"], "method": "no_post_processing"}),
    ),
    # Embeddings of all tokens; prompts are not read from the prefix cache.
    Family(
        "colqwen3",
        _LIMITS,
        VISION,
        written_by(write_colqwen3, __file__),
        extra_flags=(*_POOLING, overrides(architectures=["ColQwen3"], embed_dim=_COLUMNS)),
    ),
)
