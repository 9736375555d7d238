"""An HTTP server on 127.0.0.1 with scripted, possibly invalid responses."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Self


@dataclass
class Request:
    path: str
    headers: dict[str, str]


Answer = Callable[[Request, asyncio.StreamWriter], Awaitable[None]]


def answer(status: int = 200, body: bytes = b"", **headers: str) -> Answer:
    """Answer with these; underscores in header names are hyphens. Content-Length is the body's unless given."""
    named = {"content-length": str(len(body)), **{name.replace("_", "-"): value for name, value in headers.items()}}

    async def write(request: Request, writer: asyncio.StreamWriter) -> None:
        lines = [f"HTTP/1.1 {status} X", *(f"{name}: {value}" for name, value in named.items() if value is not None)]
        writer.write("\r\n".join(lines).encode() + b"\r\n\r\n" + body)
        await writer.drain()

    return write


@dataclass
class HttpOrigin:
    """`routes` by path; `requests` are those received. A context manager: it serves from entry to exit."""

    routes: dict[str, Answer] = field(default_factory=dict)
    requests: list[Request] = field(default_factory=list)
    num_connections: int = 0

    async def __aenter__(self) -> Self:
        self._tasks: set[asyncio.Task] = set()
        self._asked = asyncio.Event()
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *exc: object) -> None:
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def url(self, path: str = "/", host: str = "127.0.0.1") -> str:
        return f"http://{host}:{self.port}{path}"

    async def asked(self) -> None:
        """Wait for the first request."""
        async with asyncio.timeout(2):
            await self._asked.wait()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        self._tasks.add(task)
        self.num_connections += 1
        with suppress(ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            while True:
                await self._serve(reader, writer)
        writer.close()
        self._tasks.discard(task)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        headers = dict(line.lower().split(": ", 1) for line in head[1:] if line)
        request = Request(head[0].split(" ")[1], headers)
        self.requests.append(request)
        self._asked.set()
        await self.routes.get(request.path, answer(404))(request, writer)
