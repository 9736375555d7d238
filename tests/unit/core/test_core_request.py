"""Requests as they travel: the same after encoding, and never printing media."""

import msgspec

from medialane.core.feature import HandedMedia, PlaceholderRange
from medialane.core.media import MediaSize
from medialane.core.request import (
    CompletionDelta,
    EngineRequest,
    ExpandedPrompt,
    OutputDelta,
    SourcePrompt,
    TokenLogprob,
)
from medialane.core.tensor import InlineTensor, TensorSpec


def through_the_wire(value):
    return msgspec.msgpack.decode(msgspec.msgpack.encode(value), type=type(value))


def test_both_kinds_of_prompts_stay_what_they_are():
    tensor = InlineTensor(TensorSpec("uint8", (3,)), b"abc")
    feature = HandedMedia("image", "a" * 64, b"h", (tensor,), MediaSize(2, 1), PlaceholderRange(1, 2, b"\1\0"))
    for prompt in (
        ExpandedPrompt([1, 2, 3], (feature,), b'{"a":1}'),
        SourcePrompt([1, 2], (HandedMedia("image", "b" * 64, b"", (tensor,), io=b'{"a":2}'),), b"{}", "decoded"),
    ):
        request = EngineRequest("r", prompt, b"params", priority=-1, trace_headers={"a": "b"}, reasoning_ended=False)
        assert through_the_wire(request) == request


def test_outputs_stay_what_they_are():
    logprobs = [None, [TokenLogprob(1, -0.5, 1, "a"), TokenLogprob(2, float("-inf"), None, None)]]
    delta = OutputDelta("r", [CompletionDelta(0, "a", [1], logprobs=logprobs, stop_reason="x")], finished=True)
    assert through_the_wire(delta) == delta


def test_prompts_print_no_media():
    secret = InlineTensor(TensorSpec("uint8", (6,)), b"secret")
    assert "secret" not in repr(SourcePrompt([1], (HandedMedia("image", "b" * 64, b"", (secret,)),)))
    assert repr(ExpandedPrompt([1, 2])) == "ExpandedPrompt(2 tokens, 0 features)"
