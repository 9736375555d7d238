"""What a client can do to the server before its request reaches the app, over real sockets."""

import asyncio
import contextlib
import json
import resource
import subprocess
import sys

import pytest
import uvicorn
from prometheus_client import CollectorRegistry

from intakes import Intake
from medialane.gateway import BoundedServer, GatewayConfig, ScopeMiddleware, http_bounds
from medialane.gateway.http import MAX_TARGET_BYTES
from medialane.gateway.http import server as module
from medialane.observability import Metrics
from waiting import eventually

REQUEST = b"GET / HTTP/1.1\r\nhost: a\r\n\r\n"


class App:
    """Reads a body whole and answers with its length; `gate` holds answers back."""

    def __init__(self):
        self.num_calls = 0
        self.called, self.gate = asyncio.Event(), asyncio.Event()
        self.gate.set()

    async def __call__(self, scope, receive, send):
        self.num_calls += 1
        self.called.set()
        num_bytes, more = 0, scope["path"] != "/unread"
        while more:
            message = await receive()
            num_bytes += len(message.get("body", b""))
            more = message.get("more_body", False)
        await self.gate.wait()
        body = str(num_bytes).encode()
        headers = [(b"content-length", str(len(body)).encode())]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})


@contextlib.asynccontextmanager
async def serving(app=None, *, max_headers=module.MAX_HEADERS, **limits):
    """A server with these bounds: (its port, its app)."""
    config = GatewayConfig(**limits)
    app = app or App()
    intake = Intake(app, config)
    settings = uvicorn.Config(
        ScopeMiddleware(intake, Metrics(CollectorRegistry())),
        port=0,
        lifespan="off",
        log_config=None,
        timeout_graceful_shutdown=1,
    )
    server = BoundedServer(settings, bounds=http_bounds(config), max_headers=max_headers)
    task = asyncio.create_task(server.serve())
    app.server = server
    try:
        await eventually(lambda: server.started)
        yield server.servers[0].sockets[0].getsockname()[1], app
    finally:
        app.gate.set()
        server.should_exit = True
        await task
        intake.close()


@contextlib.asynccontextmanager
async def connection(port):
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        yield reader, writer
    finally:
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()


async def status_and_body(reader):
    """Of the next answer."""
    head = await reader.readuntil(b"\r\n\r\n")
    headers = dict(line.split(b": ", 1) for line in head.split(b"\r\n")[1:] if line)
    return int(head.split(b" ")[1]), await reader.readexactly(int(headers[b"content-length"])), headers


async def is_closed(reader):
    """Whether the server closes the connection without further data."""
    try:
        async with asyncio.timeout(5):
            return not await reader.read()
    except ConnectionError:
        return True


async def send_until_refused(writer, piece, total):
    """As much of `total` bytes as the server takes."""
    sent = 0
    with contextlib.suppress(ConnectionError):
        while sent < total and not writer.is_closing():
            writer.write(piece)
            await writer.drain()
            sent += len(piece)
    return sent


async def test_request_is_forwarded():
    async with serving() as (port, _), connection(port) as (reader, writer):
        for _ in range(3):
            writer.write(b"POST / HTTP/1.1\r\nhost: a\r\ncontent-length: 7\r\n\r\n[1,2,3]")
            assert (await status_and_body(reader))[:2] == (200, b"7")


@pytest.mark.parametrize(
    ("start", "piece"),
    [
        (b"GET / HTTP/1.1\r\nx: ", b"a" * 1000),
        (b"GET / HTTP/1.1\r\n", b"x: a\r\n" * 100),
        (b"GET / HTTP/1.1\r\n", b"x" * 1000),
        (b"GET /", b"a" * 1000),
        (b"GET / HTTP/1.1\r\nhost: a\r\n", b"cookie: " + b"c" * 1000 + b"\r\n"),
    ],
    ids=["a value", "lines", "a name", "a path", "long lines"],
)
async def test_endless_header_is_rejected(start, piece):
    async with serving(max_header_bytes=20_000) as (port, app), connection(port) as (reader, writer):
        writer.write(start)
        sending = asyncio.create_task(send_until_refused(writer, piece, 50_000_000))
        status, body, headers = await status_and_body(reader)
        assert (status, json.loads(body)["error"]["code"]) == (431, "header_too_large")
        assert headers[b"connection"] == b"close"
        assert await sending < 50_000_000
        assert app.num_calls == 0


