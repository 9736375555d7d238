"""An answer outlives its worker: the worker is killed, its engine is killed, or either is stopped, in the middle of a
stream, and what the client has in the end is what it has without that.

Outputs are compared with those of the same request to the same workers, undisturbed: that these are plain vLLM's is
tested elsewhere. The model's random weights give texts full of incomplete characters, and, in float32, greedy answers
that do not depend on which tokens were prefilled and which decoded, nor on the requests beside them: so one kill
interrupts many.
"""

import asyncio
from contextlib import AsyncExitStack
from itertools import pairwise

import pytest
import pytest_asyncio
from embedding_requests import REPORTED_S
from interrupted import (
    BEFORE_FAULT,
    MIDDLE_S,
    RESTART_S,
    Asked,
    Fault,
    all_interrupted,
    interrupted,
    its_worker,
    killing_engine,
    num_ready,
    whole,
)
from medialane_process import kill
from openai_http import CHAT, Answer, OpenAiHttp, assert_same, chat, in_flight, picture, text
from process_tree import descendants, suspended
from test_e2e_openai_surface import TOOL

from host_state import stats_of, store_link
from waiting import eventually

pytestmark = pytest.mark.vllm

COMPLETIONS = "/v1/completions"
STORY = text("Tell a long story.")
ASK = text("Describe the picture.")
#: Some seconds of an engine, which is ahead of what its client has read.
LONG = {"max_tokens": 2000, "ignore_eos": True, "stream_options": {"include_usage": True}}


@pytest_asyncio.fixture(autouse=True)
async def _all_workers(ours):
    async def are_ready() -> bool:
        return await num_ready(ours, 2) and await in_flight(ours, 0)

    await eventually(are_ready, "both workers are ready", RESTART_S)
    yield
    await eventually(are_ready, "both workers are ready, and no request is left", RESTART_S)


@pytest.fixture
async def store(serve):
    async with store_link(serve.store_address) as link:
        yield link


async def num_migrations(client) -> float:
    return (await client.metrics()).value("medialane_migrations_total")


async def undisturbed(client, body, path=CHAT) -> dict:
    return whole(await client.succeed({**body, "stream": True}, path))


async def goes_on(client, body, *faults: Fault, path=CHAT) -> dict:
    """Assert that a stream with these faults is the same as without. Return it."""
    right, before = await undisturbed(client, body, path), await num_migrations(client)
    found = whole(await interrupted(client, body, *faults, path=path))
    assert_goes_on(found, right)
    assert await num_migrations(client) >= before + len(faults)
    return found


async def undisturbed_together(asked: dict[str, Asked]) -> dict[str, dict]:
    answers = await asyncio.gather(*(one.undisturbed() for one in asked.values()))
    return {name: whole(answer) for name, answer in zip(asked, answers, strict=True)}


def assert_goes_on(found: dict, right: dict) -> None:
    assert found["error"] is None
    assert_same(found, right)
    assert all(len(choice["ids"]) > BEFORE_FAULT for choice in found["choices"].values())


def streamed(client, body, path=CHAT) -> Asked:
    return Asked(client, {**body, "stream": True}, path)


def completion(prompt, **options) -> dict:
    return {"prompt": prompt, "temperature": 0, "return_token_ids": True, **LONG, **options}


GOES_ON = {
    "text": (CHAT, chat(STORY, **LONG)),
    "logprobs": (CHAT, chat(STORY, **LONG, logprobs=True, top_logprobs=3)),
    "tools": (CHAT, chat(STORY, **LONG, tools=[TOOL], tool_choice="auto")),
    "repetition penalty": (CHAT, chat(STORY, **LONG, repetition_penalty=1.2)),
    "logit bias": (CHAT, chat(STORY, **LONG, logit_bias={"30": -100, "40": 2})),
    "special tokens": (CHAT, chat(STORY, **LONG, skip_special_tokens=False, spaces_between_special_tokens=False)),
    # Greedy requests may not have several choices: the most probable token each time is as good.
    "three choices": (CHAT, chat(STORY, **{**LONG, "temperature": 1.0}, n=3, top_k=1, seed=3)),
    "several media": (CHAT, chat(picture(302), ASK, picture(303), text("Compare."), **LONG)),
    "completion": (COMPLETIONS, completion("A photograph shows", logprobs=2)),
    "completion with its prompt": (COMPLETIONS, completion("A photograph shows", echo=True)),
    "completions of several prompts": (COMPLETIONS, completion(["A photograph", "The quick brown", "Which"])),
}


