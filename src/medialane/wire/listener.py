"""Listening sockets: of stores, workers and gateways for each other (`Listener`), and the port of HTTP; and how
connections are accepted (`Acceptor`), whose peers are bounded, in number and time, until they have completed a
handshake.

A server of asyncio reports a connection only after its TLS handshake, so that peers which stall in that hold any number
of file descriptors. If it is closed between accepting a connection and reporting it, it still reports it, and nothing
closes that connection. Here a connection counts from the accept on.
`PendingConnections` bounds connections whose peers have not identified themselves yet: in a handshake, or without a
first message.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import socket
import stat
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from typing import Any, Generic, TypeVar

from medialane.types.errors import AuthenticationFailed, StartupFailed
from medialane.wire.address import TcpAddress, UnixAddress, format_tcp, parse_address
from medialane.wire.config import RpcConfig
from medialane.wire.security import Authentication, Security, authenticate

logger = logging.getLogger(__name__)

#: A result of getaddrinfo.
AddressInfo = tuple[Any, Any, int, str, tuple[Any, ...]]

#: Pause after a failed accept: no descriptor or memory is left.
_ACCEPT_RETRY_S = 1.0

#: Most pending connections, unless their owner has another limit.
MAX_PENDING = 64

#: Time for sessions to end, and again for their tasks after cancellation.
END_TIMEOUT_S = 1.0

T = TypeVar("T")


class Listener:
    """Accepts connections until closed. A unix socket has mode 0600, and its file is removed by `close`.

    Each connection gets a protocol of its own, on TCP when its peer is authenticated.
    """

    def __init__(self, address: str, acceptor: Acceptor, unlink: Callable[[], None] = lambda: None) -> None:
        self.address = address
        self._acceptor = acceptor
        self._unlink = unlink

    @classmethod
    async def listen(
        cls, address: str, protocol: Callable[[], asyncio.BaseProtocol], authentication: Authentication | None = None
    ) -> Listener:
        """Listen at `address`; the `address` of the result has the port that the kernel chose for port 0.

        `authentication` is needed for TCP. Raises StartupFailed if the address is malformed, in use, not of this host,
        or beyond loopback without a secret.
        """
        target = parse_address(address)
        try:
            if isinstance(target, UnixAddress):
                return cls._listen_unix(target.path, protocol)
            if authentication is None:
                raise StartupFailed(f"cannot listen at {address}: only unix:/path is supported here")
            return await cls._listen_tcp(target, protocol, authentication)
        except OSError as error:
            raise StartupFailed(f"cannot listen at {address}: {_reason(error)}") from error

    @classmethod
    def _listen_unix(cls, path: str, protocol: Callable[[], asyncio.BaseProtocol]) -> Listener:
        async def connect(sock: socket.socket, _: str) -> None:
            await asyncio.get_running_loop().connect_accepted_socket(protocol, sock)

        listening = bind_unix(path)
        listening.listen(socket.SOMAXCONN)
        return cls(f"unix:{path}", Acceptor([listening], connect), partial(_unlink, path, _inode(path)))

    @classmethod
    async def _listen_tcp(
        cls, target: TcpAddress, protocol: Callable[[], asyncio.BaseProtocol], authentication: Authentication
    ) -> Listener:
        async def shake_hands(sock: socket.socket, ip: str) -> None:
            try:
                await authenticate(sock, protocol, authentication)
            except AuthenticationFailed as error:
                logger.warning("a connection from %s is closed: %s", ip, error.message)

        resolved = await asyncio.get_running_loop().getaddrinfo(
            target.host, target.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        sockets = _bind_all(resolved, authentication.security)
        port: int = sockets[0].getsockname()[1]
        return cls(format_tcp(target.host, port), Acceptor(sockets, shake_hands))

    async def close(self) -> None:
        """Stop listening. Connections that have reached their protocol stay open; on return, others are closed."""
        self._unlink()
        self._acceptor.close()
        await self._acceptor.wait_closed()


def check_listen(address: str, setting: str, config: RpcConfig) -> None:
    """Raise StartupFailed naming `setting`, before anything starts, unless this process can listen at `address`, and
    may. Blocking: names are resolved."""
    target, security = parse_address(address, setting), Security.load(config)
    if isinstance(target, TcpAddress):
        security.check_host(target.host, f"{setting} {address}")
        check_port(*target, setting)
        return
    folder = os.path.dirname(target.path)
    if not os.path.isdir(folder):
        raise StartupFailed(f"{setting}: cannot listen at {address}: the folder {folder} does not exist")
    try:
        _is_stale(target.path)
        if not os.access(folder, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    except OSError as error:
        raise StartupFailed(f"{setting}: cannot listen at {address}: {_reason(error)}") from error


def check_port(host: str, port: int, setting: str) -> None:
    """Raise StartupFailed naming `setting` unless this process can listen at all addresses of `host`. Blocking."""
    try:
        for sock in _bind_all(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)):
            sock.close()
    except OverflowError:
        raise StartupFailed(f"{setting}: port {port} is above 65535") from None
    except OSError as error:
        raise StartupFailed(f"{setting}: cannot listen at {format_tcp(host, port)}: {_reason(error)}") from error


def bind_http(host: str, port: int) -> socket.socket:
    """Return a socket bound to the address of the HTTP server, which does not listen yet: connections are refused until
    a gateway is ready. Raises StartupFailed with the reason for the operator."""
    sock = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((host, port))
    except OSError as error:
        sock.close()
        reason = _reason(error)
        if isinstance(error, PermissionError):
            reason = "permission denied; choose a --port of 1024 or more"
        elif isinstance(error, socket.gaierror):
            reason = "--host is not an address of this machine"
        elif error.errno == errno.EADDRINUSE:
            reason = "the port is already in use; stop the other server or choose another --port"
        raise StartupFailed(f"cannot listen on {host} port {port}: {reason}") from error
    return sock


def inherited(listen_fd: int) -> socket.socket:
    """Return the socket with this descriptor, which this process's own children do not inherit. Raises
    StartupFailed."""
    try:
        sock = socket.socket(fileno=listen_fd)
    except OSError as error:
        raise StartupFailed(f"--listen-fd {listen_fd} is not a socket") from error
    sock.set_inheritable(False)
    return sock


def _bind_all(resolved: Sequence[AddressInfo], security: Security | None = None) -> list[socket.socket]:
    """Return sockets that listen at all addresses of a host, at one port: if the kernel chooses it, it does so for the
    first. Raises OSError, OverflowError, and StartupFailed if an address is not protected as it must be."""
    sockets: list[socket.socket] = []
    try:
        for family, ip, port in dict.fromkeys((info[0], str(info[4][0]), info[4][1]) for info in resolved):
            if security is not None:
                security.check_host(ip)
            where = (ip, port or (sockets[0].getsockname()[1] if sockets else 0))
            sockets.append(socket.create_server(where, family=family, backlog=socket.SOMAXCONN))
    except BaseException:  # KeyboardInterrupt included: the sockets have no other owner
        for sock in sockets:
            sock.close()
        raise
    return sockets


def bind_unix(path: str) -> socket.socket:
    """Bind a unix socket of mode 0600 that does not listen yet, so that no client connects before its mode is set.
    Raises StartupFailed if another process listens there, or it cannot be bound."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        if _is_stale(path):
            os.unlink(path)
        sock.bind(path)
        os.chmod(path, 0o600)
    except OSError as error:
        sock.close()
        raise StartupFailed(f"cannot listen at unix:{path}: {_reason(error)}") from error
    return sock


