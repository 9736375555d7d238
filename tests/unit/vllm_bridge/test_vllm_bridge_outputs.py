import re

import msgspec
import pytest
import torch
from vllm.logprobs import FlatLogprobs, Logprob
from vllm.outputs import CompletionOutput, PoolingOutput, PoolingRequestOutput, RequestOutput
from vllm.sampling_params import RequestOutputKind, SamplingParams, StructuredOutputsParams
from vllm.v1.metrics.stats import RequestStateStats

from medialane.types.errors import GenerationFailed, InvalidGrammar
from medialane.types.request import EngineTimes, OutputDelta
from medialane.vllm_bridge.engine.outputs import (
    POOLED_PART_BYTES,
    check_grammar,
    to_delta,
    to_pooled_deltas,
    to_pooling_output,
    to_request_output,
    with_end_apart,
)
from medialane.wire import PooledOutput

POSITION = {7: Logprob(-0.5, 1, "a"), 3: Logprob(float("-inf"), 900, None)}


def flat(*positions):
    found = FlatLogprobs()
    found.extend(positions)
    return found


def completion(index=0, **changes):
    fields = {"text": "a", "token_ids": [7], "cumulative_logprob": -0.5, "logprobs": [POSITION]} | changes
    return CompletionOutput(index=index, **fields)


def output(*completions, **changes):
    fields = {
        "request_id": "theirs",
        "prompt": "hi",
        "prompt_token_ids": [1, 2],
        "prompt_logprobs": [None, {2: Logprob(-1.0, 2, "b")}],
        "outputs": list(completions),
        "finished": False,
        "num_cached_tokens": 16,
        "num_cache_creation_tokens": 4,
    }
    return RequestOutput(**(fields | changes))


def travelled(found):
    """The output after both conversions, with the wire in between."""
    wire = msgspec.msgpack.encode(to_delta(found, first=True, expanded=[1, 2]))
    delta = msgspec.msgpack.decode(wire, type=OutputDelta)
    return to_request_output(delta, request_id="ours", prompt="hi", prompt_token_ids=delta.prompt_token_ids)


def test_output_round_trips_to_the_gateway():
    original = output(completion(), finished=True)
    found = travelled(original)
    assert found.request_id == "ours"
    assert found.prompt == "hi"
    for name in ("prompt_token_ids", "prompt_logprobs", "finished", "num_cached_tokens", "num_cache_creation_tokens"):
        assert getattr(found, name) == getattr(original, name), name
    assert found.outputs == original.outputs


@pytest.mark.parametrize(("finish", "stop"), [("stop", "END"), ("stop", 151645), ("length", None), ("error", None)])
def test_finish_and_stop_reasons_round_trip(finish, stop):
    (found,) = travelled(output(completion(finish_reason=finish, stop_reason=stop))).outputs
    assert (found.finish_reason, found.stop_reason) == (finish, stop)


def test_several_completions_keep_their_index():
    assert [c.index for c in travelled(output(completion(1), completion(0))).outputs] == [1, 0]


def test_sampled_token_stays_first_among_logprobs():
    (found,) = travelled(output(completion())).outputs
    assert list(found.logprobs[0]) == [7, 3]


def test_flat_logprobs_become_dicts():
    (found,) = travelled(output(completion(logprobs=flat(POSITION, POSITION)))).outputs
    assert found.logprobs == [POSITION, POSITION]


def test_output_without_logprobs_has_none():
    found = travelled(output(completion(logprobs=None, cumulative_logprob=None), prompt_logprobs=None))
    assert found.prompt_logprobs is None
    assert found.outputs[0].logprobs is None


def test_prompt_is_sent_only_with_the_first_step():
    assert to_delta(output(completion()), first=True, expanded=[1, 2]).prompt_token_ids == [1, 2]
    assert to_delta(output(completion()), first=False, expanded=[1, 2]).prompt_token_ids is None
    assert to_delta(output(completion()), first=True).prompt_token_ids is None  # the gateway has them


def test_engine_times_use_the_engine_clock():
    stats = RequestStateStats(queued_ts=10.0, scheduled_ts=10.5, first_token_ts=12.5, last_token_ts=15.5)
    times = to_delta(output(completion(), metrics=stats), first=True).times
    assert times == EngineTimes(queue_s=0.5, prefill_s=2.0, decode_s=3.0)


@pytest.mark.parametrize("metrics", [None, RequestStateStats(queued_ts=10.0)])
def test_unknown_times_are_omitted(metrics):
    assert to_delta(output(completion(), metrics=metrics), first=True).times is None


