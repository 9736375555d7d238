"""Tiny pooling models unlike Qwen3-VL: two encoders without a common prompt (CLIP, SigLIP), placeholders that are
inserted instead of replaced, and generation models that are served for pooling."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from family import Family, written_by
from image_families import LLAVA, write_llava_next, write_paligemma
from qwen_families import VISION
from qwen_like_families import write_qwen2_vl
from remote_recipe import TRUSTED, with_weights, write_remote_config
from safetensors.torch import load_file, save_file
from tiny_recipe import LANGUAGE, TOWER, VOCABULARY, tokenizer, write_model
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    CLIPConfig,
    CLIPImageProcessor,
    CLIPModel,
    CLIPProcessor,
    Idefics3ImageProcessor,
    ModernBertConfig,
    ModernBertModel,
    PreTrainedTokenizerFast,
    SiglipConfig,
    SiglipImageProcessor,
    SiglipModel,
    SiglipProcessor,
    SiglipVisionConfig,
    SiglipVisionModel,
)

from medialane.testing.tiny_model import SENTENCES, random_weights

_SQUARE = {"height": 112, "width": 112}
_COLUMNS = 32
_WIDTH = int(LANGUAGE["hidden_size"])


def _words() -> PreTrainedTokenizerFast:
    """A tokenizer whose first ids are not special, as CLIP's: one of them stands for an image's embedding. It has no
    chat template, since vLLM has one for these models."""
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trained.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY - 2, initial_alphabet=alphabet, min_frequency=1, show_progress=False
    )
    trained.train_from_iterator(SENTENCES, trainer)
    start, end = "<|startoftext|>", "<|endoftext|>"
    trained.add_special_tokens([start, end])
    return PreTrainedTokenizerFast(tokenizer_object=trained, bos_token=start, eos_token=end, pad_token=end)


_TEXT = {
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 77,
    "projection_size": 128,
}


def write_clip(folder: Path) -> None:
    words = _words()
    ends = {"bos_token_id": words.bos_token_id, "eos_token_id": words.eos_token_id}
    size = {"projection_dim": 128}
    config = CLIPConfig(text_config=_TEXT | ends | size, vision_config=TOWER | size, **size)
    write_model(folder, CLIPModel(config))
    images = CLIPImageProcessor(size={"shortest_edge": 112}, crop_size=_SQUARE)
    CLIPProcessor(images, words).save_pretrained(folder)


def write_siglip(folder: Path) -> None:
    words = _words()
    ends = {"bos_token_id": words.bos_token_id, "eos_token_id": words.eos_token_id}
    tower = TOWER | {"hidden_size": 128, "intermediate_size": 256}  # the size of both embeddings
    config = SiglipConfig(text_config=_TEXT | ends, vision_config=tower)
    write_model(folder, SiglipModel(config))
    SiglipProcessor(SiglipImageProcessor(size=_SQUARE), words).save_pretrained(folder)


def _extend(folder: Path, weights: Mapping[str, tuple[int, ...]], **config: object) -> None:
    """Add weights of these shapes, and fields of the configuration, to a model in `folder`."""
    generator = torch.Generator().manual_seed(1)
    drawn = {name: torch.randn(shape, generator=generator) / shape[-1] ** 0.5 for name, shape in weights.items()}
    path = folder / "model.safetensors"
    save_file(load_file(path) | {name: tensor.bfloat16() for name, tensor in drawn.items()}, path, {"format": "pt"})
    found = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(found | config, indent=2))


def write_colpali(folder: Path) -> None:
    """PaliGemma with a projection of each token's hidden state."""
    write_paligemma(folder)
    _extend(
        folder,
        {"custom_text_proj.weight": (_COLUMNS, _WIDTH)},
        architectures=["ColPaliForRetrieval"],
        model_type="colpali",
        embedding_dim=_COLUMNS,
    )


def write_jina_vl(folder: Path) -> None:
    """Qwen2-VL with a scorer."""
    write_qwen2_vl(folder)
    scorer = {"score.0.weight": (_WIDTH, _WIDTH), "score.0.bias": (_WIDTH,), "score.2.weight": (1, _WIDTH)}
    _extend(folder, scorer | {"score.2.bias": (1,)}, architectures=["JinaVLForRanking"], num_labels=1)


