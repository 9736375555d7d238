"""Tiny models of LLaVA's kind: an image becomes as many tokens as its tower has patches, square or of its own shape."""

from __future__ import annotations

from pathlib import Path

from family import ALL_PREDICTED, Family, written_by
from tiny_recipe import LANGUAGE, TOWER, TOWER_NAMES, ids, tokenizer, write_model
from transformers import (
    CLIPImageProcessor,
    LightOnOcrConfig,
    LightOnOcrForConditionalGeneration,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaNextImageProcessor,
    LlavaNextVideoConfig,
    LlavaNextVideoForConditionalGeneration,
    LlavaNextVideoProcessor,
    LlavaNextVideoVideoProcessor,
    LlavaOnevisionConfig,
    LlavaOnevisionForConditionalGeneration,
    LlavaOnevisionImageProcessor,
    LlavaOnevisionProcessor,
    LlavaOnevisionVideoProcessor,
    LlavaProcessor,
    Mistral3Config,
    Mistral3ForConditionalGeneration,
    PixtralImageProcessor,
    PixtralProcessor,
    PreTrainedTokenizerFast,
)

LLAVA = {"image": "<image>"}
ONEVISION = {"image": "<image>", "video": "<video>"}
VIDEO = {"video": "<video>"}
PIXTRAL = {"image": "[IMG]"}

_SQUARE = {"height": 112, "width": 112}
_PINPOINTS = [[112, 224], [224, 112], [224, 224], [336, 112], [112, 336]]

#: Pixtral's tower: patches of 14 pixels, as many as the image has.
_PIXTRAL = {
    "model_type": "pixtral",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "head_dim": 16,
    "image_size": 448,
    "patch_size": 14,
}
_PIXTRAL_SPECIAL = ["[IMG]", "[IMG_BREAK]", "[IMG_END]"]
_PIXTRAL_NAMED = {"image_token": "[IMG]", "image_break_token": "[IMG_BREAK]", "image_end_token": "[IMG_END]"}


def write_llava(folder: Path) -> None:
    words = tokenizer(["<image>"], LLAVA, named={"image_token": "<image>"})
    config = LlavaConfig(
        text_config=LANGUAGE | {"model_type": "llama"},
        vision_config=TOWER | {"model_type": "clip_vision_model"},
        vision_feature_select_strategy="default",
        tie_word_embeddings=False,
        **ids(words, image_token_index="<image>"),
    )
    write_model(folder, LlavaForConditionalGeneration(config), renames=TOWER_NAMES)
    LlavaProcessor(
        CLIPImageProcessor(size={"shortest_edge": 112}, crop_size=_SQUARE),
        words,
        patch_size=14,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=words.chat_template,
    ).save_pretrained(folder)


def write_llava_onevision(folder: Path) -> None:
    words = tokenizer(["<image>", "<video>"], ONEVISION, named={"image_token": "<image>", "video_token": "<video>"})
    config = LlavaOnevisionConfig(
        text_config=LANGUAGE | {"model_type": "qwen2"},
        vision_config=TOWER | {"model_type": "siglip_vision_model", "vision_use_head": False},
        image_grid_pinpoints=_PINPOINTS,
        tie_word_embeddings=False,
        **ids(words, image_token_index="<image>", video_token_index="<video>"),
    )
    write_model(folder, LlavaOnevisionForConditionalGeneration(config), renames=TOWER_NAMES)
    LlavaOnevisionProcessor(
        LlavaOnevisionImageProcessor(size=_SQUARE, image_grid_pinpoints=_PINPOINTS),
        words,
        LlavaOnevisionVideoProcessor(size=_SQUARE),
        num_image_tokens=64,
        vision_feature_select_strategy="full",
        chat_template=words.chat_template,
    ).save_pretrained(folder)


def write_pixtral_hf(folder: Path) -> None:
    words = tokenizer(_PIXTRAL_SPECIAL, PIXTRAL, named=_PIXTRAL_NAMED)
    config = LlavaConfig(
        text_config=LANGUAGE | {"model_type": "mistral"},
        vision_config=_PIXTRAL,
        vision_feature_select_strategy="full",
        vision_feature_layer=-1,
        tie_word_embeddings=False,
        **ids(words, image_token_index="[IMG]"),
    )
    write_model(folder, LlavaForConditionalGeneration(config))
    _write_pixtral_processor(folder, words, spatial_merge_size=1)


