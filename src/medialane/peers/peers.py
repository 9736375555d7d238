"""The destination's side of pulls: connections to other hosts' stores, each used for one entry at a time, then again.

Blocking work runs in threads. A call that is cancelled or reaches its deadline aborts its connection and waits for the
thread, so that when it has ended, nothing is received any more: the socket is closed, and what still arrives has no
destination.

A large payload is received in parts over several connections at the same time: one connection is limited by its window
and by the core that copies its bytes. If one part fails, all of them have ended before the error is raised.
"""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import AsyncIterator, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, asynccontextmanager, suppress
from typing import TypeVar

import msgspec
from cachetools import TTLCache

from medialane.arena import Cached
from medialane.core.errors import MedialaneError, ProtocolViolation, TransferFailed, from_report
from medialane.core.remote_entry import RemoteEntry
from medialane.peers.peer_messages import (
    MAX_MESSAGE_BYTES,
    PROTOCOL,
    CloseEntry,
    EntryClosed,
    EntryOpened,
    FromSource,
    OpenEntry,
    PeerHello,
    PeerRefused,
    PeerWelcome,
    SendPayload,
    decode_from_source,
)
from medialane.peers.peer_socket import PeerSocket
from medialane.wire.address import TcpAddress, parse_address
from medialane.wire.authentication import Role
from medialane.wire.security import Security

T = TypeVar("T")