#: Of whose events nothing is merged: their texts are compared. `ignore_eos` is no member of these APIs: a question
#: whose answer is long.
LONG_ANSWER = "Describe a garden."
OTHER_APIS = {
    "response": ("/v1/responses", {"input": LONG_ANSWER, "max_output_tokens": 2500, "temperature": 0}),
    "message": (
        "/v1/messages",
        {"messages": [{"role": "user", "content": LONG_ANSWER}], "max_tokens": 2500, "temperature": 0},
    ),
}


#: Gateways of other stages and transports.
OTHER_STAGES = ("url", "decoded/shm", "features/inline", "apart")


async def test_streams_of_a_killed_worker_are_as_without(serve, ours, gateways):
    before = await num_migrations(ours)
    others = {name: streamed(ours, body, path) for name, (path, body) in OTHER_APIS.items()}
    merged = {name: streamed(ours, body, path) for name, (path, body) in GOES_ON.items()}
    images = {name: streamed(gateways[name], chat(picture(301), ASK, **LONG)) for name in OTHER_STAGES}
    right, *undisturbed_others = await asyncio.gather(
        undisturbed_together({**merged, **images}),
        *(interrupted(ours, one.body, path=one.path) for one in others.values()),
    )
    answers = await all_interrupted(serve, {**merged, **images, **others})
    assert await num_migrations(ours) >= before + len(merged) + len(others)
    for name, undisturbed_one in zip(others, undisturbed_others, strict=True):
        content, last = _texts(undisturbed_one), answers[name].events[-1]
        assert last["type"] in ("response.completed", "message_stop"), last
        assert len(content) > BEFORE_FAULT
        assert _texts(answers[name]) == content
    for name in images:
        assert_goes_on(whole(answers[name]), right[name])
    streams = {name: whole(answers[name]) for name in GOES_ON}
    for name, found in streams.items():
        assert_goes_on(found, right[name])
        max_tokens, num_choices = LONG["max_tokens"], len(found["choices"])
        assert num_choices == (3 if name in ("three choices", "completions of several prompts") else 1)
        assert found["usage"]["completion_tokens"] == num_choices * max_tokens
        for choice in found["choices"].values():
            assert len(choice["ids"]) == max_tokens
            assert choice["finish_reason"] == "length"
    logprobs = streams["completion"]["choices"][0]["logprobs"]
    assert len(logprobs["tokens"]) == LONG["max_tokens"]
    assert all(a <= b for a, b in pairwise(logprobs["text_offset"]))


