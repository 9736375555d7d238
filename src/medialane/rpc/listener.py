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
from medialane.rpc.address import UnixAddress, format_tcp, parse_address
from medialane.rpc.security import Authentication
from medialane.rpc.tcp_server import TcpServer

logger = logging.getLogger(__name__)


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


def _bind_unix(path: str) -> socket.socket:
    """Bind a unix socket without listening, so that no client connects before its mode is set."""
    _remove_stale(path)
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.bind(path)
        os.chmod(path, 0o600)
    except OSError:
        sock.close()
        raise
    return sock


def _remove_stale(path: str) -> None:
    """Remove the socket of a dead process. Raises OSError (EADDRINUSE) if it has a listener or is not a socket."""
    try:
        mode = os.stat(path).st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode) or _has_listener(path):
        raise OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE))
    os.unlink(path)


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
    return os.strerror(error.errno) if error.errno and error.errno > 0 else str(error)
