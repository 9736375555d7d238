"""Tiny models that hear, whose processors are in vLLM's model files and take fixed ids or files of other libraries."""

from __future__ import annotations

import base64
from itertools import islice, product
from pathlib import Path

import hub_names
import torch
from family import Family, written_by
from hub_names import whisper_layers, with_hub_names
from remote_recipe import TRUSTED, with_weights, write_json, write_remote_config
from safetensors.torch import save_file
from speech_families import QWEN2_AUDIO
from tiny_recipe import LANGUAGE, chat_template, ids, tokenizer
from transformers import WhisperConfig, WhisperFeatureExtractor


def write_moss_audio(folder: Path) -> None:
    words = tokenizer(["<|AUDIO|>", "<|audio_bos|>", "<|audio_eos|>"], QWEN2_AUDIO)
    words.save_pretrained(folder)
    ear = {
        "d_model": 64,
        "output_dim": 64,
        "encoder_layers": 2,
        "encoder_attention_heads": 4,
        "encoder_ffn_dim": 128,
        "downsample_hidden_size": 32,
        "deepstack_encoder_layer_indexes": [0],
    }
    text = LANGUAGE | {"model_type": "qwen3"}
    fields = LANGUAGE | {"model_type": "moss_audio", "audio_config": ear, "language_config": text}
    write_remote_config(folder, "MossAudioModel", fields | {"adapter_hidden_size": 128})
    marks = ids(words, audio_token_id="<|AUDIO|>", audio_start_id="<|audio_bos|>", audio_end_id="<|audio_eos|>")
    write_json(folder / "processor_config.json", marks)


KIMI_AUDIO = {"audio": "<|im_media_begin|><|im_kimia_text_blank|><|im_media_end|>"}

#: vLLM's tokenizer has its special tokens from this id on.
_NUM_BYTE_TOKENS, _NUM_TOKENS = 151643, 152064
_KIMI_MARKS = {
    151645: "<|im_msg_end|>",
    151661: "<|im_media_begin|>",
    151663: "<|im_media_end|>",
    151666: "<|im_kimia_text_blank|>",
    151670: "<|im_kimia_user_msg_start|>",
    151671: "<|im_kimia_assistant_msg_start|>",
}


def write_kimi_audio(folder: Path) -> None:
    """Every id is a token: bytes, all pairs of bytes, and as many triples as there is room for."""
    tokens = (bytes(token) for length in (1, 2, 3) for token in product(range(256), repeat=length))
    lines = (
        f"{base64.b64encode(token).decode()} {rank}" for rank, token in enumerate(islice(tokens, _NUM_BYTE_TOKENS))
    )
    (folder / "tiktoken.model").write_text("\n".join(lines))
    special = {token: f"<|special_{token}|>" for token in range(_NUM_BYTE_TOKENS, _NUM_TOKENS)} | _KIMI_MARKS
    added = {str(token): {"content": content, "special": True} for token, content in special.items()}
    write_json(folder / "tokenizer_config.json", {"added_tokens_decoder": added})
    (folder / "chat_template.jinja").write_text(chat_template(KIMI_AUDIO))
    fields = LANGUAGE | {
        "model_type": "kimi_audio",
        "vocab_size": _NUM_TOKENS,
        "eos_token_id": 151644,
        "bos_token_id": 151643,
        "kimia_adaptor_input_dim": 4 * 64,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
    }
    write_remote_config(folder, "MoonshotKimiaForCausalLM", fields)
    ear = folder / "whisper-large-v3"
    WhisperConfig(
        d_model=64, encoder_layers=2, encoder_attention_heads=4, encoder_ffn_dim=128, num_mel_bins=128
    ).save_pretrained(ear)
    WhisperFeatureExtractor(feature_size=128).save_pretrained(ear)
    # vLLM reads this file for the encoder's weights, which are in the other one here, and ignores this name.
    save_file({"mimo_norm.weight": torch.zeros(1)}, ear / "model.safetensors", {"format": "pt"})


FAMILIES = (
    # Several placeholders for one clip; one of them is in the prompt; outputs of inner layers of the encoder.
    Family(
        "moss_audio",
        {"audio": 2},
        QWEN2_AUDIO,
        written_by(with_weights(write_moss_audio), __file__),
        padded=frozenset(("audio_data",)),
        extra_flags=(TRUSTED,),
    ),
)

#: vLLM's model uses the embeddings of one item in a step of the engine, however many requests are in it, and ends the
#: engine when two clips in a step differ in length: answers to requests that run at once, as a beam search's, vary.
PROCESSORS = (
    # A tokenizer of vLLM's own; the audio's embeddings are added to those of the text.
    Family(
        "kimi_audio",
        {"audio": 1},
        KIMI_AUDIO,
        written_by(with_hub_names(with_weights(write_kimi_audio), whisper_layers), __file__, hub_names.__file__),
        extra_flags=(TRUSTED,),
    ),
)
