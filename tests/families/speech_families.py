"""Tiny models for transcription other than Whisper, and chats with audio whose processors are vLLM's own.

transformers has no models for most of them: their weights have vLLM's names (`write_vllm_weights`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from audio_more_families import GRANITE, QWEN_AUDIO, write_qwen3_asr
from family import Family, written_by
from pooling_families import overrides
from remote_recipe import write_config, write_vllm_weights
from safetensors.torch import load_file, save_file
from tiny_recipe import LANGUAGE, VOCABULARY, ids, tokenizer, write_model
from transformers import (
    GraniteSpeechFeatureExtractor,
    GraniteSpeechPlusConfig,
    GraniteSpeechPlusForConditionalGeneration,
    GraniteSpeechProcessor,
    PreTrainedTokenizerFast,
    WhisperFeatureExtractor,
)
from transformers.models.whisper.tokenization_whisper import LANGUAGES

_AUDIO, _START, _STOP = "<|AUDIO|>", "<|audio_bos|>", "<|audio_eos|>"
QWEN2_AUDIO = {"audio": f"{_START}{_AUDIO}{_STOP}"}
ASR = {"audio": _AUDIO}


def _write_config(folder: Path, words: PreTrainedTokenizerFast, architecture: str, **fields: Any) -> None:
    write_config(folder, architecture, fields)
    words.save_pretrained(folder)


def _write_processor(folder: Path, kind: str, **extractor: Any) -> None:
    """Write the processor files of an extractor of vLLM's own."""
    processor = {"processor_class": f"{kind}Processor"}
    document = processor | {"feature_extractor_type": f"{kind}FeatureExtractor"} | extractor
    (folder / "preprocessor_config.json").write_text(json.dumps(document, indent=2))
    (folder / "processor_config.json").write_text(json.dumps(processor, indent=2))


#: Cohere's decoder starts with these; no other tokenizer of the tests has the first.
_COHERE_TASK = ("▁", "<|startofcontext|>", "<|startoftranscript|>", "<|emo:undefined|>", "<|pnc|>", "<|noitn|>")
_COHERE_TASK += ("<|notimestamp|>", "<|nodiarize|>")


def write_cohere_asr(folder: Path) -> None:
    languages = [f"<|{code}|>" for code in LANGUAGES if len(code) == 2]
    words = tokenizer([*_COHERE_TASK, *languages], {})
    _write_config(
        folder,
        words,
        architecture="CohereAsrForConditionalGeneration",
        model_type="cohere_asr",
        is_encoder_decoder=True,
        vocab_size=VOCABULARY,
        hidden_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=128,
        max_position_embeddings=4096,
        pad_token_id=0,
        bos_token_id=0,
        eos_token_id=2,
        sample_rate=16000,
        max_audio_clip_s=35,
        overlap_chunk_second=5,
        preprocessor={"sample_rate": 16000, "features": 64, "n_fft": 512, "dither": 0.0, "window_stride": 0.01},
        encoder={
            "feat_in": 64,
            "feat_out": -1,
            "n_layers": 2,
            "n_heads": 4,
            "d_model": 64,
            "causal_downsampling": False,
            "subsampling": "dw_striding",
            "subsampling_factor": 8,
            "subsampling_conv_channels": 32,
            "ff_expansion_factor": 2,
            "self_attention_model": "rel_pos",
            "att_context_size": [-1, -1],
            "xscaling": False,
            "untie_biases": True,
            "pos_emb_max_len": 512,
            "conv_kernel_size": 9,
            "conv_norm_type": "batch_norm",
            "conv_context_size": None,
        },
        transf_decoder={
            "config_dict": {
                "hidden_size": 128,
                "inner_size": 256,
                "hidden_act": "relu",
                "num_attention_heads": 4,
                "num_layers": 2,
                "max_sequence_length": 4096,
            }
        },
        head={"num_classes": VOCABULARY, "hidden_size": 128},
    )
    write_vllm_weights(folder)
    # The weights of checkpoints have other names, which vLLM translates.
    path, head = folder / "model.safetensors", {"proj_out.": "log_softmax.mlp.layer0."}
    found = {_renamed(name, head | {"model.": ""}): tensor for name, tensor in load_file(path).items()}
    save_file(found, path, {"format": "pt"})


def _renamed(name: str, renames: Mapping[str, str]) -> str:
    return next((new + name.removeprefix(old) for old, new in renames.items() if name.startswith(old)), name)


def _asr_tokenizer() -> PreTrainedTokenizerFast:
    return tokenizer([_AUDIO], ASR, named={"audio_token": _AUDIO})


