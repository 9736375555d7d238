"""Ids of segments are those of whole texts, for tokenizers of many kinds; and what is kept of them."""

import random

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from medialane.testing.tiny_model import SENTENCES
from medialane.vllm_bridge.frontend import MIN_CHARS, SegmentCache, splitter_of

_SPECIAL = ["<unk>", "<s>", "</s>", "<|user|>", "<|end|>", "<|en", "[INST]"]
_OTHERS = (
    "привет мир",
    "你好。世界 こんにちは",
    "مرحبا",
    "👩‍👧 😀❤️",
    "def f(x):\n    return x\n",
    "ﬁn Ⅷ \uff58",
    "cafe\u0301 \u0130",
)


def _model(kind):
    unknown = {"unk_token": "<unk>"}
    if kind == "unigram":
        return models.Unigram(), trainers.UnigramTrainer(vocab_size=600, special_tokens=_SPECIAL, **unknown)
    if kind == "word piece":
        return models.WordPiece(**unknown), trainers.WordPieceTrainer(vocab_size=600, special_tokens=_SPECIAL)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    return models.BPE(**unknown), trainers.BpeTrainer(
        vocab_size=700, special_tokens=_SPECIAL, initial_alphabet=alphabet
    )


def _parts(kind):
    """Return normalizer and pre-tokenizer."""
    replaced = normalizers.Replace(" ", "▁")
    return {
        "byte level": (normalizers.NFC(), pre_tokenizers.ByteLevel(add_prefix_space=False)),
        "prefix space": (None, pre_tokenizers.ByteLevel(add_prefix_space=True)),
        "metaspace, first": (None, pre_tokenizers.Metaspace(prepend_scheme="first")),
        "metaspace, always": (normalizers.NFKC(), pre_tokenizers.Metaspace(prepend_scheme="always")),
        "prepended": (normalizers.Sequence([normalizers.Prepend("▁"), replaced]), None),
        "stripped": (normalizers.Sequence([normalizers.Strip(), normalizers.Lowercase()]), pre_tokenizers.Whitespace()),
        "merged spaces": (replaced, pre_tokenizers.Split(" ", "merged_with_previous")),
        "unigram": (normalizers.NFKC(), pre_tokenizers.Metaspace()),
        "word piece": (normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()),
    }[kind]


KINDS = ["byte level", "prefix space", "metaspace, first", "metaspace, always", "prepended", "stripped",
         "merged spaces", "unigram", "word piece"]  # fmt: skip

#: Beside the special ones.
ADDED = {
    "none": [],
    "whitespace and HTML": [AddedToken(text, normalized=False) for text in ("\n", "\n\n", "  ", "<h1>", "<|end|><h1>")],
    "strip": [
        AddedToken("<|a|>", special=True, normalized=False, rstrip=True),
        AddedToken("<|b|>", special=True, normalized=False, lstrip=True),
        AddedToken("<|c|>", special=True, normalized=False, lstrip=True, rstrip=True),
    ],
    "normalized": [AddedToken(text, normalized=True) for text in ("quick brown", "Fox", "e\u0301", " dog")],
}


def trained(kind="byte level", added=(), wrapper=PreTrainedTokenizerFast, **options):
    model, trainer = _model(kind)
    trainer.show_progress = False
    tokenizer = Tokenizer(model)
    normalizer, pre_tokenizer = _parts(kind)
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    if pre_tokenizer is not None:
        tokenizer.pre_tokenizer = pre_tokenizer
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator([*SENTENCES, *_OTHERS], trainer)
    tokenizer.add_tokens(list(added))
    return wrapper(tokenizer_object=tokenizer, **options)


def whole_ids(tokenizer, text):
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def texts(added, num=12):
    chosen = random.Random(7)
    tokens = [*_SPECIAL, *(token.content for token in added)]
    pieces = (
        tokens,
        tokens,
        [" ", "  ", "\n", "\n\n", "\t", "\u3000", ""],
        SENTENCES,
        _OTHERS,
        ["<|", "nd|>", "quick brown"],
    )
    for _ in range(num):
        yield "".join(chosen.choice(chosen.choice(pieces)) for _ in range(chosen.randrange(40, 160)))