class _ColModernVBert(torch.nn.Module):
    """The modules of a checkpoint of ColModernVBERT, by name."""

    def __init__(self, text: ModernBertConfig, vision: SiglipVisionConfig, factor: int) -> None:
        super().__init__()
        self.text_model = ModernBertModel(text)
        self.vision_model = SiglipVisionModel(vision)
        self.connector = torch.nn.Module()
        self.connector.modality_projection = torch.nn.Linear(
            vision.hidden_size * factor**2, text.hidden_size, bias=False
        )
        self.custom_text_proj = torch.nn.Linear(text.hidden_size, _COLUMNS)


def write_colmodernvbert(folder: Path) -> None:
    words = _words()
    (image,) = words.convert_tokens_to_ids(["Q"])
    text = _TEXT | {"max_position_embeddings": 512, "pad_token_id": words.pad_token_id}
    vision = TOWER | {"vision_use_head": False}
    modules = _ColModernVBert(ModernBertConfig(**text), SiglipVisionConfig(**vision), factor=2)
    generator = torch.Generator().manual_seed(0)
    state = {
        f"model.{name}".replace("vision_model.", "vision_model.vision_model."): random_weights(
            name, parameter, generator
        ).bfloat16()
        for name, parameter in modules.named_parameters()
    }
    save_file(state, folder / "model.safetensors", {"format": "pt"})
    config = {
        "architectures": ["ColModernVBertForRetrieval"],
        "model_type": "modernvbert",
        "dtype": "bfloat16",
        "embedding_dim": _COLUMNS,
        "image_token_id": image,
        "pixel_shuffle_factor": 2,
        "text_config": text,
        "vision_config": vision,
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    words.save_pretrained(folder)
    edge = {"longest_edge": TOWER["image_size"]}
    Idefics3ImageProcessor(size=edge, max_image_size=edge).save_pretrained(folder)


@with_weights
def write_nemotron_embed(folder: Path) -> None:
    """InternVL's tiles for SigLIP's tower, and a language model whose tokens see those after them."""
    tokenizer(["<img>", "</img>", "<IMG_CONTEXT>"], _TILES).save_pretrained(folder)
    fields = {
        "model_type": "llama_nemotron_vl",
        "text_config": LANGUAGE | {"model_type": "llama", "architectures": ["LlamaBidirectionalModel"]},
        "vision_config": TOWER | {"model_type": "siglip_vision_model"},
        "pooling": "avg",
        "force_image_size": 112,
        "max_dynamic_patch": 6,
        "downsample_ratio": 0.5,
        "ps_version": "v2",
    }
    write_remote_config(folder, "LlamaNemotronVLModel", fields)


def _pooled(name: str, write: Callable[[Path], None], *flags: str, **fields: Any) -> Family:
    common = {"limits": {"image": 1}, "placeholders": {}, "build": written_by(write, __file__)}
    return Family(name, extra_flags=("--runner", "pooling", *flags), **common | fields)


_TWO = {"image": 2}
_TILES = {"image": "<image>"}

FAMILIES = (
    # Text or an image, whose prompt is empty and becomes a token.
    _pooled("clip", write_clip, "--max-model-len=77"),
    _pooled("siglip", write_siglip, "--max-model-len=77"),
    # Embeddings of all tokens, of a model with its own `apply`, and of an encoder of text.
    _pooled("colpali", write_colpali),
    _pooled("colmodernvbert", write_colmodernvbert, "--max-model-len=512", limits=_TWO),
    _pooled("nemotron_embed", write_nemotron_embed, TRUSTED, limits=_TWO, placeholders=_TILES),
    # A reranker whose items are in another order than the request's.
    _pooled("jina_vl", write_jina_vl, limits=_TWO, placeholders=VISION, stage="decoded"),
    # Generation models, as VLM2Vec's and GME's.
    _pooled("llava_next_embedding", write_llava_next, "--convert=embed", limits=_TWO, placeholders=LLAVA),
    _pooled(
        "qwen2_vl_embedding", write_qwen2_vl, "--convert=embed", limits={"image": 2, "video": 1}, placeholders=VISION
    ),
)
