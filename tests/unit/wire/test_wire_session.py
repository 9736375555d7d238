"""Requests on a connection, over real sockets."""

import asyncio
import gc
import weakref

import pytest
from rpc_requests import engine_request, raw_frame, tokens_of

from medialane.testing.fake_worker import FakeHandler
from medialane.types.errors import (
    GenerationFailed,
    InvalidFeature,
    NoWorkerReady,
    PromptRejected,
    WorkerBusy,
)
from medialane.types.request import CompletionDelta, OutputDelta
from medialane.wire import Abort, Connection, Failed, Released, RpcConfig, Submit, append_frame
from waiting import eventually, iterations

HOUR_S = 3600.0


async def test_output_streams_to_the_gateway(net):
    await net.serve(FakeHandler([5, 6, 7]))
    client = await net.connect()
    assert await tokens_of(client.requests.submit(engine_request("r"))) == [5, 6, 7]


async def test_output_streams_over_tcp(tcp_net):
    await tcp_net.serve(FakeHandler([5, 6, 7]))
    client = await tcp_net.connect()
    assert await tokens_of(client.requests.submit(engine_request("r"))) == [5, 6, 7]


async def test_thousand_concurrent_requests_complete_and_are_released(net):
    server = await net.serve(FakeHandler([1, 2, 3], delay_s=0.005))
    client = await net.connect()
    asked = []
    for i in range(1000):
        asked.append(asyncio.create_task(tokens_of(client.requests.submit(engine_request(f"r{i}")))))
        if i % 50 == 49:  # in debug mode a task costs a millisecond: the loop is not to be held for all of them
            await asyncio.sleep(0)
    assert await asyncio.gather(*asked) == [[1, 2, 3]] * 1000
    await eventually(lambda: (len(client.requests), server.num_in_flight) == (0, 0))


@pytest.mark.parametrize(
    "shown", [PromptRejected("too long", param="messages"), NoWorkerReady("full", retry_after_s=7)]
)
async def test_medialane_error_reaches_the_gateway_unchanged(net, shown):
    await net.serve(FakeHandler(error=shown, fail_at=1))
    client = await net.connect()
    remote = client.requests.submit(engine_request("r"))
    with pytest.raises(type(shown), match=shown.message) as caught:
        await tokens_of(remote)
    assert (caught.value.param, caught.value.retry_after_s) == (shown.param, shown.retry_after_s)
    await eventually(lambda: len(client.requests) == 0)


async def test_foreign_error_is_logged_and_not_exposed(net, caplog):
    await net.serve(FakeHandler(error=ZeroDivisionError("secret detail")))
    client = await net.connect()
    remote = client.requests.submit(engine_request("r"))
    with pytest.raises(GenerationFailed) as caught:
        await tokens_of(remote)
    assert "secret" not in caught.value.message
    assert "secret detail" in caplog.text
    await eventually(lambda: len(client.requests) == 0)


async def test_failing_request_does_not_affect_others(net):
    await net.serve(FakeHandler([1, 2], delay_s=0.02))
    client = await net.connect()
    good = client.requests.submit(engine_request("good"))
    bad = client.requests.submit(engine_request("bad"))
    bad.abort()
    assert await tokens_of(good) == [1, 2]


async def test_output_ending_unfinished_is_a_failure(net):
    await net.serve(FakeHandler([]))
    remote = (await net.connect()).requests.submit(engine_request("r"))
    with pytest.raises(GenerationFailed, match="before it was finished"):
        await tokens_of(remote)


async def test_step_larger_than_a_message_fails_only_its_request(net):
    class Talkative(FakeHandler):
        async def run(self, request):
            text = "x" * 5000 if request.request_id == "large" else "x"
            yield OutputDelta(request.request_id, [CompletionDelta(0, text, [1])], finished=True)

    await net.serve(Talkative(), RpcConfig(max_frame_bytes=4096))
    client = await net.connect()
    with pytest.raises(GenerationFailed, match="message size limit"):
        await tokens_of(client.requests.submit(engine_request("large")))
    assert await tokens_of(client.requests.submit(engine_request("small"))) == [1]


