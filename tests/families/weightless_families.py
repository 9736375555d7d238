"""Families with much that vLLM's models have fixed, such as the towers' sizes or the ids of tokens: some are tried
without weights, since these would be too many, or since the model does not run here.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from family import Family, written_by
from remote_recipe import TRUSTED, with_weights, write_config, write_json, write_remote_config
from tiny_recipe import LANGUAGE, ids, tokenizer
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast, SiglipImageProcessor
from vllm_processor_families import IMAGE, SIGLIP, SQUARE, STEP, step_tokenizer

BOTH = {"image": "<image>", "video": "<video>"}


#: Ids of tokens that vLLM's class of Ovis 2.5 has as constants: that of a pad, and that of the first token which its
#: processor adds to the tokenizer.
_OVIS_PAD, _OVIS_ADDED = 151655, 151669


def _ovis2_5_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer as large as Qwen's. As in the hub's checkpoint, the marks of media are not in it: the processor adds
    them."""
    words = tokenizer([], BOTH)
    state = json.loads(words.backend_tokenizer.to_str())
    vocabulary = state["model"]["vocab"]
    vocabulary |= {f"<unused{n}>": n for n in range(len(vocabulary), _OVIS_ADDED) if n != _OVIS_PAD}
    vocabulary["<|image_pad|>"] = _OVIS_PAD
    pad = {"id": _OVIS_PAD, "content": "<|image_pad|>", "special": True}
    state["added_tokens"].append(dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False) | pad)
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(json.dumps(state)),
        bos_token=words.bos_token,
        eos_token=words.eos_token,
        pad_token=words.pad_token,
        chat_template=words.chat_template,
    )


def write_ovis2_5(folder: Path) -> None:
    words = _ovis2_5_tokenizer()
    tower = SIGLIP | {
        "model_type": "siglip2_navit",
        "patch_size": 16,
        "hidden_stride": 2,
        "temporal_patch_size": 1,
        "num_channels": 3,
        "num_patches": -1,
        "image_size": 128,
        "window_size": 64,
        "fullatt_block_indexes": None,
        "use_rope": True,
        "preserve_original_pe": True,
        "hidden_act": "gelu_pytorch_tanh",
        "layer_norm_eps": 1e-6,
        "attention_dropout": 0.0,
    }
    text = LANGUAGE | {"model_type": "qwen3", "vocab_size": 151680}
    fields = {"model_type": "ovis2_5", "llm_config": text, "vit_config": tower, "visual_vocab_size": 132}
    write_remote_config(folder, "Ovis2_5", fields | {"hidden_size": 128})
    words.save_pretrained(folder)
    SiglipImageProcessor(size=SQUARE).save_pretrained(folder)


def write_deepseek_vl2(folder: Path) -> None:
    projector = {"projector_type": "downsample_mlp_gelu", "input_dim": 1152, "mlp_ratio": 1}
    _write_deepseek(folder, "DeepseekVLV2ForCausalLM", projector)
    fields = {
        "processor_class": "DeepseekVLV2Processor",
        "candidate_resolutions": [[112, 112], [112, 224], [224, 112], [224, 224]],
        "patch_size": 14,
        "downsample_ratio": 2,
    }
    write_json(folder / "processor_config.json", fields)


def write_deepseek_ocr(folder: Path) -> None:
    _write_deepseek(folder, "DeepseekOCRForCausalLM", {"projector_type": "linear", "input_dim": 2048})
    write_json(folder / "processor_config.json", {"processor_class": "DeepseekOCRProcessor"})


def write_deepseek_ocr2(folder: Path) -> None:
    _write_deepseek(folder, "DeepseekOCR2ForCausalLM", {"projector_type": "linear", "input_dim": 896})
    write_json(folder / "processor_config.json", {"processor_class": "DeepseekOCRProcessor"})


def _write_deepseek(folder: Path, architecture: str, projector: dict[str, object]) -> None:
    tokenizer(["<image>"], IMAGE).save_pretrained(folder)
    text = LANGUAGE | {
        "num_key_value_heads": 4,
        "use_mla": False,
        "kv_lora_rank": None,
        "q_lora_rank": None,
        "qk_nope_head_dim": 0,
        "qk_rope_head_dim": 0,
        "v_head_dim": 0,
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
        "first_k_dense_replace": 1,
        "n_group": 1,
        "topk_group": 1,
        "topk_method": "greedy",
    }
    fields = {
        "model_type": "deepseek_vl_v2",
        "language_config": text,
        "vision_config": {"image_size": 112, "patch_size": 14},
        "projector_config": projector | {"n_embed": 128},
        "candidate_resolutions": [[112, 112], [112, 224], [224, 112], [224, 224]],
        "tile_tag": "2D",
        "global_view_pos": "head",
    }
    write_config(folder, architecture, fields)


