"""Tiny pooling models with audio: embeddings of images, videos and audio, and classes of all tokens of a transcript."""

from __future__ import annotations

import json
from pathlib import Path

from audio_more_families import QWEN_AUDIO, write_qwen3_asr
from family import Family, written_by
from processor_families import GEMMA4, GEMMA4_AUDIO, GEMMA4_VISION, gemma_ids, gemma_tokenizer
from tiny_recipe import LANGUAGE, VOCABULARY, ids, write_model
from transformers import (
    EmbeddingGemma2Config,
    EmbeddingGemma2Model,
    EmbeddingGemma2Processor,
    EmbeddingGemma2VideoProcessor,
    Gemma4AudioFeatureExtractor,
    Gemma4ImageProcessor,
)

_POOLING = ("--runner", "pooling")


def write_forced_aligner(folder: Path) -> None:
    """Qwen3-ASR, whose head has a class for each time."""
    write_qwen3_asr(folder)
    path = folder / "config.json"
    config = json.loads(path.read_text())
    thinker = {name: config.pop(name) for name in list(config) if name.endswith(("_config", "_token_id"))}
    config |= {
        "architectures": ["Qwen3ASRForcedAlignerForTokenClassification"],
        "thinker_config": thinker | {"classify_num": VOCABULARY, "model_type": "qwen3_asr_thinker"},
    }
    path.write_text(json.dumps(config, indent=2))


def write_embedding_gemma2(folder: Path) -> None:
    words = gemma_tokenizer(GEMMA4)
    text = LANGUAGE | {"hidden_size_per_layer_input": 32, "embedding_dim": 64, "sliding_window": 512}
    config = EmbeddingGemma2Config(
        text_config=text | {"layer_types": ["sliding_attention", "full_attention"]},
        vision_config=GEMMA4_VISION,
        audio_config=GEMMA4_AUDIO | {"output_proj_dims": 128},
        **ids(words, eoa_token_index="<audio|>", video_token_id="<|video|>"),
        **gemma_ids(words),
    )
    write_model(folder, EmbeddingGemma2Model(config))
    EmbeddingGemma2Processor(
        Gemma4AudioFeatureExtractor(),
        Gemma4ImageProcessor(max_soft_tokens=70),
        words,
        EmbeddingGemma2VideoProcessor(max_soft_tokens=70, num_frames=4),
        image_seq_length=70,
        chat_template=words.chat_template,
    ).save_pretrained(folder)


FAMILIES = (
    Family(
        "qwen3_asr_aligner", {"audio": 2}, QWEN_AUDIO, written_by(write_forced_aligner, __file__), extra_flags=_POOLING
    ),
    Family(
        "embedding_gemma2",
        {"image": 2, "video": 1, "audio": 2},
        GEMMA4,
        written_by(write_embedding_gemma2, __file__),
        extra_flags=_POOLING,
    ),
)
