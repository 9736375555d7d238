"""Authentication over real TCP sockets, with and without TLS: peers that fail are cut, without effect on others."""

import asyncio
import contextlib
import datetime as dt
import os
import resource
import socket
import ssl

import msgspec
import pytest
import trustme
from rpc_requests import engine_request, tokens_of

from certificates import tls_settings
from handshakes import GREETING_BYTES, handshake
from limits import no_free_descriptors
from medialane.gateway.workers import RpcClient
from medialane.testing.fake_worker import FakeHandler
from medialane.types.errors import AuthenticationFailed, MedialaneError
from medialane.wire import Hello, RpcConfig, Security, append_frame, listener
from waiting import DEADLINE_S, eventually, retried
from written_lines import written_lines

SECRET = "a secret of the tests"
TIMEOUT_S = 1.0


@pytest.fixture(scope="module")
def ca():
    return trustme.CA()


@pytest.fixture(params=["plain", "TLS"])
def config(request, tmp_path, ca):
    files = tls_settings(tmp_path, ca) if request.param == "TLS" else {}
    return RpcConfig(shared_secret=SECRET, handshake_timeout_s=TIMEOUT_S, **files)


@pytest.fixture
async def served(tcp_net, config):
    """A server at which a gateway has a request in flight; that continues, whatever other peers do."""
    tcp_net.config = config
    tcp_net.handler = FakeHandler([1, 2, 3], delay_s=0.05)
    tcp_net.server = await tcp_net.serve(tcp_net.handler)
    running = (await tcp_net.connect(gateway_id="good")).requests.submit(engine_request("good"))
    yield tcp_net
    assert await tokens_of(running) == [1, 2, 3]
    assert [hello.gateway_id for hello in tcp_net.handler.hellos if hello.gateway_id != "late"] == ["good"]
    await tcp_net.connect(gateway_id="late")


def plain_socket(net):
    host, _, port = net.address.removeprefix("tcp://").rpartition(":")
    return host, int(port)


async def is_cut(reader) -> bool:
    async with asyncio.timeout(DEADLINE_S):
        with contextlib.suppress(ConnectionError):
            while await reader.read(65536):
                pass
    return True


async def opened(net, config):
    """A connection for a hostile peer; with TLS, it has a certificate."""
    tls = Security.load(config).tls
    context = tls.context(is_dialler=True) if tls else None
    return await asyncio.open_connection(*plain_socket(net), ssl=context, server_hostname=None)


def num_files():
    return len(os.listdir("/proc/self/fd"))


def frame(message):
    buffer = bytearray()
    append_frame(buffer, message, 1 << 20)
    return bytes(buffer)


@pytest.mark.parametrize(
    "noise",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        frame(Hello(gateway_id="evil")),
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        (64 << 20).to_bytes(4, "big") + bytes(1000),
        b"\xff\xff\xff\xff" + bytes(1 << 20),
        handshake(SECRET).greeting + bytes(100),
        handshake(SECRET).greeting + frame(Hello(gateway_id="evil")),
    ],
    ids=["http", "hello", "tls", "large frame", "oversize", "proof", "hello after greeting"],
)
async def test_garbage_is_cut_at_once(served, config, noise):
    reader, writer = await opened(served, config)
    writer.write(noise)
    assert await is_cut(reader)
    writer.close()


async def test_peer_is_not_told_why_it_is_cut(served, config):
    reader, writer = await opened(served, config)
    greeting = await reader.readexactly(GREETING_BYTES)
    wrong = handshake("another secret of ours")
    writer.write(wrong.greeting + wrong.receive(greeting))
    with contextlib.suppress(ConnectionError):
        assert await reader.read() == b""
    writer.close()


async def test_replayed_connection_is_refused(served, config):
    """Everything that an authenticated gateway has sent, again."""
    reader, writer = await opened(served, config)
    real = handshake(SECRET, writer)
    proof = real.receive(await reader.readexactly(GREETING_BYTES))
    recording = real.greeting + proof
    writer.write(recording)
    assert real.receive(await reader.readexactly(32)) == b""
    assert real.is_complete
    writer.close()
    reader, again = await opened(served, config)
    again.write(recording + frame(Hello(gateway_id="evil")))
    assert await is_cut(reader)
    again.close()


async def test_slow_peer_is_cut_at_the_deadline(served, config):
    """Data does not extend it."""
    loop = asyncio.get_running_loop()
    started = loop.time()
    reader, writer = await opened(served, config)
    sending = asyncio.create_task(one_byte_at_a_time(writer, handshake(SECRET).greeting))
    assert await is_cut(reader)
    assert loop.time() - started < 5
    sending.cancel()
    await asyncio.wait([sending])
    writer.close()


async def one_byte_at_a_time(writer, data):
    for byte in data:
        with contextlib.suppress(ConnectionError):
            writer.write(bytes([byte]))
        await asyncio.sleep(TIMEOUT_S / 8)  # time: a slow peer


