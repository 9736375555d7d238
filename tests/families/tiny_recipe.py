"""What the tiny models of all families share: a tokenizer trained during the build, random weights, small models.

The weights follow `medialane.testing.tiny_model`, whose docstring says why: with the libraries' own initialisation
a model gives every image the same output.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedModel, PreTrainedTokenizerFast
from transformers.utils import logging

from medialane.testing.tiny_model import SENTENCES, random_weights

VOCABULARY = 512

#: The first ids of every vocabulary, before the family's own special tokens.
END, TURN, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"

LANGUAGE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 32768,
    "bos_token_id": 0,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}

#: Qwen3.5's language model: heads of 128, since vLLM's gated delta layers refuse smaller ones on a CPU.
QWEN3_5_LAYERS = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 2,
    "rope_parameters": {
        "rope_type": "default",
        "mrope_section": [2, 1, 1],
        "rope_theta": 1e6,
        "partial_rotary_factor": 0.25,
    },
}

#: For the towers of CLIP's kind: 8x8 patches of 14 pixels.
TOWER = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": 112,
    "patch_size": 14,
}

#: Names of weights for `write_model`: transformers saves the towers of CLIP's kind without a level that vLLM's have.
TOWER_NAMES = {
    f"{start}vision_tower.{part}": f"{start}vision_tower.vision_model.{part}"
    for start in ("", "model.")
    for part in ("embeddings", "encoder", "post_layernorm", "pre_layrnorm")
}

_CHAT_TEMPLATE = """\
{%- for message in messages %}<|im_start|>{{ message.role }}
{% if message.content is string %}{{ message.content }}
{%- elif message.content %}{% for part in message.content %}
{%- if 'image' in part.type %}IMAGE
{%- elif 'video' in part.type %}VIDEO
{%- elif 'audio' in part.type %}AUDIO
{%- else %}{{ part.text }}{% endif %}
{%- endfor %}{% endif %}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


def chat_template(placeholders: Mapping[str, str]) -> str:
    """ChatML in which a media part becomes its modality's placeholder."""
    template = _CHAT_TEMPLATE
    for modality in ("image", "video", "audio"):
        template = template.replace(modality.upper(), placeholders.get(modality, ""))
    return template


def tokenizer(
    special: list[str],
    placeholders: Mapping[str, str],
    *,
    literal: tuple[str, ...] = (),
    named: Mapping[str, str] | None = None,
) -> PreTrainedTokenizerFast:
    """VOCABULARY tokens: `special` ones follow the common three, `literal` strings come last and are tokens of text.

    `named` are the special tokens that the family's processor asks the tokenizer for by name.
    """
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trained.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY - len(literal),
        special_tokens=[END, TURN, TURN_END, *special],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        min_frequency=1,
        show_progress=False,
    )
    trained.train_from_iterator(SENTENCES, trainer)
    trained.add_tokens(list(literal))
    found = PreTrainedTokenizerFast(
        tokenizer_object=trained,
        bos_token=END,
        eos_token=TURN_END,
        pad_token=END,
        extra_special_tokens=dict(named or {}),
        chat_template=chat_template(placeholders),
    )
    assert len(found) == VOCABULARY
    return found


def ids(found: PreTrainedTokenizerFast, **names: str) -> dict[str, int]:
    """Configuration fields that hold the ids of tokens."""
    return {name: found.convert_tokens_to_ids(token) for name, token in names.items()}


def write_model(
    folder: Path,
    model: PreTrainedModel,
    *,
    embeddings: float = 1.0,
    renames: Mapping[str, str] | None = None,
    transposed: tuple[str, ...] = (),
) -> None:
    """Fill the model with random weights and save it as bf16.

    `embeddings` is their scale: a tied head wants small ones. `renames` maps beginnings of the names that transformers
    saves to those that vLLM loads; `transposed` are ends of the names of weights that the hub's checkpoints have
    transposed.
    """
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            drawn = random_weights(name, parameter, generator)
            parameter.copy_(drawn * embeddings if "embed_tokens" in name else drawn)
    logging.disable_progress_bar()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Casting complex values")  # tables of Llama 4, which are not saved
        model.to(torch.bfloat16).save_pretrained(folder)
    logging.enable_progress_bar()
    if renames or transposed:
        _rewrite(folder / "model.safetensors", renames or {}, transposed)


def _rewrite(weights: Path, renames: Mapping[str, str], transposed: tuple[str, ...]) -> None:
    found = {
        _renamed(name, renames): tensor.mT.contiguous() if name.endswith(transposed) else tensor
        for name, tensor in load_file(weights).items()
    }
    save_file(found, weights, {"format": "pt"})


def _renamed(name: str, renames: Mapping[str, str]) -> str:
    return next((new + name.removeprefix(old) for old, new in renames.items() if name.startswith(old)), name)