@pytest.mark.thread
async def test_image_of_a_killed_worker_is_neither_prepared_nor_encoded_again(serve, ours, store, metrics_port):
    """And its usage is that of the first attempt, whose prompt was cached."""
    body = chat(picture(300), ASK, **LONG)
    await undisturbed(ours, body)
    right, before = await undisturbed(ours, body), await num_migrations(ours)
    assert right["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
    killed = []

    async def kill_it(worker: str) -> None:
        killed.append(worker)
        kill(serve.worker_pid(worker))

    async def num_encoded(worker: str) -> float:
        await asyncio.sleep(REPORTED_S)  # time: until the worker has asked its engine
        port = metrics_port + list(serve.named_workers()).index(worker)
        page = await OpenAiHttp(f"http://127.0.0.1:{port}", "").metrics()
        return page.value("medialane_worker_embeddings_total", outcome="encoded")

    prepared, encoded = (await stats_of(store)).preparers.num_done, [*map(num_encoded, serve.named_workers())]
    by_worker = dict(zip(serve.named_workers(), await asyncio.gather(*encoded), strict=True))
    found = whole(await interrupted(ours, body, kill_it))
    assert_same(found, right)
    assert found["usage"] == right["usage"]
    assert await num_migrations(ours) == before + 1
    assert (await stats_of(store)).preparers.num_done == prepared
    (other,) = by_worker.keys() - set(killed)
    assert await num_encoded(other) == by_worker[other]


async def test_stopped_worker_costs_time_and_its_late_outputs_are_dropped(serve, ours):
    async with AsyncExitStack() as stopped:

        async def stop(worker: str) -> None:
            stopped.enter_context(suspended(serve.worker_pid(worker)))

        found = await goes_on(ours, chat(STORY, **LONG), stop)
    assert_same(await undisturbed(ours, chat(STORY, **LONG)), found)


async def test_stream_that_loses_two_workers_goes_on(serve, ours):
    """The engine of one is killed, that of the other one is stopped; when that is noticed, the first one is back."""
    before = await num_migrations(ours)

    async def has_moved() -> bool:
        return await num_migrations(ours) > before

    async with AsyncExitStack() as stopped:

        async def stop_engine_of_the_next(_lost: str) -> None:
            await eventually(has_moved, "the stream goes on at the other worker")
            stopped.enter_context(suspended(*descendants(serve.worker_pid(await its_worker(ours)))))

        body = chat(STORY, **{**LONG, "max_tokens": 7000})
        await goes_on(ours, body, killing_engine(serve), stop_engine_of_the_next)


REPEATED = {
    "text": chat(STORY, **LONG),
    "two seeded choices of an image": chat(picture(305), ASK, **{**LONG, "temperature": 0.8}, n=2, seed=7),
    "penalties": chat(STORY, **LONG, frequency_penalty=0.5, presence_penalty=0.3),
    "structured output": chat(STORY, max_tokens=1500, structured_outputs={"regex": "[a-z ]{1400}"}),
}


async def test_beam_search_of_a_killed_worker_is_repeated_and_equal(serve, ours):
    """Each of its steps is a request of its own."""
    body = chat(STORY, use_beam_search=True, n=2, max_tokens=120)
    right = await ours.succeed(body)
    request = asyncio.create_task(ours.post(body))
    await its_worker(ours)
    await asyncio.sleep(MIDDLE_S)  # time: no message says that an answer is in its middle
    assert not request.done()
    kill(serve.worker_pid(await its_worker(ours)))
    answer = await request
    assert answer.status == 200, answer.json
    assert_same(answer.json, right.json)


LONG_LIST = {"type": "array", "items": {"type": "integer"}, "minItems": 800, "maxItems": 900}
ENDS = {
    "a grammar": {"structured_outputs": {"regex": "[a-z ]{1400}"}},
    "a schema": {"response_format": {"type": "json_schema", "json_schema": {"name": "kinds", "schema": LONG_LIST}}},
    "a frequency penalty": {"frequency_penalty": 0.5},
    "a presence penalty": {"presence_penalty": 0.5},
    "bad words": {"bad_words": ["harbour", "yellow"]},
}


async def test_whole_answers_are_repeated_and_streams_that_need_the_lost_state_end_with_an_error(serve, ours):
    wholes = {
        name: Asked(ours, {k: v for k, v in body.items() if k != "stream_options"}) for name, body in REPEATED.items()
    }
    streams = {name: streamed(ours, chat(STORY, **LONG, **options)) for name, options in ENDS.items()}
    asked = {**wholes, **streams}
    right = dict(zip(asked, await asyncio.gather(*(one.undisturbed() for one in asked.values())), strict=True))
    answers = await all_interrupted(serve, asked)
    for name in wholes:
        assert answers[name].status == 200, answers[name].json
        assert_same(answers[name].json, right[name].json, name)
    for name in streams:
        found = whole(answers[name])
        assert found["error"], name
        assert found["error"]["code"] == "worker_lost"
        assert found["choices"][0]["ids"] == right[name].ids[: len(found["choices"][0]["ids"])]
        assert "finish_reason" not in found["choices"][0]


def _texts(answer: Answer) -> str:
    """The text of the events of the Responses and the messages API."""
    deltas = [event["delta"] for event in answer.events if event["type"].endswith(("text.delta", "block_delta"))]
    return "".join(delta if isinstance(delta, str) else delta.get("text", "") for delta in deltas)
