"""A client whose request is refused while it sends 50 MB reads the answer, whatever library it uses."""

import asyncio
import contextlib
import http.client
import io
import json
import shutil
import socket
import subprocess

import aiohttp
import httpx
import pytest
import requests
import uvicorn
from prometheus_client import CollectorRegistry

from medialane.gateway import BoundedServer, GatewayConfig, ScopeMiddleware, http_bounds
from medialane.gateway.http import MAX_DISCARDED_BYTES, error_form, send_error
from medialane.observability import Metrics
from medialane.types.errors import RateLimitExceeded
from waiting import eventually

BODY = bytes(50_000_000)
TYPE = {"content-type": "application/json"}


async def refuse(scope, receive, send):
    """Answers 429 without reading the body."""
    await send_error(send, RateLimitExceeded("too many requests", retry_after_s=7), error_form(scope))


@contextlib.asynccontextmanager
async def refusing(**settings):
    """A server that refuses every request: its port, and a function that returns the bytes that it has read."""
    config = uvicorn.Config(
        ScopeMiddleware(refuse, Metrics(CollectorRegistry())), port=0, lifespan="off", log_config=None, **settings
    )
    server = BoundedServer(config, bounds=http_bounds(GatewayConfig()))
    task = asyncio.create_task(server.serve())
    try:
        await eventually(lambda: server.started)
        yield server.servers[0].sockets[0].getsockname()[1]
    finally:
        server.should_exit = True
        await task


def with_requests(url):
    answer = requests.post(url, data=BODY, headers=TYPE, timeout=10)
    return answer.status_code, answer.headers["retry-after"], answer.json()


def with_requests_in_chunks(url):
    answer = requests.post(url, data=(BODY[:65536] for _ in range(800)), headers=TYPE, timeout=10)
    return answer.status_code, answer.headers["retry-after"], answer.json()


def with_httpx(url):
    answer = httpx.post(url, content=BODY, headers=TYPE, timeout=10)
    return answer.status_code, answer.headers["retry-after"], answer.json()


async def with_aiohttp(url):
    async with aiohttp.ClientSession() as session, session.post(url, data=io.BytesIO(BODY), headers=TYPE) as answer:
        return answer.status, answer.headers["retry-after"], await answer.json()


def with_curl(url, *flags):
    command = ["curl", "-s", "-i", "--max-time", "10", "-H", "content-type: application/json", *flags]
    output = subprocess.run([*command, "--data-binary", "@-", url], input=BODY, capture_output=True, check=True).stdout
    head, _, body = output.rpartition(b"\r\n\r\n")
    lines = dict(line.split(b": ", 1) for line in head.splitlines() if b": " in line)
    return int(head.split()[1]), lines[b"retry-after"].decode(), json.loads(body)


def with_curl_that_does_not_wait(url):
    return with_curl(url, "-H", "expect:")


CLIENTS = [with_requests, with_requests_in_chunks, with_httpx, with_aiohttp, with_curl, with_curl_that_does_not_wait]


@pytest.mark.parametrize("client", CLIENTS)
async def test_client_reads_the_answer_while_it_sends(client):
    if "curl" in client.__name__ and shutil.which("curl") is None:
        pytest.skip("there is no curl")
    async with refusing() as port:
        url = f"http://127.0.0.1:{port}/v1/chat/completions"
        answered = client(url) if asyncio.iscoroutinefunction(client) else asyncio.to_thread(client, url)
        status, retry_after, body = await answered
    assert (status, retry_after, body["error"]["code"]) == (429, "7", "rate_limit_exceeded")


def send_all_then_read(port, size, headers=b""):
    """A client that reads nothing before it has sent everything, or cannot: the bytes that it has sent, and what it
    reads."""
    with socket.create_connection(("127.0.0.1", port), timeout=10) as sock:
        sock.sendall(b"POST / HTTP/1.1\r\nhost: a\r\ncontent-length: %d\r\n%b\r\n" % (size, headers))
        sent, piece = 0, bytes(1 << 16)
        with contextlib.suppress(ConnectionError):
            while sent < size:
                sent += sock.send(piece[: size - sent])
        return sent, sock.recv(1 << 16)


async def test_no_more_than_a_mebibyte_is_read_of_a_refused_body():
    async with refusing() as port:
        sent, answer = await asyncio.to_thread(send_all_then_read, port, 1 << 30)
    assert answer.startswith(b"HTTP/1.1 429")
    assert sent < MAX_DISCARDED_BYTES + (16 << 20), "beyond what is read, only what the kernel's buffers take"


@pytest.mark.parametrize("headers", [b"", b"connection: close\r\n"])
@pytest.mark.parametrize("size", [1000, 500_000, MAX_DISCARDED_BYTES])
async def test_body_of_a_mebibyte_is_sent_without_a_reset(size, headers):
    async with refusing() as port:
        sent, answer = await asyncio.to_thread(send_all_then_read, port, size, headers)
    assert sent == size
    assert answer.startswith(b"HTTP/1.1 429")


async def test_connection_that_ends_with_its_response_ends_when_the_body_is_received():
    async with refusing() as port:

        def until_closed():
            with socket.create_connection(("127.0.0.1", port), timeout=10) as sock:
                sock.sendall(b"POST / HTTP/1.1\r\nhost: a\r\nconnection: close\r\ncontent-length: 10\r\n\r\n01234")
                answer = http.client.HTTPResponse(sock)
                answer.begin()
                answer.read()  # headers and body may come in two pieces
                sock.sendall(b"56789")
                return answer.status, sock.recv(1 << 16)

        status, rest = await asyncio.to_thread(until_closed)
    assert status == 429
    assert rest == b""


async def test_client_that_closes_after_one_request_reads_the_answer():
    async with refusing() as port:
        _, answer = await asyncio.to_thread(send_all_then_read, port, len(BODY), b"connection: close\r\n")
    assert answer.startswith(b"HTTP/1.1 429")


async def test_connection_is_used_again_after_a_small_body():
    async with refusing() as port:

        def twice():
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
            statuses = []
            for _ in range(2):
                connection.request("POST", "/", BODY[:MAX_DISCARDED_BYTES])
                answer = connection.getresponse()
                answer.read()
                statuses.append((answer.status, connection.sock.getsockname()))
            connection.close()
            return statuses

        first, second = await asyncio.to_thread(twice)
    assert first == second
