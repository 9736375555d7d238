"""Listening sockets: those of stores, workers and gateways for each other (`Listener`), and the port of HTTP."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import socket
import stat
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from medialane.types.errors import AuthenticationFailed, StartupFailed
from medialane.wire.acceptor import Acceptor
from medialane.wire.address import TcpAddress, UnixAddress, format_tcp, parse_address
from medialane.wire.authenticating import authenticate
from medialane.wire.config import RpcConfig
from medialane.wire.security import Authentication, Security

logger = logging.getLogger(__name__)

#: A result of getaddrinfo.
AddressInfo = tuple[Any, Any, int, str, tuple[Any, ...]]

#: Time for sessions to end, and again for their tasks after cancellation.
END_TIMEOUT_S = 1.0


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
    except BaseException:
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
