"""vLLM's EngineClient over a story: what goes out, what comes back, how errors travel. No model, no engine."""

from contextlib import aclosing
from http import HTTPStatus
from types import SimpleNamespace

import pytest
from vllm.inputs import tokens_input
from vllm.sampling_params import SamplingParams
from vllm.v1.engine.exceptions import EngineDeadError

from medialane.core.errors import ArenaFull
from medialane.core.feature import Feature, MediaPrompt, PlacedFeature, PlaceholderRange, PreparedPrompt
from medialane.core.media import MediaRef, MediaSize
from medialane.core.request import CompletionDelta, OutputDelta
from medialane.vllm_bridge.engine_client import BridgedError, RoutedEngineClient
from medialane.vllm_bridge.renderer_hook import engine_input


class Story:
    def __init__(self, error=None):
        self.ready = True
        self.requests, self.prepared = [], []
        self.num_ended = 0
        self._error = error
        self.failures = []

    def fail(self, error):
        self.failures.append(error)

    async def generate(self, request, prepared):
        self.requests.append(request)
        self.prepared.append(prepared)
        try:
            for number in range(3):
                if self._error is not None and number == 1:
                    raise self._error
                completion = CompletionDelta(0, "a", [number])
                yield OutputDelta("ours#1", [completion], number == 2, prompt_token_ids=None if number else [1, 2])
        finally:
            self.num_ended += 1


def client(story):
    config = SimpleNamespace(model_config=object(), observability_config=SimpleNamespace(otlp_traces_endpoint=None))
    return RoutedEngineClient(config, object(), story, ("generate",))


def prepared_prompt(*placeholders):
    items = tuple(MediaRef("image", str(n), data=b"x") for n in range(len(placeholders)))
    features = tuple(
        PlacedFeature(Feature("image", f"{n:064x}", b"", (), MediaSize()), place)
        for n, place in enumerate(placeholders)
    )
    hashes = tuple(f.feature.mm_hash for f in features)
    return PreparedPrompt(list(range(20)), features, hashes, MediaPrompt([1, 2], items))


async def outputs(generator):
    async with aclosing(generator) as found:
        return [output async for output in found]


async def test_answer_has_the_apps_own_id_and_the_workers_prompt():
    story = Story()
    found = await outputs(client(story).generate(tokens_input([1, 2]), SamplingParams(), "app-id"))
    assert [o.request_id for o in found] == ["app-id"] * 3
    assert [o.prompt_token_ids for o in found] == [[1, 2]] * 3
    assert [o.finished for o in found] == [False, False, True]
    assert story.prepared == [None]
    assert story.num_ended == 1


async def test_closing_the_answer_closes_the_story():
    story = Story()
    answer = client(story).generate(tokens_input([1, 2]), SamplingParams(), "r")
    await anext(answer)
    await answer.aclose()
    assert story.num_ended == 1


async def test_fields_of_the_request_are_carried():
    story = Story()
    prompt = tokens_input([1, 2], prompt="hi", cache_salt="tenant")
    arguments = {"priority": 3, "session_id": "s", "trace_headers": {"a": "b"}, "reasoning_ended": True}
    await outputs(client(story).generate(prompt, SamplingParams(), "r", **arguments, reasoning_parser_kwargs={"a": 1}))
    (request,) = story.requests
    assert (request.prompt_text, request.cache_salt, request.priority) == ("hi", "tenant", 3)
    assert (request.session_id, request.trace_headers, request.reasoning_ended) == ("s", {"a": "b"}, True)
    assert request.reasoning


async def test_our_error_travels_as_one_that_vllm_knows():
    with pytest.raises(BridgedError) as failed:
        await outputs(client(Story(ArenaFull("full"))).generate(tokens_input([1]), SamplingParams(), "r"))
    assert failed.value.status_code is HTTPStatus.SERVICE_UNAVAILABLE
    assert isinstance(failed.value.__cause__, ArenaFull)
    assert str(failed.value) == "full"


@pytest.mark.parametrize("prompt", ["text", {"type": "embeds"}, {"prompt": "unrendered"}])
async def test_prompt_that_was_not_rendered_is_the_clients_error(prompt):
    with pytest.raises(BridgedError) as failed:
        await outputs(client(Story()).generate(prompt, SamplingParams(), "r"))
    assert failed.value.status_code is HTTPStatus.BAD_REQUEST


@pytest.mark.parametrize("value", [object(), "\udcff"])
async def test_parameter_that_cannot_be_encoded_is_the_clients_error(value):
    params = SamplingParams(extra_args={"a": value})
    with pytest.raises(BridgedError) as failed:
        await outputs(client(Story()).generate(tokens_input([1]), params, "r"))
    assert failed.value.status_code is HTTPStatus.BAD_REQUEST


async def test_integer_that_does_not_fit_a_message_is_the_clients_error():
    generate = client(Story()).generate
    with pytest.raises(BridgedError) as failed:
        await outputs(generate(tokens_input([1]), SamplingParams(), "r", reasoning_parser_kwargs={"a": 1 << 80}))
    assert failed.value.status_code is HTTPStatus.BAD_REQUEST


async def test_placeholders_are_where_vllm_left_them():
    story = Story()
    prepared = prepared_prompt(PlaceholderRange(5, 3), PlaceholderRange(10, 2, is_embed=b"\0\1"))
    prompt = engine_input(prepared)
    ranges = prompt["mm_placeholders"]["image"]
    prompt["mm_placeholders"]["image"] = [type(r)(r.offset - 4, r.length, r.is_embed) for r in ranges]
    await outputs(client(story).generate(prompt, SamplingParams(), "r"))
    moved = [placed.placeholder for placed in story.prepared[0].features]
    assert moved == [PlaceholderRange(1, 3), PlaceholderRange(6, 2, is_embed=b"\0\1")]
    assert prepared.features[0].placeholder.offset == 5


async def test_prompt_left_to_the_worker_is_a_prompt_of_tokens():
    prepared = PreparedPrompt([1, 2], (), ("a" * 64,), MediaPrompt([1, 2], (MediaRef("image", "p", data=b"x"),)))
    story = Story()
    prompt = engine_input(prepared)
    assert prompt["type"] == "token"
    await outputs(client(story).generate(prompt, SamplingParams(), "r"))
    assert story.prepared == [prepared]


async def test_gateway_without_a_worker_is_not_healthy_and_takes_nothing():
    story = Story()
    found = client(story)
    await found.check_health()
    found.check_admission(2)
    story.ready = False
    with pytest.raises(EngineDeadError):
        await found.check_health()
    with pytest.raises(BridgedError) as refused:
        found.check_admission()
    assert refused.value.__cause__.retry_after_s
    assert not found.errored


@pytest.mark.parametrize("name", ["sleep", "wake_up", "reset_prefix_cache", "start_profile", "pause_generation"])
async def test_matters_of_one_engine_say_so(name):
    with pytest.raises(NotImplementedError, match="several"):
        await getattr(client(Story()), name)()