@pytest.mark.parametrize(("length", "status"), [(MAX_TARGET_BYTES, 200), (MAX_TARGET_BYTES + 1, 414)])
@pytest.mark.parametrize("start", [b"/", b"/?"])
async def test_path_and_query_are_bounded(start, length, status):
    async with serving() as (port, _), connection(port) as (reader, writer):
        writer.write(b"GET " + start.ljust(length, b"a") + b" HTTP/1.1\r\nhost: a\r\n\r\n")
        assert (await status_and_body(reader))[0] == status


@pytest.mark.parametrize(("num_headers", "status"), [(300, 200), (301, 431)])
async def test_header_count_limit_follows_the_setting(num_headers, status):
    async with serving(max_headers=300) as (port, _), connection(port) as (reader, writer):
        writer.write(b"GET / HTTP/1.1\r\n" + b"x: a\r\n" * num_headers + b"\r\n")
        assert (await status_and_body(reader))[0] == status


class WebSocketApp(App):
    """Accepts WebSockets and keeps them open."""

    async def __call__(self, scope, receive, send):
        await send({"type": "websocket.accept"})
        while (await receive())["type"] != "websocket.disconnect":
            pass


async def test_open_websockets_count_as_connections():
    handshake = b"\r\n".join(
        [
            b"GET / HTTP/1.1",
            b"host: a",
            b"connection: upgrade",
            b"upgrade: websocket",
            b"sec-websocket-version: 13",
            b"sec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==",
            b"\r\n",
        ]
    )
    async with serving(WebSocketApp(), max_connections=2) as (port, _), contextlib.AsyncExitStack() as held:
        for _ in range(2):
            reader, writer = await held.enter_async_context(connection(port))
            writer.write(handshake)
            assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 101 ")
        reader, _ = await held.enter_async_context(connection(port))
        status, body, _ = await status_and_body(reader)
        assert (status, json.loads(body)["error"]["code"]) == (503, "too_many_connections")


async def test_header_within_the_limit_passes_with_any_body_length():
    async with serving(max_header_bytes=2000) as (port, _), connection(port) as (reader, writer):
        body = b" " * 3_000_000
        writer.write(b"POST / HTTP/1.1\r\nx: " + b"a" * 1900 + b"\r\ncontent-length: %d\r\n\r\n" % len(body) + body)
        assert (await status_and_body(reader))[:2] == (200, b"3000000")


@pytest.mark.parametrize("endless", [b"0\r\nx: ", b"1;"], ids=["trailer", "chunk extension"])
async def test_endless_chunk_framing_closes_the_connection(endless):
    async with serving(max_header_bytes=20_000) as (port, _), connection(port) as (reader, writer):
        writer.write(b"POST / HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n1\r\na\r\n" + endless)
        sending = asyncio.create_task(send_until_refused(writer, b"a" * 10_000, 1 << 40))
        assert await is_closed(reader)
        async with asyncio.timeout(5):
            await sending


async def test_one_byte_chunks_close_the_connection():
    """One read of 256 KiB holds 40,000 of them."""
    async with serving() as (port, _), connection(port) as (reader, writer):
        writer.write(b"POST / HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n")
        sending = asyncio.create_task(send_until_refused(writer, b"1\r\na\r\n" * 40_000, 20_000_000))
        assert await is_closed(reader)
        assert await sending < 20_000_000


