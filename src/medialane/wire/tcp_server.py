"""Accepts TCP connections and authenticates them. Peers that are not authenticated are bounded in number and time.

It accepts by itself: a server of asyncio reports a connection only after its TLS handshake, so that peers which stall
in that could not be counted.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections import Counter
from collections.abc import Callable

from medialane.core.errors import AuthenticationFailed
from medialane.wire.authenticating import authenticate
from medialane.wire.security import Authentication

logger = logging.getLogger(__name__)

#: Most connections in the handshake. Above it, the oldest is closed of the address that has most, so that one address
#: cannot exclude others.
MAX_UNAUTHENTICATED = 64
#: Connections accepted in one iteration of the event loop.
_ACCEPT_AT_ONCE = 16
#: Pause after a failed accept: no descriptor or memory is left.
_ACCEPT_RETRY_S = 1.0


class TcpServer:
    """Listens until closed. Each authenticated connection gets a new `make_protocol()`."""

    def __init__(self, make_protocol: Callable[[], asyncio.Protocol], authentication: Authentication) -> None:
        self._make_protocol = make_protocol
        self._authentication = authentication
        self._pending: dict[asyncio.Task[None], str] = {}  # by address, oldest first
        self._loop = asyncio.get_running_loop()
        self._sockets: list[socket.socket] = []

    async def listen(self, host: str, port: int) -> None:
        """Listen at all addresses of `host`. Raises OSError, and StartupFailed if one of them needs a secret."""
        found = await self._loop.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        try:
            for family, ip in dict.fromkeys((family, str(address[0])) for family, _, _, _, address in found):
                self._authentication.security.check_host(ip)
                self._sockets.append(_listening_socket(family, ip, port or self.port))
        except BaseException:
            self.close()
            raise
        for sock in self._sockets:
            self._loop.add_reader(sock, self._accept, sock)

    @property
    def port(self) -> int:
        """The port, which is that of the first address if the kernel chose it; 0 before `listen`."""
        return int(self._sockets[0].getsockname()[1]) if self._sockets else 0

    @property
    def num_unauthenticated(self) -> int:
        """Connections in the handshake."""
        return len(self._pending)

    def close(self) -> None:
        """Stop listening. Connections stay open, unless they are in the handshake. Idempotent."""
        for sock in self._sockets:
            self._loop.remove_reader(sock)
            sock.close()
        self._sockets.clear()
        for task in self._pending:
            task.cancel()

    def _accept(self, listening: socket.socket) -> None:
        for _ in range(_ACCEPT_AT_ONCE):
            try:
                sock, address = listening.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                logger.warning("cannot accept a connection: %s", error.strerror)
                self._loop.remove_reader(listening)
                self._loop.call_later(_ACCEPT_RETRY_S, self._accept_again, listening)
                return
            self._admit(sock, str(address[0]))

    def _accept_again(self, listening: socket.socket) -> None:
        if listening in self._sockets:
            self._loop.add_reader(listening, self._accept, listening)

    def _admit(self, sock: socket.socket, ip: str) -> None:
        sock.setblocking(False)
        task = self._loop.create_task(self._authenticate(sock, ip), name="rpc authentication")
        self._pending[task] = ip
        task.add_done_callback(lambda _: self._ended(task, sock))
        if len(self._pending) > MAX_UNAUTHENTICATED:
            ((crowded, _),) = Counter(self._pending.values()).most_common(1)
            oldest = next(each for each, found in self._pending.items() if found == crowded)
            del self._pending[oldest]
            oldest.cancel()
            _closed(crowded, f"more than {MAX_UNAUTHENTICATED} are not authenticated")

    def _ended(self, task: asyncio.Task[None], sock: socket.socket) -> None:
        self._pending.pop(task, None)
        if task.cancelled():  # perhaps before it began
            sock.close()

    async def _authenticate(self, sock: socket.socket, ip: str) -> None:
        try:
            await authenticate(sock, self._make_protocol, self._authentication)
        except AuthenticationFailed as error:
            _closed(ip, error.message)


def _closed(ip: str, reason: str) -> None:
    logger.warning("a connection from %s is closed: %s", ip, reason)


def _listening_socket(family: int, ip: str, port: int) -> socket.socket:
    sock = socket.create_server((ip, port), family=family, backlog=socket.SOMAXCONN)
    sock.setblocking(False)
    return sock
