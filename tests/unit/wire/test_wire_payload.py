"""Tensors sent along with their request: the pure parts, then whole requests over real sockets."""

import asyncio
import os

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rpc_requests import engine_request, tokens_of

from medialane.testing.fake_worker import FakeHandler
from medialane.types.errors import (
    GenerationFailed,
    HandoverFailed,
    InvalidFeature,
    ProtocolViolation,
    WorkerBusy,
    WorkerLost,
)
from medialane.types.feature import Embedding, MediaPayload
from medialane.types.request import EngineRequest, ExpandedPrompt, UnexpandedPrompt
from medialane.types.tensor import ArenaRange, InlineTensor, TensorDescriptor, TensorSpec
from medialane.wire import (
    HEADER,
    Abort,
    DropPayload,
    Failed,
    FrameReader,
    IncomingPayload,
    OutgoingRequest,
    Payload,
    Released,
    RpcConfig,
    Submit,
    append_raw_frame,
    decode_to_worker,
    join,
    raw_data,
    split,
)
from waiting import eventually

#: Tensors are sent in pieces; so many are written at once.
PIECE_BYTES, PIECES_AT_ONCE = 64 * 1024, 4
MIB = 1 << 20
HOUR_S = 3600.0
STORED = TensorDescriptor(TensorSpec("uint8", (4,)), ArenaRange("ab" * 16, 0, 1024, 1), 64)


def inline(data):
    return InlineTensor(TensorSpec("uint8", (len(data),)), memoryview(data))


def request_with(*items, request_id="r", kind=ExpandedPrompt):
    """A request whose media have these inline tensors, one tuple of bytes for each item."""
    media = tuple(MediaPayload("image", "h", b"", tuple(map(inline, datas))) for datas in items)
    return EngineRequest(request_id, kind([1, 2], media), b"")


def bytes_in(request):
    return [[bytes(t.data) for t in item.tensors] for item in request.prompt.media]


def sent(outgoing):
    """Everything that an outgoing request appends, and how much at a time."""
    steps, more = [], True
    while more:
        buffer = bytearray()
        more = outgoing.append_next(buffer)
        steps.append(bytes(buffer))
    return steps


def received(stream, max_bytes=64 * MIB):
    """What a worker makes of a stream: its requests, whole."""
    reader, payload, found = FrameReader(max_bytes), IncomingPayload(max_bytes), []
    reader.receive(stream)
    while (frame := reader.next_frame()) is not None:
        if (piece := raw_data(frame)) is not None:
            payload.add(piece)
            continue
        match decode_to_worker(frame):
            case Payload(sizes):
                payload.begin(sizes)
            case DropPayload():
                payload.drop()
            case Submit(request, with_payload):
                found.append(join(request, payload.take()) if with_payload else request)
    return found


def outgoing(request, on_end=lambda: None, max_bytes=64 * MIB):
    message, tensors = split(request)
    return OutgoingRequest(message, tensors, on_end, max_bytes=max_bytes)


SIZES = st.one_of(st.integers(0, 40), st.sampled_from([PIECE_BYTES - 1, PIECE_BYTES, PIECE_BYTES + 1, 3 * PIECE_BYTES]))


@given(st.lists(st.lists(SIZES, max_size=3), max_size=3), st.sampled_from([ExpandedPrompt, UnexpandedPrompt]))
def test_request_round_trips(sizes, kind):
    whole = request_with(*[[os.urandom(n) for n in item] for item in sizes], kind=kind)
    message, tensors = split(whole)
    assert bytes_in(message) == [[b"" for _ in item] for item in sizes]
    if tensors:
        steps = sent(outgoing(whole))
        assert max(map(len, steps)) < PIECES_AT_ONCE * (PIECE_BYTES + 5) + 1000
        (found,) = received(b"".join(steps))
    else:
        found = join(message, [])
    assert bytes_in(found) == bytes_in(whole)
    assert found == whole


def test_arena_tensors_stay_descriptors():
    item = MediaPayload("image", "h", b"", (STORED, inline(b"abc")))
    whole = EngineRequest("r", ExpandedPrompt([1], (item,)), b"")
    (found,) = received(b"".join(sent(outgoing(whole))))
    assert found.prompt.features[0].tensors[0] == STORED
    text = engine_request("t")
    assert split(text) == (text, [])


