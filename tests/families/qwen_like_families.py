"""Tiny models of families that, like Qwen's, describe an image or video by its grid of patches."""

from __future__ import annotations

from pathlib import Path

from family import ALL_PREDICTED, Family, written_by
from qwen_families import HALF, IMAGE, PATCHES, START, STOP, VIDEO, VISION
from tiny_recipe import LANGUAGE, QWEN3_5_LAYERS, TURN_END, ids, tokenizer, write_model
from transformers import (
    Exaone4_5_Config,
    Exaone4_5_ForConditionalGeneration,
    Exaone4_5_Processor,
    Glm4vConfig,
    Glm4vForConditionalGeneration,
    Glm4vImageProcessor,
    Glm4vProcessor,
    Glm4vVideoProcessor,
    GlmOcrConfig,
    GlmOcrForConditionalGeneration,
    PaddleOCRVLConfig,
    PaddleOCRVLForConditionalGeneration,
    PaddleOCRVLImageProcessor,
    PaddleOCRVLProcessor,
    PreTrainedTokenizerFast,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
    Qwen2VLImageProcessor,
    Qwen2VLProcessor,
    Qwen2VLVideoProcessor,
    Qwen3_5Config,
    Qwen3_5ForConditionalGeneration,
    Qwen3VLMoeConfig,
    Qwen3VLMoeForConditionalGeneration,
    Qwen3VLProcessor,
    Qwen3VLVideoProcessor,
)

_QWEN_NAMED = {"image_token": IMAGE, "video_token": VIDEO, "vision_bos_token": START, "vision_eos_token": STOP}
_ROPE = {"rope_parameters": {"rope_type": "default", "mrope_section": [4, 6, 6], "rope_theta": 1e6}}
_SIZE = {"shortest_edge": 3136, "longest_edge": 1 << 20}
_TOWER = {
    "depth": 2,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_heads": 4,
    "out_hidden_size": 128,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
}
_QWEN3_TOWER = _TOWER | {"patch_size": 16, "num_position_embeddings": 256}

_GLM = {"image": "<|begin_of_image|><|image|><|end_of_image|>", "video": "<|begin_of_video|><|video|><|end_of_video|>"}
_GLM_SPECIAL = [f"<|{name}{kind}|>" for kind in ("image", "video") for name in ("begin_of_", "", "end_of_")]

_PADDLE_START, _PADDLE_STOP, _PADDLE_IMAGE = "<|IMAGE_START|>", "<|IMAGE_END|>", "<|IMAGE_PLACEHOLDER|>"
_PADDLE = {"image": f"{_PADDLE_START}{_PADDLE_IMAGE}{_PADDLE_STOP}"}


def write_qwen2_vl(folder: Path) -> None:
    words = _qwen_tokenizer()
    config = Qwen2VLConfig(
        text_config=LANGUAGE | _ROPE,
        vision_config={"depth": 2, "embed_dim": 64, "hidden_size": 128, "num_heads": 4, "mlp_ratio": 2},
        tie_word_embeddings=False,
        **_qwen_ids(words),
    )
    write_model(folder, Qwen2VLForConditionalGeneration(config))
    Qwen2VLProcessor(
        Qwen2VLImageProcessor(size=_SIZE), words, Qwen2VLVideoProcessor(size=_SIZE), chat_template=words.chat_template
    ).save_pretrained(folder)


def write_qwen3_vl_moe(folder: Path) -> None:
    words = _qwen_tokenizer()
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "norm_topk_prob": True}
    config = Qwen3VLMoeConfig(
        text_config=LANGUAGE | _ROPE | experts,
        vision_config=_QWEN3_TOWER | {"deepstack_visual_indexes": [0]},
        tie_word_embeddings=False,
        **_qwen_ids(words),
    )
    write_model(
        folder,
        Qwen3VLMoeForConditionalGeneration(config),
        transposed=("experts.gate_up_proj", "experts.down_proj"),
    )
    _write_qwen3_processor(folder, words)


def write_qwen3_5(folder: Path) -> None:
    words = _qwen_tokenizer()
    config = Qwen3_5Config(
        text_config=LANGUAGE | QWEN3_5_LAYERS,
        vision_config=_QWEN3_TOWER,
        tie_word_embeddings=False,
        **_qwen_ids(words),
    )
    write_model(folder, Qwen3_5ForConditionalGeneration(config))
    _write_qwen3_processor(folder, words)


def write_glm4v(folder: Path) -> None:
    words = _glm_tokenizer()
    config = Glm4vConfig(
        text_config=LANGUAGE | {"rope_parameters": _GLM_ROPE},
        vision_config=_TOWER | {"image_size": 224},
        tie_word_embeddings=False,
        **_glm_ids(words),
    )
    write_model(folder, Glm4vForConditionalGeneration(config))
    _write_glm_processor(folder, words)


def write_glm_ocr(folder: Path) -> None:
    words = _glm_tokenizer()
    config = GlmOcrConfig(
        text_config=LANGUAGE | {"rope_parameters": _GLM_ROPE},
        vision_config=_TOWER | {"image_size": 224},
        tie_word_embeddings=False,
        **_glm_ids(words),
    )
    write_model(folder, GlmOcrForConditionalGeneration(config))
    _write_glm_processor(folder, words)


