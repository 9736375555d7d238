"""Tiny models whose processors are their own, vLLM's, or have unusual fields."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from family import ALL_PREDICTED, Family, written_by
from qwen_families import IMAGE, START, STOP, VIDEO
from remote_recipe import TRUSTED, with_weights, write_config
from tiny_recipe import LANGUAGE, TOWER, ids, tokenizer
from transformers import (
    CohereCompassConfig,
    CohereCompassImageProcessor,
    CohereCompassProcessor,
    CohereCompassVideoProcessor,
    Gemma3nAudioFeatureExtractor,
    Gemma3nProcessor,
    Gemma4AudioFeatureExtractor,
    Gemma4ImageProcessor,
    Gemma4Processor,
    Gemma4VideoProcessor,
    PreTrainedTokenizerFast,
    Qwen2VLImageProcessor,
    Qwen2VLProcessor,
    Qwen2VLVideoProcessor,
    SiglipImageProcessor,
    SiglipProcessor,
)

_SQUARE = {"height": 112, "width": 112}
_PIXELS = {"shortest_edge": 3136, "longest_edge": 1 << 20}

#: Configurations' code in the model's folder, as checkpoints have that the libraries do not know.
_DOTS_CODE = """\
from vllm.transformers_utils.configs.dotsocr import DotsOCRConfig as Own


class DotsOCRConfig(Own):
    model_type = "dots_ocr"
"""
_NEMOTRON_CODE = """\
from transformers import BartConfig, PreTrainedConfig


class NemotronParseConfig(PreTrainedConfig):
    model_type = "nemotron_parse"

    def __init__(self, encoder=None, decoder=None, **fields):
        self.encoder = PreTrainedConfig(**(encoder or {}))
        self.decoder = BartConfig(**(decoder or {}))
        super().__init__(**fields)

    def get_text_config(self, **_):
        return self.decoder
