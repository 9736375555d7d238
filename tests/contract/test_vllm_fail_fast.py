"""A malformed body blocks the event loop for milliseconds only, though vLLM's app would list each of its errors;
what vLLM accepts is accepted."""

import asyncio
import json
import time
from copy import deepcopy
from itertools import islice
from typing import Annotated

import pytest
from app_server import image

pytestmark = [
    pytest.mark.asyncio(loop_scope="session"),
    pytest.mark.timeout(120),
    pytest.mark.filterwarnings("ignore:max_tokens is deprecated:DeprecationWarning"),
]

CHAT, RESPONSES, MESSAGES, COMPLETIONS = "/v1/chat/completions", "/v1/responses", "/v1/messages", "/v1/completions"
#: The most messages and parts, tools, and prompts; of other members as many as the bound on values permits.
#: Prompts are permitted up to 1024; the bound of the loop is that of 256, see docs/configuration.md.
PARTS, TOOLS, PROMPTS, MEMBERS = 1990, 256, 256, 9000
USER = {"role": "user", "content": "x"}
WRONG = {f"k{i}": [] for i in range(MEMBERS)}
TEXT_PARTS = [{"type": "text", "text": "x"}] * (PARTS - 10)

HOSTILE = {
    "input: {}": (RESPONSES, {"input": [{}] * PARTS}),
    "input: messages without content": (RESPONSES, {"input": [{"type": "message", "role": "user"}] * PARTS}),
    "input: parts {}": (RESPONSES, {"input": [{"role": "user", "content": [{}] * PARTS}]}),
    "input: parts without text": (
        RESPONSES,
        {"input": [{"role": "user", "content": [{"type": "input_text"}] * PARTS}]},
    ),
    "input: one item of many members": (RESPONSES, {"input": [WRONG]}),
    "input: actions": (RESPONSES, {"input": [{"type": "computer_call", "actions": [{}] * MEMBERS}]}),
    "response tools": (RESPONSES, {"input": "x", "tools": [{}] * TOOLS}),
    "response tools without a name": (RESPONSES, {"input": "x", "tools": [{"type": "function"}] * TOOLS}),
    "metadata": (RESPONSES, {"input": "x", "metadata": WRONG}),
    "include": (RESPONSES, {"input": "x", "include": ["no"] * MEMBERS}),
    "previous messages": (RESPONSES, {"input": "x", "previous_input_messages": [1] * MEMBERS}),
    "messages: {}": (CHAT, {"messages": [{}] * PARTS}),
    "messages: parts {}": (CHAT, {"messages": [{"role": "user", "content": [{}] * PARTS}]}),
    "messages: one of many members": (CHAT, {"messages": [WRONG]}),
    "the last part": (CHAT, {"messages": [{"role": "user", "content": [*TEXT_PARTS, {}]}]}),
    "tool calls": (CHAT, {"messages": [{"role": "assistant", "tool_calls": [{}] * MEMBERS}]}),
    "chat tools": (CHAT, {"messages": [USER], "tools": [{}] * TOOLS}),
    "logit_bias": (CHAT, {"messages": [USER], "logit_bias": WRONG}),
    "documents": (CHAT, {"messages": [USER], "documents": [{"a": 1}] * (MEMBERS // 2)}),
    "stop": (CHAT, {"messages": [USER], "stop": [1] * MEMBERS}),
    "vllm_xargs": (CHAT, {"messages": [USER], "vllm_xargs": {name: [{}] for name in list(WRONG)[:6000]}}),
    "batch": (f"{CHAT}/batch", {"messages": [[{}] * PARTS]}),
    "batch of conversations": (f"{CHAT}/batch", {"messages": [[{}]] * PROMPTS}),
    "anthropic messages": (MESSAGES, {"messages": [{}] * PARTS, "max_tokens": 8}),
    "anthropic parts": (MESSAGES, {"messages": [{"role": "user", "content": [{}] * PARTS}], "max_tokens": 8}),
    "anthropic tools": (MESSAGES, {"messages": [USER], "max_tokens": 8, "tools": [{}] * TOOLS}),
    "completion": (COMPLETIONS, {"prompt": "x", "logit_bias": WRONG}),
    "invocations": ("/invocations", {"messages": [{}] * PARTS, "tools": [{}] * TOOLS}),
    "tokenize": ("/tokenize", {"messages": [{}] * PARTS}),
    "detokenize": ("/detokenize", {"tokens": ["no"] * 900}),
    "scoring": ("/generative_scoring", {"query": "x", "items": [{}] * PROMPTS, "label_token_ids": [20, 30]}),
    "scoring, the last item": (
        "/generative_scoring",
        {"query": "x", "items": [*["x"] * (PROMPTS - 1), 1], "label_token_ids": [20, 30]},
    ),
    "generate": ("/inference/v1/generate", {"token_ids": [1], "sampling_params": {"stop_token_ids": ["no"] * MEMBERS}}),
}
#: Thread time of the request, its client included, in a test's process. Before, the first of them took six seconds.
MAX_S = 0.1


async def post(server, path, body):
    started = time.thread_time()
    content = json.dumps({"model": server.model, **body})
    response = await server.client.post(path, content=content, headers={"content-type": "application/json"})
    return response, time.thread_time() - started


def refused_by_gateway(response):
    """Whether one of the gateway's own bounds has refused the body."""
    return any(what in response.text for what in ("JSON values", "messages and parts", "more than 256"))


@pytest.mark.parametrize("name", HOSTILE)
async def test_malformed_body_does_not_block_the_event_loop(server, name):
    response, took_s = await post(server, *HOSTILE[name])
    assert response.status_code == 400, response.text[:500]
    assert not refused_by_gateway(response), "nothing is shown of vLLM's validation"
    assert took_s < MAX_S


FUNCTION = {"name": "f", "description": "d", "parameters": {"type": "object", "properties": {}}}
CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
REASONING = {"type": "reasoning", "id": "r", "summary": [{"type": "summary_text", "text": "x"}]}
ANSWER = {"type": "output_text", "text": "x", "annotations": []}

#: What vLLM accepts, unknown members and types included.
VALID = {
    "text": (CHAT, {"messages": [USER]}),
    "roles": (CHAT, {"messages": [{"role": "any", "content": "x", "unknown": [1, {}]}, USER]}),
    "image": (CHAT, {"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}, image()]}]}),
    "bare parts": (CHAT, {"messages": [{"role": "any", "content": ["x", {"text": "y"}]}]}),
    "tool calls": (
        CHAT,
        {
            "messages": [
                USER,
                {"role": "assistant", "tool_calls": [CALL]},
                {"role": "tool", "tool_call_id": "c1", "content": "x"},
            ],
            "tools": [{"type": "function", "function": FUNCTION}],
            "stop": ["a", "b"],
            "logit_bias": {"1": 1},
            "documents": [{"title": "a", "text": "b"}],
            "vllm_xargs": {"a": ["b", 1, 0.5]},
        },
    ),
    "input": (RESPONSES, {"input": [USER, {"type": "message", "role": "user", "content": "y"}]}),
    "items": (
        RESPONSES,
        {
            "input": [
                {"role": "user", "content": [{"type": "input_text", "text": "x"}]},
                REASONING,
                {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"},
                {"type": "function_call_output", "call_id": "c1", "output": "x"},
                {"type": "message", "id": "m", "role": "assistant", "status": "completed", "content": [ANSWER]},
                {"type": "message", "role": "user", "content": [{"type": "input_image", "image_url": "http://x/y"}]},
            ],
            "tools": [{"type": "function", "strict": True, **FUNCTION}, {"type": "web_search"}],
            "metadata": {"default": "x", "type": "list"},
            "include": ["reasoning.encrypted_content"],
        },
    ),
    "anthropic": (
        MESSAGES,
        {
            "messages": [USER, {"role": "assistant", "content": [{"type": "text", "text": "x"}]}],
            "tools": [{"name": "f", "input_schema": {}}],
            "system": [{"type": "text", "text": "x"}],
            "max_tokens": 8,
        },
    ),
    "completion": (COMPLETIONS, {"prompt": [[1, 2], [3]], "stop": "x", "logit_bias": {"1": 1}}),
    "texts": (COMPLETIONS, {"prompt": ["x", "y"]}),
    "tokenize": ("/tokenize", {"messages": [USER]}),
    "tokenize a text": ("/tokenize", {"prompt": "x"}),
    "detokenize": ("/detokenize", {"tokens": [1, 2]}),
    "batch": (f"{CHAT}/batch", {"messages": [[USER], [USER]]}),
}


TYPED = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "x"}]}
CALLED = {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"}
FUNCTION_TOOL = {"type": "function", "strict": True, **FUNCTION}
NAMESPACE = {"type": "namespace", "name": "n", "description": "d", "tools": [FUNCTION_TOOL] * (TOOLS - 1)}
#: At the limits of messages, parts, tools, values and token ids.
LARGE = {
    "input: messages": (RESPONSES, {"input": [USER] * PARTS}),
    "input: messages with parts": (RESPONSES, {"input": [TYPED] * (PARTS // 2)}),
    "input: calls": (RESPONSES, {"input": [USER, *[CALLED] * (PARTS - 1)]}),
    "input: reasoning": (RESPONSES, {"input": [USER, *[REASONING] * 1500]}),
    "chat tools": (CHAT, {"messages": [USER], "tools": [{"type": "function", "function": FUNCTION}] * TOOLS}),
    "response tools": (RESPONSES, {"input": "x", "tools": [FUNCTION_TOOL] * TOOLS}),
    "response tools in a namespace": (RESPONSES, {"input": "x", "tools": [NAMESPACE]}),
    "token ids": (COMPLETIONS, {"prompt": [1] * 131_000}),
    "prompts": (COMPLETIONS, {"prompt": ["x"] * PROMPTS}),
    "prompts of token ids": (COMPLETIONS, {"prompt": [[1] * 500] * PROMPTS}),
    "batch": (f"{CHAT}/batch", {"messages": [[USER]] * PROMPTS}),
    "scoring": ("/generative_scoring", {"query": "x", "items": ["x"] * PROMPTS, "label_token_ids": [20, 30]}),
    "messages": (CHAT, {"messages": [USER] * PARTS}),
    "parts": (CHAT, {"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}] * PARTS}]}),
}
#: CPU time of the event loop's thread in an iteration: at most 10 ms on an idle machine, 40 ms on a busy, slow one. On
#: the loop, validation alone would take 120 ms for the first.
MAX_ITERATION_S = 0.06


async def longest_iteration_s(server, path, body):
    loop, longest, last = asyncio.get_running_loop(), 0.0, time.thread_time()

    def tick():
        nonlocal longest, last, handle
        now = time.thread_time()
        last, longest = now, max(longest, now - last)
        handle = loop.call_soon(tick)

    limit = "max_output_tokens" if path == RESPONSES else "max_tokens"
    content = json.dumps({"model": server.model, limit: 8, **body})
    handle = loop.call_soon(tick)
    response = await server.client.post(path, content=content, headers={"content-type": "application/json"})
    handle.cancel()
    assert not refused_by_gateway(response)
    return longest


@pytest.mark.parametrize("name", LARGE)
async def test_large_valid_body_does_not_block_the_event_loop(server, name):
    assert await longest_iteration_s(server, *LARGE[name]) < MAX_ITERATION_S


async def test_no_line_is_logged_for_each_item_of_a_request(server, caplog):
    """Writing them would block the event loop for longer than all other work on the request."""
    await post(server, *LARGE["input: reasoning"])
    assert len(caplog.records) < 20


@pytest.fixture(scope="session")
def adapters(session_server):
    """By path: the validator that the app uses, and the original one."""
    from pydantic import TypeAdapter

    found = {}
    for route in session_server.app.routes:
        for field in getattr(getattr(route, "dependant", None), "body_params", ()):
            found[route.path] = (
                field._type_adapter,  # FastAPI's own: it has no other door to a body's validator
                TypeAdapter(Annotated[field.field_info.annotation, field.field_info]),
            )
    return found


@pytest.mark.parametrize("name", VALID)
async def test_bodies_accepted_by_vllm_are_parsed_identically(adapters, name):
    path, body = VALID[name]
    ours, plain = adapters[path]
    read = [dumped(adapter.validate_python({"model": "m", **deepcopy(body)})) for adapter in (ours, plain)]
    assert read[0] == read[1]


@pytest.mark.parametrize("name", [name for name in HOSTILE if HOSTILE[name][0] != "/invocations"])
async def test_rejected_bodies_report_the_same_location(adapters, name):
    from pydantic import ValidationError

    path, body = HOSTILE[name]
    ours, plain = adapters[path]
    errors = []
    for adapter in (ours, plain):
        try:
            adapter.validate_python({"model": "m", **shortened(body)})
            errors.append(None)  # lazily validated, where it is read
        except ValidationError as error:
            errors.append(error.errors(include_url=False, include_input=False, include_context=False)[0])
    assert errors[0] == errors[1]


def shortened(value):
    """With three elements in each list and object: all errors of the whole take pydantic up to 24 s."""
    if isinstance(value, dict):
        return {key: shortened(element) for key, element in islice(value.items(), 3)}
    return [shortened(element) for element in value[:3]] if isinstance(value, list) else value


def dumped(request):
    values = request.model_dump(mode="json", warnings=False, exclude={"request_id", "messages"})
    # What pydantic reads lazily has no equality.
    messages = getattr(request, "messages", None)
    return values, None if messages is None else json.dumps(messages, default=list_or_dump)


def list_or_dump(value):
    return value.model_dump(mode="json") if hasattr(value, "model_dump") else list(value)
