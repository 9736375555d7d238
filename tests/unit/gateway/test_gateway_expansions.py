"""Prompts expanded by workers, predicted from earlier results."""

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from medialane.gateway.request.route import Expansions, Item, PromptPrefix
from medialane.types.feature import MediaSpan

IMAGE, VIDEO = 900, 901
#: What the items of the tests expand to.
TOKENS = {"a": [900] * 5, "b": [900] * 7, "v": [901, 902, 901, 902]}
MODALITY = {"a": "image", "b": "image", "v": "video"}


def source_and_expanded(parts):
    """Parts are token ids or names of items: (source, expanded, spans, items)."""
    source, expanded, spans = [], [], []
    for part in parts:
        if isinstance(part, int):
            source.append(part)
            expanded.append(part)
        else:
            source.append(IMAGE if MODALITY[part] == "image" else VIDEO)
            spans.append(MediaSpan(part, len(expanded), len(TOKENS[part]), MODALITY[part], len(TOKENS[part])))
            expanded += TOKENS[part]
    items = [Item(s.mm_hash, s.modality) for s in spans]
    return source, expanded, tuple(spans), items


def learned(*prompts):
    found = Expansions()
    for parts in prompts:
        source, expanded, spans, _ = source_and_expanded(parts)
        assert found.learn(source, expanded, spans)
    return found


def test_text_prompt_is_known_unchanged():
    assert Expansions().expand([1, 2, 3], ()) == PromptPrefix([1, 2, 3])


def test_prompt_with_learned_items_is_fully_known():
    source, expanded, spans, items = source_and_expanded([9, "b", 8, "a", 7])
    assert learned([1, "a", 2], [3, "b"]).expand(source, items) == PromptPrefix(expanded, spans)


def test_prompt_is_known_up_to_its_first_new_item():
    source, _, spans, items = source_and_expanded([9, "a", 8, "b", 7])
    found = learned([1, "a", 2]).expand(source, items)
    assert found == PromptPrefix([9, *TOKENS["a"], 8], spans[:1], (MediaSpan("b", 7, 0, "image"),))


def test_expansion_is_unknown_before_a_placeholder_was_seen():
    source, _, _, items = source_and_expanded([9, "a", 8])
    assert Expansions().expand(source, items) == PromptPrefix([], (), (MediaSpan("a", 0, 0, "image"),))
    assert not learned([1, "v", 2]).expand(source, items).media


def test_modalities_are_distinguished():
    source, expanded, spans, items = source_and_expanded([1, "v", 2, "a", 3, "v"])
    by_modality = sorted(items, key=lambda item: item.modality)
    found = learned(["v", 2], ["a"]).expand(source, by_modality)
    assert found == PromptPrefix(expanded, spans)


def test_placeholder_of_several_tokens_is_learned():
    found = Expansions()
    span = MediaSpan("x", 2, 3, "image", 3)
    assert found.learn([1, 2, 50, 51, 3], [1, 2, 7, 7, 7, 3], [span])
    assert found.expand([50, 51, 4], [Item("x", "image")]).token_ids == [7, 7, 7, 4]


@pytest.mark.parametrize(
    ("source", "expanded"),
    [
        ([1, IMAGE, 2], [5, 900, 900, 2]),  # other text before the item
        ([1, IMAGE, 2], [1, 900, 900, 5]),  # other text behind it
        ([1, 2], [1, 900, 900, 2]),  # no placeholder at all
    ],
)
def test_prompt_rewritten_by_a_model_is_not_learned(source, expanded):
    found = Expansions()
    assert not found.learn(source, expanded, [MediaSpan("x", 1, 2, "image", 2)])
    assert len(found) == 0


def test_memory_is_bounded_and_evicts_unused_entries():
    found = Expansions(max_tokens=12)
    source, expanded, spans, _ = source_and_expanded(["a", 1, "b"])
    assert found.learn(source, expanded, spans)
    found.expand([IMAGE], [Item("a", "image")])
    assert found.learn([VIDEO], TOKENS["v"], [MediaSpan("v", 0, 4, "video", 4)])
    assert found.expand([IMAGE], [Item("a", "image")]).media
    assert not found.expand([IMAGE], [Item("b", "image")]).media


@given(st.lists(st.one_of(st.integers(0, 20), st.sampled_from(["a", "b", "v"])), min_size=1, max_size=30))
def test_learned_expansion_reproduces_its_prompt(parts):
    source, expanded, spans, items = source_and_expanded(parts)
    found = learned(["a", 1], ["b", 2], ["v", 3])
    assert found.expand(source, items) == PromptPrefix(expanded, spans)


@given(st.lists(st.one_of(st.integers(0, 3), st.sampled_from(["a", "b", "v"])), min_size=1, max_size=30))
def test_any_prompt_with_single_placeholders_is_learned_or_ignored(parts):
    source, expanded, spans, items = source_and_expanded(parts)
    found = Expansions()
    if found.learn(source, expanded, spans):
        assert found.expand(source, items).token_ids == expanded


def test_repeated_tokens_are_matched_in_linear_time():
    """Text that nearly occurs at every place: token by token, 155 ms of the event loop at 16,000 tokens."""
    half = [5] * 16_000
    source = [1, *half, 6, *half, 7, IMAGE, 8]
    expanded = [1, 900, 900, *half, 7, 900, 900, 8]
    found = Expansions()
    started = time.thread_time()
    spans = [MediaSpan("x", 1, 2, "image", 2), MediaSpan("y", len(expanded) - 3, 2, "image", 2)]
    learned = found.learn(source, expanded, spans)
    assert time.thread_time() - started < 0.05
    assert learned


def test_long_placeholder_is_searched_in_linear_time():
    placeholder = [5] * 8000 + [6]
    found = Expansions()
    assert found.learn([1, *placeholder, 2], [1, 900, 2], [MediaSpan("x", 1, 1, "image", 1)])
    started = time.thread_time()
    assert not found.expand([5] * 32_000, [Item("x", "image")]).media
    assert time.thread_time() - started < 0.05


def test_token_beyond_unicode_is_not_learned():
    found = Expansions()
    assert not found.learn([1, 2**31, 2], [1, 900, 2], [MediaSpan("x", 1, 1, "image", 1)])
    assert not found.expand([2**31], [Item("x", "image")]).media
