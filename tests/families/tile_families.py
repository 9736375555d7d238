"""Tiny models of families that cut an image into tiles, whose arrangement is written into the prompt."""

from __future__ import annotations

import json
from pathlib import Path

from family import Family, written_by
from tiny_recipe import LANGUAGE, QWEN3_5_LAYERS, TOWER, TOWER_NAMES, ids, tokenizer, write_model
from transformers import (
    Cohere2VisionConfig,
    Cohere2VisionForConditionalGeneration,
    Cohere2VisionImageProcessor,
    Cohere2VisionProcessor,
    Idefics3Config,
    Idefics3ForConditionalGeneration,
    Idefics3ImageProcessor,
    Idefics3Processor,
    Lfm2VlConfig,
    Lfm2VlForConditionalGeneration,
    Lfm2VlImageProcessor,
    Lfm2VlProcessor,
    Llama4Config,
    Llama4ForConditionalGeneration,
    Llama4ImageProcessor,
    Llama4Processor,
    MiniCPMV4_6Config,
    MiniCPMV4_6ForConditionalGeneration,
    MiniCPMV4_6ImageProcessor,
    MiniCPMV4_6Processor,
    MiniCPMV4_6VideoProcessor,
    MiniCPMV4_7Config,
    MiniCPMV4_7ForConditionalGeneration,
    MiniCPMV4_7Processor,
    PreTrainedTokenizerFast,
    QianfanOCRConfig,
    QianfanOCRForConditionalGeneration,
    SmolVLMConfig,
    SmolVLMForConditionalGeneration,
    SmolVLMImageProcessor,
    SmolVLMProcessor,
    SmolVLMVideoProcessor,
)
from transformers.processing_utils import ProcessorMixin

IDEFICS = {"image": "<image>"}
LLAMA4 = {"image": "<|image|>"}
LFM = {"image": "<image>"}
MINICPM = {"image": "<|image_pad|>", "video": "<|video_pad|>"}
COHERE = {"image": "<|IMG_PATCH|>"}
QIANFAN = {"image": "<image>"}

_IDEFICS_SPECIAL = [
    "<image>",
    "<fake_token_around_image>",
    "<global-img>",
    "<end_of_utterance>",
    *(f"<row_{row}_col_{column}>" for row in range(1, 5) for column in range(1, 5)),
]
_IDEFICS_NAMED = {
    "image_token": "<image>",
    "fake_image_token": "<fake_token_around_image>",
    "global_image_token": "<global-img>",
    "end_of_utterance_token": "<end_of_utterance>",
}
_IDEFICS_SIZES = {"size": {"longest_edge": 448}, "max_image_size": {"longest_edge": 112}}


def write_idefics3(folder: Path) -> None:
    words = tokenizer(_IDEFICS_SPECIAL, IDEFICS, named=_IDEFICS_NAMED)
    config = Idefics3Config(
        text_config=LANGUAGE | {"model_type": "llama"},
        vision_config=TOWER | {"model_type": "idefics3_vision"},
        scale_factor=2,
        pad_token_id=0,
        tie_word_embeddings=False,
        **ids(words, image_token_id="<image>"),
    )
    write_model(folder, Idefics3ForConditionalGeneration(config))
    Idefics3Processor(
        Idefics3ImageProcessor(**_IDEFICS_SIZES), words, image_seq_len=16, chat_template=words.chat_template
    ).save_pretrained(folder)


def write_smolvlm(folder: Path) -> None:
    words = tokenizer(_IDEFICS_SPECIAL, IDEFICS, named=_IDEFICS_NAMED)
    config = SmolVLMConfig(
        text_config=LANGUAGE | {"model_type": "llama"},
        vision_config=TOWER | {"model_type": "smolvlm_vision"},
        scale_factor=2,
        pad_token_id=0,
        tie_word_embeddings=False,
        **ids(words, image_token_id="<image>"),
    )
    write_model(folder, SmolVLMForConditionalGeneration(config))
    SmolVLMProcessor(
        SmolVLMImageProcessor(**_IDEFICS_SIZES),
        words,
        SmolVLMVideoProcessor(
            **_IDEFICS_SIZES, video_sampling={"max_frames": 8, "fps": 1, "video_size": {"longest_edge": 112}}
        ),
        image_seq_len=16,
        chat_template=words.chat_template,
    ).save_pretrained(folder)


