"""An answer outlives its worker: the worker is killed, its engine is killed, or either is stopped, in the middle of a
stream, and what the client has in the end is what it has without that.

Outputs are compared with those of the same request to the same workers, undisturbed: that these are plain vLLM's is
tested elsewhere. The model's random weights give texts full of incomplete characters, and greedy answers that do not
depend on which tokens were prefilled and which decoded, even in bfloat16.
"""

import asyncio
from contextlib import AsyncExitStack
from itertools import pairwise

import pytest
import pytest_asyncio
from embedding_requests import REPORTED_S
from interrupted import SEAM, Fault, interrupted, its_worker, killing, killing_engine, whole
from medialane_process import kill
from openai_http import CHAT, Answer, OpenAiHttp, assert_same, chat, in_flight, load, picture, text
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
RESTART_S = 240
#: A whole answer has some hundred tokens after this, and some thousand are left.
MIDDLE_S = 0.5


@pytest_asyncio.fixture(autouse=True)
async def _all_workers(ours):
    async def are_ready() -> bool:
        page = await ours.metrics()
        return page.value("medialane_worker_state", state="ready") == 2 and await in_flight(ours, 0)

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
    assert found["error"] is None
    assert_same(found, right)
    assert await num_migrations(client) >= before + len(faults)
    assert all(len(choice["ids"]) > SEAM for choice in found["choices"].values())
    return found


def completion(prompt, **options) -> dict:
    return {"prompt": prompt, "temperature": 0, "return_token_ids": True, **LONG, **options}


#: Greedy requests may not have several choices. The most probable token each time is as good, but between equal logits,
#: which are frequent in bfloat16, the seed would choose, and that begins anew at the seam on the CPU's model runner.
TIE_BREAKS = {str(token): 1e-4 * token for token in range(512)}

GOES_ON = {
    "text": (CHAT, chat(STORY, **LONG)),
    "logprobs": (CHAT, chat(STORY, **{**LONG, "max_tokens": 5000}, logprobs=True, top_logprobs=3)),
    "tools": (CHAT, chat(STORY, **LONG, tools=[TOOL], tool_choice="auto")),
    "repetition penalty": (CHAT, chat(STORY, **LONG, repetition_penalty=1.2)),
    "logit bias": (CHAT, chat(STORY, **LONG, logit_bias={"30": -100, "40": 2})),
    "special tokens": (CHAT, chat(STORY, **LONG, skip_special_tokens=False, spaces_between_special_tokens=False)),
    "three choices": (CHAT, chat(STORY, **{**LONG, "temperature": 1.0}, n=3, top_k=1, seed=3, logit_bias=TIE_BREAKS)),
    "completion": (COMPLETIONS, completion("A photograph shows", logprobs=2)),
    "completion with its prompt": (COMPLETIONS, completion("A photograph shows", echo=True)),
    "completions of several prompts": (COMPLETIONS, completion(["A photograph", "The quick brown", "Which"])),
}


@pytest.mark.parametrize("name", GOES_ON)
async def test_stream_of_a_killed_worker_is_as_without(serve, ours, name):
    path, body = GOES_ON[name]
    found = await goes_on(ours, body, killing(serve), path=path)
    num_choices = len(found["choices"])
    assert found["usage"]["completion_tokens"] == num_choices * body["max_tokens"]
    for choice in found["choices"].values():
        assert len(choice["ids"]) == body["max_tokens"]
        assert choice["finish_reason"] == "length"
        if name == "completion":
            assert len(choice["logprobs"]["tokens"]) == body["max_tokens"]
            assert all(a <= b for a, b in pairwise(choice["logprobs"]["text_offset"]))


@pytest.mark.thread
async def test_image_of_a_killed_worker_is_neither_prepared_nor_encoded_again(serve, ours, store, metrics_port):
    body = chat(picture(300), ASK, **LONG)
    right, before = await undisturbed(ours, body), await num_migrations(ours)
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
    assert_same(whole(await interrupted(ours, body, kill_it)), right)
    assert await num_migrations(ours) == before + 1
    assert (await stats_of(store)).preparers.num_done == prepared
    (other,) = by_worker.keys() - set(killed)
    assert await num_encoded(other) == by_worker[other]


