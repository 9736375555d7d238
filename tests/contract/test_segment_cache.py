"""Prompts whose tokens are joined from segments have plain vLLM's: whole requests, and all families' tokenizers."""

import pytest
from tiny_families import family_params

from medialane.testing.tiny_model import SENTENCES
from medialane.vllm_bridge.frontend import SegmentCache, splitter_of

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(120)]

#: More than a segment's least.
LONG = " ".join(SENTENCES * 2)


async def token_ids(server, messages, **options):
    body = {"model": server.model, "messages": messages, "max_completion_tokens": 8} | options
    response = await server.client.post("/v1/chat/completions", json=body)
    assert response.status_code == 200, response.text
    return server.backend.requests[-1].prompt.token_ids


def plain_ids(server, messages):
    tokenizer = server.frontend.renderer.tokenizer
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return tokenizer(text, add_special_tokens=False)["input_ids"]


async def test_turns_of_a_chat_have_plain_tokens_and_cost_their_new_text(server):
    messages, before = [], server.frontend.segment_stats
    for turn in range(4):
        messages.append({"role": "user", "content": f"{turn} of a chat {LONG}<|im_end|> {turn}"})
        assert await token_ids(server, messages) == plain_ids(server, messages)
        messages.append({"role": "assistant", "content": f"{LONG} {turn}"})
    stats = server.frontend.segment_stats
    num_new, num_cached = stats.num_new - before.num_new, stats.num_cached - before.num_cached
    assert 7 * len(LONG) < num_new < 10 * len(LONG)  # seven messages, and ends too short to be kept
    assert num_cached > 8 * len(LONG)


async def test_tokens_are_found_by_requests_with_the_same_cache_salt(server):
    messages = [{"role": "user", "content": f"salted {LONG}"}]
    found = []
    for salt in ({}, {}, {"cache_salt": "a"}, {"cache_salt": "a"}):
        before = server.frontend.segment_stats.num_cached
        assert await token_ids(server, messages, **salt) == plain_ids(server, messages)
        found.append(server.frontend.segment_stats.num_cached > before)
    assert found == [False, True, False, True]


async def test_truncated_prompt_has_plain_vllms_tokens(server):
    messages = [{"role": "user", "content": f"truncated {LONG}"}]
    expected = plain_ids(server, messages)
    for side, part in (("right", expected[:100]), ("left", expected[-100:])):
        options = {"truncate_prompt_tokens": 100, "truncation_side": side}
        assert await token_ids(server, messages, **options) == part


async def test_too_long_prompt_is_refused_as_by_plain_vllm(server):
    message = {"role": "user", "content": LONG + "QZ" * 6000}
    body = {"model": server.model, "messages": [message], "max_completion_tokens": 8}
    response = await server.client.post("/v1/chat/completions", json=body)
    assert response.status_code == 400
    assert "at least 8193 input tokens" in response.json()["error"]["message"]


@pytest.mark.parametrize("name", family_params())
async def test_segments_of_a_familys_prompts_have_its_tokenizers_ids(family_renderer, name):
    tokenizer = family_renderer(name).tokenizer
    if (splitter := splitter_of(tokenizer)) is None:
        pytest.skip("its texts are not cut: the log says why")
    cache = SegmentCache(tokenizer, splitter, 1 << 20)
    special = tokenizer.all_special_tokens
    for start in range(0, len(special), 4):
        text = "".join(f" {token} {LONG}\n{token}{token}" for token in special[start : start + 4])
        for each in (text, text + "\nmore", text + "\nmore"):
            assert cache.token_ids(each, "", False, None) == tokenizer(each, add_special_tokens=False)["input_ids"]
