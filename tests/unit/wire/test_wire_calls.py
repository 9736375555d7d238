"""Administrative calls and metrics over a connection."""

import asyncio
import threading

import pytest
from prometheus_client import Counter
from rpc_requests import engine_request, raw_frame, tokens_of

from medialane.testing.fake_worker import FakeHandler
from medialane.types.admin import AddLora, IsSleeping, ResetPrefixCache, Sleep
from medialane.types.errors import GenerationFailed, InvalidRequest, ProtocolViolation, Unavailable, WorkerLost
from medialane.types.stats import MetricChanges
from medialane.wire import (
    AdminDone,
    AdminFailed,
    Administer,
    MetricValues,
    ReadMetrics,
    decode_from_worker,
    decode_to_worker,
)
from waiting import DEADLINE_S, eventually


@pytest.fixture
async def handler(net):
    handler = FakeHandler()
    await net.serve(handler)
    return handler


@pytest.mark.parametrize("result", [None, True, False])
async def test_call_is_executed_by_the_handler_and_returns(net, handler, result):
    handler.admin_result = result
    client = await net.connect()
    assert await client.calls.administer(Sleep(2, "wait"), 5) is result
    assert handler.calls == [Sleep(2, "wait")]


@pytest.mark.parametrize("call", [ResetPrefixCache(True, True), AddLora(b"\x93\0\1\2"), IsSleeping()])
async def test_call_arguments_round_trip(net, handler, call):
    await (await net.connect()).calls.administer(call, 5)
    assert handler.calls == [call]


@pytest.mark.parametrize("error", [InvalidRequest("no such level"), GenerationFailed("it failed")])
async def test_medialane_error_round_trips(net, handler, error):
    handler.admin_result = error
    with pytest.raises(type(error), match=error.message):
        await (await net.connect()).calls.administer(IsSleeping(), 5)


async def test_unexpected_error_fails_only_its_call(net, handler):
    handler.admin_result = ZeroDivisionError("at 0x7f00")
    client = await net.connect()
    with pytest.raises(GenerationFailed) as failed:
        await client.calls.administer(IsSleeping(), 5)
    assert "0x7f00" not in failed.value.message
    assert await tokens_of(client.requests.submit(engine_request("r"))) == [1, 2, 3]


async def test_call_times_out_and_a_late_result_is_ignored(net):
    handler = FakeHandler(delay_s=0.2)
    await net.serve(handler)
    client = await net.connect()
    with pytest.raises(Unavailable, match="no response within"):
        await client.calls.administer(Sleep(), 0.01)
    assert await client.calls.administer(IsSleeping(), 5) is None
    assert handler.calls == [Sleep(), IsSleeping()]
    assert not client.closed.is_set()


async def test_requests_proceed_during_a_slow_call(net):
    handler = FakeHandler()
    done = asyncio.Event()
    handler.administer = lambda _call: done.wait()
    await net.serve(handler)
    client = await net.connect()
    call = asyncio.create_task(client.calls.administer(Sleep(), 10))
    assert await tokens_of(client.requests.submit(engine_request("r"))) == [1, 2, 3]
    assert not call.done()
    done.set()
    assert await call is True


async def test_call_is_cancelled_when_its_gateway_disconnects(net):
    handler = FakeHandler()
    started, cancelled = asyncio.Event(), asyncio.Event()

    async def administer(_call):
        started.set()
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    handler.administer = administer
    await net.serve(handler)
    client = await net.connect()
    call = asyncio.create_task(client.calls.administer(Sleep(), 10))
    await started.wait()
    await client.close()
    with pytest.raises(WorkerLost):
        await call
    async with asyncio.timeout(5):
        await cancelled.wait()
    await net.connect()  # the next session waits for all of the last one
    with pytest.raises(WorkerLost):
        await client.calls.administer(Sleep(), 10)