def write_mistral3(folder: Path) -> None:
    words = tokenizer(_PIXTRAL_SPECIAL, PIXTRAL, named=_PIXTRAL_NAMED)
    config = Mistral3Config(
        text_config=LANGUAGE | {"model_type": "mistral"},
        vision_config=_PIXTRAL,
        spatial_merge_size=2,
        tie_word_embeddings=False,
        **ids(words, image_token_index="[IMG]"),
    )
    write_model(folder, Mistral3ForConditionalGeneration(config))
    _write_pixtral_processor(folder, words, spatial_merge_size=2)


def write_lightonocr(folder: Path) -> None:
    words = tokenizer(_PIXTRAL_SPECIAL, PIXTRAL, named=_PIXTRAL_NAMED)
    parts = {
        "text_config": LANGUAGE | {"model_type": "qwen3"},
        "vision_config": _PIXTRAL,
        "spatial_merge_size": 2,
        "tie_word_embeddings": False,
    }
    write_model(
        folder, LightOnOcrForConditionalGeneration(LightOnOcrConfig(**parts, **ids(words, image_token_id="[IMG]")))
    )
    # The hub's checkpoints have the configuration and the processor of Mistral 3.
    config = Mistral3Config(**parts, **ids(words, image_token_index="[IMG]"))
    config.architectures, config.dtype = ["LightOnOCRForConditionalGeneration"], "bfloat16"
    config.save_pretrained(folder)
    _write_pixtral_processor(folder, words, spatial_merge_size=2)


def write_llava_next_video(folder: Path) -> None:
    words = tokenizer(["<image>", "<video>"], VIDEO, named={"image_token": "<image>", "video_token": "<video>"})
    config = LlavaNextVideoConfig(
        text_config=LANGUAGE | {"model_type": "llama"},
        vision_config=TOWER | {"model_type": "clip_vision_model", "image_size": 224},
        image_grid_pinpoints=_PINPOINTS,
        tie_word_embeddings=False,
        **ids(words, image_token_index="<image>", video_token_index="<video>"),
    )
    write_model(folder, LlavaNextVideoForConditionalGeneration(config), renames=TOWER_NAMES)
    size = {"size": {"shortest_edge": 224}, "crop_size": {"height": 224, "width": 224}}
    LlavaNextVideoProcessor(
        LlavaNextVideoVideoProcessor(**size),
        LlavaNextImageProcessor(**size, image_grid_pinpoints=_PINPOINTS),
        words,
        patch_size=14,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=words.chat_template,
    ).save_pretrained(folder)


def _write_pixtral_processor(folder: Path, words: PreTrainedTokenizerFast, *, spatial_merge_size: int) -> None:
    PixtralProcessor(
        PixtralImageProcessor(size={"longest_edge": 448}, patch_size={"height": 14, "width": 14}),
        words,
        patch_size=14,
        spatial_merge_size=spatial_merge_size,
        chat_template=words.chat_template,
    ).save_pretrained(folder)


FAMILIES = (
    # As many tokens for every image: neither sizes nor fields are read.
    Family("llava", {"image": 2}, LLAVA, written_by(write_llava, __file__), predicted=frozenset(("tokens", "bytes"))),
    # Tiles of images and frames of videos in one family. vLLM 0.32 fails on two videos of different numbers of frames.
    Family(
        "llava_onevision",
        {"image": 2, "video": 1},
        ONEVISION,
        written_by(write_llava_onevision, __file__),
        predicted=frozenset(("tokens",)),
        padded=frozenset(("pixel_values",)),
    ),
    # Images of their own shape, a token after each row of patches.
    Family("pixtral_hf", {"image": 2}, PIXTRAL, written_by(write_pixtral_hf, __file__), predicted=ALL_PREDICTED),
    # Likewise, with patches merged and pixels as bytes, which the model normalises.
    Family("mistral3", {"image": 2}, PIXTRAL, written_by(write_mistral3, __file__), predicted=ALL_PREDICTED),
    # Likewise, with images of a request padded to one size and cut back.
    Family("lightonocr", {"image": 2}, PIXTRAL, written_by(write_lightonocr, __file__), predicted=ALL_PREDICTED),
    # Frames of a video, pooled. vLLM takes one video, and no images.
    Family("llava_next_video", {"video": 1}, VIDEO, written_by(write_llava_next_video, __file__)),
)
