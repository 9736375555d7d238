"""Tiny models of families whose processors are vLLM's own, each with rules of its own for tiles and marks."""

from __future__ import annotations

from pathlib import Path

from family import Family, written_by
from remote_recipe import TRUSTED, with_weights, write_config, write_remote_config
from tiny_recipe import LANGUAGE, ids, tokenizer
from transformers import (
    Granite4VisionProcessor,
    LlavaNextImageProcessor,
    PreTrainedTokenizerFast,
    SiglipImageProcessor,
)

IMAGE = {"image": "<image>"}
STEP = {"image": "<im_patch>"}

SQUARE = {"height": 112, "width": 112}
SIGLIP = {
    "model_type": "siglip_vision_model",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": 112,
    "patch_size": 14,
}


def write_ovis(folder: Path) -> None:
    # The model looks for the token of this id, whatever the tokenizer says.
    words = tokenizer(["<a>", "<b>", "<c>", "<d>", "<unused0>", "<image>"], IMAGE)
    assert ids(words, pad="<unused0>") == {"pad": 7}
    text = LANGUAGE | {"model_type": "gemma2", "query_pre_attn_scalar": 32, "sliding_window": 512}
    tower = {
        "model_type": "siglip_visual_tokenizer",
        "vocab_size": 133,
        "hidden_stride": 2,
        "backbone_config": SIGLIP | {"vision_use_head": False},
    }
    fields = {"model_type": "ovis", "llm_config": text, "visual_tokenizer_config": tower, "hidden_size": 128}
    write_config(folder, "Ovis", fields)
    words.save_pretrained(folder)
    SiglipImageProcessor(size=SQUARE).save_pretrained(folder)


def write_step_vl(folder: Path) -> None:
    words = step_tokenizer()
    words.save_pretrained(folder)
    tower = {
        "width": 64,
        "layers": 2,
        "heads": 4,
        "mlp_ratio": 2.0,
        "output_dim": None,
        "image_size": 728,
        "patch_size": 14,
        "ls_init_value": 0.1,
        "use_abs_posemb": True,
        "use_cls_token": False,
        "use_ln_pre": True,
        "use_ln_post": False,
        "use_rope2d": True,
        "hidden_act": "quick_gelu",
    }
    fields = {
        "model_type": "step_robotics",
        "text_config": LANGUAGE | {"model_type": "qwen3"},
        "vision_config": tower,
        "understand_projector_stride": 2,
        "projector_bias": False,
        "hidden_size": 128,
        **ids(words, image_token_id="<im_patch>"),
    }
    write_remote_config(folder, "StepVLForConditionalGeneration", fields)


def step_tokenizer() -> PreTrainedTokenizerFast:
    special = ["<im_start>", "<im_end>", "<im_patch>", "<patch_start>", "<patch_end>", "<patch_newline>"]
    return tokenizer(special, STEP)


def write_isaac(folder: Path) -> None:
    words = tokenizer(["<image>", "<|image_pad|>"], IMAGE)
    words.save_pretrained(folder)
    tower = {
        "model_type": "pixel_shuffle_siglip2",
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "patch_size": 16,
        "num_patches": 256,
        "pixel_shuffle_scale_factor": 2,
    }
    fields = {
        "model_type": "isaac",
        "text_config": LANGUAGE | {"model_type": "qwen3"},
        "vision_config": tower,
        "vision_max_num_patches": 256,
        "vision_min_num_patches": 16,
        "pixel_shuffle_scale": 2,
        "vision_token": "<image>",
        **LANGUAGE,
    }
    write_config(folder, "IsaacForConditionalGeneration", fields)


def write_granite4_vision(folder: Path) -> None:
    words = tokenizer(["<image>"], IMAGE, named={"image_token": "<image>"})
    pinpoints = [[112, 224], [224, 112], [224, 224]]
    text = LANGUAGE | {"model_type": "granite4_vision_text", "num_hidden_layers": 4}
    tower = SIGLIP | {"vision_use_head": False, "num_hidden_layers": 4}
    fields = {
        "model_type": "granite4_vision",
        "text_config": text,
        "vision_config": tower,
        "image_grid_pinpoints": pinpoints,
        "downsample_rate": "4/8",
        "deepstack_layer_map": [[-1, 0], [-2, 1]],
        "spatial_target_layers": [0, 1, 2, 3],
        "use_spatial_sampling": True,
        "vision_feature_select_strategy": "full",
        "image_seq_length": 16,
        **ids(words, image_token_index="<image>"),
    }
    write_config(folder, "Granite4VisionForConditionalGeneration", fields)
    images = LlavaNextImageProcessor(
        size={"shortest_edge": 112}, crop_size=SQUARE, image_grid_pinpoints=pinpoints, do_pad=True
    )
    Granite4VisionProcessor(
        images,
        words,
        patch_size=14,
        vision_feature_select_strategy="full",
        downsample_rate="4/8",
        chat_template=words.chat_template,
    ).save_pretrained(folder)


#: Plain vLLM's engine ends with an image on a CPU.
PROCESSORS = (
    # Windows over an image of a fixed size, with a mark after each row. oneDNN refuses the strides of its patches.
    Family("step_vl", {"image": 2}, STEP, written_by(write_step_vl, __file__), extra_flags=(TRUSTED,)),
)

FAMILIES = (
    # Marks between tiles are embeddings, not tokens. vLLM cannot process two images with different tiles at once.
    Family("ovis", {"image": 1}, IMAGE, written_by(with_weights(write_ovis), __file__)),
    # LLaVA-NeXT's tiles, with fewer tokens each; as many tiles as the request's largest image has.
    Family(
        "granite4_vision",
        {"image": 2},
        IMAGE,
        written_by(with_weights(write_granite4_vision), __file__),
        predicted=frozenset(("tokens",)),
        padded=frozenset(("pixel_values",)),
    ),
    # A grid of patches; four of them are one token; there is no kernel of its attention for bf16 on a CPU.
    Family(
        "isaac",
        {"image": 2},
        IMAGE,
        written_by(with_weights(write_isaac), __file__),
        extra_flags=("--dtype=float32",),
    ),
)