"""


def _write_config(folder: Path, words: PreTrainedTokenizerFast, architecture: str, **fields: Any) -> None:
    write_config(folder, architecture, fields)
    words.save_pretrained(folder)


def _write_code(folder: Path, code: str, name: str) -> dict[str, str]:
    """Write the module `configuration_own`; return the `auto_map` that names its class."""
    (folder / "configuration_own.py").write_text(code)
    return {"AutoConfig": f"configuration_own.{name}"}


GLM = {"image": "<|begin_of_image|><|endoftext|><|end_of_image|>"}


def write_glm4v_9b(folder: Path) -> None:
    words = tokenizer(["<|begin_of_image|>", "<|end_of_image|>"], GLM)
    _write_config(
        folder,
        words,
        architecture="GLM4VForCausalLM",
        model_type="chatglm",
        num_layers=2,
        padded_vocab_size=512,
        hidden_size=128,
        ffn_hidden_size=256,
        kv_channels=32,
        num_attention_heads=4,
        multi_query_attention=True,
        multi_query_group_num=2,
        seq_length=8192,
        original_rope=True,
        tie_word_embeddings=False,
        pad_token_id=0,
        eos_token_id=2,
        vision_config={
            "dropout_prob": 0.0,
            "hidden_act": "gelu",
            "in_channels": 3,
            "num_hidden_layers": 2,
            "hidden_size": 64,
            "patch_size": 14,
            "num_heads": 4,
            "intermediate_size": 128,
            "layer_norm_eps": 1e-6,
            "num_positions": 65,
            "image_size": 112,
            "scaling_factor": 8.0,
        },
        **ids(words, boi_token_id="<|begin_of_image|>", eoi_token_id="<|end_of_image|>"),
    )


BAGEL = {"image": IMAGE}


def write_bagel(folder: Path) -> None:
    words = tokenizer([IMAGE], BAGEL)
    _write_config(
        folder,
        words,
        architecture="BagelForConditionalGeneration",
        model_type="bagel",
        visual_gen=False,
        vit_max_num_patch_per_side=8,
        llm_config=LANGUAGE | {"model_type": "qwen2"},
        vit_config=TOWER | {"vision_use_head": False},
    )
    SiglipImageProcessor(size=_SQUARE).save_pretrained(folder)


DOTS = {"image": "<|imgpad|>"}


def write_dots_ocr(folder: Path) -> None:
    words = tokenizer(["<|imgpad|>", "<|video_pad|>"], DOTS)
    tower = {"embed_dim": 64, "hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 2}
    code = _write_code(folder, _DOTS_CODE, "DotsOCRConfig")
    _write_config(
        folder,
        words,
        **LANGUAGE,
        architecture="DotsOCRForCausalLM",
        model_type="dots_ocr",
        auto_map=code,
        vision_config=tower | {"num_attention_heads": 4},
        **ids(words, image_token_id="<|imgpad|>", video_token_id="<|video_pad|>"),
    )
    Qwen2VLProcessor(
        Qwen2VLImageProcessor(size=_PIXELS, temporal_patch_size=1),
        words,
        Qwen2VLVideoProcessor(size=_PIXELS),
        chat_template=words.chat_template,
    ).save_pretrained(folder)


MOONDREAM = {"image": "<|endoftext|><image>"}


def write_moondream3(folder: Path) -> None:
    words = tokenizer(["<|md_reserved_0|>", "<|md_reserved_1|>", "<|md_reserved_2|>", "<image>"], MOONDREAM)
    text = {"dim": 128, "ff_dim": 256, "n_layers": 2, "vocab_size": 512, "n_heads": 4, "n_kv_heads": 4}
    experts = {"start_layer": 1, "n_experts": 4, "n_experts_per_tok": 2, "expert_inner_dim": 64}
    tower = {"enc_dim": 64, "enc_n_layers": 27, "enc_ff_dim": 128, "enc_n_heads": 4, "proj_inner_dim": 128}
    _write_config(
        folder,
        words,
        architecture="Moondream3ForCausalLM",
        model_type="moondream3",
        config={"text": text | {"moe": experts}, "vision": tower},
    )


COMPASS = {"image": f"{START}{IMAGE}{STOP}"}


def write_cohere_compass(folder: Path) -> None:
    named = {"image_token": IMAGE, "video_token": VIDEO, "vision_bos_token": START, "vision_eos_token": STOP}
    words = tokenizer([IMAGE, VIDEO, START, STOP], COMPASS, named=named)
    rope = {"full_attention": {"rope_type": "default", "mrope_section": [4, 6, 6], "rope_theta": 1e6}}
    config = CohereCompassConfig(
        text_config=LANGUAGE | {"rope_parameters": rope, "tie_word_embeddings": True},
        vision_config={
            "depth": 2,
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_heads": 4,
            "out_hidden_size": 128,
            "num_position_embeddings": 256,
            "deepstack_visual_indexes": [0],
        },
        tie_word_embeddings=True,
        **ids(words, image_token_id=IMAGE, video_token_id=VIDEO),
    )
    config.architectures = ["CohereCompassForConditionalGeneration"]
    config.save_pretrained(folder)
    size = {"shortest_edge": 4096, "longest_edge": 1 << 20}
    CohereCompassProcessor(
        CohereCompassImageProcessor(size=size, patch_size=16),
        words,
        CohereCompassVideoProcessor(size=size, patch_size=16),
        chat_template=words.chat_template,
    ).save_pretrained(folder)


#: In vLLM's prompts for transcriptions.
_GEMMA_TURNS = ["<start_of_turn>", "<end_of_turn>"]
_GEMMA3N_NAMES = {
    "image_token": "<image_soft_token>",
    "audio_token": "<audio_soft_token>",
    "boi_token": "<start_of_image>",
    "eoi_token": "<end_of_image>",
    "boa_token": "<start_of_audio>",
    "eoa_token": "<end_of_audio>",
}
_GEMMA4_NAMES = {
    "image_token": "<|image|>",
    "video_token": "<|video|>",
    "audio_token": "<|audio|>",
    "boi_token": "<|image>",
    "eoi_token": "<image|>",
    "boa_token": "<|audio>",
    "eoa_token": "<audio|>",
}


def _gemma_tokenizer(named: dict[str, str], placeholders: dict[str, str], *other: str) -> PreTrainedTokenizerFast:
    newlines = ("\n", "\n\n", "\n\n\n", "\n\n\n\n")
    return tokenizer([*named.values(), *other], placeholders, literal=newlines, named=named)


def gemma_tokenizer(placeholders: dict[str, str]) -> PreTrainedTokenizerFast:
    words = _gemma_tokenizer(_GEMMA4_NAMES, placeholders)
    words.video_token_id = words.convert_tokens_to_ids("<|video|>")
    return words


def gemma_ids(words: PreTrainedTokenizerFast) -> dict[str, int]:
    return _ids_of(words, _GEMMA4_NAMES, "image", "audio", "boi", "eoi", "boa")


def _ids_of(words: PreTrainedTokenizerFast, named: dict[str, str], *kinds: str) -> dict[str, int]:
    return ids(words, **{f"{kind}_token_id": named[f"{kind}_token"] for kind in kinds})


GEMMA3N = {"image": "<image_soft_token>", "audio": "<audio_soft_token>"}
GEMMA4 = {"image": "<|image|>", "audio": "<|audio|>", "video": "<|video|>"}


_GEMMA3N_TEXT = LANGUAGE | {
    "model_type": "gemma3n_text",
    "num_kv_shared_layers": 0,
    "intermediate_size": [256, 256],
    "hidden_size_per_layer_input": 32,
    "vocab_size_per_layer_input": 512,
    "tie_word_embeddings": True,
}
_GEMMA3N_AUDIO = {
    "model_type": "gemma3n_audio",
    "vocab_offset": 384,
    "hidden_size": 64,
    "conf_num_attention_heads": 4,
    "conf_num_hidden_layers": 2,
    "sscp_conv_channel_size": [16, 8],
}


def write_gemma3n(folder: Path) -> None:
    words = _gemma_tokenizer(_GEMMA3N_NAMES, GEMMA3N, *_GEMMA_TURNS)
    _write_config(
        folder,
        words,
        architecture="Gemma3nForConditionalGeneration",
        model_type="gemma3n",
        text_config=_GEMMA3N_TEXT,
        vision_config={"model_type": "gemma3n_vision", "architecture": "test_resnet", "hidden_size": 96},
        audio_config=_GEMMA3N_AUDIO,
        **_ids_of(words, _GEMMA3N_NAMES, "image", "audio", "boi", "eoi", "boa", "eoa"),
    )
    Gemma3nProcessor(
        Gemma3nAudioFeatureExtractor(),
        SiglipImageProcessor(size={"height": 512, "width": 512}),
        words,
        audio_seq_length=188,
        image_seq_length=256,
        chat_template=words.chat_template,
    ).save_pretrained(folder)


_GEMMA4_TEXT = LANGUAGE | {
    "model_type": "gemma4_text",
    "layer_types": ["sliding_attention", "full_attention"],
    "global_head_dim": 32,
    "hidden_size_per_layer_input": 0,
    "vocab_size_per_layer_input": 512,
    "tie_word_embeddings": True,
}
GEMMA4_VISION = {
    "model_type": "gemma4_vision",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 16,
    "default_output_length": 70,
}
GEMMA4_AUDIO = {"model_type": "gemma4_audio", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}


def write_gemma4(folder: Path) -> None:
    _write_gemma4(folder, audio_config=None)


def write_gemma4_audio(folder: Path) -> None:
    _write_gemma4(folder, audio_config=GEMMA4_AUDIO | {"output_proj_dims": 128})


def _write_gemma4(folder: Path, *, audio_config: dict[str, Any] | None) -> None:
    words = gemma_tokenizer(GEMMA4)
    _write_config(
        folder,
        words,
        architecture="Gemma4ForConditionalGeneration",
        model_type="gemma4",
        text_config=_GEMMA4_TEXT,
        vision_config=GEMMA4_VISION,
        audio_config=audio_config,
        **ids(words, eoa_token_index="<audio|>", video_token_id="<|video|>"),
        **gemma_ids(words),
    )
    _write_gemma4_processor(folder, words)


def _write_gemma4_processor(folder: Path, words: PreTrainedTokenizerFast) -> None:
    Gemma4Processor(
        Gemma4AudioFeatureExtractor(),
        Gemma4ImageProcessor(max_soft_tokens=70),
        words,
        Gemma4VideoProcessor(max_soft_tokens=70, num_frames=4),
        image_seq_length=70,
        chat_template=words.chat_template,
    ).save_pretrained(folder)


def write_nemotron_parse(folder: Path) -> None:
    words = tokenizer(["<s>"], {})
    code = _write_code(folder, _NEMOTRON_CODE, "NemotronParseConfig")
    _write_config(
        folder,
        words,
        architecture="NemotronParseForConditionalGeneration",
        model_type="nemotron_parse",
        auto_map=code,
        is_encoder_decoder=True,
        image_size=[128, 192],
        encoder={"patch_size": 16, "args": {"model": "vit_huge_patch16_224"}},
        decoder={
            "model_type": "bart",
            "vocab_size": 512,
            "d_model": 1024,
            "decoder_layers": 2,
            "decoder_attention_heads": 16,
            "decoder_ffn_dim": 128,
            "encoder_ffn_dim": 128,
            "encoder_attention_heads": 16,
            "max_position_embeddings": 1024,
        },
    )
    SiglipProcessor(SiglipImageProcessor(size={"height": 128, "width": 192}), words).save_pretrained(folder)


_GEMMA3N = Family("gemma3n", {"image": 2, "audio": 2}, GEMMA3N, written_by(write_gemma3n, __file__))

#: Without weights: plain vLLM does not load them, or fails at an item, on a CPU, or they need a package or much memory.
PROCESSORS = (
    Family(
        "nemotron_parse",
        {"image": 1},
        {"image": ""},
        written_by(write_nemotron_parse, __file__),
        extra_flags=(TRUSTED, "--max-model-len=1024"),
        has_encoder_prompt=True,
    ),
    _GEMMA3N,
    # oneDNN refuses the strides in the convolutions of the audio's encoder.
    Family("gemma4_audio", {"image": 2, "video": 1, "audio": 2}, GEMMA4, written_by(write_gemma4_audio, __file__)),
    # As many crops as the image has room for, as many tokens for every image.
    Family("moondream3", {"image": 1}, MOONDREAM, written_by(write_moondream3, __file__)),
    Family(
        "cohere_compass",
        {"image": 2},
        COMPASS,
        written_by(write_cohere_compass, __file__),
    ),
)

FAMILIES = (
    # A tower of timm, as many tokens for every image and audio; the decoder reads the ids of the text, too.
    replace(
        _GEMMA3N,
        build=written_by(with_weights(write_gemma3n, embeddings=0.01), __file__),
        needs="timm",
    ),
    # Patches of images of any size, their positions, and shorter ones of videos.
    Family(
        "gemma4",
        {"image": 2, "video": 1},
        GEMMA4,
        written_by(with_weights(write_gemma4, embeddings=0.01), __file__),
    ),
    # Patches of single frames; a configuration that the model brings.
    Family(
        "dots_ocr",
        {"image": 2},
        DOTS,
        written_by(with_weights(write_dots_ocr), __file__),
        predicted=ALL_PREDICTED,
        has_pixel_limits=True,
        extra_flags=(TRUSTED,),
    ),
    # One placeholder of three tokens.
    Family(
        "glm4v_9b",
        {"image": 1},
        GLM,
        written_by(with_weights(write_glm4v_9b), __file__),
        predicted=ALL_PREDICTED,
    ),
    # As many tokens for every image.
    Family(
        "bagel",
        {"image": 2},
        BAGEL,
        written_by(with_weights(write_bagel), __file__),
    ),
)