def _is_stale(path: str) -> bool:
    """Return whether the socket of a dead process is at `path`. Raises OSError (EADDRINUSE) if one with a listener is,
    or anything else."""
    try:
        mode = os.stat(path).st_mode
    except FileNotFoundError:
        return False
    if not stat.S_ISSOCK(mode) or has_listener(path):
        raise OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE))
    return True


def has_listener(path: str) -> bool:
    """Return whether a process listens at a unix socket. Raises OSError if that cannot be found out."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        try:
            probe.connect(path)
        except (ConnectionRefusedError, FileNotFoundError):
            return False
        except BlockingIOError:
            return True  # its backlog is full
    return True


def _inode(path: str) -> int:
    return os.stat(path).st_ino


def _unlink(path: str, inode: int) -> None:
    """Remove our socket's file, unless another process has replaced it."""
    try:
        if _inode(path) == inode:
            os.unlink(path)
    except OSError as error:
        logger.warning("cannot remove a socket: %s", error.strerror)


def _reason(error: OSError) -> str:
    if error.errno == errno.EADDRNOTAVAIL:
        return "it is not an address of this machine"
    if isinstance(error, socket.gaierror):
        return f"its host cannot be resolved ({error.strerror})"
    return os.strerror(error.errno) if error.errno and error.errno > 0 else str(error)