async def test_silent_peer_is_cut_at_the_deadline(served):
    """Also before TLS."""
    reader, writer = await asyncio.open_connection(*plain_socket(served))
    assert await is_cut(reader)
    writer.close()


async def test_a_thousand_half_open_connections_are_bounded(served):
    """Of one address, in any state: other addresses and the running request are not affected."""
    address, most, files = plain_socket(served), 0, num_files()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    half_open = []
    for number in range(1000):
        peer = socket.socket()
        peer.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            peer.connect(address)
        if number % 2:
            with contextlib.suppress(OSError):
                peer.send(b"\x16\x03\x01\x02\x00" if number % 4 == 1 else os.urandom(10))
        await asyncio.sleep(0)
        most = max(most, num_files() - files - len(half_open) - 1)
        if number % 100:
            peer.close()
        else:
            half_open.append(peer)
    assert most <= listener.MAX_PENDING + 4
    await served.connect(gateway_id="late")
    for peer in half_open:
        peer.close()
    await eventually(lambda: num_files() <= files + 4)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 * 1024  # KiB


async def test_above_the_bound_the_oldest_of_the_address_with_most_is_closed(tcp_net, caplog):
    """Connections are accepted in order."""
    await tcp_net.serve(FakeHandler(), RpcConfig(shared_secret=SECRET, handshake_timeout_s=60.0))
    address = plain_socket(tcp_net)
    lone = await asyncio.open_connection(*address, local_addr=("127.0.0.2", 0))
    crowd = [await asyncio.open_connection(*address) for _ in range(listener.MAX_PENDING)]
    assert await is_cut(crowd[0][0])
    for reader, writer in [lone, *crowd[1:]]:
        assert len(await reader.readexactly(GREETING_BYTES)) == GREETING_BYTES
        assert not reader.at_eof()
        writer.close()
    crowd[0][1].close()
    assert "a connection from 127.0.0.1 is closed: too many connections" in caplog.text


async def test_failures_are_logged_once_per_address(served, config, caplog):
    for _ in range(5):
        reader, writer = await opened(served, config)
        writer.write(b"noise")
        assert await is_cut(reader)
        writer.close()
    assert written_lines(caplog.records).count("is closed") == 1
    assert SECRET not in caplog.text


async def test_exhausted_descriptors_pause_accepting(served, caplog):
    with socket.socket() as peer, no_free_descriptors():
        peer.setblocking(False)
        peer.connect_ex(plain_socket(served))
        await eventually(lambda: "no connection can be accepted" in caplog.text)
    await retried(lambda: served.connect(gateway_id="late"), AuthenticationFailed)


async def test_close_ends_handshakes_and_frees_the_port(tcp_net, config):
    server = await tcp_net.serve(FakeHandler(), config)
    files = num_files()
    reader, writer = await asyncio.open_connection(*plain_socket(tcp_net))
    await eventually(lambda: num_files() == files + 2)
    await server.close()
    assert await is_cut(reader)
    writer.close()
    await tcp_net.serve(FakeHandler(), config)


WRONG = [
    ("a wrong secret", RpcConfig(shared_secret="another secret of ours")),
    ("no secret", RpcConfig()),
]


@pytest.mark.parametrize(("_", "other"), WRONG, ids=[name for name, _ in WRONG])
@pytest.mark.parametrize("at", ["gateway", "worker"])
async def test_different_secrets_are_an_error_of_both_sides(tcp_net, caplog, _, other, at):
    right = RpcConfig(shared_secret=SECRET)
    handler = FakeHandler()
    await tcp_net.serve(handler, other if at == "worker" else right)
    with pytest.raises(AuthenticationFailed, match="--rpc-secret-file"):
        await tcp_net.connect(other if at == "gateway" else right)
    assert handler.hellos == []
    await eventually(lambda: "--rpc-secret-file" in caplog.text)


def tls_of(tmp_path, name, ca, **cert):
    return RpcConfig(shared_secret=SECRET, handshake_timeout_s=2.0, **tls_settings(tmp_path / name, ca, **cert))


async def refused(net, worker, gateway) -> str:
    """Return the gateway's error."""
    handler = FakeHandler()
    await net.serve(handler, worker)
    with pytest.raises(MedialaneError) as failed:
        await net.connect(gateway)
    assert handler.hellos == []
    assert isinstance(failed.value, AuthenticationFailed)
    return failed.value.message


@pytest.mark.parametrize("encrypted", ["gateway", "worker"])
async def test_tls_on_one_side_only_is_refused(tcp_net, tmp_path, ca, encrypted, caplog):
    tls, plain = tls_of(tmp_path, "a", ca), RpcConfig(shared_secret=SECRET)
    sides = (plain, tls) if encrypted == "gateway" else (tls, plain)
    assert "tls" in (await refused(tcp_net, *sides)).lower()
    await eventually(lambda: "TLS" in caplog.text)


