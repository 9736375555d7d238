"""uvicorn's server with limits that it lacks: those of `http_protocol`, and the number of pending TLS handshakes.

Theory of operation. The event loop's own TLS server accepts every connection and presents it to uvicorn only after its
handshake, so that clients that never finish one hold any number of file descriptors. Here a connection counts from the
TCP accept on: at the limit the oldest pending handshake is aborted in favour of the new connection. A well-behaved
client completes its handshake within milliseconds, hence stalled ones cannot keep it out.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import uvicorn

from medialane.gateway.http_protocol import BoundedHttpProtocol, HttpBounds

logger = logging.getLogger(__name__)

#: Connections above `max_connections` that are still accepted, to be answered 503.
_MAX_REFUSING = 64
#: Pause after an accept that failed for lack of resources, as in asyncio's own server.
_ACCEPT_RETRY_S = 1.0


class BoundedServer(uvicorn.Server):
    """Installs no signal handlers: the process that runs it has its own."""

    def __init__(self, config: uvicorn.Config, *, bounds: HttpBounds) -> None:
        if not config.loaded:
            config.load()
        config.http_protocol_class = partial(BoundedHttpProtocol, bounds=bounds)  # type: ignore[assignment]  # a factory
        super().__init__(config)
        self._bounds = bounds

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        context = self.config.ssl
        if context is None:
            return await super().startup(sockets)
        await super().startup(sockets=[])  # without sockets uvicorn starts no server of the event loop
        self.servers = [self._listener(sock, context) for sock in sockets or ()]  # type: ignore[misc]  # only closed by uvicorn
        return None

    def _listener(self, sock: socket.socket, context: ssl.SSLContext) -> TlsListener:
        connections = self.server_state.connections
        protocol: Any = self.config.http_protocol_class
        sock.listen(self.config.backlog)
        return TlsListener(
            sock,
            context,
            partial(protocol, config=self.config, server_state=self.server_state, app_state=self.lifespan.state),
            num_open=lambda: len(connections),
            max_open=self._bounds.max_connections + _MAX_REFUSING,
            handshake_timeout_s=self._bounds.header_timeout_s,
        )


class TlsListener:
    """Accepts TLS connections on a listening socket, which it does not own, until `close`.

    At most `max_open` connections exist, of which `num_open()` have completed their handshake.
    """

    def __init__(
        self,
        sock: socket.socket,
        context: ssl.SSLContext,
        protocol: Callable[[], asyncio.Protocol],
        *,
        num_open: Callable[[], int],
        max_open: int,
        handshake_timeout_s: float,
    ) -> None:
        sock.setblocking(False)
        self._sock = sock
        self._context = context
        self._protocol = protocol
        self._num_open = num_open
        self._max_open = max_open
        self._timeout_s = handshake_timeout_s
        self._loop = asyncio.get_running_loop()
        self._resume: asyncio.TimerHandle | None = None
        #: Oldest first.
        self._handshakes: dict[asyncio.Task[None], None] = {}
        self._listen()

    def close(self) -> None:
        """Stop accepting, and abort pending handshakes."""
        self._loop.remove_reader(self._sock)
        if self._resume is not None:
            self._resume.cancel()
        for handshake in self._handshakes:
            handshake.cancel()

    async def wait_closed(self) -> None:
        if self._handshakes:
            await asyncio.wait(self._handshakes)

    def _listen(self) -> None:
        self._loop.add_reader(self._sock, self._accept)

    def _accept(self) -> None:
        """Accept one connection: the event loop gets a turn between two."""
        try:
            sock, address = self._sock.accept()
        except (BlockingIOError, InterruptedError, ConnectionAbortedError):
            return
        except OSError as error:  # no file descriptor or memory is left
            logger.warning("no connection can be accepted for %.0f s: %s", _ACCEPT_RETRY_S, error)
            self._abort_oldest()
            self._loop.remove_reader(self._sock)
            self._resume = self._loop.call_later(_ACCEPT_RETRY_S, self._listen)
            return
        if self._num_open() + len(self._handshakes) >= self._max_open and not self._abort_oldest():
            logger.warning("connection from %s closed: too many connections", address[0])
            sock.close()
            return
        handshake = self._loop.create_task(self._handshake(sock, address))
        self._handshakes[handshake] = None
        handshake.add_done_callback(partial(self._ended, sock))

    def _abort_oldest(self) -> bool:
        """Return whether a handshake was pending."""
        oldest = next(iter(self._handshakes), None)
        if oldest is None:
            return False
        logger.warning(
            "too many connections: the oldest of %d pending TLS handshakes was aborted", len(self._handshakes)
        )
        oldest.cancel()
        del self._handshakes[oldest]
        return True

    def _ended(self, sock: socket.socket, handshake: asyncio.Task[None]) -> None:
        self._handshakes.pop(handshake, None)
        if handshake.cancelled():
            sock.close()  # no transport owns it if the task was cancelled before its first step

    async def _handshake(self, sock: socket.socket, address: Sequence[object]) -> None:
        sock.setblocking(False)
        try:
            await self._loop.connect_accepted_socket(
                self._protocol, sock, ssl=self._context, ssl_handshake_timeout=self._timeout_s
            )
        except ConnectionAbortedError as error:  # the deadline
            logger.warning("connection from %s closed: %s", address[0], error)
        except OSError as error:  # ssl.SSLError is one
            logger.debug("TLS handshake with %s failed: %s", address[0], error)
