"""vLLM's EngineClient over a request backend: requests, outputs and errors. No model, no engine."""

import asyncio
from contextlib import aclosing
from http import HTTPStatus
from itertools import pairwise
from types import SimpleNamespace
from typing import get_args

import pytest
from vllm.engine.protocol import EngineClient
from vllm.entrypoints.generate.beam_search.online import BeamSearchOnlineMixin
from vllm.inputs import mm_input, tokens_input
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalKwargsItems
from vllm.sampling_params import BeamSearchParams, SamplingParams
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.serial_utils import MsgpackDecoder

from medialane.runtime.tasks import PIECES_PER_ITERATION
from medialane.types import admin
from medialane.types.errors import AdminCallIncomplete, ArenaFull, NoWorkerReady
from medialane.types.feature import Feature, MediaPrompt, PlacedFeature, PlaceholderRange, PreparedPrompt
from medialane.types.media import MediaRef, MediaSize
from medialane.types.request import CompletionDelta, OutputDelta, TokenLogprob
from medialane.vllm_bridge.engine.adapters import ACTIONS, ADAPTER_ACTIONS
from medialane.vllm_bridge.frontend import RoutedEngineClient
from medialane.vllm_bridge.frontend.engine_client import BridgedError
from medialane.vllm_bridge.items import engine_input


class RequestBackend:
    def __init__(self, error=None):
        self.ready = True
        self.requests, self.prepared = [], []
        self.num_ended = 0
        self._error = error
        self.failures = []

    def check_ready(self):
        if not self.ready:
            raise NoWorkerReady("no worker is ready to take requests", retry_after_s=5)

    def fail(self, error):
        self.failures.append(error)

    async def generate(self, request, prepared, continuable=None):
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


def client(backend):
    config = SimpleNamespace(
        model_config=SimpleNamespace(is_diffusion=False, logits_processors=None),
        watermark_config=None,
        observability_config=SimpleNamespace(otlp_traces_endpoint=None),
        _check_supports_watermarking=lambda _params: False,
    )
    return RoutedEngineClient(config, object(), backend, ("generate",))


def prepared_prompt(*placeholders):
    items = tuple(MediaRef("image", str(n), data=b"x") for n in range(len(placeholders)))
    features = tuple(
        PlacedFeature(Feature("image", f"{n:064x}", b"", (), MediaSize()), place)
        for n, place in enumerate(placeholders)
    )
    hashes = tuple(f.feature.mm_hash for f in features)
    return PreparedPrompt(list(range(20)), features, hashes, MediaPrompt([1, 2], items), None)


async def outputs(generator):
    async with aclosing(generator) as found:
        return [output async for output in found]


async def test_output_has_the_apps_request_id_and_the_workers_prompt():
    backend = RequestBackend()
    found = await outputs(client(backend).generate(tokens_input([1, 2]), SamplingParams(), "app-id"))
    assert [o.request_id for o in found] == ["app-id"] * 3
    assert [o.prompt_token_ids for o in found] == [[1, 2]] * 3
    assert [o.finished for o in found] == [False, False, True]
    assert backend.prepared == [None]
    assert backend.num_ended == 1


async def test_closing_the_output_stream_closes_the_backend():
    backend = RequestBackend()
    answer = client(backend).generate(tokens_input([1, 2]), SamplingParams(), "r")
    await anext(answer)
    await answer.aclose()
    assert backend.num_ended == 1


async def test_request_fields_are_forwarded():
    backend = RequestBackend()
    prompt = tokens_input([1, 2], prompt="hi", cache_salt="tenant")
    arguments = {"priority": 3, "session_id": "s", "trace_headers": {"a": "b"}, "reasoning_ended": True}
    await outputs(
        client(backend).generate(prompt, SamplingParams(), "r", **arguments, reasoning_parser_kwargs={"a": 1})
    )
    (request,) = backend.requests
    assert (request.prompt_text, request.cache_salt, request.priority) == ("hi", "tenant", 3)
    assert (request.session_id, request.trace_headers, request.reasoning_ended) == ("s", {"a": "b"}, True)
    assert request.reasoning


