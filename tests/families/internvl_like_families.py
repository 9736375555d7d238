"""Tiny models of families with InternVL's older processor, which is vLLM's own: their checkpoints have none."""

from __future__ import annotations

from pathlib import Path

from family import Family, written_by
from remote_recipe import TRUSTED, with_weights, write_remote_config
from tiny_recipe import LANGUAGE, tokenizer

IMAGE = {"image": "<image>"}
IMAGE_AND_VIDEO = {"image": "<image>", "video": "<video>"}
NVLM = {"image": "<image>\n"}

_MARKS = ["<img>", "</img>", "<IMG_CONTEXT>"]

#: InternViT: 8x8 patches of 14 pixels.
_TOWER = {
    "model_type": "intern_vit_6b",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": 112,
    "patch_size": 14,
    "qkv_bias": True,
    "qk_normalization": False,
    "hidden_act": "gelu",
    "norm_type": "layer_norm",
    "layer_norm_eps": 1e-6,
    "initializer_factor": 1.0,
}

_CONFIG = {
    "vision_config": _TOWER,
    "downsample_ratio": 0.5,
    "force_image_size": 112,
    "min_dynamic_patch": 1,
    "max_dynamic_patch": 6,
    "dynamic_image_size": True,
    "use_thumbnail": True,
    "ps_version": "v2",
    "select_layer": -1,
}


def write_internvl_chat(folder: Path) -> None:
    tokenizer([*_MARKS, "<|video_pad|>"], IMAGE_AND_VIDEO).save_pretrained(folder)
    fields = {"model_type": "internvl_chat", "llm_config": LANGUAGE | {"model_type": "qwen2"}}
    write_remote_config(folder, "InternVLChatModel", _CONFIG | fields)


def write_h2ovl(folder: Path) -> None:
    tokenizer(_MARKS, IMAGE).save_pretrained(folder)
    fields = {"model_type": "h2ovl_chat", "llm_config": LANGUAGE | {"model_type": "mistral"}, "use_msac": True}
    write_remote_config(folder, "H2OVLChatModel", _CONFIG | fields)


def write_skywork_r1v(folder: Path) -> None:
    tokenizer(_MARKS, IMAGE).save_pretrained(folder)
    fields = {"model_type": "skywork_chat", "llm_config": LANGUAGE | {"model_type": "qwen2"}}
    write_remote_config(folder, "SkyworkR1VChatModel", _CONFIG | fields)


def write_nvlm_d(folder: Path) -> None:
    marks = ["<Image>", "</Image>", "<|vision_pad|>", "<tile_global_thumbnail>", *(f"<tile_{n}>" for n in range(1, 7))]
    # An expression, since the template strips the white space around its tags.
    tokenizer(marks, {"image": '{{ "<image>\\n" }}'}).save_pretrained(folder)
    tower = _TOWER | {"num_attention_heads": 1}
    fields = {"model_type": "NVLM_D", "llm_config": LANGUAGE | {"model_type": "qwen2"}, "vision_config": tower}
    write_remote_config(folder, "NVLM_D", _CONFIG | fields)


def write_eagle2_5_vl(folder: Path) -> None:
    tokenizer(_MARKS, IMAGE).save_pretrained(folder)
    tower = {name: _TOWER[name] for name in ("hidden_size", "intermediate_size", "num_hidden_layers")}
    tower |= {"model_type": "siglip_vision_model", "num_attention_heads": 4, "image_size": 112, "patch_size": 14}
    fields = {"model_type": "eagle_2_5_vl", "text_config": LANGUAGE | {"model_type": "qwen2"}, "vision_config": tower}
    write_remote_config(folder, "Eagle2_5_VLForConditionalGeneration", _CONFIG | fields)


_PREDICTED = frozenset(("tokens", "bytes"))

FAMILIES = (
    # A configuration that is code in the checkpoint; tiles, and frames with a text before each.
    Family(
        "internvl_chat",
        {"image": 2, "video": 1},
        IMAGE_AND_VIDEO,
        written_by(with_weights(write_internvl_chat), __file__),
        predicted=_PREDICTED,
        extra_flags=(TRUSTED,),
    ),
    # One kind of tiles, its own image processor.
    Family(
        "skywork_r1v",
        {"image": 2},
        IMAGE,
        written_by(with_weights(write_skywork_r1v), __file__),
        predicted=_PREDICTED,
        extra_flags=(TRUSTED,),
    ),
    # A text before each tile; the newline after an image is part of what is replaced.
    Family(
        "nvlm_d",
        {"image": 2},
        NVLM,
        written_by(with_weights(write_nvlm_d), __file__),
        predicted=_PREDICTED,
        extra_flags=(TRUSTED,),
    ),
    # SigLIP's tower.
    Family(
        "eagle2_5_vl",
        {"image": 2},
        IMAGE,
        written_by(with_weights(write_eagle2_5_vl), __file__),
        predicted=_PREDICTED,
        extra_flags=(TRUSTED,),
    ),
)

#: Two passes of tiles (MSAC) for one image in a request, one pass for each of several.
DEPENDENT = (
    Family(
        "h2ovl",
        {"image": 2},
        IMAGE,
        written_by(with_weights(write_h2ovl), __file__),
        extra_flags=(TRUSTED,),
        stage="decoded",
    ),
)
