"""The gateway's end, against workers that misbehave."""

import asyncio
import socket
from unittest.mock import Mock

import msgspec
import pytest
from rpc_reports import Reported
from rpc_requests import engine_request, raw_frame, tokens_of

from medialane.gateway.workers import RpcClient
from medialane.testing.fake_worker import FAKE_CARD, FakeHandler
from medialane.types.errors import (
    GenerationFailed,
    HandoverFailed,
    NoWorkerReady,
    ProtocolViolation,
    StartupFailed,
    WorkerBusy,
    WorkerLost,
    to_report,
)
from medialane.types.request import WorkerLoad
from medialane.wire import (
    ArenaMapped,
    Authentication,
    Hello,
    LoadReport,
    Refused,
    Released,
    Role,
    RpcConfig,
    Security,
    Welcome,
    append_frame,
    dial,
)
from waiting import eventually, iterations

HOUR_S = 3600.0
HELLO = Hello(gateway_id="gateway")
QUICK = RpcConfig(connect_timeout_s=0.3, release_timeout_s=0.1, heartbeat_interval_s=0.05, heartbeat_timeout_s=0.3)
WELCOME = Welcome("w", 1, FAKE_CARD)


def frames(*messages):
    buffer = bytearray()
    for message in messages:
        append_frame(buffer, message, 1 << 20)
    return bytes(buffer)


@pytest.fixture
async def scripted_worker(tmp_path):
    """Make a worker that answers the first bytes it gets with `first`, later chunks with `later`, one each."""
    servers, writers = [], []

    async def make(first: bytes, *later: bytes, disconnect: bool = False) -> str:
        async def talk(reader, writer):
            writers.append(writer)
            for answer in (first, *later):
                if not await reader.read(65536):
                    break
                writer.write(answer)
            if disconnect:
                writer.close()

        path = f"{tmp_path}/raw.sock"
        servers.append(await asyncio.start_unix_server(talk, path))
        return f"unix:{path}"

    yield make
    for server in servers:
        server.close()
    for writer in writers:
        writer.close()
    await asyncio.gather(*(writer.wait_closed() for writer in writers), return_exceptions=True)


@pytest.mark.parametrize("address", ["unix:/nowhere/w.sock", "tcp://127.0.0.1:1", "tcp://localhost:1"])
async def test_no_listener_means_no_worker(address):
    with pytest.raises(NoWorkerReady):
        await RpcClient.connect(address, HELLO, QUICK)


async def test_socket_of_a_dead_worker_means_no_worker(tmp_path):
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(f"{tmp_path}/w.sock")
    with pytest.raises(NoWorkerReady):
        await RpcClient.connect(f"unix:{tmp_path}/w.sock", HELLO, QUICK)


@pytest.mark.parametrize("size", [{"block_size": -1}, {"data_parallel_size": 1 << 40}, {"num_kv_blocks": -1}])
async def test_card_with_impossible_sizes_closes_the_connection(scripted_worker, size):
    card = msgspec.structs.replace(FAKE_CARD, **size)
    address = await scripted_worker(frames(Welcome("w", 1, card)))
    with pytest.raises(ProtocolViolation, match="sizes out of range"):
        await RpcClient.connect(address, HELLO, QUICK)


async def test_loss_is_reported_in_the_same_loop_iteration(scripted_worker):
    client = await RpcClient.connect(await scripted_worker(frames(WELCOME)), HELLO, QUICK)
    notifications = []
    Reported(client).leave = lambda _slot: notifications.append(client.closed.is_set())
    client.closed.set = lambda real=client.closed.set: (notifications.append("closing"), real())
    await client.close()
    assert notifications == ["closing", True]


async def test_unknown_host_means_lost_not_dead():
    with pytest.raises(WorkerLost):
        await RpcClient.connect("tcp://no-such-host.invalid:1", HELLO, QUICK)


async def test_malformed_address_is_rejected():
    with pytest.raises(StartupFailed):
        await RpcClient.connect("worker", HELLO, QUICK)


async def test_silent_worker_is_lost_at_the_connect_timeout(scripted_worker):
    with pytest.raises(WorkerLost, match="in time"):
        await RpcClient.connect(await scripted_worker(b""), HELLO, QUICK)


async def test_cancelled_connect_leaves_no_connection(net):
    class Slow(FakeHandler):
        called = asyncio.Event()

        async def register(self, hello):
            self.called.set()
            await asyncio.Event().wait()

    handler = Slow()
    await net.serve(handler)
    connecting = asyncio.create_task(net.connect())
    await handler.called.wait()
    connecting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await connecting


