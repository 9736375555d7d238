"""The handshake on blocking sockets, between threads and with asyncio's side."""

import asyncio
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import trustme

from certificates import tls_settings
from medialane.core.errors import AuthenticationFailed
from medialane.wire.authentication import Role
from medialane.wire.blocking import authenticate_socket
from medialane.wire.config import RpcConfig
from medialane.wire.dial import dial
from medialane.wire.security import Security

SECRET = "a secret of the tests"
TIMEOUT_S = 0.3


@pytest.fixture(params=["plain", "TLS"])
def config(request, tmp_path):
    files = tls_settings(tmp_path, trustme.CA()) if request.param == "TLS" else {}
    return RpcConfig(shared_secret=SECRET, handshake_timeout_s=TIMEOUT_S, **files)


def authentication(config):
    return Security.load(config).authentication("pull", Role.STORE, Role.STORE)


@pytest.fixture
def pair():
    with socket.create_server(("127.0.0.1", 0)) as listening:
        one = socket.create_connection(listening.getsockname())
        other, _ = listening.accept()
    yield one, other
    one.close()
    other.close()


@pytest.fixture
def threads():
    with ThreadPoolExecutor(2) as pool:
        yield pool


def test_two_threads_authenticate_each_other(config, pair, threads):
    kinds = authentication(config)
    ends = [
        threads.submit(authenticate_socket, pair[0], kinds, dialled_host="127.0.0.1"),
        threads.submit(authenticate_socket, pair[1], kinds),
    ]
    with ends[0].result() as one, ends[1].result() as other:
        assert one.gettimeout() is None
        one.sendall(b"request")
        assert other.recv(7) == b"request"
        buffer = bytearray(5)
        other.sendall(b"reply")
        assert one.recv_into(buffer) == 5
        assert bytes(buffer) == b"reply"


def test_different_secrets_fail_on_both_sides_and_close_the_sockets(config, pair, threads):
    other = authentication(RpcConfig(**{**as_fields(config), "shared_secret": "another secret of ours"}))
    ends = [
        threads.submit(authenticate_socket, pair[0], authentication(config), dialled_host="127.0.0.1"),
        threads.submit(authenticate_socket, pair[1], other),
    ]
    for end, sock in zip(ends, pair, strict=True):
        with pytest.raises(AuthenticationFailed):
            end.result()
        assert sock.fileno() == -1


def as_fields(config):
    return {name: getattr(config, name) for name in ("tls_cert", "tls_key", "tls_ca", "handshake_timeout_s")}


@pytest.mark.parametrize("dialled_host", [None, "127.0.0.1"])
@pytest.mark.parametrize("sent", [b"", b"\xffMLAUTH"], ids=["silent", "stalled"])
def test_peer_is_cut_at_the_deadline(config, pair, dialled_host, sent):
    pair[1].sendall(sent)
    started = time.monotonic()
    with pytest.raises(AuthenticationFailed):
        authenticate_socket(pair[0], authentication(config), dialled_host=dialled_host)
    assert time.monotonic() - started < 5
    assert pair[0].fileno() == -1


def test_peer_that_sends_a_byte_at_a_time_is_cut_at_the_deadline(config, pair):
    """Each byte would restart a timeout of the socket alone."""
    stop = threading.Event()

    def drip():
        for byte in b"\xffMLAUTH\x01\x03" + bytes(100):
            if stop.wait(TIMEOUT_S / 4):
                return
            try:
                pair[1].send(bytes([byte]))
            except OSError:
                return

    dripping = threading.Thread(target=drip)
    dripping.start()
    started = time.monotonic()
    with pytest.raises(AuthenticationFailed):
        authenticate_socket(pair[0], authentication(config))
    assert time.monotonic() - started < 10 * TIMEOUT_S
    stop.set()
    dripping.join()


async def test_both_adapters_speak_the_same_protocol(config):
    """An asyncio dialler at a listening thread."""
    made = asyncio.get_running_loop().create_future()

    class Waiting(asyncio.Protocol):
        def connection_made(self, transport):
            self.transport = transport

        def data_received(self, data):
            made.set_result(data)

    def accept(listening):
        sock, _ = listening.accept()
        with authenticate_socket(sock, authentication(config)) as found:
            found.sendall(b"at once")
            found.recv(1)

    with socket.create_server(("127.0.0.1", 0)) as listening:
        accepting = asyncio.create_task(asyncio.to_thread(accept, listening))
        protocol = Waiting()
        await dial(f"tcp://127.0.0.1:{listening.getsockname()[1]}", protocol, authentication(config))
        assert await made == b"at once"
        protocol.transport.abort()
        await asyncio.wait([accepting])