async def test_medialane_error_is_translated_to_a_vllm_error():
    with pytest.raises(BridgedError) as failed:
        await outputs(client(RequestBackend(ArenaFull("full"))).generate(tokens_input([1]), SamplingParams(), "r"))
    assert failed.value.status_code is HTTPStatus.SERVICE_UNAVAILABLE
    assert isinstance(failed.value.__cause__, ArenaFull)
    assert str(failed.value) == "full"


async def test_prompt_of_embeddings_is_a_client_error():
    with pytest.raises(BridgedError) as failed:
        await outputs(client(RequestBackend()).generate({"type": "embeds"}, SamplingParams(), "r"))
    assert failed.value.status_code is HTTPStatus.BAD_REQUEST


@pytest.mark.parametrize("prompt", ["text", {"prompt": "text"}])
async def test_prompt_that_the_app_has_not_rendered_is_rendered(prompt):
    class Renderer:
        async def render_cmpl_async(self, prompts):
            assert prompts == [{"prompt": "text"}]
            return [tokens_input([5, 6])]

    backend = RequestBackend()
    asked = client(backend)
    asked.renderer, asked.model_config = Renderer(), SimpleNamespace(is_encoder_decoder=False)
    await outputs(asked.generate(prompt, SamplingParams(), "r"))
    assert [request.prompt.token_ids for request in backend.requests] == [[5, 6]]


async def test_tokens_of_the_decoder_are_those_of_the_request():
    backend = RequestBackend()
    both = {"type": "enc_dec", "encoder_prompt": tokens_input([0] * 9), "decoder_prompt": tokens_input([5, 6])}
    await outputs(client(backend).generate(both, SamplingParams(), "r"))
    assert [request.prompt.token_ids for request in backend.requests] == [[5, 6]]


@pytest.mark.parametrize("value", [object(), "\udcff"])
async def test_unserialisable_parameter_is_a_client_error(value):
    params = SamplingParams(extra_args={"a": value})
    with pytest.raises(BridgedError) as failed:
        await outputs(client(RequestBackend()).generate(tokens_input([1]), params, "r"))
    assert failed.value.status_code is HTTPStatus.BAD_REQUEST


async def test_too_large_integer_is_a_client_error():
    generate = client(RequestBackend()).generate
    with pytest.raises(BridgedError) as failed:
        await outputs(generate(tokens_input([1]), SamplingParams(), "r", reasoning_parser_kwargs={"a": 1 << 80}))
    assert failed.value.status_code is HTTPStatus.BAD_REQUEST


async def test_placeholders_equal_vllms():
    backend = RequestBackend()
    prepared = prepared_prompt(PlaceholderRange(5, 3), PlaceholderRange(10, 2, is_embed=b"\0\1"))
    prompt = engine_input(prepared)
    ranges = prompt["mm_placeholders"]["image"]
    prompt["mm_placeholders"]["image"] = [type(r)(r.offset - 4, r.length, r.is_embed) for r in ranges]
    await outputs(client(backend).generate(prompt, SamplingParams(), "r"))
    moved = [placed.placeholder for placed in backend.prepared[0].features]
    assert moved == [PlaceholderRange(1, 3), PlaceholderRange(6, 2, is_embed=b"\0\1")]
    assert prepared.features[0].placeholder.offset == 5


async def test_prompt_processed_by_the_worker_has_no_placed_items():
    prepared = PreparedPrompt([1, 2], (), ("a" * 64,), MediaPrompt([1, 2], (MediaRef("image", "p", data=b"x"),)), None)
    backend = RequestBackend()
    prompt = engine_input(prepared)
    assert (prompt["prompt_token_ids"], prompt["mm_placeholders"]) == ([1, 2], {})
    await outputs(client(backend).generate(prompt, SamplingParams(), "r"))
    assert backend.prepared == [prepared]


async def test_gateway_without_a_worker_is_unhealthy_and_rejects_requests():
    backend = RequestBackend()
    found = client(backend)
    await found.check_health()
    found.check_admission(2)
    backend.ready = False
    with pytest.raises(EngineDeadError):
        await found.check_health()
    with pytest.raises(BridgedError) as refused:
        found.check_admission()
    assert refused.value.__cause__.retry_after_s
    assert not found.errored


BEAM = BeamSearchParams(beam_width=2, max_tokens=3)


