"""Tiny models in Mistral's own format: params.json, consolidated.safetensors, tekken.json.

vLLM tokenizes their chats with mistral_common, which also expands the placeholders of media.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from family import Family, written_by
from mistral_common.tokens.tokenizers.base import SpecialTokens
from safetensors.torch import save_file
from tiny_recipe import VOCABULARY
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers.convert_slow_tokenizer import bytes_to_unicode

from medialane.testing.tiny_model import SENTENCES, random_weights

WIDTH, TOWER_WIDTH = 128, 64

#: The first ids of every vocabulary. The tokens that mistral_common knows have ids of our choice, but these three.
_SPECIAL = tuple(token.value for token in SpecialTokens)
_NUM_SPECIAL = 64
_IMAGE_ID = _SPECIAL.index("[IMG]")

_LANGUAGE = {
    "dim": WIDTH,
    "n_layers": 2,
    "head_dim": 32,
    "hidden_dim": 256,
    "n_heads": 4,
    "n_kv_heads": 2,
    "norm_eps": 1e-5,
    "rope_theta": 1e6,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 32768,
}
_TOWER = {
    "hidden_size": TOWER_WIDTH,
    "num_channels": 3,
    "image_size": 448,
    "patch_size": 14,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "rope_theta": 10000.0,
    "image_token_id": _IMAGE_ID,
}
_MERGED = {"spatial_merge_size": 2, "mm_projector_id": "patch_merge", "add_pre_mm_projector_layer_norm": True}
_AUDIO = {"sampling_rate": 16000, "num_mel_bins": 128, "window_size": 400, "hop_length": 160}
_EAR = {"dim": TOWER_WIDTH, "n_layers": 2, "head_dim": 16, "hidden_dim": 128, "n_heads": 4, "vocab_size": 51866}


def write_pixtral_mistral(folder: Path) -> None:
    """As Pixtral-12B: one patch is one token."""
    config = {"image_patch_size": 14, "max_image_size": 448}
    _write_tokenizer(folder, "v3", {"multimodal": config})
    tower = _TOWER | {"adapter_bias": True}
    weights = _language() | _vision() | _adapter("vision_language_adapter", TOWER_WIDTH, has_bias=True)
    _write(folder, {"vision_encoder": tower}, weights)


def write_mistral_small(folder: Path) -> None:
    """As Mistral-Small-3.1 and later: four patches are merged to one token."""
    config = {"image_patch_size": 14, "max_image_size": 448, "spatial_merge_size": 2}
    _write_tokenizer(folder, "v13", {"image": config})
    tower = _TOWER | _MERGED | {"adapter_bias": False}
    merger = {
        "patch_merger.merging_layer.weight": (TOWER_WIDTH, 4 * TOWER_WIDTH),
        "pre_mm_projector_norm.weight": (TOWER_WIDTH,),
    }
    weights = _language() | _vision() | merger | _adapter("vision_language_adapter", TOWER_WIDTH)
    _write(folder, {"vision_encoder": tower}, weights)


def write_voxtral(folder: Path) -> None:
    audio = {"sampling_rate": 16000, "frame_rate": 12.5, "chunk_length_s": 30.0}
    spectrogram = {name: value for name, value in _AUDIO.items() if name != "sampling_rate"}
    _write_tokenizer(folder, "v13", {"audio": audio | {"audio_encoding_config": spectrogram}})
    encoder = _EAR | {"audio_encoding_args": _AUDIO, "max_source_positions": 1500}
    whisper = {"encoder_args": encoder, "downsample_args": {"downsample_factor": 4}}
    ear = "mm_whisper_embeddings"
    projection = {
        f"{ear}.audio_language_projection.0.weight": (WIDTH, 4 * TOWER_WIDTH),
        f"{ear}.audio_language_projection.2.weight": (WIDTH, WIDTH),
    }
    weights = {
        (f"{ear}.tok_embeddings.weight" if name == "tok_embeddings.weight" else name): shape
        for name, shape in (_language() | _hearing(f"{ear}.whisper_encoder") | projection).items()
    }
    _write(folder, {"multimodal": {"whisper_model_args": whisper}}, weights)


def write_voxtral_realtime(folder: Path) -> None:
    """As Voxtral-Mini-Realtime: a causal encoder, whose frames are added to the text's embeddings as it is written."""
    streaming = {
        "transcription_format": "streaming",
        "transcription_delay_ms": 480,
        "streaming_look_ahead_ms": 2.5,
        "streaming_look_back_ms": 52.5,
        "streaming_n_left_pad_tokens": 32,
    }
    spectrogram = {name: value for name, value in _AUDIO.items() if name != "sampling_rate"}
    audio = {"sampling_rate": 16000, "frame_rate": 12.5, "audio_encoding_config": spectrogram}
    _write_tokenizer(folder, "v13", {"audio": audio | streaming})
    encoder = _EAR | {
        "audio_encoding_args": _AUDIO | {"global_log_mel_max": 1.5},
        "causal": True,
        "head_dim": 32,  # vLLM's kernels for decoders on a CPU have no smaller ones
        "n_heads": 2,
        "sliding_window": 256,
        "pos_embed": "rope",
    }
    whisper = {"encoder_args": encoder, "downsample_args": {"downsample_factor": 4}}
    ear = "mm_streams_embeddings.embedding_module"
    shapes = _language() | _causal_hearing(f"{ear}.whisper_encoder")
    shapes[f"{ear}.tok_embeddings.weight"] = shapes.pop("tok_embeddings.weight")
    shapes[f"{ear}.audio_language_projection.0.weight"] = (WIDTH, 4 * TOWER_WIDTH)
    shapes[f"{ear}.audio_language_projection.2.weight"] = (WIDTH, WIDTH)
    for layer in range(2):
        shapes[f"layers.{layer}.ada_rms_norm_t_cond.0.weight"] = (32, WIDTH)
        shapes[f"layers.{layer}.ada_rms_norm_t_cond.2.weight"] = (WIDTH, 32)
    timed = {"ada_rms_norm_t_cond": True, "ada_rms_norm_t_cond_dim": 32}
    _write(folder, {"multimodal": {"whisper_model_args": whisper}, **timed}, shapes)


