"""Token ids of the segments of prompts are kept, so that a turn of a chat costs the tokenizing of its new text.

Theory of operation. A Hugging Face tokenizer first splits a text at its added tokens; normalizer, pre-tokenizer and
model process each piece between them alone. So the ids of a text are those of its *segments*, joined, if each segment
begins with an added token (`segments`): a piece after it is never at the start of a text, which some pre-tokenizers
treat in their own way (Metaspace, `prepend_scheme` "first"). A text is cut before

* special tokens: a chat template puts one at each message, and text of clients has few (HTML tags, which some
  tokenizers add as well, would make segments of a few characters);
* that are matched before the text is normalized, and do not extend to the whitespace before them (`lstrip`);
* once the segment has `min_chars`: the cuts of a text follow from the text before them, so a longer one begins with the
  same segments.

Where added tokens overlap, the leftmost, then the longest one counts: the pattern has all that are matched before
normalization. `single_word` depends on the text on both sides: tokenizers with such tokens are not split at all.

All of this describes the library at the time of writing, and subclasses of tokenizers may do something else:
`splitter_of` looks at the tokenizer's parts, accepts the known ones only, and compares the ids of texts that are cut
wherever possible with ids of whole texts. Any doubt, and prompts are tokenized by vLLM alone, as are those that are
truncated, need offsets of characters, or belong to no JSON body.

*Between tenants.* Whether a segment was known shows in the time to the first token: about 2 us a character. An entry is
found only by requests with the same salt, like blocks of the KV cache and media: by default that of tenant or API key,
and the request's `cache_salt`. Within one salt, who knows all of a segment but a few characters can find out whether it
was sent before, as with the KV cache, which shows it for each 16 tokens. Entries have a hash of the text (BLAKE3), not
the text.
"""

from __future__ import annotations

import copy
import logging
import random
import re
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain, islice
from threading import Lock
from typing import Any

import msgspec
from blake3 import blake3
from tokenizers import AddedToken, Tokenizer, models
from transformers import TokenizersBackend
from vllm.renderers import BaseRenderer

from medialane.types.stats import SegmentStats
from medialane.vllm_bridge.frontend.request_backend import Rendering
from medialane.vllm_bridge.seams.multimodal import tokenize_by

logger = logging.getLogger(__name__)

#: Shorter segments are not worth an entry: to tokenize this much takes 0.3 ms.
MIN_CHARS = 256

#: Returns the ids of each text, without those that are added to a prompt. Any thread may call it.
Encode = Callable[[list[str]], list[list[int]]]

#: Of an entry, without its ids: key, array, and place in the dictionary.
_ENTRY_BYTES = 300

#: Normalizers and pre-tokenizers that process each piece alone.
_KNOWN_PARTS = frozenset({
    "BertNormalizer", "ByteLevel", "Lowercase", "NFC", "NFD", "NFKC", "NFKD", "Nmt", "Precompiled", "Prepend",
    "Replace", "Sequence", "Strip", "StripAccents",
    "BertPreTokenizer", "CharDelimiterSplit", "Digits", "Metaspace", "Punctuation", "Split", "UnicodeScripts",
    "Whitespace", "WhitespaceSplit",
})  # fmt: skip

#: Methods by which a tokenizer of transformers encodes.
_ENCODING = frozenset({"__call__", "_encode_plus", "_convert_encoding", "set_truncation_and_padding"})

#: Longer added tokens would exceed the nesting of regular expressions.
_MAX_TOKEN_CHARS = 128

#: Where vLLM's subclasses of a tokenizer are, which only choose a copy of it for each call.
_POOLS = "vllm.tokenizers.hf"

#: Of the trial at the start: texts, and tokens of each kind.
_NUM_TEXTS, _NUM_TOKENS = 80, 32
#: First characters of scripts, emoji, private and supplementary characters.
_SCRIPTS = (
    0xC0, 0x130, 0x1C4, 0x391, 0x430, 0x5D0, 0x627, 0x661, 0x905, 0xE01, 0xE30, 0x1100, 0x1161, 0x3042, 0x4E00, 0xAC00,
    0x1F1E6, 0x1F600, 0x20000, 0xE000, 0xFB00, 0xFF21,
)  # fmt: skip
_FRAGMENTS = (
    *("".join(map(chr, range(first, first + 5))) for first in _SCRIPTS),
    " ", "  ", "\n", "\n\n", " \n", "\t", "\r\n", "\xa0", "\u3000", "\u2028", "\u200b", "\ufeff", "\0", "\x1b[0m", "a",
    " the", "The quick brown fox", "user\n", "assistant\n", "system", " [INST] ", "[/INST]", "I'm", " we'll", "_", "0",
    "123456789", " 3.14", "1e-9", "x\xb2", "e\u0301", "I\u0307", "\u2764\ufe0f", "\U0001f468\u200d\U0001f469",
    "def f(x):\n    return x[0]\n", '{"a": [1, null]}', "</div>", "<p>", "<|", "|>", "<", ">", "[", "\\n", "`", "//",
    "\u2019s", "https://e.example/?q=%20", "\u2581", "\u2581\u2581", "\u0120", "!!!", "...", "\u2026", "\u2014", "#$%",
    "'s",
)  # fmt: skip


