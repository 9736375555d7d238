"""A tiny model whose tokenizer is as large as a real one's, trained on what every machine has.

A byte-level BPE of 100,000 merges with Qwen's pattern, from 20 MB of the standard library and words drawn from several
scripts. Training takes 2 minutes.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from medialane.testing.tiny_model import SPECIAL_TOKENS, build_once, build_tiny_model, cache_folder, recipe_digest

NUM_MERGES = 100_000
CORPUS_BYTES = 20_000_000

#: First character and number of letters; how many of a hundred words of the corpus.
_SCRIPTS = ((0x61, 26, 40), (0xE0, 31, 10), (0x3B1, 25, 8), (0x430, 32, 12), (0x5D0, 27, 5), (0x627, 36, 8),
            (0x905, 50, 5), (0x3041, 80, 6), (0x4E00, 3000, 6))  # fmt: skip
_QWEN_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def large_vocabulary_model() -> Path:
    """Return the model's folder, which has no weights; it is made if it is missing."""
    return build_once(cache_folder(os.environ) / f"bpe-qwen2.5-vl-{recipe_digest(Path(__file__))}", _write_model)


def vocabulary(chosen: random.Random) -> list[str]:
    """Return words, frequent ones first."""
    words = []
    for _ in range(60_000):
        first, num, _ = chosen.choices(_SCRIPTS, [weight for *_, weight in _SCRIPTS])[0]
        length = 1 + min(chosen.randrange(10), chosen.randrange(10)) if num < 100 else chosen.randrange(1, 4)
        words.append("".join(chr(first + int(num * chosen.random() ** 2)) for _ in range(length)))
    return words


def sources(num_bytes: int) -> Iterator[str]:
    """Yield this much of the standard library."""
    folder = Path(sysconfig.get_path("stdlib"))
    for path in sorted(folder.rglob("*.py")):
        if "site-packages" in path.parts:
            continue
        text = path.read_text("utf-8", "replace")
        yield text
        num_bytes -= len(text)
        if num_bytes < 0:
            return


def _corpus() -> Iterator[str]:
    yield from sources(CORPUS_BYTES)
    chosen, words = random.Random(0), vocabulary(random.Random(0))
    for _ in range(100_000):
        yield " ".join(words[int(len(words) * chosen.random() ** 3)] for _ in range(20))


def _write_model(folder: Path) -> None:
    """Write the tiny model's files, without weights, and with a tokenizer of the size of a real one's."""
    model = build_tiny_model(cache_folder(os.environ))
    shutil.copytree(model, folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns("*.safetensors"))
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_QWEN_SPLIT), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=NUM_MERGES + 256 + len(SPECIAL_TOKENS),
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        min_frequency=1,
        show_progress=False,
    )
    tokenizer.train_from_iterator(_corpus(), trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = json.loads((folder / "config.json").read_text())
    text = config.get("text_config", config)
    text |= {"vocab_size": tokenizer.get_vocab_size(), "max_position_embeddings": 131_072}
    (folder / "config.json").write_text(json.dumps(config))