class Acceptor:
    """Accepts until closed. Owns the listening `sockets`.

    `shake_hands` is called, in a task, with each accepted socket, which it owns, and with the peer's IP address, or
    "this host" for a unix socket. Until it returns, the connection is pending: `limit` returns how many may be."""

    def __init__(
        self,
        sockets: Sequence[socket.socket],
        shake_hands: Callable[[socket.socket, str], Coroutine[Any, Any, None]],
        *,
        limit: Callable[[], int] = lambda: MAX_PENDING,
    ) -> None:
        self._sockets = list(sockets)
        self._shake_hands = shake_hands
        self._limit = limit
        self._loop = asyncio.get_running_loop()
        self._pending: PendingConnections[asyncio.Task[None]] = PendingConnections(lambda task: task.cancel())
        self._tasks: set[asyncio.Task[None]] = set()
        for sock in self._sockets:
            sock.setblocking(False)
            self._listen(sock)

    def stop(self) -> None:
        """Stop listening, and let pending connections complete their handshakes. Idempotent."""
        for sock in self._sockets:
            self._loop.remove_reader(sock)
            sock.close()
        self._sockets.clear()

    def close(self) -> None:
        """Stop listening. Connections stay open, unless they are pending. Idempotent."""
        self.stop()
        for task in self._tasks:
            task.cancel()

    async def wait_closed(self) -> None:
        """Wait, after `stop` or `close`, until no connection is pending."""
        if self._tasks:
            await asyncio.wait(self._tasks)

    def _listen(self, listening: socket.socket) -> None:
        if listening in self._sockets:
            self._loop.add_reader(listening, self._accept, listening)

    def _accept(self, listening: socket.socket) -> None:
        """Accept one connection: the event loop gets a turn between two."""
        try:
            sock, address = listening.accept()
        except (BlockingIOError, InterruptedError, ConnectionAbortedError):
            return
        except OSError as error:
            logger.warning("no connection can be accepted for %.0f s: %s", _ACCEPT_RETRY_S, error.strerror)
            self._pending.drop_one("no more can be accepted")
            self._loop.remove_reader(listening)
            self._loop.call_later(_ACCEPT_RETRY_S, self._listen, listening)
            return
        sock.setblocking(False)
        ip = str(address[0]) if address else "this host"
        task = self._loop.create_task(self._shake_hands(sock, ip), name="handshake")
        self._tasks.add(task)
        task.add_done_callback(lambda _: self._ended(task, sock))
        self._pending.add(task, ip, limit=self._limit())

    def _ended(self, task: asyncio.Task[None], sock: socket.socket) -> None:
        self._tasks.discard(task)
        self._pending.discard(task)
        if task.cancelled():  # perhaps before it began
            sock.close()


class PendingConnections(Generic[T]):
    """Above the limit, the oldest connection is dropped of the address that has most: a peer that means well needs
    milliseconds, so neither stalled peers nor one address exclude others. `drop` closes a connection."""

    def __init__(self, drop: Callable[[T], object]) -> None:
        self._drop = drop
        self._addresses: dict[T, str] = {}  # oldest first

    def __len__(self) -> int:
        return len(self._addresses)

    def add(self, connection: T, address: str, *, limit: int = MAX_PENDING) -> None:
        """Add a connection from an IP address, or from wherever the log is to name. With a limit of 0 it is dropped."""
        self._addresses[connection] = address
        if len(self._addresses) > limit:
            self.drop_one(f"too many connections: {max(limit, 0)} may be pending")

    def discard(self, connection: T) -> None:
        """The peer has identified itself, or the connection is closed. Idempotent."""
        self._addresses.pop(connection, None)

    def drop_one(self, reason: str) -> None:
        if not self._addresses:
            return
        ((crowded, _),) = Counter(self._addresses.values()).most_common(1)
        oldest = next(connection for connection, address in self._addresses.items() if address == crowded)
        del self._addresses[oldest]
        logger.warning("a connection from %s is closed: %s", crowded, reason)
        self._drop(oldest)
