"""What is read of the streams of each API."""

import json

import pytest

from medialane.tools.compare import read_document, read_stream

CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
DONE = b"[DONE]"


def stream(*events):
    """The events, one every 0.1 s."""
    lines = [event if isinstance(event, bytes) else json.dumps(event).encode() for event in events]
    return [(0.1 * number, line) for number, line in enumerate(lines, 1)]


def delta(content, token, **members):
    return {"choices": [{"index": 0, "delta": {"content": content, **members}, "token_ids": [token]}]}


def test_chat_is_timed_from_its_first_token():
    role = {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]}
    usage = {"choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": 3}}
    fields = read_stream(CHAT, stream(role, delta("a", 1), delta("b", 2), delta("c", 3), usage, DONE))
    assert (fields["text"], fields["token_ids"], fields["prompt_tokens"]) == ("abc", (1, 2, 3), 9)
    assert fields["ttft_s"] == pytest.approx(0.2)
    assert fields["tpot_s"] == pytest.approx(0.1)


def test_reasoning_and_calls_of_tools_are_part_of_an_answer():
    call = {"choices": [{"delta": {"tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]}}]}
    reasoning = {"choices": [{"delta": {"reasoning": "hm "}}]}
    fields = read_stream(CHAT, stream(reasoning, call, DONE))
    assert fields["text"] == "hm f{}"


def test_other_choices_are_left_out():
    other = {"choices": [{"index": 1, "delta": {"content": "x"}}]}
    assert read_stream(CHAT, stream(delta("a", 1), other, DONE))["text"] == "a"


def test_responses_have_their_usage_in_the_last_event():
    fields = read_stream(
        RESPONSES,
        stream(
            {"type": "response.created", "response": {"usage": None}},
            {"type": "response.output_text.delta", "delta": "on"},
            {"type": "response.output_text.delta", "delta": "e"},
            {"type": "response.completed", "response": {"usage": {"input_tokens": 7, "output_tokens": 2}}},
        ),
    )
    assert (fields["text"], fields["num_tokens"], fields["prompt_tokens"]) == ("one", 2, 7)
    assert "is_broken_off" not in fields


def test_messages_have_the_prompts_tokens_in_the_first_event():
    fields = read_stream(
        MESSAGES,
        stream(
            {"type": "message_start", "message": {"usage": {"input_tokens": 5}}},
            {"type": "content_block_delta", "delta": {"type": "text_delta", "text": "hi"}},
            {"type": "content_block_delta", "delta": {"type": "input_json_delta", "partial_json": "{}"}},
            {"type": "message_delta", "delta": {"stop_reason": "end_turn"}, "usage": {"output_tokens": 2}},
            {"type": "message_stop"},
        ),
    )
    assert (fields["text"], fields["num_tokens"], fields["prompt_tokens"]) == ("hi{}", 2, 5)


@pytest.mark.parametrize(
    ("events", "error"),
    [
        pytest.param([delta("a", 1)], "", id="no end"),
        pytest.param(
            [delta("a", 1), {"error": {"message": "the worker is lost"}}, DONE], "the worker is lost", id="error"
        ),
    ],
)
def test_stream_that_breaks_off_is_no_answer(events, error):
    fields = read_stream(CHAT, stream(*events))
    assert fields["is_broken_off"]
    assert fields["error"] == error


@pytest.mark.parametrize(
    ("raw", "fields"),
    [
        (b'{"choices": [{"message": {"content": "hi"}}], "usage": {"completion_tokens": 2}}', {"text": "hi"}),
        (b'{"text": "heard"}', {"text": "heard"}),
        (b'{"error": {"message": "no  such model"}}', {"error": "no such model"}),
        (b"Bad Gateway", {"error": "Bad Gateway"}),
        (b'{"data": [1.5]}', {"document": {"data": [1.5]}}),
    ],
)
def test_documents_are_texts_errors_or_values(raw, fields):
    assert read_document(raw).items() >= fields.items()
