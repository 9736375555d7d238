"""Workers that connect to a gateway: the first message, refusals, and peers that are not workers."""

import asyncio
import socket
from contextlib import ExitStack

import msgspec
import pytest
from rpc_requests import engine_request, tokens_of

from medialane.gateway.workers import JoinServer
from medialane.testing.fake_worker import FAKE_CARD, FakeHandler
from medialane.types.errors import AlreadyJoined, AuthenticationFailed, NoWorkerReady, StartupFailed, WorkerLost
from medialane.wire import (
    PROTOCOL_VERSION,
    Authentication,
    FrameReader,
    Hello,
    Join,
    Refused,
    Role,
    RpcConfig,
    Security,
    Welcome,
    append_frame,
    decode_to_worker,
    dial,
)
from medialane.worker import RpcServer
from waiting import eventually

CONFIG = RpcConfig(heartbeat_timeout_s=2.0)
SECRET = RpcConfig(shared_secret="0123456789abcdef" * 2)
OTHER_SECRET = RpcConfig(shared_secret="fedcba9876543210" * 2)
JOIN = Join(name="w", worker_id="id", card=FAKE_CARD)


class Gateway:
    """Registers with every worker that joins, or refuses it."""

    def __init__(self, gateway_id="gateway"):
        self.hello = Hello(gateway_id=gateway_id, join_ports=[1, 2])
        self.server = JoinServer(CONFIG, self.serve_worker)
        self.joins = []
        self.clients = []
        self.refusal = None
        self.hangs_up = False

    async def start(self):
        self.address = await self.server.serve("tcp://127.0.0.1:0")
        return self

    async def serve_worker(self, join, client):
        self.joins.append(join)
        if self.hangs_up:
            await client.close()
            return
        if self.refusal is not None:
            raise self.refusal
        await client.register(self.hello)
        self.clients.append(client)
        await client.closed.wait()


@pytest.fixture
async def gateway():
    gateway = await Gateway().start()
    yield gateway
    await gateway.server.close()


@pytest.fixture
async def worker():
    worker = RpcServer(FakeHandler(token_ids=range(3)), CONFIG)
    yield worker
    await worker.close()


async def test_worker_that_joins_serves_requests_of_the_gateway(gateway, worker):
    hellos = []
    joining = asyncio.create_task(worker.join(gateway.address, JOIN, on_hello=hellos.append))
    await eventually(lambda: gateway.clients)
    (client,) = gateway.clients
    assert await tokens_of(client.requests.submit(engine_request("r"))) == [0, 1, 2]
    assert gateway.joins == [JOIN]
    assert [hello.join_ports for hello in hellos] == [[1, 2]]
    assert worker.num_gateways == 1
    await client.close()
    await joining
    assert worker.num_gateways == 0


async def test_worker_serves_gateways_that_it_joins_and_one_that_connects(gateway, worker):
    other = await Gateway("other").start()
    for each in (gateway, other):
        joining = asyncio.create_task(worker.join(each.address, JOIN))
        await eventually(lambda each=each: each.clients)
    assert worker.num_gateways == 2
    await other.server.close()
    await joining
    assert worker.num_gateways == 1
    assert await tokens_of(gateway.clients[0].requests.submit(engine_request("r"))) == [0, 1, 2]


async def test_refusal_of_the_gateway_is_raised_at_the_worker(gateway, worker):
    gateway.refusal = StartupFailed("model is a at the worker and b at the gateway")
    with pytest.raises(StartupFailed, match="model is a at the worker"):
        await worker.join(gateway.address, JOIN)


async def test_refusal_of_the_worker_is_raised_at_both_sides(gateway):
    worker = RpcServer(FakeHandler(refusal=StartupFailed("not this gateway")), CONFIG)
    with pytest.raises(StartupFailed, match="not this gateway"):
        await worker.join(gateway.address, JOIN)
    await worker.close()
    assert not gateway.clients


async def test_second_connection_to_a_gateway_is_refused_while_the_first_is_open(gateway, worker):
    joining = asyncio.create_task(worker.join(gateway.address, JOIN))
    await eventually(lambda: gateway.clients)
    with pytest.raises(AlreadyJoined):
        await worker.join(gateway.address, JOIN)
    assert await tokens_of(gateway.clients[0].requests.submit(engine_request("r"))) == [0, 1, 2]
    await gateway.clients[0].close()
    await joining
    joining = asyncio.create_task(worker.join(gateway.address, JOIN))
    await eventually(lambda: len(gateway.clients) == 2)


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        ({"version": 0}, rf"the worker speaks protocol 0, the gateway {PROTOCOL_VERSION} \(medialane .*same release"),
        ({"name": ""}, "name"),
        ({"name": "a\nb"}, "name"),
        ({"name": "ä"}, "name"),
    ],
)
async def test_join_that_cannot_be_used_is_refused_with_the_reason(gateway, worker, wrong, text):
    with pytest.raises(StartupFailed, match=text):
        await worker.join(gateway.address, msgspec.structs.replace(JOIN, **wrong))
    assert not gateway.joins


async def test_address_without_a_gateway_is_told_from_one_that_is_cut_off(worker):
    server = JoinServer(CONFIG, Gateway().serve_worker)
    address = await server.serve("tcp://127.0.0.1:0")
    await server.close()
    with pytest.raises(NoWorkerReady):
        await worker.join(address, JOIN)

    with ExitStack() as sockets:  # its backlog is full: the kernel drops further connections
        silent = sockets.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
        for _ in range(3):
            waiting = sockets.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(silent.getsockname())
        with pytest.raises(WorkerLost, match="does not respond"):
            await worker.join(f"tcp://127.0.0.1:{silent.getsockname()[1]}", JOIN)


