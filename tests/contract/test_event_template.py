"""Streams of chat completions and completions: made with a template, they have the bytes of vLLM's own generator."""

import asyncio
import re
from contextlib import aclosing
from itertools import repeat
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm.entrypoints.generate.base.protocol import RequestResponseMetadata
from vllm.entrypoints.openai.chat_completion import serving as chat_serving
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.completion import serving as completion_serving
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.exceptions import GenerationError
from vllm.logprobs import Logprob
from vllm.outputs import CompletionOutput, RequestOutput

from medialane.types.errors import WorkerLost
from medialane.vllm_bridge.frontend import event_template

pytestmark = [
    pytest.mark.timeout(120),
    # vLLM's own warning: it reads the field whether a request has it or not.
    pytest.mark.filterwarnings("ignore:max_tokens is deprecated:DeprecationWarning"),
]

KINDS = ["chat", "completions"]
PROMPT_IDS = [5, 6, 7]


def output(text, num_ids=1, finish_reason=None, stop_reason=None, *, index=0, num_outputs=1):
    token_ids = list(range(100, 100 + num_ids))
    logprobs = [{token: Logprob(-0.5, 1, "x")} for token in token_ids]
    completions = [
        CompletionOutput(number, text, token_ids, None, logprobs, finish_reason=finish_reason, stop_reason=stop_reason)
        for number in range(index, index + num_outputs)
    ]
    finished = finish_reason is not None
    return RequestOutput("r", "prompt", PROMPT_IDS, None, completions, finished, num_cached_tokens=2)


#: Texts in which JSON or UTF-8 is special: pydantic's form of each is the expected one.
SPECIAL = [
    '"',
    "\\",
    "\n\r\t\b\f",
    "\x00\x01\x1f\x7f",
    "é漢😀",
    "\u2028\u2029",
    "\ufffd",
    "</script>",
    "data: [DONE]\n\n",
]

#: Outputs of an engine; an exception is raised.
STREAMS = {
    "words": [output("a"), output(" b"), output(" c"), output(" d", finish_reason="stop")],
    "one token": [output("a", finish_reason="length")],
    "two tokens": [output("a"), output(" b", finish_reason="length")],
    "special texts": [*(output(text) for text in SPECIAL), output("", finish_reason="stop")],
    "a character of several tokens": [
        output(""),
        output(""),
        output("😀"),
        output(""),
        output("!", finish_reason="stop"),
    ],
    "several tokens in an output": [output("a", 3), output("b", 64), output("c", 2, finish_reason="length")],
    "stop string": [output("a"), output("", 5), output(" b", finish_reason="stop", stop_reason="END")],
    "stop token": [output("a"), output("b"), output("", finish_reason="stop", stop_reason=7)],
    "prefill in pieces": [output("", 0), output("", 0), output("a"), output("b"), output("c", finish_reason="stop")],
    "an output without tokens": [output("a"), output("b"), output("", 0), output("c"), output("d", 1, "stop")],
    "no text at all": [output("", 0, "stop")],
    "half of a surrogate pair": [output("a"), output("b"), output("\ud83d"), output("c", finish_reason="stop")],
    "half of a pair first": [output("\ud83d"), output("a"), output("c", finish_reason="stop")],
    "aborted": [output("a"), output("b"), output("", 0, "abort")],
    "engine error": [output("a"), output("b"), output("", 0, "error")],
    "lost": [output("a"), output("b"), GenerationError("the worker was lost")],
    "lost at once": [GenerationError("the worker was lost")],
    "lost after the first": [output("a"), GenerationError("the worker was lost")],
    "unforeseen error": [output("a"), output("b"), ZeroDivisionError("never")],
    "no output": [],
    "two choices": [output("a", num_outputs=2), output("b", num_outputs=2), output("c", 1, "stop", num_outputs=2)],
    "after the last": [output("a"), output("b"), output("c", 1, "stop"), output("d")],
    "the template's own key": [output('"delta":{"content":"'), output('"text":"'), output("x", finish_reason="stop")],
}

#: Options of requests whose events are made with a template.
PLAIN = [
    {},
    {"stream_options": {"include_usage": True}},
    {"stream_options": {"include_usage": False, "continuous_usage_stats": False}},
    {"n": 1, "logprobs": None, "temperature": 0.0, "top_p": 0.5, "seed": 3, "stop": ["END"], "max_tokens": 1},
    {"user": "someone", "cache_salt": "s", "request_id": "mine", "priority": 1, "return_token_ids": False},
]
#: Options of other requests.
OTHER = [
    {"stream_options": {"include_usage": True, "continuous_usage_stats": True}},
    {"n": 2},
    {"return_token_ids": True},
    {"unknown_option": 1},
    {"kv_transfer_params": {"a": 1}},
]
#: Of one endpoint only.
OTHER_OF = {
    "chat": [
        {"logprobs": True, "top_logprobs": 1},
        {"return_prompt_text": True},
        {"echo": True, "add_generation_prompt": False, "messages": [{"role": "assistant", "content": "so far"}]},
        {"tools": [{"type": "function", "function": {"name": "f"}}], "parallel_tool_calls": False},
    ],
    "completions": [{"logprobs": 0}, {"logprobs": 1}, {"echo": True}],
}


