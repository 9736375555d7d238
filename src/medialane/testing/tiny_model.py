"""Builds a tiny Qwen2.5-VL with random weights, whose output differs between images.

Outputs depend on the image because matrices are drawn from N(0, 1/fan_in), not from the library's N(0, 0.02), so that
activations keep their scale through the layers; queries and keys are twice as large, so that attention is not uniform;
the head is not tied to the embeddings. With the library's own initialisation all images give the same output.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping
from importlib.metadata import version
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from medialane.runtime.private_files import make_own_folder
from medialane.types.hashing import content_hash

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerFast

#: The first ids of the vocabulary, in this order.
SPECIAL_TOKENS = (
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|vision_pad|>",
    "<|image_pad|>", "<|video_pad|>",
)  # fmt: skip

#: The last ids: the markers of vLLM's tool and reasoning parsers. Not special, so that they stay in the text.
_MARKERS = ("<tool_call>", "</tool_call>", "<think>", "</think>")

#: vLLM's flags for this model, on any machine: no compilation, no profiling run with the largest images.
TINY_MODEL_FLAGS = (
    "--enforce-eager",
    "--skip-mm-profiling",
    "--max-model-len=8192",
    '--limit-mm-per-prompt={"image": 8, "video": 1}',
)

#: vLLM settings that exist only as environment variables, for a tiny model on a shared CPU. One thread per engine: with
#: two on two cores, each would wait for the other while the server runs. Also with --enforce-eager vLLM compiles the
#: function that ranks logprobs: 12 s of CPU time in each engine, at the first request for them.
TINY_MODEL_ENVIRON: Mapping[str, str] = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "TORCH_COMPILE_DISABLE": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
}

#: Enough text to fill the vocabulary, so that each id that the model can sample has a distinct text.
SENTENCES = (
    "A photograph shows a harbour at dawn, where three fishing boats wait between wooden piers and yellow buoys.",
    "Describe the picture in one sentence, then count every object and name its colour, its shape and its size.",
    "The quick brown fox jumps over the lazy dog while seven curious children watch from behind the garden fence.",
    "Which numbers appear on the signs: 0, 1, 2, 3, 4, 5, 6, 7, 8 or 9? Answer with valid JSON and nothing else.",
    "Mountains, rivers, bridges, streets, kitchens, windows, flowers, horses, bicycles, trains and crowded markets.",
)
_VOCABULARY = 512

_CHAT_TEMPLATE = """\
{%- if tools %}<|im_start|>system
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}<|im_end|>
{% endif %}
{%- for message in messages %}<|im_start|>{{ message.role }}
{% if message.content is string %}{{ message.content }}
{%- elif message.content %}{% for part in message.content %}
{%- if part.type in ('image', 'image_url') or 'image' in part %}<|vision_start|><|image_pad|><|vision_end|>
{%- elif part.type in ('video', 'video_url') or 'video' in part %}<|vision_start|><|video_pad|><|vision_end|>
{%- else %}{{ part.text }}{% endif %}
{%- endfor %}{% endif %}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""

_TEXT = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32768,
    "rope_parameters": {"rope_type": "default", "mrope_section": [4, 6, 6], "rope_theta": 1e6},
    "tie_word_embeddings": False,
}

_VISION = {
    "depth": 2,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_heads": 4,
    "out_hidden_size": 128,
    "patch_size": 14,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "window_size": 112,
    "fullatt_block_indexes": [1],
}

_PREPROCESSOR = {
    "image_processor_type": "Qwen2VLImageProcessor",
    "processor_class": "Qwen2_5_VLProcessor",
    "min_pixels": 3136,
    "max_pixels": 12845056,
    "patch_size": 14,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
}


def cache_folder(environ: Mapping[str, str]) -> Path:
    """Return medialane's cache folder of this user, according to the XDG base directory specification; below TMPDIR
    for a user without a home, such as `nobody`. Raises StartupFailed if another user has taken that."""
    base, home = environ.get("XDG_CACHE_HOME", ""), environ.get("HOME", "")
    if base.startswith("/"):
        return Path(base) / "medialane"
    if home and os.access(home, os.W_OK):
        return Path(home) / ".cache" / "medialane"
    folder = Path(tempfile.gettempdir()) / f"medialane-cache-{os.geteuid()}"
    make_own_folder(folder)  # models and programs are started from it
    return folder