async def test_gateway_that_is_lost_before_it_registers_may_be_tried_again(gateway, worker):
    gateway.hangs_up = True
    with pytest.raises(WorkerLost):
        await worker.join(gateway.address, JOIN)


class Peer(asyncio.Protocol):
    """An authenticated peer that sends what it likes."""

    def __init__(self):
        self.closed = asyncio.Event()
        self.received = b""

    @classmethod
    async def connect(cls, address, config=CONFIG):
        peer = cls()
        await dial(address, peer, Authentication(Security.load(config), "rpc", Role.WORKER, Role.GATEWAY))
        return peer

    def connection_made(self, transport):
        self._transport = transport

    def data_received(self, data):
        self.received += data

    def connection_lost(self, error):
        self.closed.set()

    def send(self, data):
        self._transport.write(data)

    def close(self):
        self._transport.abort()

    async def is_disconnected(self):
        async with asyncio.timeout(2.0):
            await self.closed.wait()
        return True


def frame(message):
    buffer = bytearray()
    append_frame(buffer, message, 1 << 20)
    return bytes(buffer)


@pytest.mark.parametrize(
    "sent", [b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 100, b"\0\0\0\1\xc0", b"\0\1\0\1", frame(Welcome("id", 1, FAKE_CARD))]
)
async def test_peer_that_does_not_join_is_disconnected(gateway, sent):
    peer = await Peer.connect(gateway.address)
    peer.send(sent)
    assert await peer.is_disconnected()
    assert not gateway.joins


async def test_worker_of_a_release_with_another_join_is_refused_by_its_number(gateway):
    peer = await Peer.connect(gateway.address)
    peer.send(frame(["Join", 99, {"name": "w"}, "new"]))
    assert await peer.is_disconnected()
    frames = FrameReader(1 << 20)
    frames.receive(peer.received)
    assert "the worker speaks protocol 99" in decode_to_worker(frames.next_frame()).error.message
    assert not gateway.joins


async def test_second_join_ends_the_connection(gateway):
    peer = await Peer.connect(gateway.address)
    peer.send(frame(JOIN) + frame(JOIN))
    assert await peer.is_disconnected()


async def test_silent_peer_is_disconnected_after_the_timeout():
    config = RpcConfig(heartbeat_interval_s=0.05, heartbeat_timeout_s=0.1)
    server = JoinServer(config, Gateway().serve_worker)
    peer = await Peer.connect(await server.serve("tcp://127.0.0.1:0"))
    assert await peer.is_disconnected()
    await server.close()


async def test_number_of_silent_connections_is_bounded(gateway):
    peers = [await Peer.connect(gateway.address) for _ in range(100)]
    assert await peers[0].is_disconnected(), "the oldest is closed"
    assert not peers[-1].closed.is_set()
    for peer in peers:
        peer.close()


async def test_worker_without_the_secret_cannot_join_and_vice_versa(gateway):
    for handler_config, gateway_config in ((SECRET, CONFIG), (CONFIG, SECRET), (SECRET, OTHER_SECRET)):
        theirs = Gateway()
        theirs.server = JoinServer(gateway_config, theirs.serve_worker)
        await theirs.start()
        worker = RpcServer(FakeHandler(), handler_config)
        with pytest.raises(AuthenticationFailed):
            await worker.join(theirs.address, JOIN)
        assert not theirs.joins
        await worker.close()
        await theirs.server.close()


async def test_worker_with_the_secret_joins():
    gateway = Gateway()
    gateway.server = JoinServer(SECRET, gateway.serve_worker)
    await gateway.start()
    worker = RpcServer(FakeHandler(), SECRET)
    joining = asyncio.create_task(worker.join(gateway.address, JOIN))
    await eventually(lambda: gateway.clients)
    await gateway.server.close()
    await joining
    await worker.close()


async def test_address_beyond_loopback_needs_a_secret():
    with pytest.raises(StartupFailed, match="secret"):
        await JoinServer(CONFIG, Gateway().serve_worker).serve("tcp://0.0.0.0:0")
    worker = RpcServer(FakeHandler(), CONFIG)
    with pytest.raises(StartupFailed, match="secret"):
        await worker.join("tcp://192.0.2.1:7100", JOIN)


async def test_closed_server_disconnects_its_workers(gateway, worker):
    joining = asyncio.create_task(worker.join(gateway.address, JOIN))
    await eventually(lambda: gateway.clients)
    await gateway.server.close()
    await joining


async def test_bug_at_one_worker_disconnects_it_alone(gateway, worker, caplog):
    gateway.refusal = RuntimeError("bug")
    with pytest.raises(WorkerLost):
        await worker.join(gateway.address, JOIN)
    assert "bug" in caplog.text
    gateway.refusal = None
    joining = asyncio.create_task(worker.join(gateway.address, JOIN))
    await eventually(lambda: gateway.clients)
    await gateway.server.close()
    await joining


async def test_worker_that_listens_does_not_accept_a_refusal(net, raw):
    await net.serve(FakeHandler())
    peer = await raw(hello=False)
    peer.send(Refused(error={"code": "worker_lost", "message": "x"}))
    assert await peer.is_disconnected()
