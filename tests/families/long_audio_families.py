"""Tiny models of families that split audio into windows of 30 s: the masks of several are larger than small fields."""

from __future__ import annotations

from pathlib import Path

from family import Family, written_by
from tiny_recipe import LANGUAGE, ids, tokenizer, write_model
from transformers import (
    AudioFlamingo3Config,
    AudioFlamingo3ForConditionalGeneration,
    AudioFlamingo3Processor,
    GlmAsrConfig,
    GlmAsrForConditionalGeneration,
    GlmAsrProcessor,
    WhisperFeatureExtractor,
)

PAD, PAD_START, PAD_STOP = "<|pad|>", "<|begin_of_audio|>", "<|end_of_audio|>"
GLM_PROMPT = {"audio": f"{PAD_START}{PAD}{PAD_STOP}"}

SOUND = "<sound>"
FLAMINGO_PROMPT = {"audio": SOUND}

#: transformers saves the language model one level deeper than the checkpoints of the hub have it.
DEEPER = {"language_model.model.model.": "language_model.model."}

#: The projector's input is four frames of the encoder.
_ENCODER = {"hidden_size": 64, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4}


def write_glmasr(folder: Path) -> None:
    words = tokenizer([PAD, PAD_START, PAD_STOP], GLM_PROMPT)
    config = GlmAsrConfig(
        audio_config=_ENCODER | {"num_mel_bins": 128, "max_position_embeddings": 1500},
        text_config=LANGUAGE | {"model_type": "llama"},
        tie_word_embeddings=False,
        **ids(words, audio_token_id=PAD),
    )
    write_model(folder, GlmAsrForConditionalGeneration(config), renames=DEEPER)
    GlmAsrProcessor(_ear(), words, chat_template=words.chat_template).save_pretrained(folder)


def write_audioflamingo3(folder: Path) -> None:
    words = tokenizer([SOUND], FLAMINGO_PROMPT)
    config = AudioFlamingo3Config(
        audio_config=_ENCODER | {"num_mel_bins": 128, "max_source_positions": 1500},
        text_config=LANGUAGE | {"model_type": "qwen2"},
        tie_word_embeddings=False,
        **ids(words, audio_token_id=SOUND),
    )
    write_model(folder, AudioFlamingo3ForConditionalGeneration(config), renames=DEEPER)
    AudioFlamingo3Processor(_ear(), words, chat_template=words.chat_template, audio_token=SOUND).save_pretrained(folder)


def _ear() -> WhisperFeatureExtractor:
    return WhisperFeatureExtractor(feature_size=128, return_attention_mask=True)


FAMILIES = (
    # Windows of one clip, counted by a mask; two clips in a request fail in the family's own processor.
    Family("glmasr", {"audio": 1}, GLM_PROMPT, written_by(write_glmasr, __file__)),
    Family("audioflamingo3", {"audio": 1}, FLAMINGO_PROMPT, written_by(write_audioflamingo3, __file__)),
)