@pytest.mark.parametrize(
    ("given", "token_ids", "param"),
    [
        (StructuredOutputsParams(grammar="root ::= root"), [], "structured_outputs.grammar"),
        (StructuredOutputsParams(json={"$ref": "#"}), [7], "structured_outputs.json"),  # no first token satisfies it
        (StructuredOutputsParams(structural_tag="{}"), [], "structured_outputs.structural_tag"),
        (StructuredOutputsParams(regex="a"), [7, 8], None),  # it can be followed: something else has failed
        (None, [], None),
    ],
)
def test_grammar_that_the_engine_cannot_follow_is_named(given, token_ids, param):
    failed, params = output(completion(token_ids=token_ids)), SamplingParams(structured_outputs=given)
    if param is None:
        check_grammar(failed, params)
        return
    with pytest.raises(InvalidGrammar, match=re.escape(param)) as refused:
        check_grammar(failed, params)
    assert refused.value.param == param


def pooled(data):
    return PoolingRequestOutput("theirs", PoolingOutput(data), [1, 2], num_cached_tokens=16, finished=True)


@pytest.mark.parametrize(
    "data",
    [
        torch.tensor(0.25),
        torch.arange(5, dtype=torch.bfloat16),
        torch.randn(3, 7).T,
        torch.randn(3000, 128),
        torch.empty(0, 4),
    ],
    ids=["a number", "bfloat16", "not contiguous", "several parts", "empty"],
)
def test_pooled_tensor_round_trips_bit_for_bit(data):
    deltas = list(to_pooled_deltas(pooled(data), expanded=[1, 2]))
    assert len(deltas) == max(1, -(-data.nbytes // POOLED_PART_BYTES))
    output = PooledOutput(1 << 30)
    wire = [msgspec.msgpack.decode(msgspec.msgpack.encode(delta), type=OutputDelta) for delta in deltas]
    *_, whole = map(output.add, wire)
    found = to_pooling_output(whole, request_id="ours", prompt_token_ids=whole.prompt_token_ids)
    assert found.request_id == "ours"
    assert found.prompt_token_ids == [1, 2]
    assert found.num_cached_tokens == 16
    assert found.finished
    assert found.outputs.data.dtype == data.dtype
    assert torch.equal(found.outputs.data, data)


def test_output_without_a_tensor_is_no_pooling_output():
    delta = to_delta(output(completion()), first=True)
    with pytest.raises(GenerationFailed):
        to_pooling_output(delta, request_id="r", prompt_token_ids=[1])


#: The text of each token: the bytes of one character that is in no text yet belong to the last.
TOKENS = {7: "1", 8: "}", 9: "\ufffd", 2: "<end>"}


def streamed(**changes):
    grammar = StructuredOutputsParams(json_object=True)
    return SamplingParams(**{"structured_outputs": grammar, "output_kind": RequestOutputKind.DELTA, **changes})


def merged_end(**changes):
    ended = {"text": "1}", "token_ids": [7, 8, 2], "logprobs": [POSITION] * 3, "finish_reason": "stop", **changes}
    return to_delta(output(completion(**ended), finished=True), first=False)


def test_end_of_an_answer_with_a_grammar_comes_after_its_text():
    text, end = with_end_apart(merged_end(stop_reason=2), streamed(), TOKENS.__getitem__)
    [before], [last] = text.completions, end.completions
    assert (text.finished, before.text, before.token_ids, before.finish_reason) == (False, "1}", [7, 8], None)
    assert (end.finished, last.text, last.token_ids, last.finish_reason) == (True, "", [2], "stop")
    assert (before.stop_reason, last.stop_reason) == (None, 2)
    assert [len(each.logprobs) for each in (before, last)] == [2, 1]


def test_last_token_of_a_cut_answer_comes_with_its_own_text():
    cut = merged_end(finish_reason="length", token_ids=[7, 8], logprobs=None)
    text, end = with_end_apart(cut, streamed(), TOKENS.__getitem__)
    [before], [last] = text.completions, end.completions
    assert (text.finished, before.text, before.token_ids, before.finish_reason) == (False, "1", [7], None)
    assert (end.finished, last.text, last.token_ids, last.finish_reason) == (True, "}", [8], "length")


@pytest.mark.parametrize(
    ("params", "changes"),
    [
        (streamed(structured_outputs=None), {}),
        (streamed(output_kind=RequestOutputKind.FINAL_ONLY), {}),
        (streamed(include_stop_str_in_output=True), {}),
        (streamed(), {"finish_reason": "length", "token_ids": [7, 9]}),
        (streamed(), {"finish_reason": None}),
        (streamed(), {"stop_reason": "1"}),
        (streamed(), {"text": ""}),
        (streamed(), {"token_ids": [2]}),
    ],
)
def test_other_steps_stay_whole(params, changes):
    delta = merged_end(**changes)
    assert list(with_end_apart(delta, params, TOKENS.__getitem__)) == [delta]
