import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rpc_requests import engine_request

from medialane.testing.fake_worker import FAKE_CARD
from medialane.types.errors import GenerationFailed, ProtocolViolation, to_report
from medialane.types.request import CompletionDelta, OutputDelta, WorkerLoad
from medialane.wire import (
    Abort,
    ArenaMapped,
    Failed,
    Hello,
    LoadReport,
    Output,
    Ping,
    Pong,
    Refused,
    Released,
    Submit,
    UnreadableSubmit,
    Welcome,
    decode_from_worker,
    decode_to_worker,
)

REPORT = to_report(GenerationFailed("no"))


def encoded(message):
    return memoryview(msgspec.msgpack.encode(message))


@pytest.mark.parametrize(
    "message",
    [
        Hello(gateway_id="g", processor={"dtype": "float32"}),
        Submit(engine_request("r")),
        Abort("r"),
        Ping(7),
    ],
    ids=lambda m: type(m).__name__,
)
def test_gateway_message_round_trips(message):
    assert decode_to_worker(encoded(message)) == message


@pytest.mark.parametrize(
    "message",
    [
        Welcome("w", 12, FAKE_CARD),
        Refused(REPORT),
        Output(OutputDelta("r", [CompletionDelta(0, "a", [1])])),
        Failed("r", REPORT),
        Released("r"),
        ArenaMapped("a" * 32),
        ArenaMapped(None),
        LoadReport((WorkerLoad(1, 2, 0.5), WorkerLoad(0, 0, 0.0))),
        Pong(7),
    ],
    ids=lambda m: type(m).__name__,
)
def test_worker_message_round_trips(message):
    assert decode_from_worker(encoded(message)) == message


@pytest.mark.parametrize(
    "prompt",
    [
        {"type": "expanded", "token_ids": ["not a number"]},
        {"type": "pickled"},
        {
            "type": "expanded",
            "token_ids": [1],
            "features": [
                {
                    "modality": "image",
                    "mm_hash": "0" * 64,
                    "header": b"",
                    "tensors": [{"type": "inline", "spec": {"dtype": "uint8", "shape": [9]}, "data": b"too short"[:5]}],
                    "size": {},
                    "placeholder": {"offset": 0, "length": 1},
                }
            ],
        },
    ],
    ids=["tokens", "kind", "shape"],
)
def test_submit_with_unreadable_content_keeps_its_request_id(prompt):
    message = decode_to_worker(encoded(["Submit", {"request_id": "r", "prompt": prompt, "sampling_params": b""}]))
    assert message == UnreadableSubmit(UnreadableSubmit.Request("r"))


@pytest.mark.parametrize(
    "frame",
    [
        b"",
        b"\xc1",
        b"\x92\xa5Abort\xa2\xff\xfe",
        b"\x92\xa6Submit\x81\xa1x" + b"\x91" * 100_000,
        b"\x92\xa6Submit\x82\xaarequest_id\xa1r\xa6prompt\x82\xa4type\xa8expanded\xa9token_ids\xdd\xff\xff\xff\xff",
        encoded(["Submit", {"request_id": 5}]),
        encoded(["Abort", 1]),
        encoded(["Unknown", 1]),
        encoded(Released("r")),
    ],
    ids=["empty", "opcode", "utf-8", "deep", "endless", "id", "type", "tag", "direction"],
)
def test_invalid_frame_is_a_violation(frame):
    with pytest.raises(ProtocolViolation):
        decode_to_worker(memoryview(frame))


@given(st.binary(max_size=300))
def test_random_bytes_raise_only_a_violation(noise):
    for decode in (decode_to_worker, decode_from_worker):
        with pytest.raises(ProtocolViolation):
            decode(memoryview(noise))