def build_tiny_model(cache: Path) -> Path:
    """Return the folder of the tiny model below `cache`; build it if it is missing (about 10 s).

    The folder's name contains a digest of this file and of the libraries' versions. It is created atomically; if two
    processes build it at once, one wins. Raises OSError if `cache` cannot be written.
    """
    return build_once(cache / f"tiny-qwen2.5-vl-{recipe_digest(Path(__file__))}", _write_model)


def build_once(folder: Path, write: Callable[[Path], None]) -> Path:
    """Return `folder`, created atomically and filled by `write` if it is missing."""
    if folder.is_dir():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    unfinished = Path(tempfile.mkdtemp(dir=folder.parent, prefix=".tiny-"))
    try:
        write(unfinished)
        _publish(unfinished, folder)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return folder


def _publish(unfinished: Path, folder: Path) -> None:
    unfinished.chmod(0o755)
    try:
        os.rename(unfinished, folder)
    except OSError:
        if not folder.is_dir():
            raise  # not because another process was faster


def recipe_digest(*sources: Path) -> str:
    """Return a digest of the files that build a model, and of the libraries' versions."""
    versions = [f"{name}={version(name)}" for name in ("torch", "transformers", "tokenizers")]
    return content_hash(b"".join(source.read_bytes() for source in sources) + " ".join(versions).encode())[:12]


def _write_model(folder: Path) -> None:
    from transformers.utils import logging

    tokenizer = _tokenizer()
    tokenizer.save_pretrained(folder)
    logging.disable_progress_bar()
    _model(tokenizer).save_pretrained(folder)
    logging.enable_progress_bar()
    video = _PREPROCESSOR | {"video_processor_type": "Qwen2VLVideoProcessor"}
    (folder / "preprocessor_config.json").write_text(json.dumps(_PREPROCESSOR, indent=2))
    (folder / "video_preprocessor_config.json").write_text(json.dumps(video, indent=2))


def _tokenizer() -> PreTrainedTokenizerFast:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=_VOCABULARY - len(_MARKERS),
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        min_frequency=1,
        show_progress=False,
    )
    tokenizer.train_from_iterator(SENTENCES, trainer)
    tokenizer.add_tokens(list(_MARKERS))
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",  # noqa: S106 - a token of text
        pad_token="<|endoftext|>",  # noqa: S106 - likewise
        extra_special_tokens={"image_token": "<|image_pad|>", "video_token": "<|video_pad|>"},
        chat_template=_CHAT_TEMPLATE,
    )


def _model(tokenizer: PreTrainedTokenizerFast) -> Any:
    import torch
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    ids = {token: tokenizer.convert_tokens_to_ids(token) for token in SPECIAL_TOKENS}
    ends = {"bos_token_id": ids["<|endoftext|>"], "eos_token_id": ids["<|im_end|>"]}
    config = Qwen2_5_VLConfig(
        text_config=_TEXT | ends | {"vocab_size": len(tokenizer)},
        vision_config=dict(_VISION),
        image_token_id=ids["<|image_pad|>"],
        video_token_id=ids["<|video_pad|>"],
        vision_start_token_id=ids["<|vision_start|>"],
        vision_end_token_id=ids["<|vision_end|>"],
        tie_word_embeddings=False,
        **ends,
    )
    model = Qwen2_5_VLForConditionalGeneration(config)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(random_weights(name, parameter, generator))
    return model.to(torch.bfloat16)


def random_weights(name: str, parameter: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Return the weights of the parameter of this name, as described at the top of this file."""
    import torch

    if parameter.ndim == 1:
        return torch.zeros_like(parameter) if name.endswith("bias") else torch.ones_like(parameter)
    noise: torch.Tensor = torch.randn(parameter.shape, generator=generator)
    if "embed_tokens" in name:
        return noise
    weights: torch.Tensor = noise / prod(parameter.shape[1:]) ** 0.5
    if "q_proj" in name or "k_proj" in name:
        return weights * 2
    if "qkv" in name:
        weights[: 2 * len(weights) // 3] *= 2  # queries and keys come first, then values
    return weights
