"""Expansions of media items in prompts that workers expand (stages `decoded` and `url`), learned from their outputs.

Theory of operation. Exact routing needs the prompt as the engine will see it, with every item's placeholder expanded.
If a worker expands it, its first output reports the expanded prompt and the position of each item. From then on,
prompts with the same items are expanded here as well. An item that no worker has reported is in no worker's cache
either: the prompt is known up to it, and nothing after it could be cached.

What is learned is checked: the tokens between the items must equal the source's. For a model that moves or
rewrites them, nothing is learned, and requests are routed by the tokens before their media. A wrong prediction costs
time, never correctness.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable, Sequence
from itertools import chain
from typing import NamedTuple

from cachetools import LRUCache

from medialane.types.feature import MediaSpan
from medialane.types.media import Modality

#: Limit on the tokens of all expansions together (a 1024x768 image of Qwen2.5-VL has 999).
MAX_TOKENS = 4 << 20

_UTF_32 = f"utf-32-{sys.byteorder[0]}e"


class Item(NamedTuple):
    """One media item of a source prompt; items are in the order of their modality's placeholders."""

    mm_hash: str
    modality: Modality


class PromptPrefix(NamedTuple):
    """The known start of the prompt as the engine will see it; `unplaced_items` come somewhere after it."""

    token_ids: list[int]
    media: tuple[MediaSpan, ...] = ()
    unplaced_items: tuple[MediaSpan, ...] = ()


class Expansions:
    """A bounded LRU cache of items' expansions."""

    def __init__(self, max_tokens: int = MAX_TOKENS) -> None:
        self._expansions: LRUCache[str, list[int]] = LRUCache(max_tokens, getsizeof=len)
        #: The unexpanded placeholder of one item, by modality.
        self._placeholders: dict[str, tuple[int, ...]] = {}

    def __len__(self) -> int:
        return len(self._expansions)

    def learn(self, source: Sequence[int], expanded: Sequence[int], placed: Iterable[MediaSpan]) -> bool:
        """Store the expansions of a prompt's items. False if the two prompts cannot be aligned."""
        spans = sorted(placed, key=lambda span: span.offset)
        placeholders = _align(source, expanded, spans)
        if placeholders is None:
            return False
        for span, placeholder in zip(spans, placeholders, strict=True):
            self._placeholders[span.modality] = placeholder
            if span.length <= self._expansions.maxsize:
                self._expansions[span.mm_hash] = list(expanded[span.offset : span.offset + span.length])
        return True

    def expand(self, source: Sequence[int], items: Sequence[Item]) -> PromptPrefix:
        """Return the prompt as a worker will expand it, up to the first unknown item."""
        ids: list[int] = []
        spans: list[MediaSpan] = []
        done = 0
        for start, end, item in self._places(source, items):
            ids += source[done:start]
            expansion = self._expansions.get(item.mm_hash)
            if expansion is None:
                return _prefix(ids, spans, items)
            spans.append(MediaSpan(item.mm_hash, len(ids), len(expansion), item.modality, len(expansion)))
            ids += expansion
            done = end
        if len(spans) < len(items):  # an unknown placeholder: it may be anywhere
            return _prefix([], [], items)
        ids += source[done:]
        return _prefix(ids, spans, items)

    def _places(self, source: Sequence[int], items: Sequence[Item]) -> list[tuple[int, int, Item]]:
        """Return (start, end, item) of the items' placeholders in the source, in prompt order."""
        by_modality: dict[str, list[Item]] = {}
        for item in items:
            by_modality.setdefault(item.modality, []).append(item)
        placed = []
        text = _as_text(source) if by_modality else None
        for modality, own in by_modality.items():
            placeholder = self._placeholders.get(modality)
            if placeholder is None:
                return []
            places = _occurrences(text, _as_text(placeholder), len(own))
            placed += [(place, place + len(placeholder), item) for place, item in zip(places, own, strict=False)]
        return sorted(placed)


def _prefix(token_ids: list[int], spans: list[MediaSpan], items: Sequence[Item]) -> PromptPrefix:
    """The tokens of other items are unknown, but a worker that is processing these items is the best one for them."""
    placed, end = {span.mm_hash for span in spans}, len(token_ids)
    unplaced = [MediaSpan(mm_hash, end, 0, modality) for mm_hash, modality in items if mm_hash not in placed]
    return PromptPrefix(token_ids, tuple(spans), tuple(unplaced))


def _align(source: Sequence[int], expanded: Sequence[int], spans: Sequence[MediaSpan]) -> list[tuple[int, ...]] | None:
    """Return the source tokens that each span replaced; None if the rest of the two prompts differs."""
    own, other = _as_text(source), _as_text(expanded)
    if own is None or other is None:
        return None
    placeholders: list[tuple[int, ...]] = []
    ends = chain((span.offset for span in spans), (len(other),))
    place = next(ends)
    if own[:place] != other[:place]:
        return None
    for span, end in zip(spans, ends, strict=True):
        text = other[span.offset + span.length : end]
        end_of_placeholder = _next_text(own, place, text, is_last=end == len(other))
        if end_of_placeholder is None:
            return None
        placeholders.append(tuple(source[place:end_of_placeholder]))
        place = end_of_placeholder + len(text)
    return placeholders


def _next_text(source: str, place: int, text: str, *, is_last: bool) -> int | None:
    """Return where `text` continues in the source after a placeholder of at least one token at `place`, or None."""
    start = len(source) - len(text) if is_last else source.find(text, place + 1)
    return start if start > place and source.startswith(text, start) else None


def _occurrences(source: str | None, pattern: str | None, limit: int) -> list[int]:
    """Return the offsets of the first `limit` non-overlapping occurrences of `pattern`."""
    offsets: list[int] = []
    if source is None or pattern is None:
        return offsets
    place = source.find(pattern)
    while place >= 0 and len(offsets) < limit:
        offsets.append(place)
        place = source.find(pattern, place + len(pattern))
    return offsets


def _as_text(token_ids: Sequence[int]) -> str | None:
    """Return one character per token; None if an id is not a code point (above 1.1 million).

    CPython searches strings in linear time in the worst case (two-way algorithm of `fastsearch.h`); comparing lists
    token by token is quadratic if tokens repeat.
    """
    try:
        return array("I", token_ids).tobytes().decode(_UTF_32, "surrogatepass")
    except (OverflowError, UnicodeDecodeError):
        return None
