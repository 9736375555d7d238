"""A socket in front of a worker's, whose connections can be cut as by a killed process or a broken network: what is on
its way is lost, and neither end is asked."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

_CHUNK_BYTES = 1 << 16


class CuttableSocket:
    """Forwards connections to `path` to the unix socket `target`, while `listening`."""

    def __init__(self, path: str, target: str) -> None:
        self._path = path
        self._target = target
        self._transports: set[asyncio.WriteTransport] = set()
        self._up_at = 0.0

    @contextlib.asynccontextmanager
    async def listening(self) -> AsyncIterator[None]:
        server = await asyncio.start_unix_server(self._forward, self._path)
        try:
            yield
        finally:
            server.close()
            self.cut()

    def cut(self, down_s: float = 0.0) -> None:
        """Cut all connections; new ones are refused for `down_s`, as if the worker was restarting."""
        for transport in list(self._transports):
            transport.abort()
        self._up_at = asyncio.get_running_loop().time() + down_s

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if asyncio.get_running_loop().time() < self._up_at:
            writer.transport.abort()
            return
        ours, theirs = await asyncio.open_unix_connection(self._target)
        transports = {writer.transport, theirs.transport}
        self._transports |= transports
        try:
            await asyncio.gather(_copy(reader, theirs), _copy(ours, writer))
        finally:
            self._transports -= transports


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Copy to the end of the connection, however that comes."""
    with contextlib.suppress(ConnectionError):
        while data := await reader.read(_CHUNK_BYTES):
            writer.write(data)
            await writer.drain()
    writer.transport.abort()
