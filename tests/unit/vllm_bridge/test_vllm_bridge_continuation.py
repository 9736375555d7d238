"""What of a request's sampling parameters lets its answer go on in another engine, and with which it does."""

from types import SimpleNamespace

import pytest
from vllm.sampling_params import (
    RepetitionDetectionParams,
    RequestOutputKind,
    SamplingParams,
    StructuredOutputsParams,
)
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

from installed_packages import install
from medialane.vllm_bridge.frontend.continuation import OBSTACLES, ContinuableAnswer, Continuations

#: The engine has the same answer in mind, wherever the tokens in front of the next one come from.
UNCHANGED = {
    "repetition_penalty": 1.3,  # of tokens in prompt and output
    "temperature": 0.5,
    "watermarking": False,
    "top_p": 0.9,
    "top_k": 5,
    "min_p": 0.1,
    "stop_token_ids": [7],
    "ignore_eos": True,
    "logprobs": 2,
    "logprob_token_ids": [3, 4],
    "flat_logprobs": True,
    "logit_bias": {5: 1.0},
    "allowed_token_ids": [1, 2, 3],
    "stream_interval": 3,
    "routed_experts_prompt_start": 1,  # outputs have no experts
}

#: The text is made in the gateway, by the original parameters.
OF_TEXT = {
    "stop",
    "detokenize",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "include_stop_str_in_output",
    "output_text_buffer_length",
}

#: There is a test of each below.
ADAPTED = {
    "n",
    "seed",
    "max_tokens",
    "min_tokens",
    "prompt_logprobs",
    "prompt_logprob_token_ids",
    "prompt_logprob_start",
    "skip_reading_prefix_cache",
    "output_kind",
}

#: Set by vLLM.
INTERNAL = {"skip_clone", "_eos_token_id", "_all_stop_token_ids", "_watermarking_skipped", "_bad_words_token_ids"}

OBSTRUCTING = {
    "structured_outputs": StructuredOutputsParams(regex="a+"),
    "frequency_penalty": 0.1,
    "presence_penalty": -0.1,
    "bad_words": ["no"],
    "thinking_token_budget": 0,
    "repetition_detection": RepetitionDetectionParams(2, 1, 3),
    "trace_decode_token_ids": [1, 2],
    "extra_args": {"window": 3},
}


def answer(tokenizer=None, config=None, **params):
    config = {"is_diffusion": False, "logits_processors": None, "watermark_config": None} | (config or {})
    model = SimpleNamespace(is_diffusion=config["is_diffusion"], logits_processors=config["logits_processors"])
    common = Continuations(
        SimpleNamespace(model_config=model, watermark_config=config["watermark_config"]),
        SimpleNamespace(tokenizer=tokenizer),
        lambda params: bytes(MsgpackEncoder().encode(params)[0]),
    )
    params = SamplingParams(**{"max_tokens": 20, "output_kind": RequestOutputKind.DELTA} | params)
    return ContinuableAnswer(common, params, [1, 2, 3])


def rest(num_tokens=5, index=0, **params):
    """The decoded parameters of what is left after so many tokens."""
    left = answer(**params).rest(index, [9] * num_tokens, cumulative_logprob=None)
    return MsgpackDecoder(SamplingParams).decode(left.sampling_params)


def test_every_sampling_parameter_of_vllm_is_known():
    """A new one: does it depend on which tokens are output? Then it is an obstacle, or can be adapted."""
    known = [set(UNCHANGED), OF_TEXT, ADAPTED, INTERNAL, set(OBSTACLES)]
    assert set(SamplingParams.__struct_fields__) == set().union(*known)
    assert sum(map(len, known)) == len(SamplingParams.__struct_fields__)


@pytest.mark.parametrize("name", UNCHANGED)
def test_parameter_that_does_not_depend_on_the_output_is_unchanged(name):
    more = {"logprobs": 2} if name == "logprob_token_ids" else {}
    found = answer(**{name: UNCHANGED[name]}, **more)
    assert found.obstacle == ""
    assert getattr(rest(**{name: UNCHANGED[name]}, **more), name) == UNCHANGED[name]


@pytest.mark.parametrize("name", OBSTACLES)
def test_parameter_that_depends_on_the_output_is_an_obstacle(name):
    assert answer(**{name: OBSTRUCTING[name]}).obstacle == OBSTACLES[name]


def test_stream_without_any_of_it_can_go_on():
    assert answer(stop=["END"], logprobs=3, seed=1, n=2, min_tokens=3).obstacle == ""
    assert answer(extra_args={}, bad_words=[]).obstacle == "", "as of the Responses API"


def test_cumulative_outputs_are_an_obstacle():
    assert "cumulative" in answer(output_kind=RequestOutputKind.CUMULATIVE).obstacle


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"is_diffusion": True}, "diffusion"),
        ({"logits_processors": ["module:Processor"]}, "logits processor"),
        ({"watermark_config": object()}, "watermark"),
    ],
)
def test_engine_with_state_of_its_own_is_an_obstacle(config, words):
    assert words in answer(config=config).obstacle


def test_answer_that_is_not_watermarked_can_go_on():
    assert answer(config={"watermark_config": object()}, watermarking=False).obstacle == ""


def test_installed_logits_processor_is_an_obstacle(monkeypatch, tmp_path):
    package = install(monkeypatch, tmp_path, "own", "1.0")
    (package / "entry_points.txt").write_text("[vllm.logits_processors]\nown = module:Processor\n")
    assert "logits processor" in answer().obstacle


def test_delivered_tokens_count_for_the_limits():
    assert (rest(5, max_tokens=20, min_tokens=8).max_tokens, rest(5, max_tokens=20, min_tokens=8).min_tokens) == (15, 3)
    assert rest(9, max_tokens=20, min_tokens=8).min_tokens == 0
    assert rest(5, max_tokens=None).max_tokens is None


def test_text_is_not_made_by_the_other_worker():
    found = rest(stop=["END", "STOP"], include_stop_str_in_output=True, skip_special_tokens=False)
    assert not found.detokenize
    assert not found.stop
    assert found.output_text_buffer_length == 0


def test_outputs_are_deltas():
    assert rest(output_kind=RequestOutputKind.FINAL_ONLY).output_kind is RequestOutputKind.DELTA


def test_log_probabilities_of_the_prompt_are_not_computed_again():
    """With them, the prompt is not read from the prefix cache."""
    found = rest(prompt_logprobs=2)
    assert found.prompt_logprobs is None
    assert not found.skip_reading_prefix_cache
    found = rest(prompt_logprob_token_ids=[[1, 2], [3, 4]], prompt_logprob_start=0)
    assert found.prompt_logprob_token_ids is None
    assert found.prompt_logprob_start is None
    assert rest(skip_reading_prefix_cache=True).skip_reading_prefix_cache


def test_each_choice_goes_on_alone_with_its_own_seed():
    """vLLM seeds the choices of a request one after the other."""
    assert answer(n=3).num_choices == 3
    assert [(rest(index=n, n=3, seed=40).n, rest(index=n, n=3, seed=40).seed) for n in range(3)] == [
        (1, 40),
        (1, 41),
        (1, 42),
    ]
    assert rest(seed=40).seed == 40
    assert rest(n=3).seed is None


def test_original_parameters_are_not_changed():
    """Each of several choices is continued by them, and again if the next worker is lost, too."""
    found = answer(max_tokens=20, min_tokens=8, stop=["END"], n=2)
    for _ in range(2):
        left = found.rest(1, [9] * 5, cumulative_logprob=None)
        assert MsgpackDecoder(SamplingParams).decode(left.sampling_params).max_tokens == 15
