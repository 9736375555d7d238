"""The tokens of simulated outputs: a pure function of the seed, the prompt's media and all preceding tokens.

So the right output of any prompt is known, and an output that goes on at another worker is comparable with one that
does not: after a token too few or too many, all others differ.
"""

from __future__ import annotations

from array import array
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from zlib import crc32

import msgspec

#: Output tokens: ordinary ones of any vocabulary, and plain ASCII in the tiny model's.
FIRST_ANSWER_TOKEN, NUM_ANSWER_TOKENS = 264, 240


class AnswerTokens:
    """The tokens that follow others. `mm_hashes` are those of the prompt's items, in the order of their
    placeholders."""

    def __init__(self, token_ids: Sequence[int], mm_hashes: Iterable[str] = (), seed: int | None = None) -> None:
        self._digest = crc32(array("q", token_ids).tobytes(), crc32(f"{seed} {' '.join(mm_hashes)}".encode()))

    def next(self, excluded: Collection[int] = ()) -> int:
        """Return the next token, which then precedes the others. It is none of the `excluded`, unless all are."""
        number = self._digest % NUM_ANSWER_TOKENS
        if excluded:
            later = range(number, number + NUM_ANSWER_TOKENS)
            number = next((n for n in later if FIRST_ANSWER_TOKEN + n % NUM_ANSWER_TOKENS not in excluded), number)
        token = FIRST_ANSWER_TOKEN + number % NUM_ANSWER_TOKENS
        self._digest = crc32(token.to_bytes(8, "little"), self._digest)
        return token


def answer_of(token_ids: Sequence[int], num_tokens: int, mm_hashes: Iterable[str] = ()) -> list[int]:
    """Return the output of this many tokens for a prompt, without a seed."""
    tokens = AnswerTokens(token_ids, mm_hashes)
    return [tokens.next() for _ in range(num_tokens)]


class _Model(msgspec.Struct):
    vocab: dict[str, int] | list[object] = {}


class _Tokenizer(msgspec.Struct):
    model: _Model


def token_texts(model: str) -> Mapping[int, str]:
    """Return the texts of output tokens in the vocabulary of a model's folder, as far as they are ASCII in a byte-level
    one; empty without such a folder."""
    path = Path(model, "tokenizer.json")
    if not path.is_file():
        return {}
    vocab = msgspec.json.decode(path.read_bytes(), type=_Tokenizer).model.vocab
    texts = {number: text.replace("Ġ", " ") for text, number in vocab.items()} if isinstance(vocab, dict) else {}
    tokens = range(FIRST_ANSWER_TOKEN, FIRST_ANSWER_TOKEN + NUM_ANSWER_TOKENS)
    return {token: texts[token] for token in tokens if texts.get(token, "").isascii() and texts.get(token)}