@pytest.mark.parametrize("added", ADDED.values(), ids=ADDED)
@pytest.mark.parametrize("kind", KINDS)
def test_ids_of_segments_are_those_of_the_text(kind, added):
    tokenizer = trained(kind, added)
    splitter = splitter_of(tokenizer)
    assert splitter is not None
    cache = SegmentCache(tokenizer, splitter, 1 << 20)
    for text in texts(added):
        longer = f"{text}<|user|>{SENTENCES[0]}"
        for each in (text, longer, longer):
            assert cache.token_ids(each, "", False, None) == whole_ids(tokenizer, each)
        segments = list(splitter.segments(text, min_chars=0))
        assert "".join(segments) == text
        assert [each for segment in segments for each in whole_ids(tokenizer, segment)] == whole_ids(tokenizer, text)
    assert cache.stats.num_cached > cache.stats.num_new > 0


class Lowering(PreTrainedTokenizerFast):
    def _encode_plus(self, text, *args, **kwargs):
        return super()._encode_plus(text.lower(), *args, **kwargs)


def _dropping():
    tokenizer = trained()
    tokenizer.backend_tokenizer.model.dropout = 0.5
    return tokenizer


def _without_special_tokens():
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE()))


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda: trained(added=[AddedToken("<w>", single_word=True, normalized=False)]), "whole words"),
        (lambda: trained(added=[AddedToken("<" + "w" * 200, normalized=False)]), "more than 128 characters"),
        (lambda: trained(split_special_tokens=True), "in its own way"),
        (lambda: trained(wrapper=Lowering), "in its own way: Lowering"),
        (_dropping, "at random"),
        (_without_special_tokens, "no special tokens"),
        (lambda: None, "NoneType"),
    ],
)
def test_tokenizer_whose_segments_are_in_doubt_is_not_split(make, why, caplog):
    with caplog.at_level("INFO"):
        assert splitter_of(make()) is None
    assert why in caplog.text


@pytest.fixture(scope="module")
def tokenizer():
    return trained()


@pytest.fixture
def cache(tokenizer):
    return SegmentCache(tokenizer, splitter_of(tokenizer), 1 << 20)


TEXT = "<|user|>" + SENTENCES[0] * 20


def test_entries_are_found_with_the_same_salt_only(cache, tokenizer):
    for salt in ("a", "b", "a"):
        assert cache.token_ids(TEXT, salt, False, None) == whole_ids(tokenizer, TEXT)
    assert (cache.stats.num_cached, cache.stats.num_new) == (len(TEXT), 2 * len(TEXT))


@pytest.mark.parametrize(
    ("text", "max_length"),
    [(TEXT, 100), (TEXT + "\ud800", None)],
    ids=["truncated", "not Unicode"],
)
def test_other_texts_are_left_to_the_tokenizer(cache, text, max_length):
    assert cache.token_ids(text, "", False, max_length) is None


def test_a_short_text_is_not_kept(cache, tokenizer):
    for text in ("", TEXT[: MIN_CHARS - 1]):
        assert cache.token_ids(text, "", False, None) == whole_ids(tokenizer, text)
    assert cache.stats.num_bytes == 0


@pytest.mark.parametrize("adds_tokens", [False, True])
def test_tokens_added_to_a_prompt_are_left_to_the_tokenizer(adds_tokens):
    tokenizer = trained(bos_token="<s>", add_bos_token=adds_tokens)
    assert (tokenizer.num_special_tokens_to_add() > 0) == adds_tokens
    cache = SegmentCache(tokenizer, splitter_of(tokenizer), 1 << 20)
    expected = None if adds_tokens else tokenizer(TEXT)["input_ids"]
    assert cache.token_ids(TEXT, "", True, None) == expected


def test_least_recently_used_entries_leave_the_cache(tokenizer):
    splitter = splitter_of(tokenizer)
    one = SegmentCache(tokenizer, splitter, 1 << 20)
    one.token_ids(TEXT, "", False, None)
    cache = SegmentCache(tokenizer, splitter, 3 * one.stats.num_bytes)
    for salt in ("a", "b", "c", "a", "d"):
        cache.token_ids(TEXT, salt, False, None)
    assert cache.stats.num_bytes == 3 * one.stats.num_bytes
    before = cache.stats.num_cached
    for salt in ("a", "c", "d"):
        cache.token_ids(TEXT, salt, False, None)
    assert cache.stats.num_cached == before + 3 * len(TEXT)
    cache.token_ids(TEXT, "b", False, None)
    assert cache.stats.num_cached == before + 3 * len(TEXT)


def test_a_segment_of_the_whole_memory_is_not_kept(tokenizer):
    cache = SegmentCache(tokenizer, splitter_of(tokenizer), 500)
    assert cache.token_ids(TEXT, "", False, None) == whole_ids(tokenizer, TEXT)
    assert cache.stats.num_bytes == 0
