"""The media hosts of the corpus, in a thread: an allowed one, and a canary that must never be reached."""

from __future__ import annotations

import asyncio
import socket
import ssl
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

#: The one address that the gateway under attack may fetch from. The canary sits on 127.0.0.1 and ::1.
ORIGIN_HOST = "127.0.0.2"

_TLS_HANDSHAKE = b"\x16"

Route = Callable[["Asked"], Awaitable[None]]


@dataclass(frozen=True)
class Asked:
    """One request to the origin; `send` responds."""

    path: str
    origin: MediaHosts
    writer: asyncio.StreamWriter

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()


@dataclass
class MediaHosts:
    """Their ports, and the requests that reached them. Counters are read from another thread: whole numbers only."""

    routes: dict[str, Route]
    port: int = 0
    tls_port: int = 0
    closed_port: int = 0
    canary_port: int = 0
    num_canary_hits: int = 0
    num_asked: dict[str, int] = field(default_factory=dict)

    def url(self, path: str) -> str:
        return f"http://{ORIGIN_HOST}:{self.port}{path}"


@contextmanager
def media_hosts(routes: dict[str, Route], tls: ssl.SSLContext) -> Iterator[MediaHosts]:
    """Listen until the end of the block."""
    hosts = MediaHosts(routes)
    started, stop = threading.Event(), _Stop()
    thread = threading.Thread(target=lambda: asyncio.run(_serve(hosts, tls, started, stop)))
    thread.start()
    assert started.wait(10)
    try:
        yield hosts
    finally:
        stop.set()
        thread.join(10)


class _Stop:
    """An event of the thread's loop that another thread sets."""

    def bind(self) -> asyncio.Event:
        self._loop = asyncio.get_running_loop()
        self._event = asyncio.Event()
        return self._event

    def set(self) -> None:
        self._loop.call_soon_threadsafe(self._event.set)


async def _serve(hosts: MediaHosts, tls: ssl.SSLContext, started: threading.Event, stop: _Stop) -> None:
    running: set[asyncio.Task[None]] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        running.add(task)
        try:
            await _answer_all(hosts, reader, writer)
        finally:
            writer.close()
            running.discard(task)

    async def bite(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        hosts.num_canary_hits += 1
        writer.close()

    class Datagrams(asyncio.DatagramProtocol):
        def datagram_received(self, *_: object) -> None:
            hosts.num_canary_hits += 1

    loop = asyncio.get_running_loop()
    stopped = stop.bind()
    servers = [await asyncio.start_server(serve, ORIGIN_HOST, 0)]
    servers.append(await asyncio.start_server(serve, ORIGIN_HOST, 0, ssl=tls))
    servers.append(await asyncio.start_server(bite, "127.0.0.1", 0))
    hosts.port, hosts.tls_port, hosts.canary_port = (server.sockets[0].getsockname()[1] for server in servers)
    servers.append(await asyncio.start_server(bite, "::1", hosts.canary_port))
    transport, _ = await loop.create_datagram_endpoint(Datagrams, ("127.0.0.1", hosts.canary_port))
    hosts.closed_port = _closed_port()
    started.set()
    await stopped.wait()
    transport.close()
    for server in servers:
        server.close()
    for task in running:
        task.cancel()
    await asyncio.gather(*running, return_exceptions=True)


async def _answer_all(hosts: MediaHosts, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(OSError, asyncio.IncompleteReadError, asyncio.CancelledError, asyncio.LimitOverrunError):
        first = await reader.readexactly(1)
        if first == _TLS_HANDSHAKE and writer.get_extra_info("ssl_object") is None:
            writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
            return
        while True:
            head = first + await reader.readuntil(b"\r\n\r\n")
            path = head.split(b" ")[1].decode("latin-1")
            hosts.num_asked[path] = hosts.num_asked.get(path, 0) + 1
            await hosts.routes[path.partition("?")[0]](Asked(path, hosts, writer))
            first = b""


def _closed_port() -> int:
    with socket.socket() as probe:
        probe.bind((ORIGIN_HOST, 0))
        return probe.getsockname()[1]