async def test_worker_that_disconnects_immediately_is_lost(scripted_worker):
    with pytest.raises(WorkerLost):
        await RpcClient.connect(await scripted_worker(b"", disconnect=True), HELLO, QUICK)


@pytest.mark.parametrize("noise", [b"HTTP/1.1 400 Bad Request\r\n\r\n", raw_frame(["Hello", 1]), frames(Released("r"))])
async def test_foreign_listener_is_a_protocol_violation(scripted_worker, noise):
    with pytest.raises(ProtocolViolation):
        await RpcClient.connect(await scripted_worker(noise), HELLO, QUICK)


async def test_load_of_unknown_ranks_closes_the_connection(scripted_worker, caplog):
    address = await scripted_worker(frames(WELCOME, LoadReport((WorkerLoad(), WorkerLoad()))))
    client = await RpcClient.connect(address, HELLO, QUICK)
    async with asyncio.timeout(5):
        await client.closed.wait()
    assert "the load of 2 ranks from a worker with 1" in caplog.text


async def test_rejection_is_not_mistaken_for_a_dead_worker(scripted_worker):
    address = await scripted_worker(frames(Refused(to_report(NoWorkerReady("still loading")))))
    with pytest.raises(WorkerLost, match="still loading"):
        await RpcClient.connect(address, HELLO, QUICK)


async def test_handler_rejection_reaches_the_gateway(net):
    await net.serve(FakeHandler(refusal=StartupFailed("another model")))
    with pytest.raises(StartupFailed, match="another model"):
        await net.connect()


async def test_heartbeats_keep_an_idle_connection_alive(net):
    quick = RpcConfig(heartbeat_interval_s=0.05, heartbeat_timeout_s=0.2)
    await net.serve(FakeHandler([1]), quick)
    client = await net.connect(quick)
    await asyncio.sleep(0.6)  # time: three timeouts without a request
    assert await tokens_of(client.requests.submit(engine_request("r"))) == [1]


async def test_silent_worker_is_lost_at_the_heartbeat_timeout(scripted_worker):
    client = await RpcClient.connect(await scripted_worker(frames(WELCOME), *[b""] * 100), HELLO, QUICK)
    remote = client.requests.submit(engine_request("r"))
    started = asyncio.get_running_loop().time()
    with pytest.raises(WorkerLost):
        await tokens_of(remote)
    assert 0.2 < asyncio.get_running_loop().time() - started < 2
    assert len(client.requests) == 0
    await client.closed.wait()


@pytest.mark.parametrize(
    "answer",
    [frames(Released("unknown")), frames(WELCOME), b"\xff\xff\xff\xff", b"\x00\x00\x00\x01\xc1"],
    ids=["unknown id", "second welcome", "oversize", "garbage"],
)
async def test_violation_by_the_worker_closes_the_connection_and_its_requests(scripted_worker, answer):
    client = await RpcClient.connect(await scripted_worker(frames(WELCOME), answer, b"", b""), HELLO, RpcConfig())
    remote = client.requests.submit(engine_request("r"))
    with pytest.raises(WorkerLost):
        await tokens_of(remote)
    assert client.closed.is_set()


async def test_request_is_in_flight_until_the_worker_has_released_it(net):
    handler = FakeHandler([1], release_s=0.05)
    await net.serve(handler)
    client = await net.connect()
    await tokens_of(client.requests.submit(engine_request("r")))
    assert (len(client.requests), handler.num_active) == (1, 1)
    await eventually(lambda: len(client.requests) == 0)
    assert handler.num_active == 0


async def test_request_on_a_lost_connection_fails_at_once(net):
    await net.serve(FakeHandler([1]))
    client = await net.connect()
    await client.close()
    with pytest.raises(WorkerLost):
        await tokens_of(client.requests.submit(engine_request("r")))
    assert len(client.requests) == 0


async def test_request_beyond_max_in_flight_fails_and_the_others_go_on(net):
    await net.serve(FakeHandler([1], delay_s=0.05))
    client = await net.connect(RpcConfig(max_in_flight=2))
    first, second, third = [client.requests.submit(engine_request(f"r{i}")) for i in range(3)]
    with pytest.raises(WorkerBusy):
        await tokens_of(third)
    assert [await tokens_of(first), await tokens_of(second)] == [[1], [1]]
    await eventually(lambda: len(client.requests) == 0)
    assert await tokens_of(client.requests.submit(engine_request("r4"))) == [1]


