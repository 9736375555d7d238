"""Registration, reconnection and shutdown, over real sockets."""

import asyncio
import os

import pytest
from rpc_requests import engine_request, raw_frame, tokens_of

from medialane import __version__
from medialane.testing.fake_worker import FakeHandler
from medialane.types.errors import (
    GenerationFailed,
    NoWorkerReady,
    StartupFailed,
    WorkerLost,
)
from medialane.wire import PROTOCOL_VERSION, Hello, Refused, RpcConfig, Welcome
from waiting import DEADLINE_S, eventually

HOUR_S = 3600.0


async def test_worker_sees_connecting_gateways(net):
    handler = FakeHandler()
    await net.serve(handler)
    client = await net.connect(processor={"dtype": "float32"})
    assert handler.hellos == [Hello(gateway_id="gateway", processor={"dtype": "float32"})]
    assert client.welcome.pid == os.getpid()


async def test_reconnecting_gateway_is_registered_after_its_requests_are_released(net):
    handler = FakeHandler([1], delay_s=HOUR_S, release_s=0.2)
    await net.serve(handler)
    first = await net.connect()
    first.requests.submit(engine_request("r"))
    await eventually(lambda: handler.num_active == 1)
    await net.connect()
    assert handler.num_active == 0
    assert first.closed.is_set()


async def test_other_gateway_is_registered_immediately(net):
    handler = FakeHandler([1], delay_s=HOUR_S)
    await net.serve(handler)
    first = await net.connect()
    first.requests.submit(engine_request("r"))
    await eventually(lambda: handler.num_active == 1)
    await net.connect(gateway_id="other")
    assert handler.num_active == 1
    assert not first.closed.is_set()


async def test_reconnection_is_rejected_while_requests_are_unreleased(net):
    handler = FakeHandler([1], delay_s=HOUR_S, release_s=0.6)
    await net.serve(handler, RpcConfig(release_timeout_s=0.1))
    (await net.connect()).requests.submit(engine_request("r"))
    await eventually(lambda: handler.num_active == 1)
    with pytest.raises(WorkerLost, match="have not been released"):
        await net.connect()
    assert len(handler.hellos) == 1
    await eventually(lambda: handler.num_active == 0)
    await net.connect()


async def test_other_protocol_version_is_rejected(net):
    await net.serve(FakeHandler())
    with pytest.raises(StartupFailed) as refused:
        await net.connect(version=99)
    assert refused.value.message == (
        f"the gateway speaks protocol 99, the worker {PROTOCOL_VERSION} (medialane {__version__}):"
        " install the same release on both"
    )


@pytest.mark.parametrize("rest", [[], [None, 7], [{"gateway": "g"}, [], [], "new"]])
async def test_gateway_of_a_release_with_another_hello_is_refused_by_its_number(net, raw, rest):
    """Whatever the rest of the message is: its beginning stays (docs/reference/stability.md)."""
    await net.serve(FakeHandler())
    gateway = await raw(hello=False)
    gateway.write(raw_frame(["Hello", 99, *rest]))
    refused = await gateway.next(Refused)
    assert "the gateway speaks protocol 99" in refused.error.message
    assert await gateway.is_disconnected()


async def test_handler_failure_at_registration_gives_a_generic_error(net, caplog):
    class Broken(FakeHandler):
        async def register(self, hello):
            raise ZeroDivisionError("secret detail")

    await net.serve(Broken())
    with pytest.raises(GenerationFailed) as caught:
        await net.connect()
    assert "secret" not in caught.value.message
    assert "secret detail" in caplog.text


async def test_registration_is_cancelled_when_its_gateway_disconnects(net):
    cancelled = asyncio.Event()

    class Slow(FakeHandler):
        async def register(self, hello):
            try:
                await asyncio.Event().wait()
            finally:
                cancelled.set()

    await net.serve(Slow())
    with pytest.raises(WorkerLost, match="in time"):
        await net.connect(RpcConfig(connect_timeout_s=0.1, release_timeout_s=0.05))
    async with asyncio.timeout(DEADLINE_S):
        await cancelled.wait()