class BeamSearch(BeamSearchOnlineMixin):
    """vLLM's serving classes, as far as beam search goes."""

    def __init__(self, engine_client):
        self.engine_client = engine_client
        tokenizer = SimpleNamespace(eos_token_id=99, decode=lambda ids, **_: " ".join(map(str, ids)))
        self.renderer = SimpleNamespace(get_tokenizer=lambda: tokenizer)


class BranchingBackend(RequestBackend):
    """Each step has two candidates: tokens 10 (likely) and 11."""

    async def generate(self, request, prepared, continuable=None):
        self.requests.append(request)
        self.prepared.append(prepared)
        candidates = [TokenLogprob(10, -0.1, 1, None), TokenLogprob(11, -1.0, 2, None)]
        yield OutputDelta("ours#1", [CompletionDelta(0, "", [10], logprobs=[candidates])], True)


@pytest.mark.parametrize("placeholders", [(), (PlaceholderRange(5, 3),)], ids=["left to the worker", "expanded"])
async def test_every_beam_has_the_media_of_the_prompt(placeholders):
    backend = BranchingBackend()
    prepared = prepared_prompt(*placeholders)
    prompt = engine_input(prepared)
    (answer,) = await outputs(BeamSearch(client(backend)).beam_search(prompt, "r", BEAM))
    assert answer.outputs[0].token_ids == [10, 10, 10]
    assert len(backend.requests) == 1 + 2 + 2
    assert backend.prepared == [prepared] * 5
    assert {len(request.prompt.token_ids) for request in backend.requests} == {20, 21, 22}


async def test_beam_search_of_text():
    backend = BranchingBackend()
    (answer,) = await outputs(BeamSearch(client(backend)).beam_search(tokens_input([1, 2]), "r", BEAM))
    assert [beam.token_ids for beam in answer.outputs] == [[10, 10, 10], [10, 10, 11]]
    assert backend.prepared == [None] * 5


async def test_precomputed_tensors_are_not_mistaken_for_text():
    prompt = mm_input([1, 2], MultiModalKwargsItems({"image": [None]}), {"image": ["a"]}, {"image": []})
    with pytest.raises(BridgedError) as failed:
        await outputs(client(RequestBackend()).generate(prompt, SamplingParams(), "r"))
    assert failed.value.status_code is HTTPStatus.BAD_REQUEST


LORA = LoRARequest("sql", 1, "/adapters/sql")

#: Each administrative method of vLLM's protocol, as its routes call it; the calls to workers and their results.
ADMIN = {
    "start_profile": (
        lambda c: c.start_profile(profile_prefix="a", max_iterations=3),
        admin.StartProfile("a", None, 3),
        None,
        None,
    ),
    "stop_profile": (lambda c: c.stop_profile(), admin.StopProfile(), None, None),
    "reset_mm_cache": (lambda c: c.reset_mm_cache(), admin.ResetMmCache(), None, None),
    "reset_encoder_cache": (lambda c: c.reset_encoder_cache(), admin.ResetEncoderCache(), None, None),
    "reset_prefix_cache": (lambda c: c.reset_prefix_cache(True, False), admin.ResetPrefixCache(True), True, True),
    "sleep": (lambda c: c.sleep(2, "wait"), admin.Sleep(2, "wait"), None, None),
    "release_kv_cache_memory": (lambda c: c.release_kv_cache_memory(), admin.ReleaseKvCacheMemory(), None, None),
    "wake_up": (lambda c: c.wake_up(["weights"]), admin.WakeUp(("weights",)), False, False),
    "is_sleeping": (lambda c: c.is_sleeping(), admin.IsSleeping(), True, True),
    "pause_generation": (
        lambda c: c.pause_generation(mode="keep", clear_cache=False),
        admin.PauseGeneration("keep", clear_cache=False),
        None,
        None,
    ),
    "resume_generation": (lambda c: c.resume_generation(), admin.ResumeGeneration(), None, None),
    "is_paused": (lambda c: c.is_paused(), admin.IsPaused(), False, False),
}

#: Methods that do not concern the engines, or that this gateway says it does not support.
OTHERS = {
    "abort",
    "add_lora",
    "check_health",
    "do_log_stats",
    "encode",
    "generate",
    "is_tracing_enabled",
    "notify_kv_transfer_request_rejected",
    "shutdown",
}


