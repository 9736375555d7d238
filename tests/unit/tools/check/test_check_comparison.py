import math

import pytest

from medialane.tools.check import compare

ANSWER = {
    "id": "chatcmpl-1",
    "choices": [{"token_ids": [3, 5], "logprobs": {"content": [{"logprob": -0.25}, {"logprob": -1.5}]}}],
    "usage": {"prompt_tokens": 7, "prompt_tokens_details": {"cached_tokens": 4}},
}


def changed(**choice):
    return {**ANSWER, "choices": [{**ANSWER["choices"][0], **choice}]}


def test_names_and_cache_hits_are_not_compared():
    other = {**ANSWER, "id": "chatcmpl-2", "usage": {"prompt_tokens": 7, "prompt_tokens_details": None}}
    found = compare(other, ANSWER)
    assert (found.first, found.largest) == ("", 0)


def test_fractional_numbers_give_the_largest_difference():
    found = compare(changed(logprobs={"content": [{"logprob": -0.5}, {"logprob": -1.625}]}), ANSWER)
    assert (found.first, found.largest) == ("", 0.25)


@pytest.mark.parametrize(
    ("ours", "first"),
    [
        (changed(token_ids=[3, 6]), "choices[0].token_ids[1]: 6 instead of 5"),
        (changed(token_ids=[3]), "choices[0].token_ids: 1 values instead of 2"),
        (changed(logprobs=None), "choices[0].logprobs: None instead of"),
        (changed(token_ids=[3, True]), "choices[0].token_ids[1]: True instead of 5"),
        ({**ANSWER, "usage": {}}, "usage.prompt_tokens is missing"),
        ({**ANSWER, "extra": 1}, "extra is not in plain vLLM's answer"),
    ],
)
def test_first_other_difference_is_described(ours, first):
    assert compare(ours, ANSWER).first.startswith(first)


def test_a_number_that_is_none_is_infinitely_different_from_one_that_is():
    assert compare({"a": math.nan}, {"a": 1.0}).largest == math.inf
    assert compare({"a": math.nan}, {"a": math.nan}).largest == 0