def request_of(kind, options):
    if kind == "chat":
        messages = {"messages": [{"role": "user", "content": "look"}]}
        return ChatCompletionRequest(model="m", stream=True, **(messages | options))
    return CompletionRequest(model="m", prompt="look", stream=True, **options)


async def results_of(outputs, kind="chat"):
    for each in outputs:
        if isinstance(each, Exception):
            raise each
        completions = [
            CompletionOutput(c.index, c.text, list(c.token_ids), None, c.logprobs, None, c.finish_reason, c.stop_reason)
            for c in each.outputs
        ]
        copy = RequestOutput("r", "prompt", PROMPT_IDS, None, completions, each.finished, num_cached_tokens=2)
        yield copy if kind == "chat" else (0, copy)


def events_of(server, kind, options, outputs, *, is_vllms, metadata=None):
    """Return the generator of a stream's events."""
    request, results = request_of(kind, options), results_of(outputs, kind)
    metadata = metadata or RequestResponseMetadata(request_id="r")
    state = server.app.state
    if kind == "chat":
        made_by = state.openai_serving_chat
        make = made_by.chat_completion_stream_generator
        if is_vllms:
            make = type(made_by).chat_completion_stream_generator.__get__(made_by)
        conversation = [{"role": "assistant", "content": "so far"}]
        return make(request, results, "chatcmpl-r", "m", conversation, server.frontend.renderer.tokenizer, metadata)
    made_by = state.openai_serving_completion
    make = made_by.completion_stream_generator
    if is_vllms:
        make = type(made_by).completion_stream_generator.__get__(made_by)
    inputs = [{"type": "token", "prompt_token_ids": PROMPT_IDS, "prompt": "look"}]
    tokenizer = server.frontend.renderer.tokenizer
    return make(
        request, inputs, results, "cmpl-r", 1, "m", num_prompts=1, tokenizer=tokenizer, request_metadata=metadata
    )


def sent(server, kind, options, outputs, *, is_vllms):
    """Return what a stream sends, and the usage that middleware is told of."""
    metadata = RequestResponseMetadata(request_id="r")

    async def read():
        events = events_of(server, kind, options, outputs, is_vllms=is_vllms, metadata=metadata)
        return [event.encode() async for event in events]

    pieces = asyncio.run(read())
    assert all(piece.startswith(b"data: ") and piece.endswith(b"\n\n") for piece in pieces)
    return pieces, metadata.final_usage_info


def check_equal(server, kind, options, outputs):
    vllms_pieces, vllms_usage = sent(server, kind, options, outputs, is_vllms=True)
    for server.backend.arrivals in (repeat(True), repeat(False)):
        pieces, usage = sent(server, kind, options, outputs, is_vllms=False)
        assert _without_ids(b"".join(pieces)) == _without_ids(b"".join(vllms_pieces))
        assert usage == vllms_usage


@pytest.mark.parametrize("outputs", STREAMS.values(), ids=STREAMS.keys())
@pytest.mark.parametrize("kind", KINDS)
def test_stream_has_the_bytes_and_the_usage_of_vllms(session_server, kind, outputs):
    for options in [*PLAIN, *OTHER, *OTHER_OF[kind]]:
        check_equal(session_server, kind, options, outputs)


@settings(deadline=None, max_examples=200)
@given(st.lists(st.tuples(st.text(st.characters(exclude_categories=())), st.integers(0, 3)), max_size=8), st.data())
def test_any_text_has_the_bytes_of_vllms(session_server, texts, data):
    outputs = [*(output(text, num_ids) for text, num_ids in texts), output("end", 1, "stop")]
    kind, options = data.draw(st.sampled_from(KINDS)), data.draw(st.sampled_from(PLAIN))
    check_equal(session_server, kind, options, outputs)


NUM_TOKENS = 20
LONG = [*(output(f" {n}") for n in range(NUM_TOKENS - 1)), output("!", finish_reason="stop")]


def dumped(server, monkeypatch, kind, options):
    """Return how many events of `LONG` vLLM's models are made for."""
    module = chat_serving if kind == "chat" else completion_serving
    name = "ChatCompletionStreamResponse" if kind == "chat" else "CompletionStreamResponse"
    made, model = [], getattr(module, name)
    monkeypatch.setattr(module, name, lambda **values: made.append(values) or model(**values))
    sent(server, kind, options, LONG, is_vllms=False)
    return len(made)