class AdminBackend(RequestBackend):
    def __init__(self, answers=(), error=None):
        super().__init__()
        self.calls = []
        self._answers, self._failure = answers, error

    async def administer(self, call):
        self.calls.append(call)
        if self._failure is not None:
            raise self._failure
        return list(self._answers)


@pytest.mark.parametrize("name", ADMIN)
async def test_administrative_call_reaches_every_worker(name):
    ask, call, answer, result = ADMIN[name]
    backend = AdminBackend([answer, answer])
    assert await ask(client(backend)) == result
    assert backend.calls == [call]


@pytest.mark.parametrize("name", ADMIN)
async def test_failed_administrative_call_names_the_workers(name):
    with pytest.raises(BridgedError, match="unix:/w1") as failed:
        await ADMIN[name][0](client(AdminBackend(error=AdminCallIncomplete("1 of 2 have done it; not: unix:/w1"))))
    assert failed.value.status_code == 503


def test_every_administrative_method_of_vllms_protocol_is_handled():
    methods = {n for n in EngineClient.__abstractmethods__ if not isinstance(vars(EngineClient)[n], property)}
    assert methods == set(ADMIN) | OTHERS
    assert {type(call) for _, call, *_ in ADMIN.values()} == set(ACTIONS)
    assert set(ACTIONS) | set(ADAPTER_ACTIONS) == set(get_args(admin.AdminCall))


@pytest.mark.parametrize("name", ["is_sleeping", "is_paused"])
async def test_differing_workers_give_an_error_instead_of_a_boolean(name):
    with pytest.raises(BridgedError, match="1 of 2 workers"):
        await getattr(client(AdminBackend([True, False])), name)()


async def test_reset_fails_if_one_worker_fails():
    assert await client(AdminBackend([True, False])).reset_prefix_cache() is False


async def test_request_has_the_adapters_name_and_the_version_that_the_workers_have_loaded():
    backend = AdminBackend(["v1"])
    found = client(backend)
    found.is_serving = True
    assert await found.add_lora(LORA)
    await outputs(found.generate(tokens_input([1]), SamplingParams(), "r", lora_request=LORA))
    (request,) = backend.requests
    used = MsgpackDecoder(LoRARequest).decode(request.lora)
    assert (used.lora_name, used.lora_path) == ("sql@v1", "/adapters/sql")
    assert (request.lora_name, request.adapter) == ("sql", "sql@v1")


async def test_command_line_adapters_do_not_wait_for_workers():
    backend = AdminBackend(error=NoWorkerReady("no worker is ready"))
    assert await client(backend).add_lora(LORA)
    assert backend.calls == []


async def test_unsupported_call_raises():
    with pytest.raises(NotImplementedError, match="several"):
        await client(RequestBackend()).abort("r")


async def test_rejected_request_with_parameters_of_a_connector_concerns_no_engine():
    """vLLM's app reports it before it answers."""
    backend = RequestBackend()
    await client(backend).notify_kv_transfer_request_rejected("r", {"do_remote_prefill": True})
    assert backend.requests == []


async def test_prompts_of_one_request_are_started_a_few_per_iteration_of_the_loop():
    """vLLM's app starts them all in one: a thousand prompts would block the loop for 0.1 s."""
    backend = RequestBackend()
    engine = client(backend)
    tasks = [
        asyncio.create_task(outputs(engine.generate(tokens_input([1, 2]), SamplingParams(), str(number))))
        for number in range(10 * PIECES_PER_ITERATION)
    ]
    started = [0]
    while started[-1] < len(tasks):
        await asyncio.sleep(0)
        started.append(len(backend.requests))
    assert max(later - earlier for earlier, later in pairwise(started)) <= PIECES_PER_ITERATION
    await asyncio.gather(*tasks)


async def test_app_lets_the_loop_run_while_it_makes_the_requests_of_many_prompts():
    engine, num_iterations = client(RequestBackend()), 0

    async def count():
        nonlocal num_iterations
        while True:
            await asyncio.sleep(0)
            num_iterations += 1

    counting = asyncio.create_task(count())
    for _ in range(10 * PIECES_PER_ITERATION):
        assert not await engine.is_tracing_enabled()
    counting.cancel()
    assert num_iterations >= 8
