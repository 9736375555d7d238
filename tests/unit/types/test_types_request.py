"""Requests as they travel: the same after encoding, and never printing media."""

import msgspec

from medialane.types.feature import MediaPayload, PlaceholderRange
from medialane.types.media import MediaSize
from medialane.types.request import (
    CompletionDelta,
    EngineRequest,
    EngineTimes,
    ExpandedPrompt,
    KvTransfer,
    OutputDelta,
    TokenLogprob,
    UnexpandedPrompt,
    merge_deltas,
)
from medialane.types.tensor import InlineTensor, TensorSpec


def through_the_wire(value):
    return msgspec.msgpack.decode(msgspec.msgpack.encode(value), type=type(value))


def test_both_prompt_types_round_trip():
    tensor = InlineTensor(TensorSpec("uint8", (3,)), b"abc")
    feature = MediaPayload("image", "a" * 64, b"h", (tensor,), MediaSize(2, 1), PlaceholderRange(1, 2, b"\1\0"))
    for prompt in (
        ExpandedPrompt([1, 2, 3], (feature,), b'{"a":1}'),
        UnexpandedPrompt([1, 2], (MediaPayload("image", "b" * 64, b"", (tensor,), io=b'{"a":2}'),), b"{}", "decoded"),
    ):
        request = EngineRequest("r", prompt, b"params", priority=-1, trace_headers={"a": "b"}, reasoning_ended=False)
        assert through_the_wire(request) == request


def test_outputs_round_trip():
    logprobs = [None, [TokenLogprob(1, -0.5, 1, "a"), TokenLogprob(2, float("-inf"), None, None)]]
    delta = OutputDelta("r", [CompletionDelta(0, "a", [1], logprobs=logprobs, stop_reason="x")], finished=True)
    assert through_the_wire(delta) == delta


def test_repr_of_prompts_omits_media():
    secret = InlineTensor(TensorSpec("uint8", (6,)), b"secret")
    assert "secret" not in repr(UnexpandedPrompt([1], (MediaPayload("image", "b" * 64, b"", (secret,)),)))
    assert repr(ExpandedPrompt([1, 2])) == "ExpandedPrompt(2 tokens, 0 features)"


def test_merged_deltas_equal_their_sequence():
    first = OutputDelta(
        "r",
        [CompletionDelta(0, "a ", [1], -0.5, [[TokenLogprob(1, -0.5, 1, "a ")]])],
        prompt_token_ids=[7, 8],
        num_cached_tokens=16,
        times=EngineTimes(0.1, 0.2),
    )
    second = OutputDelta("r", [CompletionDelta(0, "cat", [2, 3], -2.0, [[TokenLogprob(2, -1.5, 2, "cat")], None])])
    last = OutputDelta("r", [CompletionDelta(0, "", [4], -2.5, None, "stop", 4)], finished=True, num_cached_tokens=16)
    assert merge_deltas([first, second, last]) == OutputDelta(
        "r",
        [
            CompletionDelta(
                0,
                "a cat",
                [1, 2, 3, 4],
                -2.5,
                [[TokenLogprob(1, -0.5, 1, "a ")], [TokenLogprob(2, -1.5, 2, "cat")], None],
                "stop",
                4,
            )
        ],
        finished=True,
        prompt_token_ids=[7, 8],
        num_cached_tokens=16,
        times=EngineTimes(0.1, 0.2),
    )


def test_merged_deltas_keep_completions_apart():
    deltas = [
        OutputDelta("r", [CompletionDelta(0, "a", [1]), CompletionDelta(1, "b", [2])]),
        OutputDelta("r", [CompletionDelta(1, "d", [4], finish_reason="length")]),
        OutputDelta("r", [CompletionDelta(0, "c", [3])]),
    ]
    assert merge_deltas(deltas).completions == [
        CompletionDelta(0, "ac", [1, 3]),
        CompletionDelta(1, "bd", [2, 4], finish_reason="length"),
    ]


def test_tokens_of_another_worker_are_not_the_workers_own():
    assert OutputDelta("r", [], num_cached_tokens=40, num_transferred_tokens=24).num_own_cached_tokens == 16
    assert OutputDelta("r", [], num_transferred_tokens=24).num_own_cached_tokens is None
    several = OutputDelta("r", [], num_cached_tokens=32, num_transferred_tokens=39)
    assert several.num_own_cached_tokens == 0, "only whole blocks were found in the cache"


def test_merged_outputs_keep_what_they_say_about_kv_blocks():
    deltas = [OutputDelta("r", [], num_transferred_tokens=24), OutputDelta("r", [], True, kv_params=b"{}")]
    merged = merge_deltas(deltas)
    assert (merged.num_transferred_tokens, merged.kv_params) == (24, b"{}")


def test_parameters_of_kv_blocks_are_not_in_logs():
    assert "secret" not in repr(KvTransfer("receive", b"secret"))
