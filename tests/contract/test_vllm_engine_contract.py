"""`worker.Engine` over vLLM and over the fake: what a worker may rely on."""

import asyncio
import io
import multiprocessing
import os
import signal
from contextlib import aclosing

import msgspec
import pytest
from PIL import Image as PILImage
from prompt_maker import PromptMaker, bytes_of, encoded, encoded_item, pixels, with_feature

from fake_engine import FakeEngine, FakeParams
from medialane.types.admin import PauseGeneration, ResumeGeneration
from medialane.types.errors import GenerationFailed, InvalidFeature, InvalidRequest, PromptRejected
from medialane.types.feature import PlaceholderRange
from medialane.types.request import EngineRequest, ExpandedPrompt, UnexpandedPrompt
from waiting import eventually

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(300)]


class Case:
    """One engine, and requests in its own encoding of sampling parameters."""

    def __init__(self, engine, params):
        self.engine = engine
        self._params = params
        self._count = 0

    def request(self, prompt, max_tokens=4, generated=()):
        self._count += 1
        return EngineRequest(f"contract-{self._count}", prompt, self._params(max_tokens), generated=list(generated))

    def start(self, prompt, max_tokens=4, generated=()):
        return self.engine.generate(self.request(prompt, max_tokens, generated), bytes_of(prompt))

    async def deltas(self, prompt, max_tokens=4, generated=()):
        async with aclosing(self.start(prompt, max_tokens, generated)) as deltas:
            return [delta async for delta in deltas]

    async def answer(self, prompt, max_tokens=4, generated=()):
        deltas = await self.deltas(prompt, max_tokens, generated)
        return [token for delta in deltas for token in delta.completions[0].token_ids]


@pytest.fixture(params=["fake", pytest.param("vllm", marks=pytest.mark.vllm)])
def case(request):
    if request.param == "fake":
        return Case(FakeEngine(), lambda n: msgspec.json.encode(FakeParams(max_tokens=n, token_s=0.01)))
    return Case(request.getfixturevalue("vllm_engine"), lambda n: encoded(max_tokens=n))


@pytest.fixture(scope="module")
def maker(renderer):
    return PromptMaker(renderer)


@pytest.fixture
def text(maker):
    return ExpandedPrompt(maker.tokenizer.encode("<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"))


async def test_output_arrives_in_deltas_and_the_last_is_finished(case, text):
    deltas = await case.deltas(text, max_tokens=5)
    assert [d.finished for d in deltas] == [False] * (len(deltas) - 1) + [True]
    assert sum(len(d.completions[0].token_ids) for d in deltas) == 5
    assert deltas[-1].completions[0].finish_reason == "length"


async def test_expanded_prompt_is_not_sent_back(case, text):
    assert all(d.prompt_token_ids is None for d in await case.deltas(text))


async def test_first_delta_has_the_engine_times(case, text):
    first, *rest = await case.deltas(text)
    assert first.times is not None
    assert first.times.queue_s >= 0
    assert all(d.times is None for d in rest)


async def test_equal_requests_have_equal_outputs(case, maker):
    prompt = maker.inline(pixels(200, 100))
    assert await case.answer(prompt) == await case.answer(prompt)


async def test_output_depends_on_the_pixels(case, maker):
    one, other = maker.inline(pixels(200, 100, 1)), maker.inline(pixels(200, 100, 2))
    assert one.token_ids == other.token_ids
    assert await case.answer(one, 8) != await case.answer(other, 8)


async def test_closing_the_output_stream_ends_the_request(case, maker):
    deltas = case.start(maker.inline(pixels(100, 100)), max_tokens=2000)
    await anext(deltas)
    assert case.engine.loads()[0].num_running + case.engine.loads()[0].num_waiting == 1
    await deltas.aclose()
    assert case.engine.loads()[0].num_running + case.engine.loads()[0].num_waiting == 0


async def test_cancelling_the_output_stream_ends_the_request(case, text):
    started = asyncio.Event()

    async def read():
        async with aclosing(case.start(text, max_tokens=2000)) as deltas:
            async for _ in deltas:
                started.set()

    running = asyncio.create_task(read())
    await started.wait()
    assert case.engine.loads()[0].num_running == 1
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert case.engine.loads()[0].num_running + case.engine.loads()[0].num_waiting == 0


async def test_invalid_feature_is_rejected_and_the_next_request_succeeds(case, maker):
    prompt = maker.inline(pixels(100, 100))
    end = len(prompt.token_ids)
    with pytest.raises(InvalidFeature):
        await case.answer(with_feature(prompt, placeholder=PlaceholderRange(offset=end - 1, length=16)))
    assert len(await case.answer(prompt)) == 4


async def test_prompt_longer_than_the_model_is_rejected(case, text):
    with pytest.raises(PromptRejected, match="8192"):
        await case.answer(ExpandedPrompt(text.token_ids[:1] * 9000))


