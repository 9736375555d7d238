"""Tiny models of Qwen's families with images and video. Qwen2.5-VL is the product's own tiny model."""

from __future__ import annotations

from pathlib import Path

from family import ALL_PREDICTED, Family, written_by
from tiny_recipe import LANGUAGE, TURN_END, ids, tokenizer, write_model
from transformers import (
    Qwen2VLImageProcessor,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
    Qwen3VLProcessor,
    Qwen3VLVideoProcessor,
)

from medialane.testing.tiny_model import build_tiny_model

IMAGE, VIDEO, START, STOP = "<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>"
VISION = {"image": f"{START}{IMAGE}{STOP}", "video": f"{START}{VIDEO}{STOP}"}

PATCHES = {"patch_size": 16, "temporal_patch_size": 2, "merge_size": 2}
HALF = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}


def write_qwen3_vl(folder: Path) -> None:
    words = tokenizer(
        [START, STOP, IMAGE, VIDEO],
        VISION,
        named={"image_token": IMAGE, "video_token": VIDEO, "vision_bos_token": START, "vision_eos_token": STOP},
    )
    config = Qwen3VLConfig(
        text_config=LANGUAGE
        | {"rope_parameters": {"rope_type": "default", "mrope_section": [4, 6, 6], "rope_theta": 1e6}},
        vision_config={
            "depth": 2,
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_heads": 4,
            "out_hidden_size": 128,
            "patch_size": 16,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
            "num_position_embeddings": 256,
            "deepstack_visual_indexes": [0],
        },
        tie_word_embeddings=False,
        **ids(
            words,
            image_token_id=IMAGE,
            video_token_id=VIDEO,
            vision_start_token_id=START,
            vision_end_token_id=STOP,
            eos_token_id=TURN_END,
        ),
    )
    write_model(folder, Qwen3VLForConditionalGeneration(config))
    images = Qwen2VLImageProcessor(**PATCHES, **HALF, size={"shortest_edge": 4096, "longest_edge": 1 << 20})
    videos = Qwen3VLVideoProcessor(**PATCHES, **HALF, size={"shortest_edge": 4096, "longest_edge": 1 << 22})
    Qwen3VLProcessor(images, words, videos, chat_template=words.chat_template).save_pretrained(folder)


FAMILIES = (
    # Grids of patches in flat fields; frames sampled by the default sampler.
    Family(
        "qwen2_5_vl",
        {"image": 2, "video": 2},
        VISION,
        build_tiny_model,
        predicted=ALL_PREDICTED,
        has_pixel_limits=True,
        in_make_test=True,
    ),
    # Text (timestamps) inside a video's placeholder, an embedding mask, its own frame sampler.
    Family(
        "qwen3_vl",
        {"image": 2, "video": 2},
        VISION,
        written_by(write_qwen3_vl, __file__),
        predicted=ALL_PREDICTED,
        has_pixel_limits=True,
        in_make_test=True,
    ),
)