CONNECT_TIMEOUT_S = 3.0
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
    """Connects to the stores of other hosts, for at most `max_pulls` entries at the same time, each over at most
    `max_streams` connections. `arena` is the id of ours. The owner calls `close`."""

    def __init__(self, arena: str, security: Security, *, max_pulls: int, max_streams: int) -> None:
        self._arena = arena
        self._security = security
        self._max_streams = max_streams
        self._threads = ThreadPoolExecutor(max_pulls * (max_streams + 1), "medialane-pull")
        self._idle: dict[str, list[_Connection]] = {}
        self._unreachable: TTLCache[str, bool] = TTLCache(_MAX_UNREACHABLE, UNREACHABLE_S)

    @asynccontextmanager
    async def open(self, entry: RemoteEntry, *, deadline: float) -> AsyncIterator[PeerEntry]:
        """Have the source hold the entry in the block. At its end, the source confirms that it did.

        Raises TransferFailed; then nothing that was received may be used.
        """
        connection = await self._connect(entry.address, deadline)
        opened = PeerEntry(self, entry, connection)
        is_reusable = False
        try:
            await self.in_thread(connection, opened.open, deadline)
            yield opened
            if not opened.is_closed:
                await self.in_thread(connection, opened.close, deadline)
            is_reusable = True
        finally:
            if is_reusable:
                self._keep(connection)
            else:
                connection.socket.close()

    async def fetch(self, entry: RemoteEntry, payload: memoryview, *, deadline: float) -> Cached:
        """Receive an entry by tcp into `payload` and return its description. Raises TransferFailed; nothing is written
        afterwards."""
        async with self.first_part(entry, payload, deadline=deadline) as first:
            return await self._fetch(entry, first, 0, deadline)

    @asynccontextmanager
    async def first_part(
        self, entry: RemoteEntry, payload: memoryview, *, deadline: float
    ) -> AsyncIterator[memoryview]:
        """Receive all parts of `payload` but the first one, while the block receives that. Raises TransferFailed;
        nothing is written afterwards."""
        num_parts = max(1, min(self._max_streams, len(payload) // MIN_PART_BYTES))
        size = -(-len(payload) // num_parts)
        with ExitStack() as views:  # released: a traceback would keep the arena mapped
            parts = [views.enter_context(payload[n * size : (n + 1) * size]) for n in range(num_parts)]
            try:
                async with asyncio.TaskGroup() as others:
                    for number, part in enumerate(parts[1:], 1):
                        others.create_task(self._fetch(entry, part, number * size, deadline))
                    yield parts[0]
            except BaseExceptionGroup as group:  # the errors after the first are those of aborted connections
                raise group.exceptions[0] from None

    async def _fetch(self, entry: RemoteEntry, part: memoryview, start: int, deadline: float) -> Cached:
        """Open the entry, receive the part of the payload that begins at `start`, and close it. The request is sent
        here and all the rest done in one thread: waking one takes as long as copying a small entry."""
        connection = await self._connect(entry.address, deadline)
        opened = PeerEntry(self, entry, connection)
        try:
            connection.socket.send(OpenEntry(entry), SendPayload(start, start + len(part)))
            await self.in_thread(connection, lambda: opened.finish(part), deadline)
        except BaseException:  # cancellation included: the connection has no other owner
            connection.socket.close()
            raise
        self._keep(connection)
        return opened.value

    async def in_thread(self, connection: _Connection, work: Callable[[], T], deadline: float) -> T:
        """Run blocking work with a connection until `deadline` by time.monotonic. Raises TransferFailed. However this
        ends, the work has ended."""
        running = asyncio.get_running_loop().run_in_executor(self._threads, work)
        try:
            async with asyncio.timeout(max(0.0, deadline - time.monotonic())):
                return await asyncio.shield(running)
        except TimeoutError:
            raise TransferFailed("the other store did not respond in time") from None
        except ProtocolViolation as error:
            raise TransferFailed(f"the other store violated the protocol: {error.message}") from error
        finally:
            if not running.done():
                connection.socket.abort()
                await _ended(running)

    def close(self) -> None:
        """Close idle connections. The owner has ended all pulls."""
        for connections in self._idle.values():
            for connection in connections:
                connection.socket.close()
        self._idle.clear()
        self._threads.shutdown(wait=False)

    async def _connect(self, address: str, deadline: float) -> _Connection:
        """Return an idle connection, or a new one. Raises TransferFailed."""
        if (idle := self._take_idle(address)) is not None:
            return idle
        if address in self._unreachable:
            raise TransferFailed("the other store could not be reached a moment ago")
        try:
            return await self._new_connection(address, deadline)
        except TransferFailed:
            self._unreachable[address] = True
            raise

    async def _new_connection(self, address: str, deadline: float) -> _Connection:
        dialing = asyncio.get_running_loop().run_in_executor(self._threads, _dial, address, self._security)
        try:
            async with asyncio.timeout(max(0.0, deadline - time.monotonic())):
                sock = await asyncio.shield(dialing)
        except (TimeoutError, asyncio.CancelledError) as error:
            dialing.add_done_callback(_close_result)
            if isinstance(error, TimeoutError):
                raise TransferFailed("the other store could not be reached in time") from None
            raise
        connection = _Connection(address, sock)
        try:
            await self.in_thread(connection, lambda: connection.register(self._arena), deadline)
        except BaseException:  # cancellation included: the connection has no other owner
            sock.close()
            raise
        return connection

    def _take_idle(self, address: str) -> _Connection | None:
        connections = self._idle.get(address, [])
        while connections:
            connection = connections.pop()
            if connection.is_usable:
                return connection
            connection.socket.close()
        return None

    def _keep(self, connection: _Connection) -> None:
        """Keep an idle connection, and close those of any peer that have been idle for long."""
        connection.idle_since = time.monotonic()
        connections = self._idle.setdefault(connection.address, [])
        connections.append(connection)
        if len(connections) > MAX_IDLE:
            connections.pop(0).socket.close()
        oldest = connection.idle_since - MAX_IDLE_S
        for address, kept in list(self._idle.items()):
            while kept and kept[0].idle_since < oldest:
                kept.pop(0).socket.close()
            if not kept:
                del self._idle[address]


class PeerEntry:
    """An entry that its store holds for us (`transfer.OpenedEntry`)."""

    def __init__(self, peers: Peers, entry: RemoteEntry, connection: _Connection) -> None:
        self._peers = peers
        self._entry = entry
        self._connection = connection
        self._offers: Mapping[str, bytes] = {}
        self.is_closed = False
        self.value: Cached

    @property
    def entry(self) -> RemoteEntry:
        return self._entry

    @property
    def offers(self) -> Mapping[str, bytes]:
        return self._offers

    async def receive(self, payload: memoryview, deadline_s: float) -> None:
        deadline = time.monotonic() + deadline_s
        async with self._peers.first_part(self._entry, payload, deadline=deadline) as part:

            def receive() -> None:
                self._connection.socket.send(SendPayload(0, len(part)))
                self._connection.socket.receive_into(part)
                self.close()  # in this thread: waking another one takes longer than the round trip

            await self._peers.in_thread(self._connection, receive, deadline)

    def open(self) -> None:
        """Blocking. Raises TransferFailed."""
        self._opened(self._connection.ask(OpenEntry(self._entry), EntryOpened))

    def finish(self, part: memoryview) -> None:
        """Receive the replies to OpenEntry and SendPayload, and close. Blocking. Raises TransferFailed."""
        self._opened(self._connection.reply(EntryOpened))
        self._connection.socket.receive_into(part)
        self.close()

    def _opened(self, opened: EntryOpened) -> None:
        value = opened.feature or opened.encoded
        if value is None:
            raise TransferFailed("the other store has sent an entry without its description")
        self.value = value
        self._offers = opened.offers

    def close(self) -> None:
        """Have the source confirm that it held the entry until now. Blocking. Raises TransferFailed."""
        self._connection.ask(CloseEntry(), EntryClosed)
        self.is_closed = True


M = TypeVar("M", bound=msgspec.Struct)


class _Connection:
    def __init__(self, address: str, sock: PeerSocket) -> None:
        self.address = address
        self.socket = sock
        self.idle_since = 0.0

    @property
    def is_usable(self) -> bool:
        return time.monotonic() - self.idle_since < MAX_IDLE_S and self.socket.is_usable

    def register(self, arena: str) -> None:
        """Blocking. Raises TransferFailed."""
        self.ask(PeerHello(arena), PeerWelcome)

    def ask(self, message: msgspec.Struct, reply: type[M]) -> M:
        """Send `message` and return the reply to it. Blocking. Raises TransferFailed, or the error that the other store
        reports as one."""
        self.socket.send(message)
        return self.reply(reply)

    def reply(self, reply: type[M]) -> M:
        """Receive what must be a `reply`, or an error. As `ask`."""
        found: FromSource = decode_from_source(self.socket.receive(MAX_MESSAGE_BYTES))
        if isinstance(found, PeerRefused):
            raise TransferFailed(from_report(found.error).message)
        if not isinstance(found, reply):
            raise ProtocolViolation(f"unexpected {type(found).__name__}")
        return found


def _dial(address: str, security: Security) -> PeerSocket:
    """Connect and authenticate. Raises TransferFailed."""
    try:
        target = parse_address(address)
        if not isinstance(target, TcpAddress):
            raise TransferFailed(f"{address} is not the address of another host's store")
        found = socket.getaddrinfo(*target, type=socket.SOCK_STREAM)[0][4]
        security.check_host(str(found[0]))
        peer = PeerSocket(socket.create_connection((str(found[0]), target.port), CONNECT_TIMEOUT_S))
        authentication = security.authentication(PROTOCOL, Role.STORE, Role.STORE)
        peer.authenticate(authentication, dialled_host=target.host)
    except OSError as error:
        raise TransferFailed(f"the other store cannot be reached: {error.strerror or error}") from error
    except MedialaneError as error:
        raise TransferFailed(error.message) from error
    return peer


def _close_result(dialing: asyncio.Future[PeerSocket]) -> None:
    if not dialing.cancelled() and dialing.exception() is None:
        dialing.result().close()


async def _ended(running: asyncio.Future[T]) -> None:
    """Wait until the work has ended, whatever it raises, also if this is cancelled meanwhile: it is about to end."""
    while not running.done():
        with suppress(asyncio.CancelledError):
            await asyncio.wait([running])
    if not running.cancelled():
        running.exception()
