"""Kimi-K2.5 and K2.6: images and parts of videos are one modality of vLLM's, `vision_chunk`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import hub_names
import torch
from family import Family, written_by
from hub_names import deepseek_layers, with_hub_names
from remote_recipe import with_weights, write_config, write_json
from tiny_recipe import LANGUAGE, ids, tokenizer

_IMAGE = "<|media_begin|>image<|media_content|><|media_pad|><|media_end|>"
_VIDEO = "<|kimi_k25_video_placeholder|>"

#: Fields of DeepSeek-V3's text model, with ordinary attention: plain vLLM's latent attention on a CPU gives a repeated
#: prompt, with blocks in the prefix cache, other logprobs than a new one. No layer has experts: vLLM would not load
#: them by its own names.
_TEXT = LANGUAGE | {
    "model_type": "llama",
    "num_key_value_heads": 4,
    "kv_lora_rank": None,
    "qk_nope_head_dim": 0,
    "qk_rope_head_dim": 0,
    "v_head_dim": 0,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "first_k_dense_replace": LANGUAGE["num_hidden_layers"],
    "n_group": 1,
    "topk_group": 1,
}

_TOWER = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "patch_size": 14,
    "merge_kernel_size": [2, 2],
    "pos_emb_height": 16,
    "pos_emb_width": 16,
}

_MEDIA = {
    "patch_size": 14,
    "merge_kernel_size": 2,
    "temporal_merge_kernel_size": 4,
    "in_patch_limit": 1024,
    "in_patch_limit_each_frame": 256,
    "in_patch_limit_video": None,
    "patch_limit_on_one_side": 64,
    "fixed_output_tokens": None,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
}


def _text_layers(name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    if "qkv_proj" not in name or not name.startswith("language_model."):
        yield from deepseek_layers(name, tensor)
        return
    for part, third in zip(("q_proj", "k_proj", "v_proj"), tensor.chunk(3), strict=True):
        yield name.replace("qkv_proj", part), third.contiguous()


def write_kimi_k25(folder: Path) -> None:
    words = tokenizer(
        ["<|media_begin|>", "<|media_content|>", "<|media_pad|>", "<|media_end|>", _VIDEO],
        {"image": _IMAGE, "video": _VIDEO},
    )
    words.save_pretrained(folder)
    fields = {
        "model_type": "kimi_k25",
        "use_unified_vision_chunk": True,
        "video_placeholder": _VIDEO,
        "text_config": _TEXT,
        "vision_config": _TOWER,
        "projection_hidden_size": 64,
        "tie_word_embeddings": False,
        **ids(words, image_token_id="<|media_pad|>"),
    }
    write_config(folder, "KimiK25ForConditionalGeneration", fields)
    write_json(folder / "preprocessor_config.json", {"media_proc_cfg": _MEDIA})


FAMILIES = (
    Family(
        "kimi_k25",
        {"image": 8},
        {"image": _IMAGE},
        written_by(with_hub_names(with_weights(write_kimi_k25), _text_layers), __file__, hub_names.__file__),
        extra_flags=('--limit-mm-per-prompt={"vision_chunk": 8}',),  # vLLM knows no limit of images
    ),
)
