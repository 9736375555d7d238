"""Families whose processors are code in the hub's checkpoints, and whose towers vLLM makes as large as the published
ones, or whose models it does not run on a CPU: only their processors are tried."""

from __future__ import annotations

from pathlib import Path

from family import Family
from remote_families import built_with
from remote_recipe import TRUSTED, write_remote_config, write_remote_processor
from tiny_recipe import LANGUAGE, ids, tokenizer

NUMBERED = {"image": "<|image_{}|>"}
NUMBERED_BOTH = {"image": "<|image_{}|>", "audio": "<|audio_{}|>"}
NONE = {"image": ""}
ERNIE = {
    "image": "<|IMAGE_START|><|image@placeholder|><|IMAGE_END|>",
    "video": "<|VIDEO_START|><|video@placeholder|><|VIDEO_END|>",
}


def write_phi3v(folder: Path) -> None:
    tower = {"image_dim_out": 1024, "num_img_tokens": 144, "layer_idx": -2, "name": "clip_vision_model"}
    layer = {"use_hd_transform": True, "with_learnable_separator": True, "hd_transform_order": "sub_glb"}
    fields = LANGUAGE | {"model_type": "phi3_v", "vocab_size": 32064, "img_processor": tower, "embd_layer": layer}
    write_remote_config(folder, "Phi3VForCausalLM", fields)
    tokenizer([], NONE).save_pretrained(folder)
    write_remote_processor(folder, "phi3v")


def write_phi4mm(folder: Path) -> None:
    ear = {"embedding_cls": "audio", "compression_rate": 8, "downsample_rate": 1}
    layer = {"image_embd_layer": {"embedding_cls": "tune_image"}, "audio_embd_layer": ear}
    fields = LANGUAGE | {"model_type": "phi4mm", "vocab_size": 200064, "img_processor": None, "embd_layer": layer}
    write_remote_config(folder, "Phi4MMForCausalLM", fields)
    tokenizer([], NONE).save_pretrained(folder)
    write_remote_processor(folder, "phi4mm")


def write_molmo(folder: Path) -> None:
    write_remote_config(folder, "MolmoForCausalLM", LANGUAGE | {"model_type": "molmo", "embedding_size": 512})
    tokenizer(["<im_patch>", "<im_col>", "<im_start>", "<im_end>", "<|image|>"], NONE).save_pretrained(folder)
    write_remote_processor(folder, "molmo")


def write_ernie4_5_vl(folder: Path) -> None:
    marks = ["<|IMAGE_START|>", "<|IMAGE_END|>", "<|VIDEO_START|>", "<|VIDEO_END|>", "<|IMAGE_PLACEHOLDER|>"]
    words = tokenizer([*marks, "<|image@placeholder|>", "<|video@placeholder|>"], ERNIE)
    tower = {
        "model_type": "DFNRope_vision_transformer",
        "depth": 2,
        "embed_dim": 64,
        "hidden_size": 64,
        "num_heads": 4,
        "mlp_ratio": 2,
        "in_channels": 3,
        "patch_size": 14,
        "spatial_merge_size": 2,
        "hidden_act": "quick_gelu",
    }
    fields = LANGUAGE | {
        "model_type": "ernie4_5_moe_vl",
        "vision_config": tower,
        "pixel_hidden_size": 64,
        "spatial_conv_size": 2,
        "temporal_conv_size": 2,
        "use_temporal_conv": True,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "freq_allocation": 8,
        "rope_parameters": {"rope_type": "default", "rope_theta": 5e5, "mrope_section": [4, 4, 8]},
        "use_moe": False,
        "moe_num_experts": [4, 4],
        "moe_layer_start_index": [0, 0],
        **ids(
            words,
            im_patch_id="<|IMAGE_PLACEHOLDER|>",
            image_start_token_id="<|IMAGE_START|>",
            image_end_token_id="<|IMAGE_END|>",
            video_start_token_id="<|VIDEO_START|>",
            video_end_token_id="<|VIDEO_END|>",
        ),
    }
    write_remote_config(folder, "Ernie4_5_VLMoeForConditionalGeneration", fields)
    words.save_pretrained(folder)
    write_remote_processor(folder, "ernie4_5_vl")


PROCESSORS = (
    # Patches of images and videos in one field of the processor's. vLLM's rotary embedding for it fails on a CPU.
    Family(
        "ernie4_5_vl",
        {"image": 2, "video": 1},
        ERNIE,
        built_with(write_ernie4_5_vl, "ernie4_5_vl"),
        extra_flags=(TRUSTED,),
    ),
    # Numbered placeholders; the prompt is tokenized again, without them; as many crops for every image.
    Family("phi3v", {"image": 2}, NUMBERED, built_with(write_phi3v, "phi3v"), extra_flags=(TRUSTED,)),
    # Numbered placeholders of two modalities; ids of tokens that the tokenizer has not.
    Family(
        "phi4mm",
        {"image": 2, "audio": 2},
        NUMBERED_BOTH,
        built_with(write_phi4mm, "phi4mm"),
        padded=frozenset(("input_image_embeds", "image_attention_mask")),
        joint=frozenset(("image_attention_mask",)),
        extra_flags=(TRUSTED,),
    ),
    # Images at the start of the prompt, which is tokenized again.
    Family("molmo", {"image": 1}, NONE, built_with(write_molmo, "molmo"), extra_flags=(TRUSTED,)),
)
