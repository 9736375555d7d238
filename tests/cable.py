"""A unix socket between a client and its server, to lose connections as a network or a killed process does."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

_CHUNK_BYTES = 1 << 16


class Cable:
    """Forwards connections from `address` to `server`, a unix socket's. Nothing remains after `close`."""

    def __init__(self, address: str, server: str) -> None:
        self.address = address
        self._server = server
        self._listening: asyncio.Server | None = None
        self._ends: set[asyncio.StreamWriter] = set()
        self._forwarding: set[asyncio.Task[None]] = set()
        self._flows = asyncio.Event()
        self._flows.set()
        #: Connections that have reached the server so far.
        self.num_made = 0

    @classmethod
    async def lay(cls, server: str) -> Cable:
        """Return a cable to the address `server`, where a process need not listen yet."""
        cable = cls(f"{server}.{secrets.token_hex(4)}", server)
        await cable.plug()
        return cable

    @property
    def num_open(self) -> int:
        """Connections that neither side has closed."""
        return len(self._forwarding)

    def cut(self) -> None:
        """Lose all connections; what is on its way is lost, too. Clients may connect again."""
        for end in self._ends:
            end.transport.abort()

    async def plug(self) -> None:
        """Accept connections, at first and after `unplug`."""
        self._listening = await asyncio.start_unix_server(self._connected, _path(self.address))

    def unplug(self) -> None:
        """Lose all connections, and refuse others. Idempotent."""
        if self._listening is not None:
            self._listening.close()
            self._listening = None
            Path(_path(self.address)).unlink(missing_ok=True)
        self.cut()

    @asynccontextmanager
    async def stalled(self) -> AsyncIterator[None]:
        """Forward nothing meanwhile: to both sides, the other is silent."""
        self._flows.clear()
        try:
            yield
        finally:
            self._flows.set()

    async def close(self) -> None:
        """Idempotent."""
        self.unplug()
        self._flows.set()
        if self._forwarding:
            await asyncio.wait(self._forwarding)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task, ends = asyncio.current_task(), {writer}
        self._forwarding.add(task)
        self._ends.add(writer)
        try:
            with suppress(OSError):  # no process listens there
                server_reader, server_writer = await asyncio.open_unix_connection(_path(self._server))
                ends.add(server_writer)
                self._ends.add(server_writer)
                self.num_made += 1
                await asyncio.gather(self._forward(reader, server_writer), self._forward(server_reader, writer))
        finally:
            for end in ends:
                end.transport.abort()
            self._ends -= ends
            self._forwarding.discard(task)

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Until one side closes the connection, which is closed to the other as well."""
        try:
            with suppress(ConnectionError):
                while data := await reader.read(_CHUNK_BYTES):
                    await self._flows.wait()
                    writer.write(data)
                    await writer.drain()
        finally:
            writer.close()


def _path(address: str) -> str:
    return address.removeprefix("unix:")