def write_llama4(folder: Path) -> None:
    special = {
        "image_token": "<|image|>",
        "start_of_image_token": "<|image_start|>",
        "end_of_image_token": "<|image_end|>",
        "patch_token": "<|patch|>",
        "tile_x_separator_token": "<|tile_x_separator|>",
        "tile_y_separator_token": "<|tile_y_separator|>",
    }
    words = tokenizer(list(special.values()), LLAMA4, named=special)
    config = Llama4Config(
        text_config=LANGUAGE
        | {"intermediate_size_mlp": 256, "num_local_experts": 4, "interleave_moe_layer_step": 1, "pad_token_id": 0},
        vision_config={
            "hidden_size": 64,
            "intermediate_size": 256,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "image_size": 28,
            "patch_size": 14,
            "vision_output_dim": 64,
            "projector_input_dim": 64,
            "projector_output_dim": 64,
        },
        tie_word_embeddings=False,
        **ids(words, boi_token_index="<|image_start|>", eoi_token_index="<|image_end|>", image_token_index="<|patch|>"),
    )
    write_model(folder, Llama4ForConditionalGeneration(config))
    Llama4Processor(
        Llama4ImageProcessor(size={"height": 28, "width": 28}, max_patches=6, resize_to_max_canvas=False),
        words,
        patch_size=14,
        chat_template=words.chat_template,
    ).save_pretrained(folder)


def write_cohere2_vision(folder: Path) -> None:
    special = {
        "image_token": "<|IMG_PATCH|>",
        "boi_token": "<|START_OF_IMG|>",
        "eoi_token": "<|END_OF_IMG|>",
        "img_line_break_token": "<|IMG_LINE_BREAK|>",
    }
    words = tokenizer(list(special.values()), COHERE, named=special)
    # The processor counts patch_size squared tokens in a tile, the model (image_size / patch_size / 2) squared.
    config = Cohere2VisionConfig(
        text_config=LANGUAGE | {"model_type": "cohere2", "sliding_window": 512, "tie_word_embeddings": True},
        vision_config=TOWER
        | {"model_type": "siglip_vision_model", "vision_use_head": False, "image_size": 128, "patch_size": 8},
        downsample_factor=2,
        alignment_intermediate_size=256,
        tie_word_embeddings=True,
        **ids(words, image_token_id="<|IMG_PATCH|>"),
    )
    write_model(folder, Cohere2VisionForConditionalGeneration(config), embeddings=0.01, renames=TOWER_NAMES)
    Cohere2VisionProcessor(
        Cohere2VisionImageProcessor(size={"height": 128, "width": 128}, patch_size=8, max_patches=6),
        words,
        chat_template=words.chat_template,
    ).save_pretrained(folder)


def write_lfm2_vl(folder: Path) -> None:
    named = {
        "image_token": "<image>",
        "image_start_token": "<|image_start|>",
        "image_end_token": "<|image_end|>",
        "image_thumbnail_token": "<|img_thumbnail|>",
    }
    tiles = [f"<|img_row_{row}_col_{column}|>" for row in range(1, 5) for column in range(1, 5)]
    words = tokenizer([*named.values(), *tiles], LFM, named=named)
    config = Lfm2VlConfig(
        text_config=LANGUAGE
        | {
            "model_type": "lfm2",
            "tie_word_embeddings": True,
            "layer_types": ["conv", "full_attention"],
            "block_auto_adjust_ff_dim": False,
            # vLLM reads these two, which transformers does not know.
            "conv_dim": 128,
            "block_dim": 128,
        },
        vision_config={
            "model_type": "siglip2_vision_model",
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "patch_size": 16,
            "num_patches": 256,
            "vision_use_head": False,
        },
        projector_hidden_size=128,
        downsample_factor=2,
        tie_word_embeddings=True,
        **ids(words, image_token_id="<image>"),
    )
    write_model(folder, Lfm2VlForConditionalGeneration(config), embeddings=0.01, renames=TOWER_NAMES)
    images = Lfm2VlImageProcessor(
        tile_size=128,
        min_tiles=2,
        max_tiles=4,
        min_image_tokens=4,
        max_image_tokens=32,
        max_num_patches=256,
        encoder_patch_size=16,
    )
    Lfm2VlProcessor(images, words, chat_template=words.chat_template).save_pretrained(folder)


def write_minicpmv4_6(folder: Path) -> None:
    words = _minicpm_tokenizer()
    config = MiniCPMV4_6Config(**_MINICPM_CONFIG, **ids(words, **_MINICPM_IDS))
    write_model(folder, MiniCPMV4_6ForConditionalGeneration(config))
    _write_minicpm_processor(folder, MiniCPMV4_6Processor, words)


def write_minicpmv4_7(folder: Path) -> None:
    words = _minicpm_tokenizer()
    marks = {
        "image_start_id": "<image>",
        "image_end_id": "</image>",
        "slice_start_id": "<slice>",
        "slice_end_id": "</slice>",
        "newline_id": "\n",
    }
    config = MiniCPMV4_7Config(**_MINICPM_CONFIG, **ids(words, **_MINICPM_IDS, **marks))
    write_model(folder, MiniCPMV4_7ForConditionalGeneration(config))
    _write_minicpm_processor(folder, MiniCPMV4_7Processor, words)