async def test_calls_in_flight_are_bounded(net, raw):
    handler = FakeHandler(delay_s=60)
    await net.serve(handler)
    gateway = await raw()
    for number in range(1, 101):
        gateway.send(Administer(number, Sleep()))
    refused = await gateway.next(AdminFailed)
    assert refused.error.code == "unavailable"
    assert 0 < len(handler.calls) == refused.call_id - 1


@pytest.mark.parametrize("call", [["Shutdown"], ["collective_rpc", "eval"], ["Sleep", "now"], ["Sleep", 1, "never"]])
async def test_unknown_call_closes_the_connection(call, net, handler, raw):
    with pytest.raises(ProtocolViolation):
        decode_to_worker(memoryview(raw_frame(["Administer", 1, call])[4:]))
    gateway = await raw()
    gateway.write(raw_frame(["Administer", 1, call]))
    assert await gateway.is_disconnected()
    assert handler.calls == []


@pytest.mark.parametrize(
    "answer", [["AdminDone", 1, "yes"], ["AdminDone", 1, 7], ["AdminDone", "1", True], ["MetricValues", None, False]]
)
def test_results_are_typed(answer):
    with pytest.raises(ProtocolViolation):
        decode_from_worker(memoryview(raw_frame(answer)[4:]))


async def test_metrics_are_current_at_every_read(net, handler):
    counter = Counter("vllm:a", "A", registry=handler.registry)
    client = await net.connect()
    for expected in (0, 3):
        assert await client.calls.read_metrics(5)
        assert [v for _, s, v in client.calls.metrics.samples() if s.name == "vllm:a_total"] == [expected]
        counter.inc(3)


async def test_concurrent_reads_share_one_call(net, handler):
    read = handler.metrics()
    num_reads = 0

    def counted():
        nonlocal num_reads
        num_reads += 1
        return read()

    handler.metrics = lambda: counted
    client = await net.connect()
    assert await asyncio.gather(*(client.calls.read_metrics(5) for _ in range(3))) == [True] * 3
    assert num_reads == 1


async def test_every_connection_starts_with_all_metrics(net, handler):
    Counter("vllm:a", "A", registry=handler.registry).inc()
    for gateway in ("g1", "g2"):
        client = await net.connect(gateway_id=gateway)
        assert await client.calls.read_metrics(5)
        assert len(client.calls.metrics) == 2


async def test_unresponsive_worker_keeps_its_last_values(net):
    handler, responds = FakeHandler(), threading.Event()
    responds.set()
    read = handler.metrics()
    handler.metrics = lambda: lambda: (responds.wait(DEADLINE_S), read())[1]
    await net.serve(handler)
    Counter("vllm:a", "A", registry=handler.registry).inc()
    client = await net.connect()
    assert await client.calls.read_metrics(5)
    responds.clear()
    assert not await client.calls.read_metrics(0.01)
    assert len(client.calls.metrics) == 2
    responds.set()
    await client.close()
    assert not await client.calls.read_metrics(5)


async def test_unreadable_registry_gives_a_result_without_changes(net, handler):
    handler.metrics = lambda: lambda: 1 / 0
    client = await net.connect()
    assert await client.calls.read_metrics(5)
    assert len(client.calls.metrics) == 0


async def test_concurrent_metrics_requests_close_the_connection(net, handler, raw):
    gateway = await raw()
    gateway.send(ReadMetrics())
    gateway.send(ReadMetrics())
    assert await gateway.is_disconnected()


@pytest.mark.parametrize("answer", [AdminDone(1, True), MetricValues(MetricChanges())])
async def test_unsolicited_result_closes_the_connection(net, handler, answer):
    client = await net.connect()
    with pytest.raises(ProtocolViolation):
        client.calls.received(answer)


async def test_invalid_metrics_close_the_connection(net, handler):
    handler.metrics = lambda: lambda: [MetricChanges(ids=bytes(4), values=bytes(8))]
    client = await net.connect()
    assert not await client.calls.read_metrics(5)
    await eventually(client.closed.is_set)