def test_completion_is_reported_once_when_the_last_byte_is_copied():
    ended = []
    out = outgoing(request_with((bytes(PIECES_AT_ONCE * PIECE_BYTES + 1),)), lambda: ended.append(1))
    assert out.append_next(bytearray())
    assert (ended, out.num_bytes_left) == ([], 1)
    assert not out.append_next(bytearray())
    assert (ended, out.num_bytes_left) == ([1], 0)


@pytest.mark.parametrize("num_steps", [0, 1, 2])
def test_aborted_request_frees_space_for_the_next(num_steps):
    ended, stream = [], bytearray()
    out = outgoing(request_with((bytes(MIB), b"x")), lambda: ended.append(1))
    for _ in range(num_steps):
        out.append_next(stream)
    out.cancel()
    assert not out.append_next(stream)
    assert ended == [1]
    following = request_with((b"abc",), request_id="next")
    assert received(bytes(stream) + b"".join(sent(outgoing(following)))) == [following]
    assert (num_steps == 0) == (not stream)


def test_size_limit_of_a_request_includes_its_tensors():
    outgoing(request_with((bytes(999),)), max_bytes=1000)
    with pytest.raises(ProtocolViolation):
        outgoing(request_with((bytes(500), bytes(500))), max_bytes=1000)
    with pytest.raises(ProtocolViolation):
        outgoing(request_with((b"x",), request_id="r" * 2000), max_bytes=1000)


@pytest.mark.parametrize(
    ("lacking", "given"),
    [
        ((b"abc",), []),
        ((b"abc",), [b"ab"]),
        ((b"abc",), [b"abc", b"d"]),
        ((), [b"abc"]),
    ],
)
def test_tensors_of_another_request_are_an_invalid_feature(lacking, given):
    message, _ = split(request_with(lacking))
    found = [memoryview(data) for data in given]
    if given:
        with pytest.raises(InvalidFeature):
            join(message, found)
    else:  # nothing arrived: fetching the tensor raises
        assert bytes_in(join(message, found)) == [[b""]]


def incoming(*sizes, max_bytes=100):
    payload = IncomingPayload(max_bytes)
    if sizes:
        payload.begin(sizes)
    return payload


@pytest.mark.parametrize(
    "violate",
    [
        lambda: incoming(3).begin([3]),
        lambda: incoming().begin([]),
        lambda: incoming().begin([5, 0]),
        lambda: incoming().begin([-1]),
        lambda: incoming().begin([50, 50]),
        lambda: incoming().add(memoryview(b"x")),
        lambda: incoming(3).add(memoryview(b"xxxx")),
        lambda: incoming().take(),
        lambda: incoming(3).take(),
    ],
)
def test_unexpected_payload_is_a_violation(violate):
    with pytest.raises(ProtocolViolation):
        violate()


def test_payload_tensors_are_read_only_and_aligned():
    payload = incoming(3, 8, max_bytes=1000)
    payload.add(memoryview(b"abc"))
    payload.add(memoryview(b"defghijk"))
    first, second = payload.take()
    assert (bytes(first), bytes(second)) == (b"abc", b"defghijk")
    assert first.readonly
    with pytest.raises(ProtocolViolation):
        payload.take()


class Keeping(FakeHandler):
    """Writes down the bytes of its requests."""

    async def run(self, request):
        self.seen = {**getattr(self, "seen", {}), request.request_id: bytes_in(request)}
        async for delta in super().run(request):
            yield delta


async def test_large_tensors_arrive_intact_along_with_other_requests(unix_or_tls_net):
    handler = Keeping([1, 2])
    await unix_or_tls_net.serve(handler)
    client = await unix_or_tls_net.connect()
    datas = {f"r{n}": [[os.urandom(MIB + n), b"", os.urandom(7)]] for n in range(4)}
    remotes = [client.requests.submit(request_with(*items, request_id=name)) for name, items in datas.items()]
    texts = [client.requests.submit(engine_request(f"t{n}")) for n in range(4)]
    assert await asyncio.gather(*map(tokens_of, remotes + texts)) == [[1, 2]] * 8
    assert {name: handler.seen[name] for name in datas} == datas
    await eventually(lambda: len(client.requests) == 0)


async def test_abort_during_tensor_sending_stops_and_the_next_request_arrives(net):
    handler = Keeping()
    await net.serve(handler)
    client = await net.connect()
    large, second = bytearray(20 * MIB), bytearray(MIB)
    remote = client.requests.submit(request_with((large,), request_id="large"))
    waiting = client.requests.submit(request_with((second,), request_id="waiting"))
    await asyncio.sleep(0)
    for one in (remote, waiting):
        one.abort()
    assert client.requests.num_unsent_bytes == 0, "aborted, but their tensors are still read"
    with pytest.raises(GenerationFailed):
        await tokens_of(remote)
    assert await tokens_of(client.requests.submit(request_with((b"abc",), request_id="small"))) == [1, 2, 3]
    assert handler.seen == {"small": [[b"abc"]]}
    await eventually(lambda: len(client.requests) == 0)


