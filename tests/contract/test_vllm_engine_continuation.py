"""An answer that goes on in another engine, against one that is not disturbed: a real engine answers both."""

import asyncio
from contextlib import aclosing
from itertools import count

import pytest
import pytest_asyncio
from prompt_maker import PromptMaker, bytes_of, encoded, encoded_item, pixels
from vllm.sampling_params import SamplingParams
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

from medialane.testing.sample_media import sample_jpeg
from medialane.types.request import EngineRequest, ExpandedPrompt, UnexpandedPrompt
from medialane.vllm_bridge.frontend.continuation import ContinuableAnswer, Continuations

pytestmark = [pytest.mark.vllm, pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(300)]

_NUMBERS = count()


@pytest.fixture(scope="module")
def maker(renderer):
    return PromptMaker(renderer)


@pytest.fixture
def text(maker):
    return ExpandedPrompt(maker.tokenizer.encode("<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"))


class Answers:
    """Answers of one engine, undisturbed or continued, as the completions of each choice."""

    def __init__(self, engine, renderer):
        self._engine = engine
        self._common = Continuations(
            engine.llm.vllm_config, renderer, lambda params: bytes(MsgpackEncoder().encode(params)[0])
        )

    async def undisturbed(self, prompt, params, generated=()):
        """The outputs of each choice by index, and the ids of a prompt that the worker expanded."""
        request = EngineRequest(f"continued-{next(_NUMBERS)}", prompt, params, generated=list(generated))
        choices, expanded = {}, None
        async with aclosing(self._engine.generate(request, bytes_of(prompt))) as deltas:
            async for delta in deltas:
                expanded = delta.prompt_token_ids or expanded
                for completion in delta.completions:
                    choices.setdefault(completion.index, []).append(completion)
        return choices, expanded or prompt.token_ids

    async def continued(self, prompt, params, whole, at, expanded):
        """The outputs of the choice of `whole`, whose first `at` were delivered. It goes on in the engine."""
        delivered = whole[:at]
        token_ids = tokens(delivered)
        answer = ContinuableAnswer(self._common, MsgpackDecoder(SamplingParams).decode(params), expanded)
        assert answer.obstacle == ""
        index = whole[0].index
        rest = answer.rest(index, token_ids, cumulative_logprob=delivered[-1].cumulative_logprob if delivered else None)
        left, _ = await self.undisturbed(prompt, rest.sampling_params, token_ids)
        completions = list(delivered)
        for completion in left[0]:
            completions.append(rest.restore(completion))
            if completions[-1].finish_reason is not None:
                break
        assert all(completion.index == index for completion in completions)
        return completions

    async def check_every_break(self, prompt, **params):
        sampling_params = encoded(**params)
        choices, expanded = await self.undisturbed(prompt, sampling_params)
        for whole in choices.values():
            breaks = [self.continued(prompt, sampling_params, whole, at, expanded) for at in range(len(whole))]
            for at, continued in enumerate(await asyncio.gather(*breaks)):
                assert tokens(continued) == tokens(whole), at
                assert text_of(continued) == text_of(whole), at
                assert continued[-1].finish_reason == whole[-1].finish_reason, at
                assert continued[-1].stop_reason == whole[-1].stop_reason, at
                check_logprobs(continued, whole)
        return choices


def tokens(completions):
    return [token for completion in completions for token in completion.token_ids]


def text_of(completions):
    return "".join(completion.text for completion in completions)


def check_logprobs(continued, whole):
    """The same but for rounding: a prefill computes them in another order."""
    if whole[-1].cumulative_logprob is None:
        assert all(completion.logprobs is None for completion in continued)
        return
    assert continued[-1].cumulative_logprob == pytest.approx(whole[-1].cumulative_logprob, abs=1e-3)
    ours, theirs = ([p for completion in each for p in completion.logprobs] for each in (continued, whole))
    assert len(ours) == len(theirs)
    for our, their in zip(ours, theirs, strict=True):
        assert our[0].decoded_token == their[0].decoded_token
        assert our[0].logprob == pytest.approx(their[0].logprob, abs=1e-3)
        assert len(our) == len(their)
        text_of_token = {each.token_id: each.decoded_token for each in their}
        assert all(text_of_token.get(each.token_id, each.decoded_token) == each.decoded_token for each in our)


@pytest.fixture
def answers(vllm_engine, renderer):
    return Answers(vllm_engine, renderer)


@pytest_asyncio.fixture(loop_scope="session")
async def plain_text(answers, text):
    """The greedy answer without any limits of its own: its completions."""
    choices, _ = await answers.undisturbed(text, encoded(max_tokens=16))
    return choices[0]


