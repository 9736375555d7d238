"""The source's side of pulls: hosts' stores connect, and read entries for which they have a capability.

Every connection has a thread, which blocks; the arena is used on the event loop only. A connection that has passed its
deadline (a peer that does not authenticate, stops, or disappears) is aborted by `_watch`, which wakes its thread: then
the hold ends. What the peer receives after that may be overwritten, and it gets no EntryClosed.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import time
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from medialane.arena import ENTRY_HEADER_BYTES, Arena, Cached, Lease
from medialane.core.errors import (
    AuthenticationFailed,
    HandoverFailed,
    MedialaneError,
    ProtocolViolation,
    StartupFailed,
    to_report,
)
from medialane.core.media import EncodedMedia
from medialane.core.remote_entry import MoverChoice, RemoteEntry
from medialane.observability.logging import RateLimitedWarning
from medialane.rpc.address import TcpAddress, format_tcp, parse_address
from medialane.rpc.authentication import Role
from medialane.rpc.security import Security
from medialane.store.capabilities import Capabilities
from medialane.store.peer_messages import (
    MAX_HELLO_BYTES,
    MAX_MESSAGE_BYTES,
    PEER_VERSION,
    PROTOCOL,
    CloseEntry,
    EntryClosed,
    EntryOpened,
    OpenEntry,
    PeerHello,
    PeerRefused,
    PeerWelcome,
    SendPayload,
    decode_to_source,
)
from medialane.store.peer_socket import PeerSocket
from medialane.store.pull_time import longest_hold_s
from medialane.transfer import Mover

logger = logging.getLogger(__name__)

T = TypeVar("T")

MAX_CONNECTIONS = 256
#: Connections of peers that are not authenticated.
MAX_UNREGISTERED = 32
HELLO_TIMEOUT_S = 5.0
#: Longer than a destination keeps an idle connection.
IDLE_TIMEOUT_S = 120.0
#: The loop answers at once, unless this process is stopped.
LOOP_TIMEOUT_S = 30.0
_WATCH_INTERVAL_S = 0.25


class PeerServer:
    """`serve` once, and `close` in any case. `movers` are those with which other stores may read our arena."""

    def __init__(self, arena: Arena, security: Security, movers: Sequence[Mover] = ()) -> None:
        self._arena = arena
        self._security = security
        self._movers = movers
        self._warn = RateLimitedWarning(logger)
        self._capabilities: Capabilities | None = None
        self._connections: set[_Connection] = set()
        self._loop = asyncio.get_running_loop()
        self._threads = ThreadPoolExecutor(MAX_CONNECTIONS, "medialane-peer")
        self._tasks: list[asyncio.Task[None]] = []
        self._listener: socket.socket | None = None
        self._file: int | None = None

    @property
    def capabilities(self) -> Capabilities | None:
        """What gives capabilities; None if other stores cannot connect."""
        return self._capabilities

    @property
    def num_connections(self) -> int:
        return len(self._connections)

    async def serve(self, address: str) -> str:
        """Listen at a TCP address; with port 0 the kernel chooses one. Returns the address. Raises StartupFailed."""
        target = parse_address(address)
        if not isinstance(target, TcpAddress):
            raise StartupFailed(f"stores of other hosts connect over TCP, not to {address}: tcp://host:port")
        self._listener = _bind(address, target, self._security)
        self._file = os.open(self._arena.path, os.O_RDONLY | os.O_CLOEXEC)
        bound = format_tcp(target.host, self._listener.getsockname()[1])
        self._capabilities = Capabilities(bound)
        self._tasks = [
            asyncio.create_task(self._accept(self._listener), name="accepting stores"),
            asyncio.create_task(self._watch(), name="deadlines of stores"),
        ]
        return bound

    async def close(self) -> None:
        """Stop listening, end all connections, and release what they hold. Idempotent."""
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)
            self._tasks = []
        if self._listener is not None:
            self._listener.close()
            self._listener = None
        for connection in list(self._connections):
            connection.socket.abort()
        while self._connections:  # their threads return soon, as their sockets are aborted
            await asyncio.wait([connection.served for connection in self._connections])
        self._threads.shutdown(wait=False)
        if self._file is not None:
            os.close(self._file)
            self._file = None

    async def _accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                sock, _ = await loop.sock_accept(listener)
            except OSError as error:  # the peer has gone, or we have too many open files
                logger.warning("a store's connection was not accepted: %s", error.strerror)
                await asyncio.sleep(_WATCH_INTERVAL_S)
                continue
            self._make_space()
            if len(self._connections) >= MAX_CONNECTIONS:
                sock.close()
            else:
                self._start(sock)

    def _make_space(self) -> None:
        """End the oldest connection that is not authenticated, if there are too many."""
        unknown = [connection for connection in self._connections if not connection.is_registered]
        if len(unknown) >= MAX_UNREGISTERED:
            min(unknown, key=lambda connection: connection.deadline).socket.abort()

    def _start(self, sock: socket.socket) -> None:
        connection = _Connection(PeerSocket(sock), deadline=time.monotonic() + HELLO_TIMEOUT_S)
        self._connections.add(connection)
        running = asyncio.get_running_loop().run_in_executor(self._threads, self._serve, connection, self._on_loop())
        connection.served = asyncio.ensure_future(running)
        connection.served.add_done_callback(lambda served: self._ended(connection, served))

    def _ended(self, connection: _Connection, served: asyncio.Future[None]) -> None:
        self._connections.discard(connection)
        connection.end()
        if not served.cancelled() and (error := served.exception()) is not None:
            logger.error("a store's connection failed", exc_info=error)

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(_WATCH_INTERVAL_S)
            now = time.monotonic()
            for connection in self._connections:
                if connection.deadline < now:
                    connection.socket.abort()

    def _on_loop(self) -> Callable[[Coroutine[Any, Any, T]], T]:
        """Return a function that runs a coroutine on this loop, for a thread to call."""
        loop = asyncio.get_running_loop()
        return lambda work: asyncio.run_coroutine_threadsafe(work, loop).result(LOOP_TIMEOUT_S)

    def _serve(self, connection: _Connection, on_loop: Callable[[Coroutine[Any, Any, Any]], Any]) -> None:
        """Serve one connection, in its thread, until it is closed."""
        peer = connection.socket
        try:
            peer.authenticate(self._security.authentication(PROTOCOL, Role.STORE, Role.STORE))
            self._welcome(peer)
            connection.is_registered = True
            while True:
                if connection.lease is None:
                    connection.deadline = time.monotonic() + IDLE_TIMEOUT_S
                self._answer(decode_to_source(peer.receive(MAX_MESSAGE_BYTES)), connection, on_loop)
        except HandoverFailed:
            pass  # the peer has closed the connection, or it was aborted
        except (ProtocolViolation, AuthenticationFailed) as error:
            self._warn("ending the connection of a store: %s", error.message)
        finally:
            peer.close()

    def _welcome(self, peer: PeerSocket) -> None:
        hello = decode_to_source(peer.receive(MAX_HELLO_BYTES))
        if not isinstance(hello, PeerHello):
            raise ProtocolViolation(f"unexpected {type(hello).__name__}")
        if hello.version != PEER_VERSION:
            error = StartupFailed(f"the store speaks version {hello.version}, this one {PEER_VERSION}: same release?")
            peer.send(PeerRefused(to_report(error)))
            raise ProtocolViolation(error.message)
        peer.send(PeerWelcome(self._arena.id))

    async def _offers(self, choice: MoverChoice) -> dict[str, bytes]:
        offers = {"tcp": b""}
        for mover in self._movers:
            if choice in ("auto", mover.name) and (offer := await mover.offer(wait=choice == mover.name)) is not None:
                offers[mover.name] = offer
        return offers

    def _answer(
        self, message: object, connection: _Connection, on_loop: Callable[[Coroutine[Any, Any, Any]], Any]
    ) -> None:
        peer, lease = connection.socket, connection.lease
        match message:
            case OpenEntry(entry) if lease is None:
                connection.deadline = time.monotonic() + longest_hold_s(entry.range.nbytes)
                peer.send(on_loop(self._opened(connection, entry)))
            case SendPayload() if lease is not None and self._file is not None:
                found = lease.range
                first = found.offset + ENTRY_HEADER_BYTES
                peer.send_file(self._file, first, found.nbytes - ENTRY_HEADER_BYTES)
            case SendPayload() if lease is None:
                pass  # sent with an OpenEntry that was refused
            case CloseEntry() if lease is not None:
                # Nothing else ends the hold while this thread runs: what the peer has received was held.
                connection.lease = None
                self._loop.call_soon_threadsafe(lease.release)
                peer.send(EntryClosed())
            case _:
                raise ProtocolViolation(f"unexpected {type(message).__name__}")

    async def _opened(self, connection: _Connection, entry: RemoteEntry) -> EntryOpened | PeerRefused:
        """Hold the entry for this connection; return the reply."""
        try:
            lease = self._lease(entry)
        except MedialaneError as error:
            return PeerRefused(to_report(error))
        if not connection.own(lease):
            raise HandoverFailed("the connection has ended")
        value, offers = lease.value, await self._offers(entry.mover)
        if isinstance(value, EncodedMedia):
            return EntryOpened(encoded=value, offers=offers)
        return EntryOpened(feature=value, offers=offers)

    def _lease(self, entry: RemoteEntry) -> Lease[Cached]:
        """Raises HandoverFailed."""
        if self._capabilities is None:
            raise HandoverFailed("the store is stopping")
        self._capabilities.check(entry)
        lease = self._arena.share_cached(entry.range, entry.key, entry.kind)
        if lease is None:
            raise HandoverFailed("the entry is no longer in its store")
        return lease


class _Connection:
    """One connection, at most one lease for it. While its thread runs, only that ends the lease, on the event loop.
    Other attributes that it writes: `deadline`, by time.monotonic, and `is_registered`."""

    served: asyncio.Future[None]

    def __init__(self, peer: PeerSocket, deadline: float) -> None:
        self.socket = peer
        self.deadline = deadline
        self.lease: Lease[Cached] | None = None
        self.is_registered = False
        self._ended = False

    def own(self, lease: Lease[Cached]) -> bool:
        """Own `lease`; release it and return False if the connection has ended."""
        if self._ended:
            lease.release()
            return False
        self.lease = lease
        return True

    def end(self) -> None:
        """Release what is held, now and later."""
        self._ended = True
        lease, self.lease = self.lease, None
        if lease is not None:
            lease.release()


def _bind(address: str, target: TcpAddress, security: Security) -> socket.socket:
    """Return a listening socket for the event loop. Raises StartupFailed."""
    if target.host in ("0.0.0.0", "::"):  # noqa: S104 - refused
        raise StartupFailed(
            f"--peer-listen {address}: other stores connect to this address, so it must be one of a host"
        )
    try:
        family, kind, protocol, _, where = socket.getaddrinfo(target.host, target.port, type=socket.SOCK_STREAM)[0]
        security.check_host(str(where[0]))
        sock = socket.socket(family, kind, protocol)
    except OSError as error:
        raise StartupFailed(f"cannot listen at {address}: {error.strerror}") from error
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(where)
        sock.listen(MAX_CONNECTIONS)
    except OSError as error:
        sock.close()
        raise StartupFailed(f"cannot listen at {address}: {error.strerror}") from error
    sock.setblocking(False)
    return sock