async def test_lost_connection_stops_sending(net):
    server = await net.serve(FakeHandler())
    client = await net.connect()
    remote = client.requests.submit(request_with((bytes(20 * MIB),)))
    await client.close()
    assert client.requests.num_unsent_bytes == 0
    with pytest.raises(WorkerLost):
        await tokens_of(remote)
    await eventually(lambda: server.num_in_flight == 0)


async def test_queued_tensors_for_a_slow_worker_are_bounded(net):
    config = RpcConfig(max_write_buffer_bytes=2 * MIB, max_frame_bytes=8 * MIB)
    await net.serve(FakeHandler())
    client = await net.connect(config)
    first = [client.requests.submit(request_with((bytes(MIB),), request_id=f"r{n}")) for n in range(4)]
    with pytest.raises(WorkerBusy):
        await tokens_of(first[3])
    assert await asyncio.gather(*map(tokens_of, first[:3])) == [[1, 2, 3]] * 3


async def test_tensors_exceeding_the_message_limit_fail_the_hand_over(net):
    await net.serve(FakeHandler())
    client = await net.connect(RpcConfig(max_frame_bytes=MIB))
    remote = client.requests.submit(request_with((bytes(MIB),)))
    with pytest.raises(HandoverFailed):
        await tokens_of(remote)
    assert (len(client.requests), client.requests.num_unsent_bytes) == (0, 0)


async def test_request_with_missing_tensors_fails_alone(net, raw):
    await net.serve(FakeHandler([1], delay_s=HOUR_S))
    gateway = await raw()
    message, _ = split(request_with((b"abc",), request_id="bad"))
    gateway.send(Payload([2]))
    gateway.write(raw_frame(b"xy"))
    gateway.send(Submit(message, with_payload=True))
    assert (await gateway.next(Failed)).request_id == "bad"
    assert await gateway.next(Released) == Released("bad")
    gateway.send(Submit(engine_request("good")))
    gateway.send(Abort("good"))
    assert await gateway.next(Released) == Released("good")


async def test_payload_of_an_unreadable_request_is_discarded(net, raw):
    await net.serve(FakeHandler([1]))
    gateway = await raw()
    gateway.send(Payload([2]))
    gateway.write(raw_frame(b"xy"))
    body = msgspec.msgpack.encode(["Submit", {"request_id": "bad", "prompt": 5}, True])
    gateway.write(HEADER.pack(len(body)) + body)
    assert await gateway.next(Released) == Released("bad")
    gateway.send(Payload([3]))
    gateway.write(raw_frame(b"abc"))
    message, _ = split(request_with((b"abc",), request_id="good"))
    gateway.send(Submit(message, with_payload=True))
    assert await gateway.next(Released) == Released("good")


@pytest.mark.parametrize(
    "say",
    [
        lambda gateway: gateway.write(raw_frame(b"bytes of nothing")),
        lambda gateway: gateway.send(Payload([1 << 40])),
        lambda gateway: gateway.send(Submit(split(request_with((b"abc",)))[0], with_payload=True)),
    ],
)
async def test_payload_violating_the_protocol_closes_the_connection(net, raw, say):
    server = await net.serve(FakeHandler([1]))
    gateway = await raw()
    say(gateway)
    assert await gateway.is_disconnected()
    await eventually(lambda: server.num_in_flight == 0)


def raw_frame(data):
    buffer = bytearray()
    append_raw_frame(buffer, memoryview(data))
    return bytes(buffer)


def test_embedding_stays_with_its_item_when_tensors_are_sent_apart():
    tensor = TensorDescriptor(TensorSpec("bfloat16", (2, 8)), ArenaRange("a" * 32, 4096, 128, 1), 64)
    items = (
        MediaPayload("image", "h", b"", (), embedding=Embedding("k", tensor)),
        MediaPayload("image", "i", b"", (InlineTensor(TensorSpec("uint8", (3,)), memoryview(b"abc")),)),
    )
    sent = EngineRequest("r", ExpandedPrompt([1], items), b"")
    without, tensors = split(sent)
    decoded = msgspec.msgpack.decode(msgspec.msgpack.encode(without), type=EngineRequest)
    assert join(decoded, tensors) == sent