async def test_request_larger_than_a_message_fails_and_the_others_go_on(net):
    await net.serve(FakeHandler([1], delay_s=0.05))
    client = await net.connect(RpcConfig(max_frame_bytes=2000))
    running = client.requests.submit(engine_request("r"))
    with pytest.raises(HandoverFailed):
        await tokens_of(client.requests.submit(engine_request("large", num_tokens=5000)))
    assert await tokens_of(running) == [1]


async def test_requests_to_a_worker_that_does_not_read_time_out(scripted_worker):
    address = await scripted_worker(frames(WELCOME))
    client = await RpcClient.connect(address, HELLO, RpcConfig(max_write_buffer_bytes=1_000_000))
    remotes = [client.requests.submit(engine_request(f"r{i}", num_tokens=100_000)) for i in range(40)]
    answers = [asyncio.create_task(tokens_of(remote)) for remote in remotes]
    await iterations(3)
    refused = [answer.exception() for answer in answers if answer.done()]
    assert 10 < len(refused) < 40
    assert {(type(error), "overloaded" in error.message) for error in refused} == {(WorkerBusy, True)}
    await client.close()
    await asyncio.gather(*answers, return_exceptions=True)


async def test_duplicate_request_id_is_rejected_before_sending(net):
    handler = FakeHandler([1], delay_s=0.05)
    await net.serve(handler)
    client = await net.connect()
    first = client.requests.submit(engine_request("r"))
    with pytest.raises(GenerationFailed):
        client.requests.submit(engine_request("r"))
    assert await tokens_of(first) == [1]
    assert len(handler.requests) == 1


async def test_slow_consumer_is_aborted_at_its_buffer_limit(net):
    handler = FakeHandler(range(100_000))
    await net.serve(handler)
    client = await net.connect(RpcConfig(max_queued_bytes=10_000))
    slow = client.requests.submit(engine_request("slow"))
    await eventually(lambda: len(client.requests) == 0)
    assert handler.num_cancelled == 1
    with pytest.raises(GenerationFailed, match="too slowly"):
        await tokens_of(slow)


async def test_close_fails_what_is_in_flight_and_is_idempotent(net):
    handler = FakeHandler([1], delay_s=HOUR_S)
    await net.serve(handler)
    client = await net.connect()
    reading = asyncio.create_task(tokens_of(client.requests.submit(engine_request("r"))))
    await eventually(lambda: handler.num_active == 1)
    await client.close()
    await client.close()
    with pytest.raises(WorkerLost):
        await reading
    assert len(client.requests) == 0


async def test_tcp_sends_small_messages_immediately(tcp_net):
    await tcp_net.serve(FakeHandler())
    protocol = Mock(asyncio.Protocol)
    authentication = Authentication(Security.load(tcp_net.config), "rpc", Role.GATEWAY, Role.WORKER)
    await dial(tcp_net.address, protocol, authentication)
    (transport,) = protocol.connection_made.call_args.args
    sock = transport.get_extra_info("socket")
    transport.abort()
    assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) == 1


async def test_outputs_of_finished_requests_outlive_the_connection(net):
    server = await net.serve(FakeHandler([1, 2]))
    client = await net.connect()
    remote = client.requests.submit(engine_request("r"))
    await eventually(lambda: len(client.requests) == 0)
    await server.close()
    await eventually(client.closed.is_set)
    assert await tokens_of(remote) == [1, 2]


async def test_workers_mapped_arena_and_its_changes_are_reported(net):
    handler = FakeHandler()
    handler.map_arena("first")
    await net.serve(handler)
    client = await net.connect()
    await eventually(lambda: client.reports.arena == "first")
    seen = Reported(client).arenas
    for arena in (None, "second"):
        handler.map_arena(arena)
    await eventually(lambda: seen == [None, "second"])


async def test_arena_is_reported_to_every_gateway_until_it_leaves(net):
    handler = FakeHandler()
    await net.serve(handler)
    first, second = await net.connect(gateway_id="a"), await net.connect(gateway_id="b")
    await eventually(lambda: len(handler.arena_listeners) == 2)
    await first.close()
    await eventually(lambda: len(handler.arena_listeners) == 1)
    handler.map_arena("x")
    await eventually(lambda: second.reports.arena == "x")
    assert first.reports.arena is None


async def test_malformed_arena_report_closes_the_connection(scripted_worker):
    client = await RpcClient.connect(await scripted_worker(frames(WELCOME), frames(ArenaMapped(7))), HELLO, RpcConfig())
    with pytest.raises(WorkerLost):
        await tokens_of(client.requests.submit(engine_request("r")))
    assert client.closed.is_set()
    assert client.reports.arena is None