def write_fireredasr2(folder: Path) -> None:
    _write_config(
        folder,
        _asr_tokenizer(),
        **LANGUAGE,
        architecture="FireRedASR2ForConditionalGeneration",
        model_type="qwen2",
        encoder_downsample_rate=2,
        audio_encoder_conf={
            "idim": 80,
            "n_layers": 2,
            "n_head": 4,
            "d_model": 64,
            "kernel_size": 33,
            "pe_maxlen": 5000,
        },
    )
    _write_processor(folder, "FireRedASR2", means=[0.0] * 80, inverse_std_variences=[1.0] * 80)


def write_funasr(folder: Path) -> None:
    _write_config(
        folder,
        _asr_tokenizer(),
        **LANGUAGE | {"hidden_size": 1024},
        architecture="FunASRForConditionalGeneration",
        model_type="qwen3",
        audio_encoder_conf={"output_size": 512, "attention_heads": 4, "linear_units": 128, "num_blocks": 2},
    )
    frontend = {"cmvn_file": None, "fs": 16000, "window": "hamming", "n_mels": 80, "lfr_m": 7, "lfr_n": 6}
    _write_processor(folder, "FunASR", frontend_conf=frontend)
    write_vllm_weights(folder)


def write_granite_speech_plus(folder: Path) -> None:
    words = tokenizer(["<|audio|>"], GRANITE, named={"audio_token": "<|audio|>"})
    config = GraniteSpeechPlusConfig(
        text_config=LANGUAGE | {"model_type": "granite"},
        encoder_config={
            "num_layers": 2,
            "hidden_dim": 64,
            "num_heads": 4,
            "input_dim": 160,
            "output_dim": 42,
            "cat_hidden_layers": [1],
        },
        projector_config={
            "model_type": "blip_2_qformer",
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 1,
            "num_attention_heads": 4,
            "encoder_hidden_size": 128,
            "cross_attention_frequency": 1,
        },
        has_lora_adapter=False,
        tie_word_embeddings=False,
        **ids(words, audio_token_index="<|audio|>"),
    )
    deeper = {"language_model.model.model.": "language_model.model."}
    write_model(folder, GraniteSpeechPlusForConditionalGeneration(config), renames=deeper)
    GraniteSpeechProcessor(GraniteSpeechFeatureExtractor(), words, chat_template=words.chat_template).save_pretrained(
        folder
    )


def write_funaudiochat(folder: Path) -> None:
    words = tokenizer([_AUDIO, _START, _STOP], QWEN2_AUDIO, named={"audio_token": _AUDIO})
    _write_config(
        folder,
        words,
        architecture="FunAudioChatForConditionalGeneration",
        model_type="funaudiochat",
        text_config=LANGUAGE | {"model_type": "qwen3"},
        audio_config={
            "num_mel_bins": 128,
            "encoder_layers": 2,
            "encoder_attention_heads": 4,
            "encoder_ffn_dim": 128,
            "d_model": 64,
            "output_dim": 128,
            "codebook_size": VOCABULARY,
            "pad_token_id": 3,
        },
        **ids(words, audio_token_index=_AUDIO),
    )
    WhisperFeatureExtractor(feature_size=128, return_attention_mask=True).save_pretrained(folder)
    speech = tokenizer(["<|audio_pad|>"], {})
    speech.pad_token = "<|audio_pad|>"
    speech.save_pretrained(folder / "speech_tokenizer")
    write_vllm_weights(folder)


_ONE = {"audio": 1}
_REALTIME = overrides(architectures=["Qwen3ASRRealtimeGeneration"])

FAMILIES = (
    # An encoder and a decoder, without a placeholder; vLLM overrides how its items are processed.
    Family(
        "cohere_asr",
        _ONE,
        {"audio": ""},
        written_by(write_cohere_asr, __file__),
        extra_flags=("--max-model-len=448",),
        has_encoder_prompt=True,
        stage="decoded",
    ),
    # Transcription by decoders whose prompts have a placeholder. vLLM overrides how items of the second are processed.
    Family(
        "fireredasr2",
        _ONE,
        ASR,
        written_by(write_fireredasr2, __file__),
        extra_flags=("--load-format=dummy",),
        needs="kaldi_native_fbank",
    ),
    Family("funasr", _ONE, ASR, written_by(write_funasr, __file__), stage="decoded"),
    Family("granite_speech_plus", _ONE, GRANITE, written_by(write_granite_speech_plus, __file__)),
    # Discrete tokens of a clip beside its spectrum, padded to those of the request's longest.
    Family("funaudiochat", {"audio": 2}, QWEN2_AUDIO, written_by(write_funaudiochat, __file__), stage="decoded"),
    # Models for transcription in real time answer chats, too.
    Family(
        "qwen3_asr_realtime",
        _ONE,
        QWEN_AUDIO,
        written_by(write_qwen3_asr, __file__),
        extra_flags=(_REALTIME,),
        stage="decoded",
    ),
)