class Unproven(Exception):
    """The ids of this tokenizer's segments may not be those of its texts."""


class SegmentSplitter:
    """Cuts texts of one tokenizer; see above. Made by `splitter_of`."""

    def __init__(self, tokens: Sequence[AddedToken]) -> None:
        """Raises Unproven."""
        early = [token for token in tokens if not token.normalized]
        if any(token.single_word for token in early):
            raise Unproven("has tokens that are matched as whole words")
        if any(len(token.content) > _MAX_TOKEN_CHARS for token in early):
            raise Unproven(f"has added tokens of more than {_MAX_TOKEN_CHARS} characters")
        self._cuts = frozenset(token.content for token in early if _may_cut(token))
        if not self._cuts:
            raise Unproven("has no special tokens at which its texts can be cut")
        self._pattern = re.compile(_longest_of(token.content for token in early))

    def segments(self, text: str, *, min_chars: int = MIN_CHARS) -> Iterator[str]:
        start = 0
        for match in self._pattern.finditer(text):
            if match.start() - start >= min_chars and match.group() in self._cuts:
                yield text[start : match.start()]
                start = match.start()
        yield text[start:]


def _may_cut(token: AddedToken) -> bool:
    return token.special and not token.lstrip and not re.search(r"\s", token.content)


def _longest_of(words: Iterable[str]) -> str:
    """Return a regular expression for the longest of the words that begin at a place. Alternatives would be tried one
    by one: some tokenizers have 6000 tokens that begin with `<`."""
    tree: dict[str, Any] = {}
    for word in filter(None, words):
        node = tree
        for char in word:
            node = node.setdefault(char, {})
        node[""] = {}
    return _expression(tree)


def _expression(tree: Mapping[str, Any]) -> str:
    branches = [re.escape(char) + _expression(rest) for char, rest in tree.items() if char]
    if not branches:
        return ""
    joined = branches[0] if len(branches) == 1 else f"(?:{'|'.join(branches)})"
    return f"(?:{joined})?" if "" in tree else joined


def splitter_of(tokenizer: Any) -> SegmentSplitter | None:
    """Return what cuts the texts of vLLM's tokenizer so that the ids of segments make those of the text; None, with a
    line in the log, if that is not certain."""
    try:
        return _proven(tokenizer)
    except Unproven as doubt:
        logger.info("tokens of prompts are not cached: the tokenizer %s", doubt)
        return None


def _proven(tokenizer: Any) -> SegmentSplitter:
    """Raises Unproven."""
    if not isinstance(tokenizer, TokenizersBackend) or type(tokenizer.backend_tokenizer) is not Tokenizer:
        raise Unproven(f"is not one of the library `tokenizers`: {type(tokenizer).__name__}")
    kinds = type(tokenizer).__mro__
    own = [kind for kind in kinds[: kinds.index(TokenizersBackend)] if kind.__module__ != _POOLS]
    if tokenizer.split_special_tokens or any(_ENCODING & vars(kind).keys() for kind in own):
        raise Unproven(f"encodes texts in its own way: {type(tokenizer).__name__}")
    backend = tokenizer.backend_tokenizer
    if unknown := (_parts(backend.normalizer) | _parts(backend.pre_tokenizer)) - _KNOWN_PARTS:
        raise Unproven(f"has parts that are not known: {', '.join(sorted(unknown))}")
    if isinstance(backend.model, models.BPE) and backend.model.dropout:
        raise Unproven("drops merges at random")
    tokens = list(backend.get_added_tokens_decoder().values())
    splitter = SegmentSplitter(tokens)
    texts = _trial_texts(tokens)
    cut = [list(splitter.segments(text, min_chars=0)) for text in texts]
    try:
        ids, whole_ids = iter(encoder_of(tokenizer)(list(chain(*cut)))), _plain_ids(tokenizer, texts)
    except Exception as error:  # the library's own kinds: vLLM says why, if a client's prompt raises one
        raise Unproven(f"cannot encode some texts: {error}") from error
    for text, segments, whole in zip(texts, cut, whole_ids, strict=True):
        if list(chain.from_iterable(islice(ids, len(segments)))) != whole:
            raise Unproven(f"has other ids for this text than for its segments: {text[:200]!r}")
    return splitter


def _parts(part: Any) -> set[str]:
    """Return the types in a normalizer or pre-tokenizer."""
    if part is None:
        return set()
    return {found.decode() for found in re.findall(rb'"type":"(\w+)"', part.__getstate__())}


