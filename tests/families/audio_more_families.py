"""Tiny models of further families with audio, whose tokens follow from the clip's length."""

from __future__ import annotations

import json
from pathlib import Path

from family import ALL_PREDICTED, Family, written_by
from qwen_families import HALF, PATCHES
from tiny_recipe import LANGUAGE, TURN_END, ids, tokenizer, write_model
from transformers import (
    GraniteSpeechConfig,
    GraniteSpeechFeatureExtractor,
    GraniteSpeechForConditionalGeneration,
    GraniteSpeechProcessor,
    Qwen2VLImageProcessor,
    Qwen3ASRConfig,
    Qwen3ASRFeatureExtractor,
    Qwen3ASRForConditionalGeneration,
    Qwen3ASRProcessor,
    Qwen3OmniMoeProcessor,
    Qwen3OmniMoeThinkerConfig,
    Qwen3OmniMoeThinkerForConditionalGeneration,
    Qwen3VLVideoProcessor,
    WhisperFeatureExtractor,
)

AUDIO, AUDIO_START, AUDIO_STOP = "<|audio_pad|>", "<|audio_start|>", "<|audio_end|>"
QWEN_AUDIO = {"audio": f"{AUDIO_START}{AUDIO}{AUDIO_STOP}"}

GRANITE = {"audio": "<|audio|>"}

_IMAGE, _VIDEO, _START, _STOP = "<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>"
OMNI = {"image": f"{_START}{_IMAGE}{_STOP}", "video": f"{_START}{_VIDEO}{_STOP}", **QWEN_AUDIO}

_NAMED = {"audio_token": AUDIO, "audio_bos_token": AUDIO_START, "audio_eos_token": AUDIO_STOP}
_ENCODER = {
    "num_mel_bins": 128,
    "encoder_layers": 2,
    "encoder_attention_heads": 4,
    "encoder_ffn_dim": 128,
    "d_model": 64,
    "downsample_hidden_size": 32,
    "output_dim": 128,
}


def write_qwen3_asr(folder: Path) -> None:
    words = tokenizer([AUDIO, AUDIO_START, AUDIO_STOP], QWEN_AUDIO, named=_NAMED)
    config = Qwen3ASRConfig(
        text_config=LANGUAGE | {"model_type": "qwen3"},
        audio_config=_ENCODER,
        pad_token_id=0,
        tie_word_embeddings=False,
        **ids(words, audio_token_id=AUDIO, timestamp_token_id=AUDIO_STOP, eos_token_id=TURN_END),
    )
    write_model(folder, Qwen3ASRForConditionalGeneration(config), renames={"lm_head.": "thinker.lm_head."})
    Qwen3ASRProcessor(
        Qwen3ASRFeatureExtractor(feature_size=128), words, chat_template=words.chat_template
    ).save_pretrained(folder)


def write_qwen3_omni(folder: Path) -> None:
    vision = {"image_token": _IMAGE, "video_token": _VIDEO, "vision_bos_token": _START, "vision_eos_token": _STOP}
    words = tokenizer([AUDIO, AUDIO_START, AUDIO_STOP, _IMAGE, _VIDEO, _START, _STOP], OMNI, named=_NAMED | vision)
    config = Qwen3OmniMoeThinkerConfig(
        text_config=LANGUAGE
        | {
            "rope_parameters": {"rope_type": "default", "mrope_section": [4, 6, 6], "rope_theta": 1e6},
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 64,
        },
        audio_config=_ENCODER,
        vision_config={
            "depth": 2,
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_heads": 4,
            "out_hidden_size": 128,
            "num_position_embeddings": 256,
            "deepstack_visual_indexes": [0],
        },
        tie_word_embeddings=False,
        **ids(
            words,
            audio_token_id=AUDIO,
            image_token_id=_IMAGE,
            video_token_id=_VIDEO,
            audio_start_token_id=AUDIO_START,
        ),
    )
    write_model(folder, Qwen3OmniMoeThinkerForConditionalGeneration(config), renames={"": "thinker."})
    # vLLM reads fields that transformers does not write.
    thinker = config.to_dict()
    thinker |= ids(words, audio_end_token_id=AUDIO_STOP, vision_start_token_id=_START, vision_end_token_id=_STOP)
    thinker["vision_config"] |= {"image_size": 256, "apply_vit_abs_pos_embed": True}
    whole = {
        "architectures": ["Qwen3OmniMoeForConditionalGeneration"],
        "model_type": "qwen3_omni_moe",
        "dtype": "bfloat16",
        "thinker_config": thinker,
    }
    (folder / "config.json").write_text(json.dumps(whole, indent=2))
    size = {"shortest_edge": 4096, "longest_edge": 1 << 20}
    Qwen3OmniMoeProcessor(
        Qwen2VLImageProcessor(**PATCHES, **HALF, size=size),
        Qwen3VLVideoProcessor(**PATCHES, **HALF, size=size),
        WhisperFeatureExtractor(feature_size=128, return_attention_mask=True),
        words,
        chat_template=words.chat_template,
    ).save_pretrained(folder)


def write_granite_speech(folder: Path) -> None:
    words = tokenizer(["<|audio|>"], GRANITE, named={"audio_token": "<|audio|>"})
    config = GraniteSpeechConfig(
        text_config=LANGUAGE | {"model_type": "granite"},
        encoder_config={"num_layers": 2, "hidden_dim": 64, "num_heads": 4, "input_dim": 160, "output_dim": 42},
        projector_config={
            "model_type": "blip_2_qformer",
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 1,
            "num_attention_heads": 4,
            "encoder_hidden_size": 64,
            "cross_attention_frequency": 1,
        },
        has_lora_adapter=False,
        tie_word_embeddings=False,
        **ids(words, audio_token_index="<|audio|>"),
    )
    # transformers saves the language model one level deeper than the hub's checkpoints have it.
    deeper = {"language_model.model.model.": "language_model.model."}
    write_model(folder, GraniteSpeechForConditionalGeneration(config), renames=deeper)
    GraniteSpeechProcessor(GraniteSpeechFeatureExtractor(), words, chat_template=words.chat_template).save_pretrained(
        folder
    )


FAMILIES = (
    # Features as long as the clip.
    Family("qwen3_asr", {"audio": 2}, QWEN_AUDIO, written_by(write_qwen3_asr, __file__)),
    # Likewise, and grids of patches; clips of a request are padded before their spectrum is computed.
    Family(
        "qwen3_omni",
        {"image": 2, "video": 1, "audio": 2},
        OMNI,
        written_by(write_qwen3_omni, __file__),
        joint=frozenset(("input_audio_features",)),
        predicted=ALL_PREDICTED,
        has_pixel_limits=True,
    ),
    # Windows of a clip, and a mask made from the clip's own length. vLLM takes one clip.
    Family("granite_speech", {"audio": 1}, GRANITE, written_by(write_granite_speech, __file__)),
)