async def test_abort_cancels_the_generator_and_is_confirmed_by_released(net):
    handler = FakeHandler(range(1000), delay_s=0.005, release_s=0.05)
    await net.serve(handler)
    client = await net.connect()
    remote = client.requests.submit(engine_request("r"))
    await anext(remote)
    remote.abort()
    assert handler.num_active == 1
    await eventually(lambda: len(client.requests) == 0)
    assert (handler.num_active, handler.num_cancelled) == (0, 1)


class Tensors(bytearray):
    """What a request reads."""


class ReadingHandler(FakeHandler):
    """Its requests fail, or are cancelled, while they read tensors."""

    def __init__(self, *, fails):
        super().__init__()
        self.read = []
        self._fails = fails

    async def run(self, request):
        tensors = Tensors(b"pixels")
        self.read.append(weakref.ref(tensors))
        try:
            yield OutputDelta(request.request_id, [CompletionDelta(0, "x", [1])], finished=False)
            if self._fails:
                raise GenerationFailed("x")
            await asyncio.Event().wait()
        finally:
            assert tensors


@pytest.mark.parametrize("end", ["error", "abort", "loss"])
async def test_nothing_that_a_request_has_read_is_kept_when_it_has_ended(net, end):
    """A cancelled task keeps its exception, whose frames have what the request was reading: shared memory that stays
    mapped. An idle worker collects no garbage."""
    handler = ReadingHandler(fails=end == "error")
    server = await net.serve(handler)
    client = await net.connect()
    gc.collect()
    gc.disable()
    try:
        remote = client.requests.submit(engine_request("r"))
        await eventually(lambda: handler.read)
        if end == "abort":
            remote.abort()
        elif end == "loss":
            await client.close()
        await eventually(lambda: server.num_in_flight == 0)
        await iterations(10)
        assert [tensors() for tensors in handler.read] == [None]
    finally:
        gc.enable()


async def test_release_comes_after_the_generator_has_released(net):
    handler = FakeHandler([1], release_s=0.1)
    await net.serve(handler)
    client = await net.connect()
    remote = client.requests.submit(engine_request("r"))
    assert await tokens_of(remote) == [1]
    assert handler.num_active == 1
    await eventually(lambda: len(client.requests) == 0)
    assert handler.num_active == 0


async def test_second_abort_does_not_interrupt_the_release(net, raw):
    handler = FakeHandler([1, 2], delay_s=HOUR_S, release_s=0.1)
    await net.serve(handler)
    gateway = await raw()
    gateway.send(Submit(engine_request("r")))
    await eventually(lambda: handler.num_active == 1)
    gateway.send(Abort("r"))
    await eventually(lambda: handler.num_cancelled == 1)
    gateway.send(Abort("r"))
    gateway.send(Submit(engine_request("later")))
    await eventually(lambda: len(handler.requests) == 2)
    await iterations(3)
    assert handler.num_active == 2, "the second abort cut the release short"
    assert await gateway.next(Released) == Released("r")


async def test_release_is_sent_in_the_same_write_as_the_final_output(net, raw, monkeypatch):
    written = []
    write = Connection._write  # nobody else sees which messages are in one write

    def recorded(connection):
        written.append(bytes(connection._buffer))  # likewise
        write(connection)

    monkeypatch.setattr(Connection, "_write", recorded)
    await net.serve(FakeHandler([1]))
    gateway = await raw()
    gateway.send(Submit(engine_request("r")))
    await gateway.next(Released)
    assert [b"Released" in data for data in written if b"Output" in data] == [True]


async def test_abort_in_the_same_packet_as_its_submit_is_released(net, raw):
    handler = FakeHandler([1], delay_s=HOUR_S)
    await net.serve(handler)
    gateway = await raw()
    buffer = bytearray()
    for message in (Submit(engine_request("r")), Abort("r")):
        append_frame(buffer, message, 4096)
    gateway.write(bytes(buffer))
    assert await gateway.next(Released) == Released("r")
    assert handler.num_active == 0


async def test_lost_gateway_closes_its_generators(net):
    handler = FakeHandler(range(1000), delay_s=0.005)
    server = await net.serve(handler)
    client = await net.connect()
    for i in range(10):
        client.requests.submit(engine_request(f"r{i}"))
    await eventually(lambda: handler.num_active == 10)
    await client.close()
    await eventually(lambda: server.num_in_flight == 0)
    assert (handler.num_active, handler.num_cancelled) == (0, 10)