Shapes = dict[str, tuple[int, ...]]


def _language() -> Shapes:
    shapes: Shapes = {"norm.weight": (WIDTH,)}
    shapes |= dict.fromkeys(("tok_embeddings.weight", "output.weight"), (VOCABULARY, WIDTH))
    for layer in range(2):
        shapes |= _layer(f"layers.{layer}", WIDTH, 256, num_kv=64)
    return shapes


def _vision() -> Shapes:
    shapes: Shapes = {
        "vision_encoder.patch_conv.weight": (TOWER_WIDTH, 3, 14, 14),
        "vision_encoder.ln_pre.weight": (TOWER_WIDTH,),
    }
    for layer in range(2):
        shapes |= _layer(f"vision_encoder.transformer.layers.{layer}", TOWER_WIDTH, 128, num_kv=TOWER_WIDTH)
    return shapes


def _layer(name: str, width: int, inner: int, *, num_kv: int) -> Shapes:
    return {
        f"{name}.attention.wq.weight": (width, width),
        f"{name}.attention.wk.weight": (num_kv, width),
        f"{name}.attention.wv.weight": (num_kv, width),
        f"{name}.attention.wo.weight": (width, width),
        f"{name}.attention_norm.weight": (width,),
        f"{name}.ffn_norm.weight": (width,),
        f"{name}.feed_forward.w1.weight": (inner, width),
        f"{name}.feed_forward.w2.weight": (width, inner),
        f"{name}.feed_forward.w3.weight": (inner, width),
    }


def _hearing(name: str) -> Shapes:
    width, inner = TOWER_WIDTH, 128
    shapes: Shapes = {f"{name}.conv_layers.0.weight": (width, _AUDIO["num_mel_bins"], 3)}
    shapes[f"{name}.conv_layers.1.weight"] = (width, width, 3)
    biased = {f"{name}.conv_layers.{n}": width for n in range(2)} | {f"{name}.transformer.norm": width}
    shapes[f"{name}.transformer.norm.weight"] = (width,)
    for layer in (f"{name}.transformer.layers.{n}" for n in range(2)):
        shapes |= {f"{layer}.attention.w{part}.weight": (width, width) for part in "qkvo"}
        shapes |= {f"{layer}.{norm}.weight": (width,) for norm in ("attention_norm", "ffn_norm")}
        shapes |= {f"{layer}.feed_forward.w1.weight": (inner, width), f"{layer}.feed_forward.w2.weight": (width, inner)}
        biased |= {f"{layer}.attention.w{part}": width for part in "qvo"}
        biased |= {f"{layer}.{part}": width for part in ("attention_norm", "ffn_norm", "feed_forward.w2")}
        biased[f"{layer}.feed_forward.w1"] = inner
    return shapes | {f"{part}.bias": (size,) for part, size in biased.items()}