async def test_greedy_answer(answers, text):
    (whole,) = (await answers.check_every_break(text, max_tokens=16, logprobs=2)).values()
    assert len(tokens(whole)) == 16


async def test_answer_about_an_image_as_features(answers, maker):
    await answers.check_every_break(maker.inline(pixels(200, 100)), max_tokens=8)


async def test_answer_about_an_image_that_the_worker_processes(answers, maker):
    """The prompt that is continued is the one that the worker has expanded."""
    prompt = UnexpandedPrompt(maker.token_ids(1), (encoded_item(sample_jpeg(1, 120, 80), "f" * 64),))
    await answers.check_every_break(prompt, max_tokens=8, logprobs=0)


async def test_placeholder_tokens_among_those_generated(answers, maker):
    """An answer may contain the token that stands for an image: that is none."""
    (placeholder,) = maker.tokenizer.encode("<|image_pad|>")
    allowed = [placeholder, *maker.tokenizer.encode("ab")]
    choices = await answers.check_every_break(
        maker.inline(pixels(200, 100)), max_tokens=6, allowed_token_ids=allowed, logit_bias={placeholder: 5.0}
    )
    assert placeholder in tokens(choices[0])


@pytest.mark.parametrize("include", [False, True])
async def test_stop_string(answers, text, plain_text, include):
    """It is part of the text of several tokens, so there are breaks within it."""
    whole = text_of(plain_text)
    end = len(text_of(plain_text[:12]))
    stop = whole[end - 6 : end - 1]
    choices = await answers.check_every_break(
        text, max_tokens=16, stop=[stop, "never"], include_stop_str_in_output=include, logprobs=1
    )
    assert choices[0][-1].stop_reason == stop
    assert text_of(choices[0]).endswith(stop) == include


async def test_stop_token(answers, text, plain_text):
    token_ids = tokens(plain_text)
    stop = next(token for number, token in enumerate(token_ids) if number > 5 and token not in token_ids[:number])
    choices = await answers.check_every_break(text, max_tokens=16, stop_token_ids=[stop])
    assert choices[0][-1].stop_reason == stop


async def test_least_number_of_tokens(answers, text, plain_text):
    """Without it the answer would stop at its third token."""
    stop = tokens(plain_text)[2]
    choices = await answers.check_every_break(text, max_tokens=12, min_tokens=8, stop_token_ids=[stop])
    assert len(tokens(choices[0])) >= 8


async def test_repetition_penalty(answers, text, plain_text):
    """Below 1 it prefers what prompt and output have had."""
    choices = await answers.check_every_break(text, max_tokens=12, repetition_penalty=0.1)
    assert tokens(choices[0]) != tokens(plain_text)[:12]


async def test_each_of_several_choices(answers, text):
    """Sampling the most likely token only, as vLLM has one choice if it is greedy."""
    choices = await answers.check_every_break(text, max_tokens=6, n=2, temperature=1.0, top_k=1, logprobs=0)
    assert sorted(choices) == [0, 1]


async def test_seeded_sample_goes_on_with_other_noise_on_a_cpu(answers, text):
    """The runner for CPUs draws its noise from a generator that begins anew. That for GPUs derives it from seed and
    position: the answer is the same there. The documentation says so; this fails if it is no longer true."""
    params = encoded(max_tokens=12, temperature=1.0, seed=11)
    choices, expanded = await answers.undisturbed(text, params)
    again, _ = await answers.undisturbed(text, params)
    assert tokens(again[0]) == tokens(choices[0])
    continued = await asyncio.gather(*[answers.continued(text, params, choices[0], at, expanded) for at in range(12)])
    assert all(tokens(each)[:at] == tokens(choices[0])[:at] for at, each in enumerate(continued))
    assert all(len(tokens(each)) == 12 for each in continued)
    assert tokens(continued[0]) == tokens(choices[0])
    assert any(tokens(each) != tokens(choices[0]) for each in continued[1:])


async def test_answer_that_moves_several_times(answers, text):
    """Each worker delivers three tokens."""
    params = encoded(max_tokens=12, stop=["never"], logprobs=1)
    choices, expanded = await answers.undisturbed(text, params)
    whole = choices[0]
    parts = []
    while len(tokens(parts)) < 12:
        parts = (await answers.continued(text, params, parts or whole, len(parts), expanded))[: len(parts) + 3]
    assert tokens(parts) == tokens(whole)
    assert text_of(parts) == text_of(whole)
    check_logprobs(parts, whole)
