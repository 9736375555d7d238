"""The source's side of pulls: hosts' stores connect, and read entries for which they have a capability.

The event loop waits for the next request of an idle connection, and opens the entry, as it alone uses the arena. All
else is blocking work in a thread, one for each connection that is not idle. A connection that has passed its deadline
(a peer that does not authenticate, stops, or disappears) is aborted by `_watch`, which wakes its thread: then the hold
ends. What the peer receives after that may be overwritten, and it gets no EntryClosed.

Peers that are not authenticated are bounded in number and time; of too many, the oldest one of the address that has
most is aborted, so that one address cannot exclude others.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, TypeVar

import msgspec

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
from medialane.core.remote_entry import RemoteEntry
from medialane.peers.capabilities import Capabilities
from medialane.peers.mover import Mover
from medialane.peers.peer_messages import (
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
    ToSource,
    decode_to_source,
)
from medialane.peers.peer_socket import PeerSocket
from medialane.peers.pull_time import longest_hold_s
from medialane.wire.address import TcpAddress, format_tcp, parse_tcp
from medialane.wire.authentication import Role
from medialane.wire.security import Security

logger = logging.getLogger(__name__)

T = TypeVar("T")

#: Idle ones are closed first.
MAX_CONNECTIONS = 1024
#: Connections of peers that are not authenticated.
MAX_UNREGISTERED = 32
#: Connections that are not idle: handshakes, and pulls.
_MAX_THREADS = 256
HELLO_TIMEOUT_S = 5.0
#: From the first byte of a request until its reply is sent, unless it opens an entry.
REQUEST_TIMEOUT_S = 5.0
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
        self._capabilities: Capabilities | None = None
        self._connections: set[_Connection] = set()
        self._loop = asyncio.get_running_loop()
        self._threads = ThreadPoolExecutor(_MAX_THREADS, "medialane-peer")
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
        target = parse_tcp(address, "--peer-listen")
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
            connection.abort()
            if connection.served is None:
                self._loop.remove_reader(connection.socket.fileno())
                self._end(connection)
        while self._connections:  # their threads return soon, as their sockets are aborted
            await asyncio.wait([found.served for found in self._connections if found.served is not None])
        self._threads.shutdown(wait=False)
        if self._file is not None:
            os.close(self._file)
            self._file = None

    async def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                sock, address = await self._loop.sock_accept(listener)
            except OSError as error:  # the peer has gone, or we have too many open files
                logger.warning("a store's connection was not accepted: %s", error.strerror)
                await asyncio.sleep(_WATCH_INTERVAL_S)
                continue
            if self._make_space():
                self._start(sock, str(address[0]))
            else:
                sock.close()

    def _make_space(self) -> bool:
        """Abort a connection if there are too many. Return whether there is space for one more."""
        unknown = [found for found in self._connections if not (found.is_registered or found.is_aborted)]
        if len(unknown) >= MAX_UNREGISTERED:
            ((crowded, _),) = Counter(found.ip for found in unknown).most_common(1)
            min((found for found in unknown if found.ip == crowded), key=lambda found: found.deadline).abort()
        if len(self._connections) < MAX_CONNECTIONS:
            return True
        idle = [found for found in self._connections if found.served is None and not found.is_aborted]
        if idle:
            min(idle, key=lambda found: found.deadline).abort()
        return bool(idle)

    def _start(self, sock: socket.socket, ip: str) -> None:
        connection = _Connection(PeerSocket(sock), ip, deadline=time.monotonic() + HELLO_TIMEOUT_S)
        self._connections.add(connection)
        self._in_thread(connection, lambda: self._register(connection))

    def _in_thread(self, connection: _Connection, work: Callable[[], None]) -> None:
        """Run blocking work with the connection, then wait for its next request."""

        def ended(served: asyncio.Future[None]) -> None:
            connection.served = None
            with self._ending_on_errors(connection):
                served.result()
                if connection.is_aborted:
                    self._end(connection)
                    return
                connection.deadline = time.monotonic() + IDLE_TIMEOUT_S
                self._loop.add_reader(connection.socket.fileno(), self._request, connection)

        connection.served = self._loop.run_in_executor(self._threads, work)
        connection.served.add_done_callback(ended)

    @contextmanager
    def _ending_on_errors(self, connection: _Connection) -> Iterator[None]:
        try:
            yield
        except HandoverFailed:  # the peer has closed the connection, or it was aborted
            self._end(connection)
        except (ProtocolViolation, AuthenticationFailed) as error:
            logger.warning("ending the connection of a store: %s", error.message)
            self._end(connection)
        except Exception:  # the supervisor of one connection: no other must be affected
            logger.exception("a store's connection failed")
            self._end(connection)

    def _end(self, connection: _Connection) -> None:
        self._connections.discard(connection)
        connection.end()

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(_WATCH_INTERVAL_S)
            now = time.monotonic()
            for connection in self._connections:
                if connection.deadline < now:
                    connection.abort()

    def _request(self, connection: _Connection) -> None:
        """Called when something can be read from an idle connection."""
        self._loop.remove_reader(connection.socket.fileno())
        connection.deadline = time.monotonic() + REQUEST_TIMEOUT_S
        with self._ending_on_errors(connection):
            connection.socket.set_blocking()  # libuv makes what it polls non-blocking
            frame = connection.socket.receive_at_once(MAX_MESSAGE_BYTES)
            message = None if frame is None else decode_to_source(frame)
            reply = None
            if isinstance(message, OpenEntry) and (message.entry.mover == "tcp" or not self._movers):
                reply = self._opened(connection, message.entry, {"tcp": b""})
            self._in_thread(connection, lambda: self._serve(connection, message, reply))

    def _serve(self, connection: _Connection, message: ToSource | None, reply: msgspec.Struct | None) -> None:
        """Answer requests, in a thread, until the connection is idle. The first one has perhaps been received, or even
        been handled: then `reply` is to be sent."""
        peer = connection.socket
        if reply is not None:
            peer.send(reply)
        else:
            self._answer(message or decode_to_source(peer.receive(MAX_MESSAGE_BYTES)), connection)
        while connection.lease is not None or peer.has_decrypted:
            self._answer(decode_to_source(peer.receive(MAX_MESSAGE_BYTES)), connection)

    def _register(self, connection: _Connection) -> None:
        connection.socket.authenticate(self._security.authentication(PROTOCOL, Role.STORE, Role.STORE))
        self._welcome(connection.socket)
        connection.is_registered = True
        for mover in self._movers:
            self._loop.call_soon_threadsafe(mover.is_ready)  # if not, it starts now rather than at the first entry

    def _welcome(self, peer: PeerSocket) -> None:
        hello = decode_to_source(peer.receive(MAX_HELLO_BYTES))
        if not isinstance(hello, PeerHello):
            raise ProtocolViolation(f"unexpected {type(hello).__name__}")
        if hello.version != PEER_VERSION:
            error = StartupFailed(f"the store speaks version {hello.version}, this one {PEER_VERSION}: same release?")
            peer.send(PeerRefused(to_report(error)))
            raise ProtocolViolation(error.message)
        peer.send(PeerWelcome(self._arena.id))

    def _answer(self, message: ToSource, connection: _Connection) -> None:
        peer, lease = connection.socket, connection.lease
        match message:
            case OpenEntry(entry) if lease is None:
                peer.send(self._on_loop(self._opened_with_offers(connection, entry)))
            case SendPayload(start, stop) if lease is not None and self._file is not None:
                if not 0 <= start <= stop <= lease.range.nbytes - ENTRY_HEADER_BYTES:
                    raise ProtocolViolation("the part is not one of the payload")
                peer.send_file(self._file, lease.range.offset + ENTRY_HEADER_BYTES + start, stop - start)
            case SendPayload() if lease is None:
                pass  # sent with an OpenEntry that was refused
            case CloseEntry() if lease is not None:
                # Nothing else ends the hold while this thread runs: what the peer has received was held.
                connection.lease = None
                self._loop.call_soon_threadsafe(lease.release)
                peer.send(EntryClosed())
            case _:
                raise ProtocolViolation(f"unexpected {type(message).__name__}")

    def _on_loop(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the event loop, for a thread. Raises HandoverFailed if it takes too long."""
        running = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return running.result(LOOP_TIMEOUT_S)
        except TimeoutError:
            running.cancel()
            raise HandoverFailed("the entry could not be opened in time") from None

    async def _opened_with_offers(self, connection: _Connection, entry: RemoteEntry) -> EntryOpened | PeerRefused:
        offers = {"tcp": b""}
        reply = self._opened(connection, entry, offers)
        if isinstance(reply, EntryOpened):
            for mover in self._movers:
                wait = entry.mover == mover.name
                if (wait or entry.mover == "auto") and (offer := await mover.offer(wait=wait)) is not None:
                    offers[mover.name] = offer
        return reply

    def _opened(
        self, connection: _Connection, entry: RemoteEntry, offers: dict[str, bytes]
    ) -> EntryOpened | PeerRefused:
        """Hold the entry for this connection; return the reply."""
        try:
            lease = self._lease(entry)
        except MedialaneError as error:
            return PeerRefused(to_report(error))
        connection.deadline = time.monotonic() + longest_hold_s(lease.range.nbytes)
        if not connection.own(lease):
            raise HandoverFailed("the connection has ended")
        value = lease.value
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
    """One connection, at most one lease for it. While a thread serves it, only that ends the lease, on the event loop.
    Other attributes that it writes: `deadline`, by time.monotonic, and `is_registered`."""

    def __init__(self, peer: PeerSocket, ip: str, deadline: float) -> None:
        self.socket = peer
        self.ip = ip
        self.deadline = deadline
        self.lease: Lease[Cached] | None = None
        self.served: asyncio.Future[None] | None = None
        """the work of its thread; None if it is idle"""
        self.is_registered = False
        self.is_aborted = False
        self._ended = False

    def abort(self) -> None:
        """Make its thread return, or its next request an error."""
        self.is_aborted = True
        self.socket.abort()

    def own(self, lease: Lease[Cached]) -> bool:
        """Own `lease`; release it and return False if the connection has ended."""
        if self._ended:
            lease.release()
            return False
        self.lease = lease
        return True

    def end(self) -> None:
        """Close it; release what is held, now and later."""
        self._ended = True
        self.socket.close()
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
        sock.listen(socket.SOMAXCONN)
    except OSError as error:
        sock.close()
        raise StartupFailed(f"cannot listen at {address}: {error.strerror}") from error
    sock.setblocking(False)
    return sock