def encoder_of(tokenizer: Any) -> Encode:
    """Return what encodes texts like this tokenizer, which `splitter_of` has proven, in half the time: nobody asks
    where in its text a token is."""
    backend = tokenizer.backend_tokenizer
    is_its_own = type(tokenizer).__module__ == _POOLS  # calls are made of copies
    if not is_its_own or backend.truncation is not None or backend.padding is not None:
        backend = copy.deepcopy(backend)
        backend.no_truncation()
        backend.no_padding()

    def encode(texts: list[str]) -> list[list[int]]:
        return [encoding.ids for encoding in backend.encode_batch_fast(texts, add_special_tokens=False)]

    return encode


def _plain_ids(tokenizer: Any, texts: list[str]) -> list[list[int]]:
    """Return what transformers finds."""
    options = {"return_attention_mask": False, "return_token_type_ids": False, "verbose": False}
    found: list[list[int]] = tokenizer(texts, add_special_tokens=False, **options)["input_ids"]
    return found


def _trial_texts(tokens: Sequence[AddedToken]) -> list[str]:
    """Return texts of several scripts, code and odd whitespace, with special tokens at odd places: equal ones for each
    call with these tokens."""
    chosen = random.Random(0)  # noqa: S311 - no secret
    contents = [token.content for token in tokens]
    odd = [token.content for token in tokens if token.normalized or token.lstrip or token.rstrip or not token.special]
    some = chosen.sample(contents, min(_NUM_TOKENS, len(contents))) + chosen.sample(odd, min(_NUM_TOKENS, len(odd)))
    cut_off = [content[: len(content) // 2] for content in some] + [content[1:] for content in some]
    texts = [content * 2 for content in some]
    for _ in range(_NUM_TEXTS):
        words = [chosen.choice(chosen.choice((_FRAGMENTS, _FRAGMENTS, some, some, cut_off))) for _ in range(24)]
        texts.append("".join(words))
    return texts


def install_segment_cache(
    renderer: BaseRenderer, backend: Rendering, splitter: SegmentSplitter | None, max_bytes: int
) -> SegmentCache | None:
    """Have this renderer join the ids of its prompts from segments, those of earlier prompts of `backend` included;
    None, and nothing is changed, without splitter or memory."""
    if splitter is None or not max_bytes:
        return None
    cache = SegmentCache(renderer.get_tokenizer(), splitter, max_bytes)
    tokenize_by(renderer, lambda: backend.salt, cache.token_ids)
    return cache


class SegmentCache:
    """Ids by segment, the least recently used leave it at `max_bytes`. Any thread may call it."""

    def __init__(self, tokenizer: Any, splitter: SegmentSplitter, max_bytes: int) -> None:
        self._encode = encoder_of(tokenizer)
        self._splitter = splitter
        self._adds_tokens = bool(tokenizer.num_special_tokens_to_add())
        self._max_bytes = max_bytes
        self._entries: OrderedDict[bytes, array[int]] = OrderedDict()
        self._num_bytes = 0
        self._num_chars = {"cached": 0, "new": 0}
        self._lock = Lock()

    @property
    def stats(self) -> SegmentStats:
        return SegmentStats(self._num_chars["cached"], self._num_chars["new"], self._num_bytes)

    def token_ids(self, text: str, salt: str, adds_special_tokens: bool, max_length: int | None) -> list[int] | None:
        """Return the ids of a text; None for the tokenizer to find them: of a text of more than `max_length` tokens, of
        one that is not valid Unicode, and if it adds tokens to a text."""
        if adds_special_tokens and self._adds_tokens:
            return None
        segments = list(self._splitter.segments(text))
        try:
            keys = [blake3(msgspec.msgpack.encode((salt, segment))).digest() for segment in segments]
        except UnicodeEncodeError:
            return None
        known = self._known(dict(zip(keys, map(len, segments), strict=True)))
        new = {key: segment for key, segment in zip(keys, segments, strict=True) if key not in known}
        ids = [array("I", each) for each in self._encode(list(new.values()))]
        known.update(zip(new, ids, strict=True))
        self._keep({key: known[key] for key, segment in new.items() if len(segment) >= MIN_CHARS})
        joined = array("I")
        for key in keys:
            joined += known[key]
        return None if max_length is not None and len(joined) > max_length else joined.tolist()

    def _known(self, sizes: Mapping[bytes, int]) -> dict[bytes, array[int]]:
        """Return the known ones of these segments, whose characters are counted."""
        known = {}
        with self._lock:
            for key, num_chars in sizes.items():
                if (ids := self._entries.get(key)) is not None:
                    self._entries.move_to_end(key)
                    known[key] = ids
                self._num_chars["new" if ids is None else "cached"] += num_chars
        return known

    def _keep(self, entries: Mapping[bytes, array[int]]) -> None:
        with self._lock:
            for key, ids in entries.items():
                if key not in self._entries:  # by another thread, meanwhile
                    self._entries[key] = ids
                    self._num_bytes += _size(ids)
            while self._num_bytes > self._max_bytes:
                self._num_bytes -= _size(self._entries.popitem(last=False)[1])


def _size(ids: array[int]) -> int:
    return len(ids) * ids.itemsize + _ENTRY_BYTES