def write_paddleocr_vl(folder: Path) -> None:
    words = tokenizer([_PADDLE_START, _PADDLE_STOP, _PADDLE_IMAGE], _PADDLE, named={"image_token": _PADDLE_IMAGE})
    config = PaddleOCRVLConfig(
        text_config=LANGUAGE | _ROPE,
        vision_config={
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "image_size": 224,
        },
        tie_word_embeddings=False,
        **ids(
            words,
            image_token_id=_PADDLE_IMAGE,
            video_token_id=_PADDLE_IMAGE,
            vision_start_token_id=_PADDLE_START,
            vision_end_token_id=_PADDLE_STOP,
        ),
    )
    write_model(folder, PaddleOCRVLForConditionalGeneration(config))
    PaddleOCRVLProcessor(
        PaddleOCRVLImageProcessor(size=_SIZE), words, chat_template=words.chat_template
    ).save_pretrained(folder)


def write_exaone4_5(folder: Path) -> None:
    words = _qwen_tokenizer()
    config = Exaone4_5_Config(
        text_config=LANGUAGE | {"model_type": "exaone4", "sliding_window": 512, "sliding_window_pattern": 2},
        vision_config=_TOWER | {"num_key_value_heads": 2, "fullatt_block_indexes": [1]},
        tie_word_embeddings=False,
        **ids(words, image_token_id=IMAGE, video_token_id=VIDEO),
    )
    write_model(folder, Exaone4_5_ForConditionalGeneration(config))
    Exaone4_5_Processor(
        Qwen2VLImageProcessor(size=_SIZE), words, Qwen2VLVideoProcessor(size=_SIZE), chat_template=words.chat_template
    ).save_pretrained(folder)


_GLM_ROPE = {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 1e4, "partial_rotary_factor": 0.5}


def _qwen_tokenizer() -> PreTrainedTokenizerFast:
    return tokenizer([START, STOP, IMAGE, VIDEO], VISION, named=_QWEN_NAMED)


def _qwen_ids(words: PreTrainedTokenizerFast) -> dict[str, int]:
    return ids(
        words,
        image_token_id=IMAGE,
        video_token_id=VIDEO,
        vision_start_token_id=START,
        vision_end_token_id=STOP,
        eos_token_id=TURN_END,
    )


def _write_qwen3_processor(folder: Path, words: PreTrainedTokenizerFast) -> None:
    size = {"shortest_edge": 4096, "longest_edge": 1 << 20}
    Qwen3VLProcessor(
        Qwen2VLImageProcessor(**PATCHES, **HALF, size=size),
        words,
        Qwen3VLVideoProcessor(**PATCHES, **HALF, size=size),
        chat_template=words.chat_template,
    ).save_pretrained(folder)


def _glm_tokenizer() -> PreTrainedTokenizerFast:
    return tokenizer(_GLM_SPECIAL, _GLM, named={"image_token": "<|image|>", "video_token": "<|video|>"})


def _glm_ids(words: PreTrainedTokenizerFast) -> dict[str, int]:
    return ids(
        words,
        image_token_id="<|image|>",
        video_token_id="<|video|>",
        image_start_token_id="<|begin_of_image|>",
        image_end_token_id="<|end_of_image|>",
        video_start_token_id="<|begin_of_video|>",
        video_end_token_id="<|end_of_video|>",
    )


def _write_glm_processor(folder: Path, words: PreTrainedTokenizerFast) -> None:
    size = {"shortest_edge": 112 * 112, "longest_edge": 1 << 20}
    Glm4vProcessor(
        Glm4vImageProcessor(size=size),
        words,
        Glm4vVideoProcessor(size=size, max_image_size={"longest_edge": 1 << 20}),
        chat_template=words.chat_template,
    ).save_pretrained(folder)


FAMILIES = (
    # As Qwen2.5-VL, without the seconds of a video's grid.
    Family(
        "qwen2_vl",
        {"image": 2, "video": 2},
        VISION,
        written_by(write_qwen2_vl, __file__),
        predicted=ALL_PREDICTED,
        has_pixel_limits=True,
    ),
    # As Qwen3-VL, with experts in the language model.
    Family(
        "qwen3_vl_moe",
        {"image": 2, "video": 2},
        VISION,
        written_by(write_qwen3_vl_moe, __file__),
        predicted=ALL_PREDICTED,
        has_pixel_limits=True,
    ),
    # As Qwen3-VL, with a language model whose state is not in KV blocks alone.
    Family(
        "qwen3_5",
        {"image": 2, "video": 2},
        VISION,
        written_by(write_qwen3_5, __file__),
        predicted=ALL_PREDICTED,
        has_pixel_limits=True,
    ),
    # A video's text has timestamps, computed from its metadata. vLLM 0.32 takes one video.
    Family("glm4v", {"image": 2, "video": 1}, _GLM, written_by(write_glm4v, __file__), predicted=ALL_PREDICTED),
    # As GLM-4V, with another tower.
    Family(
        "glm_ocr", {"image": 2}, {"image": _GLM["image"]}, written_by(write_glm_ocr, __file__), predicted=ALL_PREDICTED
    ),
    # Patches in four dimensions, whose number the size of the image says, not the grid.
    Family(
        "paddleocr_vl",
        {"image": 2},
        _PADDLE,
        written_by(write_paddleocr_vl, __file__),
        predicted=ALL_PREDICTED,
        has_pixel_limits=True,
    ),
    # As Qwen2-VL, without rotary positions in three dimensions.
    Family(
        "exaone4_5",
        {"image": 2, "video": 2},
        VISION,
        written_by(write_exaone4_5, __file__),
        predicted=ALL_PREDICTED,
        has_pixel_limits=True,
    ),
)