@pytest.mark.parametrize("gateway", ["url", "decoded/shm", "features/inline", "apart"])
async def test_image_of_another_stage_or_transport_goes_on(serve, gateways, gateway):
    await goes_on(gateways[gateway], chat(picture(301), ASK, **LONG), killing(serve))


async def test_answer_of_several_media_goes_on(serve, ours):
    await goes_on(ours, chat(picture(302), ASK, picture(303), text("Compare."), **LONG), killing(serve))


async def test_usage_is_that_of_the_first_attempt(serve, ours):
    body = chat(picture(304), STORY, **LONG)
    await undisturbed(ours, body)
    (right, found) = [
        whole(await request)["usage"]
        for request in (ours.succeed({**body, "stream": True}), interrupted(ours, body, killing(serve)))
    ]
    assert right["prompt_tokens_details"]["cached_tokens"] > 0
    assert found == right


async def test_stop_string_across_the_seam_ends_the_answer(serve, ours):
    """Its first characters come from the first worker, which holds them back, the last ones from the other one."""
    right = (await undisturbed(ours, chat(STORY, **LONG)))["choices"][0]
    text_at = len(right["content"]) // len(right["ids"]) * SEAM // 2
    stop = right["content"][text_at : -len(right["content"]) // 4]
    for included in (False, True):
        body = chat(STORY, **LONG, stop=[stop], include_stop_str_in_output=included)
        (choice,) = (await goes_on(ours, body, killing(serve)))["choices"].values()
        assert choice["stop_reason"] == stop
        assert choice["content"].endswith(stop) == included


async def test_stop_string_that_is_begun_but_not_met_is_delivered(serve, ours):
    right = (await undisturbed(ours, chat(STORY, **LONG)))["choices"][0]["content"]
    stop = right[: -len(right) // 4] + "\0never"
    (choice,) = (await goes_on(ours, chat(STORY, **LONG, stop=[stop]), killing(serve)))["choices"].values()
    assert choice["content"] == right


async def test_stop_string_far_behind_the_seam_ends_the_answer(serve, ours):
    right = (await undisturbed(ours, chat(STORY, **LONG)))["choices"][0]["content"]
    stop = right[-len(right) // 4 :][:30]
    (choice,) = (await goes_on(ours, chat(STORY, **LONG, stop=[stop]), killing(serve)))["choices"].values()
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", stop)


async def test_stop_token_and_least_number_of_tokens_hold_across_the_seam(serve, ours):
    """Without the minimum the token would end the answer before the seam; and after it, if the other worker counted
    from the seam."""
    ids = (await undisturbed(ours, chat(STORY, **LONG)))["choices"][0]["ids"]
    stop = next(token for token in ids[: SEAM // 2] if ids.count(token) > 4)
    body = chat(STORY, **LONG, stop_token_ids=[stop], min_tokens=1000)
    (choice,) = (await goes_on(ours, body, killing(serve)))["choices"].values()
    assert len(choice["ids"]) > 1000


@pytest.mark.parametrize("kind", ["response", "message"])
async def test_stream_of_another_api_goes_on(serve, ours, kind):
    """Responses and Anthropic's messages, of which nothing is merged: the texts are in the order of their events."""
    path, body = {
        "response": (
            "/v1/responses",
            {"input": "Tell a long story.", "max_output_tokens": 1500, "temperature": 0, "logit_bias": TIE_BREAKS},
        ),
        "message": (
            "/v1/messages",
            {"messages": [{"role": "user", "content": "Tell a long story."}], "max_tokens": 1500, "temperature": 0},
        ),
    }[kind]
    right, before = _texts(await interrupted(ours, body, path=path)), await num_migrations(ours)
    assert len(right) > SEAM
    found = await interrupted(ours, body, killing(serve), path=path)
    assert await num_migrations(ours) == before + 1
    assert found.events[-1]["type"] in ("response.completed", "message_stop"), found.events[-1]
    assert _texts(found) == right


async def test_stream_of_a_killed_engine_goes_on(serve, ours):
    await goes_on(ours, chat(STORY, **LONG), killing_engine(serve))


@pytest.mark.parametrize("process", ["worker", "engine"])
async def test_stopped_process_costs_time_and_its_late_outputs_are_dropped(serve, ours, process):
    async with AsyncExitStack() as stopped:

        async def stop(worker: str) -> None:
            pid = serve.worker_pid(worker)
            stopped.enter_context(suspended(*([pid] if process == "worker" else descendants(pid))))

        found = await goes_on(ours, chat(STORY, **LONG), stop)
    again = await undisturbed(ours, chat(STORY, **LONG))
    assert_same(again, found)


async def test_stream_that_loses_two_workers_goes_on(serve, ours):
    async def kill_when_the_other_is_back(worker: str) -> None:
        await eventually(lambda: _num_ready(ours, 2), "the first one is back", RESTART_S)
        kill(serve.worker_pid(await its_worker(ours)))

    body = chat(STORY, **{**LONG, "max_tokens": 7000})
    await goes_on(ours, body, killing(serve), kill_when_the_other_is_back)


async def test_all_streams_of_a_killed_worker_go_on(serve, ours):
    bodies = [chat(text(f"Tell story {number}."), **LONG) for number in range(8)]
    right = [await undisturbed(ours, body) for body in bodies]
    before = await num_migrations(ours)
    streams = [asyncio.create_task(ours.post({**body, "stream": True})) for body in bodies]
    await eventually(lambda: in_flight(ours, len(bodies)), "all are at the workers")
    await asyncio.sleep(MIDDLE_S)  # time: no message says that an answer is in its middle
    number_of = await load(ours)
    lost = max(number_of, key=number_of.get)
    kill(serve.worker_pid(lost))
    for answer, expected in zip(await asyncio.gather(*streams), right, strict=True):
        assert_same(whole(answer), expected)
    assert await num_migrations(ours) >= before + number_of[lost]


REPEATED = {
    "text": chat(STORY, **LONG),
    "two seeded choices of an image": chat(picture(305), ASK, **{**LONG, "temperature": 0.8}, n=2, seed=7),
    "penalties": chat(STORY, **LONG, frequency_penalty=0.5, presence_penalty=0.3),
    "structured output": chat(STORY, max_tokens=1500, structured_outputs={"regex": "[a-z ]{1400}"}),
    "beam search": chat(STORY, use_beam_search=True, n=2, max_tokens=120),
}


@pytest.mark.parametrize("name", REPEATED)
async def test_whole_answer_of_a_killed_worker_is_repeated_and_equal(serve, ours, name):
    body = {key: value for key, value in REPEATED[name].items() if key != "stream_options"}
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


@pytest.mark.parametrize("name", ENDS)
async def test_stream_that_needs_the_state_of_a_killed_engine_ends_with_an_error(serve, ours, name):
    body = chat(STORY, **LONG, **ENDS[name])
    right = await undisturbed(ours, body)
    found = whole(await interrupted(ours, body, killing(serve)))
    assert found["error"]["code"] == "worker_lost"
    assert found["choices"][0]["ids"] == right["choices"][0]["ids"][: len(found["choices"][0]["ids"])]
    assert "finish_reason" not in found["choices"][0]


def _texts(answer: Answer) -> str:
    """The text of the events of the Responses and the messages API."""
    deltas = [event["delta"] for event in answer.events if event["type"].endswith(("text.delta", "block_delta"))]
    return "".join(delta if isinstance(delta, str) else delta.get("text", "") for delta in deltas)


async def _num_ready(client, number: int) -> bool:
    return (await client.metrics()).value("medialane_worker_state", state="ready") == number
