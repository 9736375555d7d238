"""The listening socket of a worker or a store."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import socket
import stat
from collections.abc import Callable

from medialane.core.errors import StartupFailed
from medialane.wire.address import TcpAddress, UnixAddress, format_tcp, parse_address
from medialane.wire.config import RpcConfig
from medialane.wire.security import Authentication, Security, check_protection
from medialane.wire.tcp_server import TcpServer

logger = logging.getLogger(__name__)

#: Most connections without a first message. It is sent immediately; above this limit the oldest is closed.
MAX_UNIDENTIFIED = 64
#: Time for sessions to end, and again for their tasks after cancellation.
END_TIMEOUT_S = 1.0


class Listener:
    """Accepts connections until closed. A unix socket has mode 0600, and its file is removed by `close`.

    Each connection gets a protocol of its own, on TCP when its peer is authenticated.
    """

    def __init__(self, server: asyncio.Server | TcpServer, address: str, bound: tuple[str, int] | None = None) -> None:
        self._server = server
        self._bound = bound
        self.address = address

    @classmethod
    async def listen(
        cls, address: str, protocol: Callable[[], asyncio.Protocol], authentication: Authentication | None = None
    ) -> Listener:
        """Listen at `address`; the `address` of the result has the port that the kernel chose for port 0.

        `authentication` is needed for TCP. Raises StartupFailed if the address is malformed, in use, not of this host,
        or beyond loopback without a secret.
        """
        target = parse_address(address)
        loop = asyncio.get_running_loop()
        try:
            if isinstance(target, UnixAddress):
                bound = _bind_unix(target.path)
                server = await loop.create_unix_server(protocol, sock=bound)
                return cls(server, address, (target.path, _inode(target.path)))
            if authentication is None:
                raise StartupFailed(f"cannot listen at {address}: only unix:/path is supported here")
            tcp_server = TcpServer(protocol, authentication)
            await tcp_server.listen(target.host, target.port)
        except OSError as error:
            raise StartupFailed(f"cannot listen at {address}: {_reason(error)}") from error
        return cls(tcp_server, format_tcp(target.host, tcp_server.port))

    def close(self) -> None:
        """Stop listening. Connections stay open, unless they are in the handshake."""
        if self._bound is not None:
            _unlink(*self._bound)
        self._server.close()


def check_listen(address: str, setting: str, config: RpcConfig) -> None:
    """Raise StartupFailed naming `setting`, before anything starts, unless this process can listen at `address`, and
    may. Blocking: names are resolved."""
    target, security = parse_address(address, setting), Security.load(config)
    if isinstance(target, TcpAddress):
        check_protection(target.host, f"{setting} {address}", security)
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
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        for family, ip in dict.fromkeys((family, str(address[0])) for family, _, _, _, address in found):
            socket.create_server((ip, port), family=family).close()
    except OverflowError:
        raise StartupFailed(f"{setting}: port {port} is above 65535") from None
    except OSError as error:
        raise StartupFailed(f"{setting}: cannot listen at {format_tcp(host, port)}: {_reason(error)}") from error


def _bind_unix(path: str) -> socket.socket:
    """Bind a unix socket without listening, so that no client connects before its mode is set."""
    if _is_stale(path):
        os.unlink(path)
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.bind(path)
        os.chmod(path, 0o600)
    except OSError:
        sock.close()
        raise
    return sock


def _is_stale(path: str) -> bool:
    """Return whether the socket of a dead process is at `path`. Raises OSError (EADDRINUSE) if one with a listener is,
    or anything else."""
    try:
        mode = os.stat(path).st_mode
    except FileNotFoundError:
        return False
    if not stat.S_ISSOCK(mode) or _has_listener(path):
        raise OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE))
    return True


def _has_listener(path: str) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        try:
            probe.connect(path)
        except ConnectionRefusedError:
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
