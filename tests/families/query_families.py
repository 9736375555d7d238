"""Tiny models of families that turn every image into the same number of tokens, by learnt queries."""

from __future__ import annotations

from pathlib import Path

from family import ALL_PREDICTED, Family, written_by
from tiny_recipe import LANGUAGE, TOWER, VOCABULARY, ids, tokenizer, write_model
from transformers import (
    AriaConfig,
    AriaForConditionalGeneration,
    AriaImageProcessor,
    AriaProcessor,
    Blip2Config,
    Blip2ForConditionalGeneration,
    Blip2Processor,
    BlipImageProcessor,
)

ARIA = {"image": "<|img|>"}

_SQUARE = {"height": 112, "width": 112}


def write_blip2(folder: Path) -> None:
    words = tokenizer(["<image>"], {}, named={"image_token": "<image>"})
    config = Blip2Config(
        text_config={
            "model_type": "opt",
            "vocab_size": VOCABULARY,
            "hidden_size": 128,
            "word_embed_proj_dim": 128,
            "ffn_dim": 256,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "max_position_embeddings": 4096,
            "bos_token_id": 0,
            "eos_token_id": 2,
            "pad_token_id": 0,
            "tie_word_embeddings": False,
        },
        vision_config=TOWER,
        qformer_config={
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "vocab_size": VOCABULARY,
        },
        num_query_tokens=8,
        image_text_hidden_size=64,
        tie_word_embeddings=False,
        **ids(words, image_token_index="<image>"),
    )
    write_model(folder, Blip2ForConditionalGeneration(config))
    Blip2Processor(BlipImageProcessor(size=_SQUARE), words, num_query_tokens=8).save_pretrained(folder)


def write_aria(folder: Path) -> None:
    words = tokenizer(["<|img|>"], ARIA, named={"image_token": "<|img|>"})
    config = AriaConfig(
        text_config=LANGUAGE
        | {
            "model_type": "aria_text",
            "intermediate_size": 64,
            "moe_num_experts": 4,
            "moe_topk": 2,
            "moe_num_shared_experts": 1,
            "pad_token_id": 0,
        },
        vision_config=TOWER | {"image_size": 980},
        projector_patch_to_query_dict={4900: 64},
        tie_word_embeddings=False,
        **ids(words, image_token_index="<|img|>"),
    )
    write_model(folder, AriaForConditionalGeneration(config))
    AriaProcessor(
        AriaImageProcessor(),
        words,
        chat_template=words.chat_template,
        size_conversion={980: 64},
    ).save_pretrained(folder)


FAMILIES = (
    # Nothing in the prompt stands for the image: its tokens are inserted at the start.
    Family("blip2", {"image": 1}, {}, written_by(write_blip2, __file__), predicted=ALL_PREDICTED),
    # A mask of the pixels, which the model reads.
    Family("aria", {"image": 2}, ARIA, written_by(write_aria, __file__), predicted=ALL_PREDICTED),
)
