"""What the comparison of clients finds, and what it leaves out."""

import pytest
from compared_clients import assert_equal


def chunk(content=None, *, index=0, finish=None):
    delta = {} if content is None else {"content": content}
    return {"id": "a", "choices": [{"index": index, "delta": delta, "finish_reason": finish}]}


def stream(*events):
    return {"value": {"stream": list(events)}}


def called(arguments, *, finish=None, **first):
    call = {"index": 0, "function": {"arguments": arguments, **first}}
    return {"id": "a", "choices": [{"index": 0, "delta": {"tool_calls": [call]}, "finish_reason": finish}]}


def error(**fields):
    return {"error": {"class": "BadRequestError", "status": 400, "code": "400", **fields}}


WHOLE = stream(chunk("a"), chunk("b"), chunk("c", finish="stop"))

EQUAL = {
    "cut elsewhere": stream(chunk("ab"), chunk("c"), chunk(finish="stop")),
    "last piece with the end": stream(chunk("a"), chunk("bc", finish="stop")),
    "all with the end": stream(chunk("abc", finish="stop")),
    "another id": stream(*({**chunk("abc"), "id": "b"}, chunk(finish="stop"))),
}

DIFFERENT = {
    "another text": stream(chunk("a"), chunk("x"), chunk("c", finish="stop")),
    "another end": stream(chunk("a"), chunk("bc", finish="length")),
    "no end": stream(chunk("a"), chunk("bc")),
    "another order": stream(chunk("b"), chunk("a"), chunk("c", finish="stop")),
    "a field more": stream({**chunk("abc"), "usage": {}}, chunk(finish="stop")),
    "an error": error(),
}


@pytest.mark.parametrize("name", EQUAL)
def test_streams_are_equal_however_they_are_cut(name):
    assert_equal(EQUAL[name], WHOLE)


@pytest.mark.parametrize("name", DIFFERENT)
def test_difference_of_a_stream_is_found(name):
    with pytest.raises(AssertionError):
        assert_equal(DIFFERENT[name], WHOLE)


def test_answers_of_one_request_may_alternate_differently():
    one, other = [chunk("a"), chunk("b", finish="stop")], [chunk("x", index=1), chunk("y", index=1, finish="stop")]
    alternating = [event for pair in zip(one, other, strict=True) for event in pair]
    assert_equal(stream(*alternating), stream(*one, *other))
    with pytest.raises(AssertionError):
        assert_equal(stream(*alternating), stream(*one, chunk("y", index=1), chunk("x", index=1, finish="stop")))


def test_arguments_of_a_tool_call_may_end_with_the_choice_or_before():
    whole = stream(called("{", name="look"), called("}"), chunk(finish="stop"))
    assert_equal(stream(called("{", name="look"), called("}", finish="stop")), whole)
    assert_equal(stream(called("{}", name="look"), chunk(finish="stop")), whole)
    assert_equal(
        stream(called("{}", name="look", finish="stop")),
        stream(called("{}", name="look"), chunk(), chunk(finish="stop")),
    )
    for other in (called("]", finish="stop"), called("}", finish="stop", name="look")):
        with pytest.raises(AssertionError):
            assert_equal(stream(called("{", name="look"), other), whole)


def test_braces_that_only_plain_vllm_appends_to_the_arguments_of_a_tool_make_no_difference():
    right, wrong = (stream(called(text, name="look", finish="stop")) for text in ('{"a": 1}', '{"a": 1}{}'))
    assert_equal(right, wrong)
    with pytest.raises(AssertionError):
        assert_equal(wrong, right)
    with pytest.raises(AssertionError):
        assert_equal(wrong, wrong)


def test_fields_may_come_with_a_chunk_of_their_own_but_must_come():
    """LiteLLM gives the reason of a stop where the end is, and leaves it out elsewhere."""
    ended = chunk("c", finish="stop")
    ended["choices"][0]["stop_reason"] = None
    apart = chunk(finish="stop")
    apart["choices"][0]["stop_reason"] = None
    assert_equal(stream(chunk("ab"), ended), stream(chunk("abc"), apart))
    with pytest.raises(AssertionError):
        assert_equal(stream(chunk("ab"), ended), WHOLE)


def test_difference_of_an_error_is_found_unless_it_is_said():
    with pytest.raises(AssertionError):
        assert_equal(error(code="invalid_image"), error())
    assert_equal(error(code="invalid_image"), error(), ["code"])


def test_difference_that_is_said_but_is_none_is_found():
    with pytest.raises(AssertionError, match="code does not differ"):
        assert_equal(error(), error(), ["code"])