@pytest.mark.parametrize("size", [1000, 100_000])
async def test_chunked_body_passes(size):
    async with serving() as (port, _), connection(port) as (reader, writer):
        writer.write(b"POST / HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n")
        writer.write((b"%x\r\n" % size + b" " * size + b"\r\n") * (1_000_000 // size) + b"0\r\n\r\n")
        assert (await status_and_body(reader))[:2] == (200, b"1000000")


async def test_slow_header_gets_408():
    async with serving(header_timeout_s=0.2) as (port, app), connection(port) as (reader, writer):
        writer.write(b"GET / HTTP/1.1\r\nx")
        status, body, _ = await status_and_body(reader)
        assert (status, json.loads(body)["error"]["code"]) == (408, "request_timeout")
        assert await is_closed(reader)
        assert app.num_calls == 0


async def test_unused_connection_is_closed_without_a_response():
    async with serving(header_timeout_s=0.1) as (port, _), connection(port) as (reader, _):
        assert await is_closed(reader)


async def test_pipelined_body_has_the_body_timeout():
    async with serving(header_timeout_s=0.2) as (port, _), connection(port) as (reader, writer):
        writer.write(REQUEST + b"POST / HTTP/1.1\r\nhost: a\r\ncontent-length: 2\r\n\r\n[")
        assert (await status_and_body(reader))[0] == 200
        await asyncio.sleep(0.5)  # time: more than the header timeout
        writer.write(b"]")
        assert (await status_and_body(reader))[:2] == (200, b"2")


async def test_second_header_of_a_connection_has_a_timeout():
    async with serving(header_timeout_s=0.2) as (port, _), connection(port) as (reader, writer):
        writer.write(REQUEST)
        assert (await status_and_body(reader))[0] == 200
        writer.write(b"GET / HTTP/1.1\r\nx")
        assert (await status_and_body(reader))[0] == 408


async def test_response_may_take_longer_than_the_header_timeout():
    async with serving(header_timeout_s=0.1) as (port, app), connection(port) as (reader, writer):
        app.gate.clear()
        writer.write(REQUEST)
        await asyncio.sleep(0.3)  # time: more than the header timeout
        app.gate.set()
        assert (await status_and_body(reader))[0] == 200


class EndlessApp(App):
    """Sends until its client is gone."""

    def __init__(self):
        super().__init__()
        self.ended = asyncio.Event()

    async def __call__(self, scope, receive, send):
        await receive()
        gone = asyncio.create_task(receive())
        await send({"type": "http.response.start", "status": 200, "headers": []})
        while not gone.done():
            await send({"type": "http.response.body", "body": bytes(1 << 18), "more_body": True})
            await asyncio.sleep(0)  # a write to a reset connection waits for nothing, and is told by the event loop
        self.ended.set()


async def test_client_that_reads_nothing_is_disconnected():
    async with serving(EndlessApp(), body_timeout_s=0.3) as (port, app), connection(port) as (_, writer):
        writer.write(REQUEST)
        async with asyncio.timeout(5):
            await app.ended.wait()
        assert not app.server.server_state.connections


async def test_client_that_reads_on_is_not_disconnected():
    async with serving(EndlessApp(), body_timeout_s=0.8) as (port, app), connection(port) as (reader, writer):
        writer.write(REQUEST)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(2):
                while await reader.read(1 << 20):
                    pass
        assert not app.ended.is_set()


async def test_remaining_body_is_not_read_forever():
    async with serving(header_timeout_s=0.3) as (port, _), connection(port) as (reader, writer):
        writer.write(b"GET /unread HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n")
        assert (await status_and_body(reader))[0] == 200
        sending = asyncio.create_task(send_until_refused(writer, b"2710\r\n" + b"a" * 10_000 + b"\r\n", 1 << 40))
        assert await is_closed(reader)
        async with asyncio.timeout(5):
            await sending


@pytest.mark.parametrize("limits", [{"min_body_rate_grace_s": 0.2}, {"body_timeout_s": 0.2}])
async def test_slow_body_gets_408(limits):
    async with serving(**limits) as (port, app), connection(port) as (reader, writer):
        writer.write(b"POST / HTTP/1.1\r\nhost: a\r\ncontent-length: 1000\r\n\r\n{")
        status, body, _ = await status_and_body(reader)
        assert (status, json.loads(body)["error"]["code"]) == (408, "request_timeout")
        assert app.num_calls == 0


async def test_connections_are_bounded():
    async with serving(max_connections=3) as (port, _), contextlib.AsyncExitStack() as stack:
        idle = [await stack.enter_async_context(connection(port)) for _ in range(3)]
        for reader, writer in idle:
            writer.write(REQUEST)
            assert (await status_and_body(reader))[0] == 200
        async with connection(port) as (reader, writer):
            status, body, headers = await status_and_body(reader)
            assert (status, json.loads(body)["error"]["code"]) == (503, "too_many_connections")
            assert headers[b"retry-after"] == b"1"
        idle[0][1].close()
        await idle[0][1].wait_closed()
        async with connection(port) as (reader, writer):
            writer.write(REQUEST)
            assert (await status_and_body(reader))[0] == 200


async def test_pipelined_requests_are_bounded():
    async with serving() as (port, app), connection(port) as (reader, writer):
        app.gate.clear()
        writer.write(REQUEST * 3000)
        assert await is_closed(reader)
        assert app.num_calls <= 1


async def test_bodies_share_one_budget():
    async with (
        serving(max_bodies_bytes=1_000_000) as (port, app),
        connection(port) as (first, to_first),
        connection(port) as (second, to_second),
    ):
        app.gate.clear()
        head = b"POST / HTTP/1.1\r\nhost: a\r\ncontent-length: 800000\r\n\r\n"
        to_first.write(head + b" " * 800_000)
        async with asyncio.timeout(5):
            await app.called.wait()
        to_second.write(head + b" " * 800_000)
        status, body, headers = await status_and_body(second)
        assert (status, json.loads(body)["error"]["code"]) == (503, "body_memory_exhausted")
        assert headers[b"retry-after"] == b"1"
        app.gate.set()
        assert (await status_and_body(first))[0] == 200
        to_second.write(head + b" " * 800_000)
        assert (await status_and_body(second))[0] == 200


BOUNDS = """
import resource, sys
from medialane.gateway import GatewayConfig, http_bounds
resource.setrlimit(resource.RLIMIT_NOFILE, (1024, int(sys.argv[1])))
print(http_bounds(GatewayConfig(max_connections=4096)).max_connections, resource.getrlimit(resource.RLIMIT_NOFILE))
"""


def bounds_of_a_process(hard_limit):
    """The most connections in a process that may open 1024 files and permit itself `hard_limit`; its limits then, and
    what it has logged. A hard limit cannot be raised again."""
    command = [sys.executable, "-c", BOUNDS, str(hard_limit)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    return done.stdout.strip(), done.stderr


def test_open_file_limit_bounds_connections_and_is_logged():
    bounds, logged = bounds_of_a_process(1024)
    assert bounds == "512 (1024, 1024)"
    assert "the limit of open files (1024) allows 512 connections" in logged


def test_open_file_limit_is_raised_if_permitted():
    _, hard_limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard_limit < 5000:
        pytest.skip("the tests may not open as many files")
    assert bounds_of_a_process(5000)[0] == "4096 (4608, 5000)"


async def test_hitting_a_limit_is_logged(caplog):
    async with serving(max_connections=1) as (port, _), connection(port):
        for _ in range(5):
            async with connection(port) as (reader, _):
                assert (await status_and_body(reader))[0] == 503
    assert "too many connections" in caplog.text


async def stopped_listening(app):
    """Have the server stop, and wait until it takes no new connections."""
    app.server.should_exit = True
    await eventually(lambda: not app.server.servers[0].is_serving())


async def test_request_on_an_idle_connection_is_answered_while_the_server_stops():
    async with serving() as (port, app), connection(port) as (reader, writer):
        writer.write(REQUEST)
        assert b"connection" not in (await status_and_body(reader))[2]
        await stopped_listening(app)
        writer.write(REQUEST)
        status, _, headers = await status_and_body(reader)
        assert (status, headers[b"connection"]) == (200, b"close")
        assert await is_closed(reader)


async def test_idle_connections_are_closed_when_the_server_has_stopped_for_a_while():
    async with serving() as (port, app), connection(port) as (used, writer), connection(port) as (unused, _):
        writer.write(REQUEST)
        await status_and_body(used)
        app.server.should_exit = True
        assert await is_closed(used)
        assert await is_closed(unused)


async def test_response_that_begins_while_the_server_stops_ends_its_connection():
    async with serving() as (port, app), connection(port) as (reader, writer):
        app.gate.clear()
        writer.write(REQUEST)
        await app.called.wait()
        app.server.should_exit = True
        await asyncio.sleep(0.3)  # time: uvicorn sees that it is to stop
        app.gate.set()
        status, _, headers = await status_and_body(reader)
        assert (status, headers[b"connection"]) == (200, b"close")