@pytest.mark.parametrize("options", PLAIN, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_events_of_plain_requests_are_made_from_a_template(session_server, monkeypatch, kind, options):
    num_events = 2 + (kind == "chat") + bool(options.get("stream_options", {}).get("include_usage"))
    assert dumped(session_server, monkeypatch, kind, options) == num_events


@pytest.mark.parametrize(
    ("kind", "options"), [(kind, options) for kind in KINDS for options in [*OTHER, *OTHER_OF[kind]]], ids=str
)
def test_other_requests_are_left_to_vllm(session_server, monkeypatch, kind, options):
    assert dumped(session_server, monkeypatch, kind, options) >= NUM_TOKENS


@pytest.mark.parametrize(("kind", "option"), [("chat", "parser_cls"), ("chat", "enable_log_outputs"),
    ("chat", "enable_force_include_usage"), ("completions", "enable_force_include_usage")])  # fmt: skip
def test_streams_of_an_app_with_such_flags_are_left_to_vllm(session_server, kind, option):
    app = session_server.app.state
    name = "chat_completion_stream_generator" if kind == "chat" else "completion_stream_generator"
    for is_set in (True, False):
        chat, completion = vars(app.openai_serving_chat), vars(app.openai_serving_completion)
        state = SimpleNamespace(
            openai_serving_chat=SimpleNamespace(**chat | {option: is_set}),
            openai_serving_completion=SimpleNamespace(**completion | {option: is_set}),
        )
        serving = state.openai_serving_chat if kind == "chat" else state.openai_serving_completion
        before = getattr(serving, name)
        event_template.install(state, session_server.backend)
        assert (getattr(serving, name) is before) == is_set


def test_another_vllm_makes_every_event(session_server, monkeypatch, caplog):
    monkeypatch.setattr(event_template, "TESTED_VLLM", "0.1.0")
    caplog.set_level("WARNING", "medialane")
    event_template.install(None, session_server.backend)
    assert "makes every event of a stream" in caplog.text


@pytest.mark.parametrize(("kind", "num_pieces"), [("chat", 4), ("completions", 4)])
def test_events_that_are_ready_together_leave_together(session_server, kind, num_pieces):
    """The role with the first text; the last text with usage and end."""
    options = {"stream_options": {"include_usage": True}}
    pieces, _ = sent(session_server, kind, options, STREAMS["words"], is_vllms=False)
    assert [piece.count(b"\n\n") for piece in pieces] == [2 if kind == "chat" else 1, 1, 1, 3]
    pieces, _ = sent(session_server, kind, options, STREAMS["one token"], is_vllms=False)
    assert len(pieces) == 1


@pytest.mark.parametrize("kind", KINDS)
def test_outputs_that_have_arrived_leave_together(session_server, kind):
    session_server.backend.arrivals = iter([False, True, True, False, True, False])
    outputs = [*(output(f" {number}") for number in range(6)), output("", finish_reason="length")]
    pieces, _ = sent(session_server, kind, {}, outputs, is_vllms=False)
    assert [piece.count(b"\n\n") for piece in pieces] == [1 + (kind == "chat"), 3, 2, 2]


@pytest.mark.parametrize("num_read", [1, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_closing_a_stream_closes_vllms_generator(session_server, monkeypatch, kind, num_read):
    serving = session_server.app.state.openai_serving_chat if kind == "chat" else None
    closed = []

    async def make(results):
        try:
            async for _, result in numbered(results):
                yield f'{{"delta":{{"content":"{result.outputs[0].text}"}}}}'
        finally:
            closed.append(serving)

    async def numbered(results):
        async for result in results:
            yield 0, result

    async def read():
        request = request_of("chat", {})
        events = event_template.stream(
            request, results_of(STREAMS["words"]), make, has_next=lambda: False, key='"delta":{"content":'
        )
        async with aclosing(events):
            for _ in range(num_read):
                await anext(events)
            assert not closed

    asyncio.run(read())
    assert len(closed) == 1


@pytest.mark.asyncio(loop_scope="session")
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
@pytest.mark.parametrize("error", [None, WorkerLost("the worker was lost")])
async def test_response_has_the_bytes_of_vllms(server, path, error):
    """Through the whole app, with our engine client: what vLLM's own generator sends for these outputs."""
    server.backend.texts = dict(enumerate(["é", "", '"', " b"]))
    server.backend.tokens = list(server.backend.texts)
    server.backend.error, server.backend.error_at = error, "stream" if error is not None else ""
    body = server.body(stream=True, request_id="r", stream_options={"include_usage": True})
    if path == "/v1/completions":
        body = {**body, "prompt": "look"}
        del body["messages"]
    ours = await server.client.post(path, json=body)
    vllms = await server.client.post(path, json={**body, "unknown_option": 1})
    assert ours.status_code == 200
    assert b"[DONE]" in ours.content
    assert (b"worker was lost" in ours.content) == (error is not None)
    assert _without_ids(ours.content) == _without_ids(vllms.content)


def _without_ids(body):
    """Leave out what differs between two requests: time and request id."""
    return re.sub(rb'"created":\d+|[0-9a-f]{32}', b"", body)