def _causal_hearing(name: str) -> Shapes:
    """Without biases where those of Mistral's other layers have none, and with Mistral's feed-forward layers."""
    shapes = {part: shape for part, shape in _hearing(name).items() if not part.endswith(("norm.bias", "w1.bias"))}
    for n in range(2):
        for parameter in ("weight", "bias"):
            shapes[f"{name}.conv_layers.{n}.conv.{parameter}"] = shapes.pop(f"{name}.conv_layers.{n}.{parameter}")
        shapes[f"{name}.transformer.layers.{n}.attention.wk.bias"] = (TOWER_WIDTH,)
        shapes[f"{name}.transformer.layers.{n}.feed_forward.w3.weight"] = (128, TOWER_WIDTH)
    return shapes


def _adapter(name: str, width: int, *, has_bias: bool = False) -> Shapes:
    shapes: Shapes = {f"{name}.w_in.weight": (WIDTH, width), f"{name}.w_out.weight": (WIDTH, WIDTH)}
    return shapes | ({f"{name}.{part}.bias": (WIDTH,) for part in ("w_in", "w_out")} if has_bias else {})


def _write(folder: Path, tower: Mapping[str, Any], shapes: Shapes) -> None:
    (folder / "params.json").write_text(json.dumps(_LANGUAGE | tower, indent=2))
    generator = torch.Generator().manual_seed(0)
    weights = {name: _drawn(name, shape, generator).to(torch.bfloat16) for name, shape in shapes.items()}
    save_file(weights, folder / "consolidated.safetensors", {"format": "pt"})


def _drawn(name: str, shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    """Random weights, by the names that `random_weights` knows."""
    for mistral, other in (("tok_embeddings", "embed_tokens"), (".wq.", ".q_proj."), (".wk.", ".k_proj.")):
        name = name.replace(mistral, other)
    return random_weights(name, torch.empty(shape), generator)


def _write_tokenizer(folder: Path, version: str, media: Mapping[str, Any]) -> None:
    special = [{"rank": rank, "token_str": token, "is_control": True} for rank, token in enumerate(_SPECIAL)]
    vocabulary = [
        {"rank": rank, "token_bytes": base64.b64encode(token).decode(), "token_str": None}
        for rank, token in enumerate(_trained(VOCABULARY - _NUM_SPECIAL))
    ]
    config = {
        "pattern": r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        "num_vocab_tokens": len(vocabulary),
        "default_vocab_size": VOCABULARY,
        "default_num_special_tokens": _NUM_SPECIAL,
        "version": version,
    }
    document = {"config": config, "vocab": vocabulary, "special_tokens": special, **media}
    (folder / "tekken.json").write_text(json.dumps(document))


def _trained(num_tokens: int) -> list[bytes]:
    """The bytes, and tokens in the order in which a trained BPE merges them."""
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=num_tokens, initial_alphabet=alphabet, min_frequency=1, show_progress=False
    )
    trained.train_from_iterator(SENTENCES, trainer)
    byte_of = {character: byte for byte, character in bytes_to_unicode().items()}
    in_order = sorted(trained.get_vocab(), key=trained.get_vocab().__getitem__)
    merged = [bytes(byte_of[character] for character in token) for token in in_order if len(token) > 1]
    return [bytes([byte]) for byte in range(256)] + merged


_TARGET = frozenset({"target"})

FAMILIES = (
    Family("pixtral_mistral", {"image": 3}, {}, written_by(write_pixtral_mistral, __file__), predicted=_TARGET),
    Family("mistral_small", {"image": 3}, {}, written_by(write_mistral_small, __file__), predicted=_TARGET),
    Family("voxtral", {"audio": 2}, {}, written_by(write_voxtral, __file__)),
    # Embeddings also for the tokens that are generated.
    Family("voxtral_realtime", {"audio": 1}, {}, written_by(write_voxtral_realtime, __file__), stage="decoded"),
)
