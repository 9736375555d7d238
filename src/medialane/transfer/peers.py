"""The destination's side of pulls: connections to other hosts' stores, each used for one entry at a time, then again.

A large payload is received in parts over several connections at the same time, since one is limited by its window. If
one part fails, all of them have ended before the error is raised. A connection whose use fails, is cancelled or reaches
its deadline is closed: what still arrives on it has no destination.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TypeVar

import msgspec
from cachetools import TTLCache

from medialane.arena import Cached
from medialane.transfer.mover import OpenedEntry
from medialane.transfer.peer_connection import (
    CloseEntry,
    EntryClosed,
    EntryOpened,
    OpenEntry,
    PeerConnection,
    PeerHello,
    PeerRefused,
    PeerWelcome,
    SendPayload,
    decode_from_source,
)
from medialane.types.errors import MedialaneError, ProtocolViolation, TransferFailed, from_report
from medialane.types.feature import RemoteEntry
from medialane.wire.address import TcpAddress, parse_address
from medialane.wire.connection import dial
from medialane.wire.security import Authentication

M = TypeVar("M", bound=msgspec.Struct)

#: For connecting and the handshake.
CONNECT_TIMEOUT_S = 4.0
#: Shorter than the source keeps an idle connection.
MAX_IDLE_S = 60.0
#: Idle connections that are kept per peer.
MAX_IDLE = 8
#: Smallest part of a payload that gets a connection of its own.
MIN_PART_BYTES = 16 << 20
#: How long a peer that could not be reached is not tried again: every request would wait.
UNREACHABLE_S = 2.0
_MAX_UNREACHABLE = 1024


class Peers:
    """Connects to the stores of other hosts, with at most `max_streams` connections for one entry. `arena` is the id
    of ours. The owner calls `close`. Deadlines are by time.monotonic."""

    def __init__(self, arena: str, authentication: Authentication, *, max_streams: int, min_part_bytes: int) -> None:
        self._arena = arena
        self._authentication = authentication
        self._max_streams, self._min_part_bytes = max_streams, min_part_bytes
        self._idle: dict[str, list[tuple[float, PeerConnection]]] = {}  # since when, the oldest first
        self._unreachable: TTLCache[str, bool] = TTLCache(_MAX_UNREACHABLE, UNREACHABLE_S)

    async def fetch(self, entry: RemoteEntry, payload: memoryview, *, deadline: float) -> Cached:
        """Receive an entry by tcp into `payload` and return its description. Raises TransferFailed; nothing is written
        afterwards."""
        num_parts = max(1, min(self._max_streams, len(payload) // self._min_part_bytes))
        size = -(-len(payload) // num_parts)
        try:
            async with asyncio.TaskGroup() as parts:
                for start in range(size, len(payload), size):
                    part = self._fetch_part(entry, payload, start, start + size, deadline=deadline)
                    parts.create_task(part)
                return await self._fetch_part(entry, payload, 0, size, deadline=deadline)
        except BaseExceptionGroup as group:  # the errors after the first are of aborted connections
            raise group.exceptions[0] from None

    @asynccontextmanager
    async def open(self, entry: RemoteEntry, *, deadline: float) -> AsyncIterator[tuple[OpenedEntry, Cached]]:
        """Have the source hold the entry in the block, and return its description. At the end, the source confirms that
        it did. Raises TransferFailed; then nothing that was received may be used."""
        connection = await self._connect(entry.address, deadline)
        async with self._kept(entry.address, connection):
            async with _until(deadline):
                opened = await _ask(connection, OpenEntry(entry), EntryOpened)
            yield OpenedEntry(entry, opened.offers), _value(opened)
            async with _until(deadline):
                await _ask(connection, CloseEntry(), EntryClosed)

    def close(self) -> None:
        """Close idle connections. The owner has ended all pulls."""
        for connections in self._idle.values():
            for _, connection in connections:
                connection.abort()
        self._idle.clear()

    async def _fetch_part(
        self, entry: RemoteEntry, payload: memoryview, start: int, stop: int, *, deadline: float
    ) -> Cached:
        """Open the entry, receive a part of the payload, and have the source confirm that it held the entry."""
        connection = await self._connect(entry.address, deadline)
        with payload[start:stop] as part:  # released: a traceback would keep the arena mapped
            async with self._kept(entry.address, connection), _until(deadline):
                await connection.send(OpenEntry(entry), SendPayload(start, start + len(part)))
                opened = await _reply(connection, EntryOpened)
                await connection.receive_into(part)
                await _ask(connection, CloseEntry(), EntryClosed)
                return _value(opened)

    async def _connect(self, address: str, deadline: float) -> PeerConnection:
        """Return an idle connection, or a new one. Raises TransferFailed."""
        idle = self._idle.pop(address, [])
        while idle:
            since, connection = idle.pop()
            if time.monotonic() - since < MAX_IDLE_S and connection.is_idle:
                self._idle[address] = idle
                return connection
            connection.abort()
        if address in self._unreachable:
            raise TransferFailed("the other store could not be reached a moment ago")
        try:
            async with _until(min(deadline, time.monotonic() + CONNECT_TIMEOUT_S)):
                return await self._new_connection(address)
        except TransferFailed:
            self._unreachable[address] = True
            raise

    async def _new_connection(self, address: str) -> PeerConnection:
        connection = PeerConnection()
        try:
            if not isinstance(parse_address(address), TcpAddress):
                raise TransferFailed(f"{address} is not the address of another host's store")
            await dial(address, connection, self._authentication)
            await _ask(connection, PeerHello(self._arena), PeerWelcome)
        except BaseException as error:  # cancellation included: the connection has no other owner
            connection.abort()
            if isinstance(error, MedialaneError):
                raise TransferFailed(f"the other store cannot be reached: {error.message}") from error
            raise
        return connection

    @asynccontextmanager
    async def _kept(self, address: str, connection: PeerConnection) -> AsyncIterator[None]:
        """Keep the connection for other entries, unless its use has failed."""
        try:
            yield
        except BaseException:  # cancellation included: the connection has no other owner
            connection.abort()
            raise
        now = time.monotonic()
        self._idle.setdefault(address, []).append((now, connection))
        for peer, idle in list(self._idle.items()):
            while idle and (idle[0][0] < now - MAX_IDLE_S or len(idle) > MAX_IDLE):
                idle.pop(0)[1].abort()
            if not idle:
                del self._idle[peer]


@asynccontextmanager
async def _until(deadline: float) -> AsyncIterator[None]:
    """End the block at a time by time.monotonic. Raises TransferFailed; the peer's violation of the protocol is one."""
    try:
        async with asyncio.timeout(max(0.0, deadline - time.monotonic())):
            yield
    except TimeoutError:
        raise TransferFailed("the other store did not respond in time") from None
    except ProtocolViolation as error:
        raise TransferFailed(f"the other store violated the protocol: {error.message}") from error


async def _ask(connection: PeerConnection, message: msgspec.Struct, expected: type[M]) -> M:
    await connection.send(message)
    return await _reply(connection, expected)


async def _reply(connection: PeerConnection, expected: type[M]) -> M:
    """Raises TransferFailed with the error that the other store reports; ProtocolViolation for another message."""
    reply = await connection.receive(decode_from_source)
    if isinstance(reply, PeerRefused):
        raise TransferFailed(from_report(reply.error).message)
    if not isinstance(reply, expected):
        raise ProtocolViolation(f"unexpected {type(reply).__name__}")
    return reply


def _value(opened: EntryOpened) -> Cached:
    value = opened.feature or opened.encoded
    if value is None:
        raise TransferFailed("the other store has sent an entry without its description")
    return value
