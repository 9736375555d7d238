"""Tiny models of families with audio: Qwen2-Audio, and Qwen2.5-Omni's thinker, which supports all modalities."""

from __future__ import annotations

import json
from pathlib import Path

from family import ALL_PREDICTED, Family, written_by
from tiny_recipe import LANGUAGE, TURN_END, ids, tokenizer, write_model
from transformers import (
    Qwen2_5OmniProcessor,
    Qwen2_5OmniThinkerConfig,
    Qwen2_5OmniThinkerForConditionalGeneration,
    Qwen2AudioConfig,
    Qwen2AudioForConditionalGeneration,
    Qwen2AudioProcessor,
    Qwen2VLImageProcessor,
    Qwen2VLVideoProcessor,
    WhisperFeatureExtractor,
)

AUDIO, AUDIO_START, AUDIO_STOP = "<|AUDIO|>", "<|audio_bos|>", "<|audio_eos|>"
AUDIO_PROMPT = {"audio": f"{AUDIO_START}{AUDIO}{AUDIO_STOP}"}

_IMAGE, _VIDEO, _START, _STOP = "<|IMAGE|>", "<|VIDEO|>", "<|vision_bos|>", "<|vision_eos|>"
OMNI = {"image": f"{_START}{_IMAGE}{_STOP}", "video": f"{_START}{_VIDEO}{_STOP}", **AUDIO_PROMPT}

_ENCODER = {
    "num_mel_bins": 128,
    "encoder_layers": 2,
    "encoder_attention_heads": 4,
    "encoder_ffn_dim": 128,
    "d_model": 64,
    "max_source_positions": 1500,
}
_NAMED = {"audio_token": AUDIO, "audio_bos_token": AUDIO_START, "audio_eos_token": AUDIO_STOP}


def write_qwen2_audio(folder: Path) -> None:
    words = tokenizer([AUDIO, AUDIO_START, AUDIO_STOP], AUDIO_PROMPT, named=_NAMED)
    config = Qwen2AudioConfig(
        text_config=LANGUAGE | {"model_type": "qwen2"},
        audio_config=_ENCODER | {"model_type": "qwen2_audio_encoder"},
        tie_word_embeddings=False,
        **ids(words, audio_token_index=AUDIO),
    )
    # transformers saves the language model one level deeper than the hub's checkpoints have it.
    deeper = {"language_model.model.model.": "language_model.model."}
    write_model(folder, Qwen2AudioForConditionalGeneration(config), renames=deeper)
    Qwen2AudioProcessor(_ear(), words, chat_template=words.chat_template).save_pretrained(folder)


def write_qwen2_5_omni(folder: Path) -> None:
    vision = {"image_token": _IMAGE, "video_token": _VIDEO, "vision_bos_token": _START, "vision_eos_token": _STOP}
    words = tokenizer([AUDIO, AUDIO_START, AUDIO_STOP, _IMAGE, _VIDEO, _START, _STOP], OMNI, named={**_NAMED, **vision})
    config = Qwen2_5OmniThinkerConfig(
        text_config=LANGUAGE
        | {"rope_parameters": {"rope_type": "default", "mrope_section": [4, 6, 6], "rope_theta": 1e6}},
        audio_config=_ENCODER | {"n_window": 100, "output_dim": 128},
        vision_config={
            "depth": 2,
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_heads": 4,
            "out_hidden_size": 128,
            "fullatt_block_indexes": [1],
        },
        tie_word_embeddings=False,
        **ids(
            words,
            audio_token_index=AUDIO,
            image_token_index=_IMAGE,
            video_token_index=_VIDEO,
            audio_start_token_id=AUDIO_START,
            audio_end_token_id=AUDIO_STOP,
            vision_start_token_id=_START,
            vision_end_token_id=_STOP,
            eos_token_id=TURN_END,
        ),
    )
    # The hub's checkpoints hold thinker, talker and vocoder, and configurations of all; vLLM uses the first.
    write_model(folder, Qwen2_5OmniThinkerForConditionalGeneration(config), renames={"": "thinker."})
    whole = {
        "architectures": ["Qwen2_5OmniModel"],
        "model_type": "qwen2_5_omni",
        "dtype": "bfloat16",
        "thinker_config": config.to_dict(),
    }
    (folder / "config.json").write_text(json.dumps(whole, indent=2))
    size = {"shortest_edge": 3136, "longest_edge": 1 << 20}
    Qwen2_5OmniProcessor(
        Qwen2VLImageProcessor(size=size),
        Qwen2VLVideoProcessor(size=size),
        _ear(),
        words,
        chat_template=words.chat_template,
    ).save_pretrained(folder)


def _ear() -> WhisperFeatureExtractor:
    return WhisperFeatureExtractor(feature_size=128, return_attention_mask=True)


FAMILIES = (
    # Masks that the prompt's expansion reads.
    Family("qwen2_audio", {"audio": 2}, AUDIO_PROMPT, written_by(write_qwen2_audio, __file__), in_make_test=True),
    # Three modalities in one prompt.
    Family(
        "qwen2_5_omni",
        {"image": 2, "video": 1, "audio": 2},
        OMNI,
        written_by(write_qwen2_5_omni, __file__),
        predicted=ALL_PREDICTED,
        has_pixel_limits=True,
        in_make_test=True,
    ),
)