async def test_unreadable_parameters_are_rejected(case, text):
    request = msgspec.structs.replace(case.request(text), sampling_params=b"\xc1")
    with pytest.raises(PromptRejected, match="sampling parameters"):
        await anext(case.engine.generate(request, []))


async def test_unexpanded_prompt_generates_output(case, maker):
    prompt = unexpanded_prompt(maker)
    deltas = await case.deltas(prompt)
    assert deltas[-1].finished
    assert len(deltas[0].prompt_token_ids) >= len(prompt.token_ids)
    assert all(d.prompt_token_ids is None for d in deltas[1:])


def unexpanded_prompt(maker):
    file = io.BytesIO()
    PILImage.fromarray(pixels(120, 80)).save(file, "PNG")
    return UnexpandedPrompt(maker.token_ids(1), (encoded_item(file.getvalue(), "e" * 64),))


@pytest.mark.parametrize("kind", ["text", "features", "unexpanded"])
async def test_answer_goes_on_after_what_was_generated_elsewhere(case, maker, text, kind):
    prompt = {
        "text": lambda: text,
        "features": lambda: maker.inline(pixels(200, 100)),
        "unexpanded": lambda: unexpanded_prompt(maker),
    }[kind]()
    whole = await case.answer(prompt, 8)
    assert await case.answer(prompt, 5, whole[:3]) == whole[3:]


async def test_placeholder_token_that_was_generated_is_no_item(case, maker):
    """It is neither matched with an item nor expanded, in a prompt that is expanded by the worker either."""
    placeholder = maker.tokenizer.encode("<|image_pad|>")
    for prompt in (maker.inline(pixels(200, 100)), unexpanded_prompt(maker)):
        deltas = await case.deltas(prompt, 2, [*placeholder, *placeholder])
        assert sum(len(d.completions[0].token_ids) for d in deltas) == 2


async def test_expanded_prompt_does_not_include_what_was_generated_elsewhere(case, maker):
    prompt = unexpanded_prompt(maker)
    (first, *_) = await case.deltas(prompt)
    (again, *_) = await case.deltas(prompt, generated=[5, 6, 7])
    assert again.prompt_token_ids == first.prompt_token_ids
    assert again.placed == first.placed


async def test_generated_tokens_count_for_the_length_of_the_model(case, text):
    room = case.engine.card.max_model_len - len(text.token_ids)
    assert len(await case.answer(text, 1, text.token_ids[:1] * (room - 1))) == 1
    with pytest.raises(PromptRejected, match="8192"):
        await case.answer(text, 1, text.token_ids[:1] * room)


@pytest.mark.vllm
@pytest.mark.parametrize("token_id", [-1, 1 << 40])
async def test_generated_token_that_is_none_of_the_vocabulary_is_rejected(vllm_engine, text, token_id):
    case = Case(vllm_engine, lambda n: encoded(max_tokens=n))
    with pytest.raises(PromptRejected, match="vocabulary"):
        await case.answer(text, 4, [token_id])


async def test_requests_run_concurrently(case, maker):
    prompts = [maker.inline(pixels(100 + 28 * i, 100, i)) for i in range(4)]
    alone = [await case.answer(p) for p in prompts]
    assert await asyncio.gather(*[case.answer(p) for p in prompts]) == alone


async def test_ping_returns(case):
    await case.engine.ping(30)


async def test_model_card_states_the_request_limits(case):
    assert case.engine.card.max_model_len == 8192
    assert case.engine.card.processor


async def test_errors_belong_to_our_exception_hierarchy(case, text):
    with pytest.raises(InvalidRequest):
        await case.answer(msgspec.structs.replace(text, token_ids=[1] * 8192))


@pytest.mark.vllm
async def test_work_of_the_engine_is_seen_and_that_it_is_stopped(vllm_engine, maker, text):
    """A step computes; an engine that is stopped does neither that nor reply."""
    before = await vllm_engine.used_cpu_s()
    assert await Case(vllm_engine, lambda n: encoded(max_tokens=n)).answer(text, max_tokens=20)
    assert await vllm_engine.used_cpu_s() > before
    (core,) = [process.pid for process in multiprocessing.active_children() if "EngineCore" in process.name]
    os.kill(core, signal.SIGSTOP)

    async def is_seen():  # the signal stops a running process a moment later
        return await vllm_engine.used_cpu_s() is None

    try:
        await eventually(is_seen)
        with pytest.raises(GenerationFailed, match="did not respond"):
            await vllm_engine.ping(0.3)
    finally:
        os.kill(core, signal.SIGCONT)
    await vllm_engine.ping(30)
    assert await vllm_engine.used_cpu_s() > before


async def test_paused_engine_replies(case):
    """So it is not stalled."""
    await case.engine.administer(PauseGeneration())
    try:
        await case.engine.ping(30)
    finally:
        await case.engine.administer(ResumeGeneration())