_MINICPM_IDS = {"image_token_id": "<|image_pad|>", "video_token_id": "<|video_pad|>"}
_MINICPM_CONFIG = {
    "text_config": LANGUAGE | QWEN3_5_LAYERS | {"model_type": "qwen3_5_text"},
    "vision_config": {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "image_size": 224,
        "patch_size": 14,
    },
    "insert_layer_id": 0,
    "image_size": 224,
    "tie_word_embeddings": False,
}


def _minicpm_tokenizer() -> PreTrainedTokenizerFast:
    named = {
        "image_token": "<|image_pad|>",
        "video_token": "<|video_pad|>",
        "image_start_token": "<image>",
        "image_end_token": "</image>",
        "slice_start_token": "<slice>",
        "slice_end_token": "</slice>",
        "image_id_start_token": "<image_id>",
        "image_id_end_token": "</image_id>",
    }
    return tokenizer(list(named.values()), MINICPM, literal=("\n",), named=named)


def _write_minicpm_processor(folder: Path, processor: type[ProcessorMixin], words: PreTrainedTokenizerFast) -> None:
    sizes = {"scale_resolution": 224}
    processor(
        MiniCPMV4_6ImageProcessor(**sizes),
        MiniCPMV4_6VideoProcessor(**sizes, max_num_frames=8),
        words,
        chat_template=words.chat_template,
    ).save_pretrained(folder)


def write_qianfan_ocr(folder: Path) -> None:
    words = tokenizer(["<img>", "</img>", "<IMG_CONTEXT>"], QIANFAN)
    config = QianfanOCRConfig(
        text_config=LANGUAGE | {"model_type": "qwen3"},
        vision_config={
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "image_size": 112,
            "patch_size": 14,
        },
        image_seq_length=16,
        tie_word_embeddings=False,
        **ids(words, image_token_id="<IMG_CONTEXT>"),
    )
    # transformers undoes its renaming of the tower's layers in the language model, too.
    deeper = {"language_model.model.encoder.layers.": "language_model.model.layers."}
    write_model(folder, QianfanOCRForConditionalGeneration(config), renames=deeper)
    words.save_pretrained(folder)
    # vLLM has its own classes for configuration and processor, which the hub's files fit.
    path = folder / "config.json"
    found = json.loads(path.read_text())
    found["vision_config"] |= {"image_size": 112, "patch_size": 14, "qkv_bias": True, "qk_normalization": False}
    found |= {"force_image_size": 112, "min_dynamic_patch": 1, "max_dynamic_patch": 6, "use_thumbnail": True}
    path.write_text(json.dumps(found, indent=2))


FAMILIES = (
    # A mask as large as the pixels; a token for each tile's row and column.
    Family(
        "idefics3",
        {"image": 2},
        IDEFICS,
        written_by(write_idefics3, __file__),
        predicted=frozenset(("tokens", "bytes")),
    ),
    # Likewise, with other defaults of its own.
    Family(
        "smolvlm",
        {"image": 2},
        IDEFICS,
        written_by(write_smolvlm, __file__),
        predicted=frozenset(("tokens", "bytes")),
        needs="num2words",
    ),
    # Aspect ratios and numbers of tiles, from which the separators between tiles follow. Tiles are small, so that every
    # image has several: vLLM's kernels for CPUs fail on one tile.
    Family("llama4", {"image": 2}, LLAMA4, written_by(write_llama4, __file__)),
    # Line breaks between tiles; a number of tiles by the image's size alone.
    Family("cohere2_vision", {"image": 2}, COHERE, written_by(write_cohere2_vision, __file__)),
    # Tiles padded to as many patches each, and their shapes.
    Family("lfm2_vl", {"image": 2}, LFM, written_by(write_lfm2_vl, __file__)),
    # An image's number in the request is in its text; frames are cut into slices, too.
    Family("minicpmv4_6", {"image": 2, "video": 1}, MINICPM, written_by(write_minicpmv4_6, __file__)),
    # Likewise, with rotary positions by the slices' places in the image.
    Family("minicpmv4_7", {"image": 2, "video": 1}, MINICPM, written_by(write_minicpmv4_7, __file__)),
    # InternVL's older processor, which is vLLM's own: there is none in the checkpoint.
    Family(
        "qianfan_ocr",
        {"image": 2},
        QIANFAN,
        written_by(write_qianfan_ocr, __file__),
        predicted=frozenset(("tokens", "bytes")),
    ),
)