def write_step3_vl(folder: Path) -> None:
    words = step_tokenizer()
    words.save_pretrained(folder)
    tower = {"hidden_size": 64, "intermediate_size": 128, "output_hidden_size": 64, "num_hidden_layers": 2}
    text = {
        "architectures": ["Step3TextForCausalLM"],
        "model_type": "step3_text",
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_attention_heads": 4,
        "num_hidden_layers": 2,
        "vocab_size": LANGUAGE["vocab_size"],
        "moe_intermediate_size": 64,
        "moe_num_experts": 4,
        "moe_top_k": 2,
        "share_expert_dim": 64,
        "share_q_dim": 64,
        "head_dim": 32,
        "moe_layers_enum": "1",
        "bos_token_id": 0,
        "eos_token_id": 2,
    }
    fields = {
        "model_type": "step3_vl",
        "text_config": text,
        "vision_config": tower | {"num_attention_heads": 4},
        "understand_projector_stride": 2,
        **ids(words, image_token_id="<im_patch>"),
    }
    write_config(folder, "Step3VLForConditionalGeneration", fields)


def write_nemotron_nano_vl(folder: Path) -> None:
    _write_nemotron(folder, {})


def write_nemotron_dynamic(folder: Path) -> None:
    _write_nemotron(folder, {"min_num_patches": 16, "max_num_patches": 512})


def _write_nemotron(folder: Path, sizes: dict[str, int]) -> None:
    words = tokenizer(["<img>", "</img>", "<image>", "<video>", "<so_embedding>"], BOTH)
    words.save_pretrained(folder)
    tower = {"model": "vit_small_patch16_224", "register_multiple": 8, "teachers": [{"name": "one"}], **sizes}
    text = LANGUAGE | {
        "model_type": "nemotron_h",
        "dtype": "bfloat16",
        "layers_block_type": ["mamba", "attention", "mlp"],
        "num_hidden_layers": 3,
        "chunk_size": 4096,  # vLLM's kernel for CPUs fails on prompts of several
        "mamba_num_heads": 4,
        "mamba_head_dim": 64,
        "ssm_state_size": 16,
        "n_groups": 1,
    }
    fields = {
        "model_type": "NemotronH_Nano_VL_V2",
        "text_config": text,
        "vision_config": {"args": tower, "patch_size": 16, "video_temporal_patch_size": 2},
        "force_image_size": 128,
        "patch_size": 16,
        "downsample_ratio": 0.5,
        "use_thumbnail": True,
        "norm_mean": [0.5, 0.5, 0.5],
        "norm_std": [0.25, 0.25, 0.25],
        "image_tag_type": "internvl",
        "template": "nemotron",
        "ps_version": "v2",
        "vit_hidden_size": 384,
        "projector_hidden_size": 128,
    }
    write_remote_config(folder, "NemotronH_Nano_VL_V2", fields)


#: Without weights.
PROCESSORS = (
    # Its processor adds tokens to the tokenizer, which the prompts of chats contain.
    Family(
        "ovis2_5",
        {"image": 2, "video": 1},
        BOTH,
        written_by(write_ovis2_5, __file__),
        # Small frames are enlarged: 3538 tokens for a short video.
        extra_flags=(TRUSTED, "--max-model-len=16384", "--max-num-batched-tokens=16384"),
    ),
    # Towers of a fixed size; no tile for a small image.
    Family("deepseek_ocr", {"image": 2}, IMAGE, written_by(write_deepseek_ocr, __file__)),
    Family("deepseek_ocr2", {"image": 2}, IMAGE, written_by(write_deepseek_ocr2, __file__)),
    # Windows over an image of a fixed size, with a mark after each row.
    Family("step3_vl", {"image": 2}, STEP, written_by(write_step3_vl, __file__)),
    # Functions decorated with `torch.compile`; texts between the frames of a video; Mamba layers.
    Family(
        "nemotron_nano_vl",
        {"image": 2, "video": 1},
        BOTH,
        written_by(write_nemotron_nano_vl, __file__),
        extra_flags=(TRUSTED,),
    ),
    # Likewise, with a size of each image that depends on the length of the prompt.
    Family(
        "nemotron_dynamic",
        {"image": 2, "video": 1},
        BOTH,
        written_by(write_nemotron_dynamic, __file__),
        extra_flags=(TRUSTED,),
    ),
)

#: Tiles for up to two images in a request, none for each of more.
DEPENDENT = (Family("deepseek_vl2", {"image": 4}, IMAGE, written_by(write_deepseek_vl2, __file__), stage="decoded"),)

#: Those with weights: 800 MB in a tower of timm.
DEPENDENT_WHOLE = tuple(
    replace(family, build=written_by(with_weights(write_deepseek_vl2, separate=True), __file__), needs="timm")
    for family in DEPENDENT
)