async def test_oversized_frame_closes_the_connection_and_its_requests(net, raw):
    handler = FakeHandler([1], delay_s=HOUR_S)
    await net.serve(handler, RpcConfig(max_frame_bytes=100_000))
    gateway = await raw()
    gateway.send(Submit(engine_request("r")))
    await eventually(lambda: handler.num_active == 1)
    gateway.write((100_001).to_bytes(4, "big"))
    assert await gateway.is_disconnected()
    await eventually(lambda: handler.num_active == 0)


async def test_unreadable_request_fails_alone(net, raw):
    await net.serve(FakeHandler([1]))
    gateway = await raw()
    gateway.write(raw_frame(["Submit", {"request_id": "bad", "prompt": {"type": "expanded"}, "sampling_params": b""}]))
    failed = await gateway.next(Failed)
    assert (failed.request_id, failed.error.code) == ("bad", InvalidFeature.code)
    assert await gateway.next(Released) == Released("bad")
    gateway.send(Submit(engine_request("good")))
    assert await gateway.next(Released) == Released("good")


async def test_duplicate_request_id_is_rejected_and_the_first_continues(net, raw):
    handler = FakeHandler([1], delay_s=HOUR_S)
    await net.serve(handler)
    gateway, other = await raw(), await raw()
    gateway.send(Submit(engine_request("r")))
    await eventually(lambda: handler.num_active == 1)
    gateway.send(Submit(engine_request("r")))
    assert (await gateway.next(Failed, Released)).error.code == GenerationFailed.code
    other.send(Submit(engine_request("r")))
    assert (await other.next(Failed, Released)).error.code == GenerationFailed.code
    assert await other.next(Failed, Released) == Released("r")
    assert (len(handler.requests), handler.num_active) == (1, 1)
    gateway.send(Abort("r"))
    assert await gateway.next(Failed, Released) == Released("r")


async def test_requests_over_the_limit_are_rejected(net, raw):
    handler = FakeHandler([1], delay_s=HOUR_S)
    await net.serve(handler, RpcConfig(max_in_flight=2))
    gateway = await raw()
    for i in range(3):
        gateway.send(Submit(engine_request(f"r{i}")))
    failed = await gateway.next(Failed)
    assert (failed.request_id, failed.error.code) == ("r2", WorkerBusy.code)
    assert await gateway.next(Released) == Released("r2")


async def test_unread_output_pauses_the_generators(net, raw):
    handler = FakeHandler(range(1_000_000))
    await net.serve(handler, RpcConfig(heartbeat_interval_s=5.0, heartbeat_timeout_s=10.0))
    gateway = await raw()
    gateway.send(Submit(engine_request("r", num_tokens=1000)))
    before = -1
    while before != (before := handler.num_tokens):  # noqa: ASYNC110
        await asyncio.sleep(0.3)  # time: the absence of tokens has no event
    assert 0 < before < 100_000
    assert handler.num_active == 1


async def test_gateway_that_pings_but_does_not_read_is_dropped(net, raw):
    await net.serve(FakeHandler(), RpcConfig(max_write_buffer_bytes=10_000, max_frame_bytes=10_000))
    gateway = await raw()
    with pytest.raises(ConnectionError):
        await gateway.flood(raw_frame(["Ping", 1 << 60]) * 100)


async def test_silent_gateway_is_dropped_with_its_requests(net, raw):
    handler = FakeHandler([1], delay_s=HOUR_S)
    await net.serve(handler, RpcConfig(heartbeat_interval_s=0.05, heartbeat_timeout_s=0.3))
    gateway = await raw()
    gateway.send(Submit(engine_request("r")))
    await eventually(lambda: handler.num_active == 1)
    await eventually(lambda: handler.num_active == 0)
    assert await gateway.is_disconnected()


async def test_load_is_reported_on_change_and_by_heartbeat(net):
    handler = FakeHandler([1], delay_s=HOUR_S)
    await net.serve(handler)
    client = await net.connect()
    client.requests.submit(engine_request("r"))
    await eventually(lambda: sum(load.num_running for load in client.reports.loads) == 1)
    handler.num_active = 5  # a change that no request of this gateway made
    await eventually(lambda: sum(load.num_running for load in client.reports.loads) == 5)
    handler.num_active = 1