async def test_certificate_of_another_ca_is_refused(tcp_net, tmp_path, ca):
    other = tls_of(tmp_path, "b", trustme.CA())
    assert "certificate is not accepted" in await refused(tcp_net, tls_of(tmp_path, "a", ca), other)


async def test_gateway_without_the_right_certificate_is_refused(tcp_net, tmp_path, ca, caplog):
    """It trusts the worker's CA, but its own certificate is of another: the worker checks that, too."""
    right, stranger = tls_settings(tmp_path / "a", ca), tls_settings(tmp_path / "b", trustme.CA())
    await tcp_net.serve(FakeHandler(), RpcConfig(shared_secret=SECRET, **right))
    for own in (stranger, None):
        context = ssl.create_default_context(cafile=right["tls_ca"])
        context.check_hostname = False
        if own is not None:
            context.load_cert_chain(own["tls_cert"], own["tls_key"])
        with contextlib.suppress(ssl.SSLError, ConnectionError):
            reader, writer = await asyncio.open_connection(*plain_socket(tcp_net), ssl=context)
            writer.write(handshake(SECRET).greeting)
            assert await reader.read(1) == b""
            writer.close()
    assert "TLS failed" in caplog.text or "certificate is not accepted" in caplog.text


async def test_expired_certificate_is_refused_and_running_connections_stay(tcp_net, tmp_path, ca):
    end = dt.datetime.now(dt.UTC) + dt.timedelta(seconds=2)
    old, gateway = tls_of(tmp_path, "old", ca, not_after=end), tls_of(tmp_path, "a", ca)
    await tcp_net.serve(FakeHandler(), old)  # an expired one does not start
    client = await tcp_net.connect(gateway)
    await asyncio.sleep(max(0.0, (end - dt.datetime.now(dt.UTC)).total_seconds()) + 1)  # time: of a certificate
    with pytest.raises(AuthenticationFailed, match="expired"):
        await tcp_net.connect(gateway)
    assert not client.closed.is_set()


async def test_hostname_is_checked_if_configured(tcp_net, tmp_path, ca):
    other = tls_of(tmp_path, "other", ca, host="worker.example.com")
    gateway = tls_of(tmp_path, "a", ca)
    checking = msgspec.structs.replace(gateway, tls_check_hostname=True)
    server = await tcp_net.serve(FakeHandler(), other)
    with pytest.raises(AuthenticationFailed, match="certificate is not accepted"):
        await tcp_net.connect(checking)
    await tcp_net.connect(gateway)
    await server.close()
    await tcp_net.serve(FakeHandler(), gateway)
    await tcp_net.connect(checking)


async def test_relay_with_another_certificate_of_the_ca_is_refused(tcp_net, tmp_path, ca):
    """A man in the middle with a stolen certificate, but without the secret, cannot pass the proofs on."""
    worker, gateway, thief = (tls_of(tmp_path, name, ca) for name in ("worker", "gateway", "thief"))
    handler = FakeHandler()
    await tcp_net.serve(handler, worker)
    stolen = Security.load(thief).tls

    async def relay(reader, writer):
        there, back = await asyncio.open_connection(*plain_socket(tcp_net), ssl=stolen.context(is_dialler=True))
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(copy(reader, back))
            tasks.create_task(copy(there, writer))

    async with await asyncio.start_server(relay, "127.0.0.1", 0, ssl=stolen.context(is_dialler=False)) as server:
        port = server.sockets[0].getsockname()[1]
        with pytest.raises(AuthenticationFailed):
            await RpcClient.connect(f"tcp://127.0.0.1:{port}", Hello(gateway_id="g"), gateway)
    assert handler.hellos == []


async def copy(reader, writer):
    with contextlib.suppress(ConnectionError):
        while data := await reader.read(65536):
            writer.write(data)
    writer.close()


async def test_dialler_cuts_a_listener_that_is_silent_or_talks_nonsense(config):
    async def talk(reader, writer):
        writer.write(next(texts))
        await is_cut(reader)
        writer.close()

    texts = iter([b"", b"HTTP/1.1 400 Bad Request\r\n\r\n"])
    async with await asyncio.start_server(talk, "127.0.0.1", 0) as server:
        address = f"tcp://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        for _ in range(2):
            with pytest.raises(AuthenticationFailed):
                await RpcClient.connect(address, Hello(gateway_id="g"), config)


async def test_cancelled_connect_leaves_no_connection(config):
    accepted = asyncio.Queue()

    async def wait(reader, writer):
        await accepted.put(None)
        accepted.put_nowait(await is_cut(reader))
        writer.close()

    async with await asyncio.start_server(wait, "127.0.0.1", 0) as server:
        address = f"tcp://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        connecting = asyncio.create_task(RpcClient.connect(address, Hello(gateway_id="g"), config))
        await accepted.get()
        connecting.cancel()
        await asyncio.wait([connecting])
        assert connecting.cancelled()
        assert await accepted.get()
