"""Accepts connections whose peers are bounded, in number and time, until they have completed a handshake.

A server of asyncio reports a connection only after its TLS handshake, so that peers which stall in that hold any number
of file descriptors. If it is closed between accepting a connection and reporting it, it still reports it, and nothing
closes that connection. Here a connection counts from the accept on.
`PendingConnections` bounds those whose peers have not identified themselves yet: in a handshake, or without a first
message.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Generic, TypeVar

logger = logging.getLogger(__name__)

#: Pause after a failed accept: no descriptor or memory is left.
_ACCEPT_RETRY_S = 1.0


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


#: Most of them, unless the owner has another limit.
MAX_PENDING = 64

T = TypeVar("T")


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
