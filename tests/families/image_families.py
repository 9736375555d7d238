"""Tiny models of families with images, one of them also with video."""

from __future__ import annotations

from pathlib import Path

from family import ALL_PREDICTED, Family, written_by
from tiny_recipe import LANGUAGE, TOWER, TOWER_NAMES, ids, tokenizer, write_model
from transformers import (
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    Gemma3ImageProcessor,
    Gemma3Processor,
    GotOcr2ImageProcessor,
    InternVLConfig,
    InternVLForConditionalGeneration,
    InternVLProcessor,
    InternVLVideoProcessor,
    LlavaNextConfig,
    LlavaNextForConditionalGeneration,
    LlavaNextImageProcessor,
    LlavaNextProcessor,
    PaliGemmaConfig,
    PaliGemmaForConditionalGeneration,
    PaliGemmaProcessor,
    SiglipImageProcessor,
)

LLAVA = {"image": "<image>"}
GEMMA = {"image": "<start_of_image>"}
INTERNVL = {"image": "<IMG_CONTEXT>", "video": "<video>"}

_SQUARE = {"height": 112, "width": 112}
_PINPOINTS = [[112, 224], [224, 112], [224, 224], [336, 112], [112, 336]]


def write_llava_next(folder: Path) -> None:
    words = tokenizer(["<image>"], LLAVA, named={"image_token": "<image>"})
    config = LlavaNextConfig(
        text_config=LANGUAGE | {"model_type": "llama"},
        vision_config=TOWER | {"model_type": "clip_vision_model"},
        image_grid_pinpoints=_PINPOINTS,
        tie_word_embeddings=False,
        **ids(words, image_token_index="<image>"),
    )
    write_model(folder, LlavaNextForConditionalGeneration(config), renames=TOWER_NAMES)
    images = LlavaNextImageProcessor(
        size={"shortest_edge": 112}, crop_size=_SQUARE, image_grid_pinpoints=_PINPOINTS, do_pad=True
    )
    LlavaNextProcessor(
        images,
        words,
        patch_size=14,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=words.chat_template,
    ).save_pretrained(folder)


def write_gemma3(folder: Path) -> None:
    start, stop, image = "<start_of_image>", "<end_of_image>", "<image_soft_token>"
    words = tokenizer(
        [start, stop, image],
        GEMMA,
        literal=("\n", "\n\n", "\n\n\n", "\n\n\n\n"),
        named={"boi_token": start, "eoi_token": stop, "image_token": image},
    )
    config = Gemma3Config(
        text_config=LANGUAGE
        | {
            "model_type": "gemma3_text",
            "tie_word_embeddings": True,
            "query_pre_attn_scalar": 32,
            "sliding_window": 512,
        },
        vision_config=TOWER | {"model_type": "siglip_vision_model", "vision_use_head": False},
        mm_tokens_per_image=16,
        tie_word_embeddings=True,
        **ids(words, boi_token_index=start, eoi_token_index=stop, image_token_index=image),
    )
    write_model(folder, Gemma3ForConditionalGeneration(config), embeddings=0.01, renames=TOWER_NAMES)
    Gemma3Processor(
        Gemma3ImageProcessor(size=_SQUARE), words, chat_template=words.chat_template, image_seq_length=16
    ).save_pretrained(folder)


def write_internvl(folder: Path) -> None:
    image, video, start, stop = "<IMG_CONTEXT>", "<video>", "<img>", "</img>"
    words = tokenizer(
        [image, video, start, stop],
        INTERNVL,
        named={
            "context_image_token": image,
            "video_token": video,
            "start_image_token": start,
            "end_image_token": stop,
        },
    )
    config = InternVLConfig(
        text_config=LANGUAGE | {"model_type": "qwen2"},
        vision_config=TOWER | {"model_type": "internvl_vision", "image_size": [112, 112], "patch_size": [14, 14]},
        image_seq_length=16,
        tie_word_embeddings=False,
        **ids(words, image_token_id=image),
    )
    write_model(folder, InternVLForConditionalGeneration(config))
    images = GotOcr2ImageProcessor(size=_SQUARE, crop_to_patches=True, min_patches=1, max_patches=6)
    InternVLProcessor(
        images,
        words,
        InternVLVideoProcessor(size=_SQUARE),
        image_seq_length=16,
        chat_template=words.chat_template,
    ).save_pretrained(folder)


def write_paligemma(folder: Path) -> None:
    words = tokenizer(["<image>"], {}, literal=("\n",), named={"image_token": "<image>"})
    config = PaliGemmaConfig(
        text_config=LANGUAGE | {"model_type": "gemma", "tie_word_embeddings": True},
        vision_config=TOWER | {"model_type": "siglip_vision_model", "vision_use_head": False, "projection_dim": 128},
        projection_dim=128,
        hidden_size=128,
        tie_word_embeddings=True,
        **ids(words, image_token_index="<image>"),
    )
    write_model(folder, PaliGemmaForConditionalGeneration(config), embeddings=0.01, renames=TOWER_NAMES)
    images = SiglipImageProcessor(size=_SQUARE)
    images.image_seq_length = 64
    PaliGemmaProcessor(images, words, chat_template=words.chat_template).save_pretrained(folder)


FAMILIES = (
    # As many tokens as the image's own size says; as many tiles as the request's largest image has.
    Family(
        "llava_next",
        {"image": 2},
        LLAVA,
        written_by(write_llava_next, __file__),
        predicted=frozenset(("tokens",)),
        padded=frozenset(("pixel_values",)),
        in_make_test=True,
    ),
    # Newlines around an image merge with those of the text.
    Family(
        "gemma3", {"image": 2}, GEMMA, written_by(write_gemma3, __file__), predicted=ALL_PREDICTED, in_make_test=True
    ),
    # Tiles; one text for frames and tiles; a field that is shared by all videos.
    Family(
        "internvl",
        {"image": 2, "video": 1},
        INTERNVL,
        written_by(write_internvl, __file__),
        predicted=frozenset(("tokens", "bytes")),
        in_make_test=True,
    ),
    # No placeholder in the prompt; its own `apply`.
    Family(
        "paligemma", {"image": 1}, {}, written_by(write_paligemma, __file__), predicted=ALL_PREDICTED, in_make_test=True
    ),
)
