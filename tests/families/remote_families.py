"""Tiny models of families whose processors are code in the hub's checkpoints (`--trust-remote-code`).

`remote_code` has a processor for each, with that code's interface and rules, written for these tests.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import hub_names
import torch
from family import ALL_PREDICTED, Family, written_by
from hub_names import deepseek_layers, whisper_layers, with_hub_names
from remote_recipe import TRUSTED, with_weights, write_config, write_json, write_remote_config, write_remote_processor
from tiny_recipe import LANGUAGE, TOWER, ids, tokenizer
from transformers import WhisperFeatureExtractor

ULTRAVOX = {"audio": "<|audio|>"}
KIMI = {"image": "<|media_start|>image<|media_content|><|media_pad|><|media_end|>"}
MOLMO = {"image": "<|image|>", "video": "<|video|>"}
MINICPM = {"image": "(<image>./</image>)", "video": "(<video>./</video>)"}
KEYE = {modality: f"<|vision_start|><|{modality}_pad|><|vision_end|>" for modality in ("image", "video")}
DASHENG = {"audio": "<|audio_bos|><|AUDIO|><|audio_eos|>"}


def write_ultravox(folder: Path) -> None:
    words = tokenizer(["<|audio|>"], ULTRAVOX)
    ear = {
        "model_type": "whisper",
        "d_model": 64,
        "encoder_layers": 2,
        "encoder_attention_heads": 4,
        "encoder_ffn_dim": 128,
        "num_mel_bins": 80,
        "max_source_positions": 1500,
    }
    fields = {
        "model_type": "ultravox",
        "audio_config": ear,
        "text_config": LANGUAGE | {"model_type": "llama"},
        "hidden_size": 128,
        "vocab_size": LANGUAGE["vocab_size"],
        "stack_factor": 8,
        "projector_ln_mid": True,
        **ids(words, audio_token_index="<|audio|>"),
    }
    write_config(folder, "UltravoxModel", fields)
    words.save_pretrained(folder)
    WhisperFeatureExtractor(feature_size=80).save_pretrained(folder)
    write_remote_processor(folder, "ultravox")


def write_kimi_vl(folder: Path) -> None:
    words = tokenizer(["<|media_start|>", "<|media_content|>", "<|media_pad|>", "<|media_end|>"], KIMI)
    text = LANGUAGE | {
        "model_type": "deepseek_v2",
        "kv_lora_rank": 512,
        "q_lora_rank": None,
        "qk_nope_head_dim": 32,
        "qk_rope_head_dim": 64,
        "v_head_dim": 32,
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
        "first_k_dense_replace": 1,
        "n_group": 1,
        "topk_group": 1,
        "topk_method": "greedy",
    }
    tower = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    fields = {
        "model_type": "kimi_vl",
        "text_config": text,
        "vision_config": tower | {"model_type": "moonvit", "init_pos_emb_height": 16, "init_pos_emb_width": 16},
        **ids(words, media_placeholder_token_id="<|media_pad|>"),
    }
    write_config(folder, "KimiVLForConditionalGeneration", fields)
    words.save_pretrained(folder)
    write_remote_processor(folder, "kimi_vl")


def write_midashenglm(folder: Path) -> None:
    words = tokenizer(["<|AUDIO|>", "<|audio_bos|>", "<|audio_eos|>"], DASHENG)
    ear = {"embed_dim": 64, "outputdim": 64, "depth": 2, "num_heads": 4, "patch_size": [64, 4], "patch_stride": [64, 4]}
    fields = {
        "model_type": "midashenglm",
        "audio_encoder_config": ear,
        "text_config": LANGUAGE | {"model_type": "qwen2_5_omni_text"},
        **ids(words, audio_token_id="<|AUDIO|>"),
    }
    write_config(folder, "MiDashengLMModel", fields)
    words.save_pretrained(folder)
    write_remote_processor(folder, "midashenglm")


def write_molmo2(folder: Path) -> None:
    marks = ["<im_patch>", "<im_col>", "<im_start>", "<low_res_im_start>", "<frame_start>", "<im_end>", "<frame_end>"]
    words = tokenizer([*marks, "<im_low>", "<|image|>", "<|video|>"], MOLMO)
    shared = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 16}
    tower = shared | {
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "hidden_act": "gelu_pytorch_tanh",
        "layer_norm_eps": 1e-6,
        "image_default_input_size": [112, 112],
        "image_patch_size": 14,
        "image_num_pos": 64,
    }
    adapter = shared | {
        "vit_layers": [-1, -2],
        "pooling_attention_mask": True,
        "hidden_act": "silu",
        "intermediate_size": 128,
        "text_hidden_size": 128,
    }
    text = LANGUAGE | {
        "model_type": "molmo2_text",
        "additional_vocab_size": 128,
        "qkv_bias": True,
        "hidden_act": "silu",
        "rope_theta": 1e6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
        "use_qk_norm": True,
        "qk_norm_type": "qwen3",
        "layer_norm_eps": 1e-6,
        "norm_after": False,
        "rope_scaling_layers": None,
    }
    fields = {
        "model_type": "molmo2",
        "vit_config": tower,
        "adapter_config": adapter,
        "text_config": text,
        **ids(
            words,
            image_patch_id="<im_patch>",
            image_col_id="<im_col>",
            image_low_res_id="<im_low>",
            image_start_token_id="<im_start>",
            image_end_token_id="<im_end>",
            low_res_image_start_token_id="<low_res_im_start>",
            frame_start_token_id="<frame_start>",
            frame_end_token_id="<frame_end>",
        ),
    }
    write_remote_config(folder, "Molmo2ForConditionalGeneration", fields)
    words.save_pretrained(folder)
    write_json(folder / "video_preprocessor_config.json", {"video_processor_type": "Molmo2VideoProcessor"})
    write_remote_processor(folder, "molmo2")


def write_keye(folder: Path) -> None:
    words = tokenizer(["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"], KEYE)
    tower = TOWER | {
        "model_type": "keye_vision",
        "num_channels": 3,
        "spatial_merge_size": 2,
        "hidden_act": "gelu_pytorch_tanh",
        "layer_norm_eps": 1e-6,
    }
    fields = LANGUAGE | {
        "model_type": "Keye",
        "vision_config": tower,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [4, 6, 6]},
        **ids(words, image_token_id="<|image_pad|>", video_token_id="<|video_pad|>"),
    }
    write_remote_config(folder, "KeyeForConditionalGeneration", fields)
    words.save_pretrained(folder)
    write_remote_processor(folder, "keye")


def write_minicpmv(folder: Path) -> None:
    marks = [f"<{end}{name}>" for name in ("image", "slice", "image_id") for end in ("", "/")]
    tokenizer([*marks, "<unk>", "<im_start>", "<im_end>"], MINICPM).save_pretrained(folder)
    fields = LANGUAGE | {
        "model_type": "minicpmv",
        "version": 2.6,
        "vision_config": TOWER | {"model_type": "siglip_vision_model"},
        "query_num": 16,
        "drop_vision_last_layer": False,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
    }
    write_remote_config(folder, "MiniCPMV", fields)
    write_remote_processor(folder, "minicpmv")
    images = {"AutoImageProcessor": "processing_tiny.TinyImageProcessor"}
    write_json(folder / "preprocessor_config.json", {"auto_map": images})


def molmo_embeddings(name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """The ids of marks are apart from the ids of text."""
    if name == "model.embed_tokens.weight":
        text, marks = tensor.split([LANGUAGE["vocab_size"], 128])
        yield "model.transformer.wte.embedding", text.contiguous()
        yield "model.transformer.wte.new_embedding", marks.contiguous()
    else:
        yield name, tensor


def built_with(write: Callable[[Path], None], code: str) -> Callable[[Path], Path]:
    """`written_by` for a family whose processor is the module `code`."""
    return written_by(write, __file__, hub_names.__file__, str(Path(__file__).parent / "remote_code" / f"{code}.py"))


FAMILIES = (
    # Chunks of a clip; the first is as long as the longest clip of the request.
    Family(
        "ultravox",
        {"audio": 2},
        ULTRAVOX,
        built_with(with_hub_names(with_weights(write_ultravox), whisper_layers), "ultravox"),
        padded=frozenset(("audio_features",)),
        joint=frozenset(("audio_features",)),
        extra_flags=(TRUSTED,),
    ),
    # Which patches a token pools is a field; the marks between patches are embeddings, too; a sampling of its own.
    Family(
        "molmo2",
        {"image": 2, "video": 1},
        MOLMO,
        built_with(with_hub_names(with_weights(write_molmo2), molmo_embeddings), "molmo2"),
        predicted=frozenset(("tokens",)),
        extra_flags=(TRUSTED,),
    ),
    # Waveforms as they are.
    Family(
        "midashenglm",
        {"audio": 2},
        DASHENG,
        built_with(with_weights(write_midashenglm), "midashenglm"),
        padded=frozenset(("input_values",)),
        extra_flags=(TRUSTED,),
    ),
    # A position for each patch, and for each frame of a video.
    Family(
        "keye",
        {"image": 2, "video": 1},
        KEYE,
        built_with(with_weights(write_keye), "keye"),
        predicted=ALL_PREDICTED,
        extra_flags=(TRUSTED,),
    ),
    # Patches of an image of any size; latent attention, of whose sizes vLLM supports one on a CPU.
    Family(
        "kimi_vl",
        {"image": 2},
        KIMI,
        built_with(with_hub_names(with_weights(write_kimi_vl), deepseek_layers), "kimi_vl"),
        predicted=frozenset(("tokens", "bytes")),
        extra_flags=(TRUSTED,),
    ),
)

#: Not compared with plain vLLM.
PROCESSORS = (
    # The number of an image is part of its text; lists of slices; placeholders that are text to the tokenizer. vLLM's
    # model asks for CUDA.
    Family(
        "minicpmv",
        {"image": 2, "video": 1},
        MINICPM,
        built_with(with_weights(write_minicpmv), "minicpmv"),
        extra_flags=(TRUSTED,),
    ),
)