@pytest.mark.parametrize(
    "noise",
    [
        b"GET / HTTP/1.1\r\nHost: worker\r\n\r\n",
        b"\x00\x00\x00\x03\xc1\xc1\xc1",
        raw_frame(["Abort", "r"]),
        raw_frame(["Hello", "one", "two"]),
        (1 << 17).to_bytes(4, "big"),
        b"\xff\xff\xff\xff",
    ],
    ids=["http", "msgpack", "order", "hello", "large", "huge"],
)
async def test_unregistered_peer_is_disconnected_without_affecting_others(net, raw, noise):
    await net.serve(FakeHandler([1, 2], delay_s=0.05))
    running = (await net.connect()).requests.submit(engine_request("r"))
    other = await raw(hello=False)
    other.write(noise)
    assert await other.is_disconnected()
    assert await tokens_of(running) == [1, 2]


async def test_silent_unregistered_peer_is_disconnected(net, raw):
    await net.serve(FakeHandler(), RpcConfig(heartbeat_interval_s=0.05, heartbeat_timeout_s=0.2))
    assert await (await raw(hello=False)).is_disconnected()


async def test_connections_over_the_limit_are_rejected(net):
    await net.serve(FakeHandler(), RpcConfig(max_connections=1))
    first = await net.connect(gateway_id="a")
    with pytest.raises(WorkerLost):
        await net.connect(gateway_id="b")
    assert not first.closed.is_set()


async def test_unregistered_connections_do_not_exclude_gateways(net, raw):
    await net.serve(FakeHandler(), RpcConfig(max_connections=2))
    others = [await raw(hello=False) for _ in range(4)]
    for name in ("a", "b"):
        await net.connect(gateway_id=name)
    with pytest.raises(WorkerLost, match="limit of gateways"):
        await net.connect(gateway_id="c")
    assert await net.connect(gateway_id="b")
    assert len(others) == 4


async def test_too_many_unregistered_connections_close_the_oldest(net, raw):
    await net.serve(FakeHandler())
    oldest, *_, newest = [await raw(hello=False) for _ in range(100)]
    assert await oldest.is_disconnected()
    await net.connect()
    newest.send(Hello(gateway_id="late"))
    assert await newest.next(Welcome)


async def test_server_keeps_listening_while_a_request_is_unreleased(net, caplog):
    handler = FakeHandler([1], delay_s=HOUR_S, release_s=0.6)
    server = await net.serve(handler, RpcConfig(release_timeout_s=0.1))
    client = await net.connect()
    client.requests.submit(engine_request("r"))
    await eventually(lambda: handler.num_active == 1)
    await server.stop()
    assert "1 requests have not been released" in caplog.text
    with pytest.raises(WorkerLost):
        await net.connect(gateway_id="late")
    assert (handler.num_active, handler.num_cancelled, client.closed.is_set()) == (1, 1, False)
    await server.close()
    with pytest.raises(NoWorkerReady):
        await net.connect(gateway_id="late")


async def test_close_fails_and_releases_requests_in_flight(net):
    handler = FakeHandler([1], delay_s=HOUR_S, release_s=0.05)
    server = await net.serve(handler)
    client = await net.connect()
    remote = client.requests.submit(engine_request("r"))
    await eventually(lambda: handler.num_active == 1)
    await server.close()
    with pytest.raises(WorkerLost, match="shutting down"):
        await tokens_of(remote)
    assert len(client.requests) == 0
    assert client.closed.is_set()
    assert handler.num_active == 0


async def test_listener_stays_until_everything_is_released(net):
    handler = FakeHandler([1], delay_s=HOUR_S, release_s=0.2)
    server = await net.serve(handler)
    (await net.connect()).requests.submit(engine_request("r"))
    await eventually(lambda: handler.num_active == 1)
    closing = asyncio.create_task(server.close())
    await eventually(lambda: handler.num_cancelled == 1)
    with pytest.raises(WorkerLost):
        await net.connect(gateway_id="late")
    assert handler.num_active == 1
    await closing
    with pytest.raises(NoWorkerReady):
        await net.connect(gateway_id="late")


async def test_close_returns_despite_an_unreleased_request(net, caplog):
    handler = FakeHandler([1], delay_s=HOUR_S, release_s=HOUR_S)
    server = await net.serve(handler, RpcConfig(release_timeout_s=0.1))
    (await net.connect()).requests.submit(engine_request("r"))
    await eventually(lambda: handler.num_active == 1)
    async with asyncio.timeout(5):
        await server.close()
    assert "1 requests have not been released" in caplog.text
    assert handler.num_active == 0


async def test_server_serves_once(net):
    server = await net.serve(FakeHandler())
    with pytest.raises(StartupFailed, match="once"):
        await server.serve(net.address)
