"""Other features of vLLM's OpenAI app are identical: tools, logprobs, n, stop strings, structured outputs, routes."""

import pytest
from openai_http import CHAT, assert_same, chat, picture, text

pytestmark = [pytest.mark.vllm, pytest.mark.thread]

ASK = text("What is in the picture?")
IMAGE = (picture(40), ASK)

TOOL = {
    "type": "function",
    "function": {
        "name": "describe",
        "description": "Describe a picture",
        "parameters": {
            "type": "object",
            "properties": {"colour": {"type": "string", "enum": ["red", "green", "blue"]}},
            "required": ["colour"],
            "additionalProperties": False,
        },
    },
}
FORCED = {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "describe"}}, "max_tokens": 40}
SCHEMA = {
    "type": "object",
    "properties": {"kind": {"type": "string", "enum": ["photo", "drawing"]}, "sharp": {"type": "boolean"}},
    "required": ["kind", "sharp"],
    "additionalProperties": False,
}
STRUCTURED = {
    "response_format": {"type": "json_schema", "json_schema": {"name": "picture", "schema": SCHEMA}},
    "max_tokens": 40,
}

SAME = {
    "tools offered": (CHAT, chat(*IMAGE, tools=[TOOL])),
    "tools in a text request": (CHAT, chat(ASK, tools=[TOOL], tool_choice="auto")),
    "a tool forced": (CHAT, chat(*IMAGE, **FORCED)),
    "logprobs": (CHAT, chat(*IMAGE, logprobs=True, top_logprobs=3)),
    "prompt logprobs of text": (CHAT, chat(ASK, prompt_logprobs=1)),
    "two choices": (CHAT, chat(*IMAGE, n=2, temperature=0.8, seed=7)),
    "seeded sampling": (CHAT, chat(*IMAGE, temperature=0.8, seed=7)),
    "structured output": (CHAT, chat(*IMAGE, **STRUCTURED)),
    "a token limit of one": (CHAT, chat(*IMAGE, max_tokens=1)),
    "min_tokens and penalties": (CHAT, chat(*IMAGE, min_tokens=4, repetition_penalty=1.3)),
    "completion": (
        "/v1/completions",
        {"prompt": "A photograph shows", "max_tokens": 10, "temperature": 0, "return_token_ids": True, "logprobs": 2},
    ),
    "completions of two prompts": (
        "/v1/completions",
        {"prompt": ["A photograph", "The quick brown"], "max_tokens": 5, "temperature": 0, "echo": True},
    ),
    "beam search": (CHAT, chat(*IMAGE, use_beam_search=True, n=3, max_tokens=5, logprobs=True, top_logprobs=2)),
    "beam search of text": (CHAT, chat(ASK, use_beam_search=True, n=2, max_tokens=5, length_penalty=0.5)),
    "beam search of a completion": (
        "/v1/completions",
        {"prompt": "A photograph shows", "max_tokens": 5, "n": 2, "use_beam_search": True, "temperature": 0},
    ),
    "tokenize": ("/tokenize", {"prompt": "A photograph shows a harbour."}),
    "tokenize a chat": ("/tokenize", {"messages": [{"role": "user", "content": "A photograph."}]}),
    "detokenize": ("/detokenize", {"tokens": [20, 30, 40]}),
}


@pytest.mark.parametrize("name", SAME)
async def test_output_equals_plain_vllm(ours, plain, name):
    path, body = SAME[name]
    assert_same((await ours.succeed(body, path)).json, (await plain.succeed(body, path)).json)


@pytest.mark.parametrize("name", ["tools offered", "a tool forced", "logprobs", "two choices", "structured output"])
async def test_streamed_chunks_equal_plain_vllm(ours, plain, name):
    body = {**SAME[name][1], "stream": True}
    ids = [
        [_ids(answer, index) for index in (0, 1)] for answer in [await ours.succeed(body), await plain.succeed(body)]
    ]
    assert ids[0] == ids[1]


async def test_streamed_tool_call_equals_plain_vllm(ours, plain):
    body = chat(*IMAGE, **FORCED, stream=True)
    assert _arguments(await ours.succeed(body)) == _arguments(await plain.succeed(body)) != ""


async def test_stop_string_ends_the_output_as_in_plain_vllm(ours, plain):
    free = await plain.succeed(chat(*IMAGE, ignore_eos=True))
    words = free.content
    stop = words[len(words) // 2 :][:3]
    assert stop
    body = chat(*IMAGE, ignore_eos=True, stop=[stop])
    answer, right = await ours.succeed(body), await plain.succeed(body)
    assert right.json["choices"][0]["stop_reason"] == stop
    assert_same(answer.json, right.json)
    assert (await ours.succeed({**body, "stream": True})).content == right.content


async def test_response_equals_plain_vllm(ours, plain):
    content = [
        {"type": "input_text", "text": "What is in the picture?"},
        {"type": "input_image", "image_url": IMAGE[0]["image_url"]["url"], "detail": "auto"},
    ]
    body = {"input": [{"role": "user", "content": content}], "max_output_tokens": 10, "temperature": 0}
    answer, right = await ours.succeed(body, "/v1/responses"), await plain.succeed(body, "/v1/responses")
    assert_same(answer.json["output"], right.json["output"])
    assert_same(answer.json["usage"], right.json["usage"])


async def test_model_list_equals_plain_vllm(ours, plain):
    models = [(await server.get("/v1/models")).json["data"] for server in (ours, plain)]
    for found in models:
        for model in found:
            del model["permission"]
    assert_same(*models)


async def test_tokenize_of_a_chat_with_an_image_equals_plain_vllm(ours, plain):
    body = {"messages": chat(*IMAGE)["messages"]}
    assert_same((await ours.succeed(body, "/tokenize")).json, (await plain.succeed(body, "/tokenize")).json)


def _ids(answer, index):
    choices = [choice for event in answer.events for choice in event["choices"] if choice["index"] == index]
    return [token for choice in choices for token in choice.get("token_ids") or ()]


def _arguments(answer):
    deltas = [choice["delta"] for event in answer.events for choice in event["choices"]]
    return "".join(call["function"].get("arguments") or "" for d in deltas for call in d.get("tool_calls") or ())
