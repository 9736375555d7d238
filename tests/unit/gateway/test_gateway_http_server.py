"""What a client can do to a TLS server before its handshake is complete, over real sockets."""

import asyncio
import contextlib
import logging
import os
import re
import socket
import ssl

import pytest
import trustme
import uvicorn

from limits import no_free_descriptors
from medialane.gateway import BoundedServer, GatewayConfig, http_bounds
from waiting import eventually

REQUEST = b"GET / HTTP/1.1\r\nhost: a\r\n\r\n"
MAX_OPEN = 6  # of `serving`


@pytest.fixture(scope="module")
def authority():
    return trustme.CA()


@pytest.fixture
def files(authority, tmp_path):
    certificate = authority.issue_cert("localhost")
    certificate.private_key_pem.write_to_path(tmp_path / "key.pem")
    certificate.cert_chain_pems[0].write_to_path(tmp_path / "cert.pem")
    return {"ssl_keyfile": tmp_path / "key.pem", "ssl_certfile": tmp_path / "cert.pem"}


@pytest.fixture
def client_context(authority):
    context = ssl.create_default_context()
    authority.configure_trust(context)
    return context


async def app(_scope, receive, send):
    await receive()
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
    await send({"type": "http.response.body", "body": b"ok"})


@contextlib.asynccontextmanager
async def serving(files, *, header_timeout_s=20.0, max_refusing=2):
    """A server of MAX_OPEN - 2 connections and 2 that it refuses: its port."""
    settings = uvicorn.Config(
        app, ssl_keyfile=files["ssl_keyfile"], ssl_certfile=files["ssl_certfile"], lifespan="off", log_config=None
    )
    bounds = http_bounds(GatewayConfig(max_connections=MAX_OPEN - 2, header_timeout_s=header_timeout_s))
    server = BoundedServer(settings, bounds=bounds, max_refusing=max_refusing)
    with socket.create_server(("127.0.0.1", 0)) as sock:
        port = sock.getsockname()[1]
        task = asyncio.create_task(server.serve(sockets=[sock]))
        try:
            yield port
        finally:
            server.should_exit = True
            async with asyncio.timeout(10):
                await task


@contextlib.asynccontextmanager
async def connections(port, number, *, first=b""):
    """TCP connections that send `first` and nothing more: their readers."""
    pairs = [await asyncio.open_connection("127.0.0.1", port) for _ in range(number)]
    try:
        for _, writer in pairs:
            writer.write(first)
        yield [reader for reader, _ in pairs]
    finally:
        for _, writer in pairs:
            writer.close()


@contextlib.asynccontextmanager
async def tls_connection(port, context):
    reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context, server_hostname="localhost")
    try:
        yield reader, writer
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()


async def status(reader, writer, request=REQUEST):
    writer.write(request)
    async with asyncio.timeout(5):
        head = await reader.readuntil(b"\r\n\r\n")
        await reader.readexactly(int(re.search(rb"content-length: (\d+)", head)[1]))
    return int(head.split()[1])


async def is_closed(reader):
    with contextlib.suppress(ConnectionError):
        async with asyncio.timeout(5):
            return not await reader.read()
    return True


def num_sockets():
    return sum(os.readlink(f"/proc/self/fd/{fd.name}").startswith("socket:") for fd in os.scandir("/proc/self/fd"))


async def until_num_sockets(number):
    await eventually(lambda: num_sockets() <= number)


#: Of a TLS 1.3 ClientHello, the record's header and too few bytes.
BEGUN = b"\x16\x03\x01\x02\x00\x01"


@pytest.mark.parametrize("first", [b"", BEGUN], ids=["never started", "never finished"])
async def test_stalled_handshakes_are_bounded_and_keep_nobody_out(files, client_context, caplog, first):
    async with serving(files) as port, tls_connection(port, client_context) as client:
        assert await status(*client) == 200
        before = num_sockets()
        async with connections(port, 5 * MAX_OPEN, first=first) as stalled:
            assert await is_closed(stalled[0])
            async with tls_connection(port, client_context) as another:
                assert await status(*another) == 200
            assert await status(*client) == 200
            closed = [await is_closed(reader) for reader in stalled[: -MAX_OPEN + 1]]
            assert all(closed)
            assert num_sockets() - before <= len(stalled) + MAX_OPEN
        await until_num_sockets(before)
    assert "is closed: too many connections" in caplog.text


@pytest.mark.parametrize("first", [b"", BEGUN], ids=["never started", "never finished"])
async def test_stalled_handshake_is_closed_at_the_deadline(files, client_context, caplog, first):
    async with serving(files, header_timeout_s=0.3) as port:
        before = num_sockets()
        async with connections(port, 3, first=first) as stalled:
            for reader in stalled:
                assert await is_closed(reader)
        await until_num_sockets(before)
        async with tls_connection(port, client_context) as client:
            assert await status(*client) == 200
    assert "handshake is taking longer than 0.3 seconds" in caplog.text


async def test_failed_handshake_leaves_nothing_behind(files, client_context):
    async with serving(files) as port:
        before = num_sockets()
        async with connections(port, 1, first=REQUEST) as (reader,):
            assert not (await reader.read()).startswith(b"HTTP")
        await until_num_sockets(before)
        async with tls_connection(port, client_context) as client:
            assert await status(*client) == 200


async def test_connections_above_the_limit_get_503_then_are_closed(files, client_context):
    async with serving(files) as port, contextlib.AsyncExitStack() as stack:
        for _ in range(MAX_OPEN - 2):
            client = await stack.enter_async_context(tls_connection(port, client_context))
            assert await status(*client) == 200
        refused = await stack.enter_async_context(tls_connection(port, client_context))
        assert await status(*refused, b"") == 503


async def test_connection_is_closed_if_no_handshake_can_be_aborted(files, client_context, caplog):
    async with serving(files, max_refusing=0) as port, contextlib.AsyncExitStack() as stack:
        for _ in range(MAX_OPEN - 2):
            client = await stack.enter_async_context(tls_connection(port, client_context))
            assert await status(*client) == 200
        with pytest.raises(OSError):  # noqa: PT011 - a reset or an end of file
            await stack.enter_async_context(tls_connection(port, client_context))
        assert await status(*client) == 200
    assert "closed: too many connections" in caplog.text


async def test_pending_handshakes_do_not_delay_the_stop(files):
    before = num_sockets()
    started = asyncio.get_running_loop().time()
    async with serving(files) as port:
        readers = connections(port, 3)
        stalled = await readers.__aenter__()
        await asyncio.sleep(0)
    for reader in stalled:
        assert await is_closed(reader)
    await readers.__aexit__(None, None, None)
    assert asyncio.get_running_loop().time() - started < 5
    await until_num_sockets(before)


async def test_exhausted_file_descriptors_pause_the_accept(files, client_context, caplog):
    async with serving(files) as port:
        with socket.socket() as waiting, no_free_descriptors():
            waiting.setblocking(False)
            waiting.connect_ex(("127.0.0.1", port))
            await eventually(lambda: "no connection can be accepted for" in caplog.text)
        async with tls_connection(port, client_context) as client:
            assert await status(*client) == 200
    assert caplog.records[-1].levelno <= logging.WARNING
