"""uvicorn's server with limits that it lacks: on connections and headers (`protocol`), and on the number of pending TLS
handshakes (`wire.acceptor`). Behind the name router, it restores the client's address.

The router's own header has it, not `X-Forwarded-For`: that stays what the client has sent, so that a gateway trusts
it, or not, as without a router (`FORWARDED_ALLOW_IPS`, `sessions`).
"""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec
import uvicorn

from medialane.gateway.http.asgi import header
from medialane.gateway.http.protocol import LINGER_S, BoundedHttpProtocol, HttpBounds
from medialane.types.errors import StartupFailed
from medialane.wire.acceptor import Acceptor

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Receive, Scope, Send

logger = logging.getLogger(__name__)

#: How long the name router's idle connections are kept: it closes them before.
ROUTER_KEEP_ALIVE_S = 60
#: Connections above `max_connections` that are still accepted, to be answered 503.
MAX_REFUSING = 64


class BoundedServer(uvicorn.Server):
    """Installs no signal handlers: the process that runs it has its own. `on_listening` is called when connections are
    accepted."""

    def __init__(
        self,
        config: uvicorn.Config,
        *,
        bounds: HttpBounds,
        is_behind_router: bool = False,
        on_listening: Callable[[], None] = lambda: None,
        max_refusing: int = MAX_REFUSING,
    ) -> None:
        """With `is_behind_router`, requests come from the name router, which tells whose they are."""
        if not config.loaded:
            config.load()
        if is_behind_router:
            config.loaded_app = RestoredClient(config.loaded_app)
            config.timeout_keep_alive = ROUTER_KEEP_ALIVE_S
        config.http_protocol_class = partial(  # type: ignore[assignment]  # a factory
            BoundedHttpProtocol, bounds=bounds, is_stopping=lambda: self.should_exit
        )
        super().__init__(config)
        self._bounds = bounds
        self._on_listening = on_listening
        self._max_refusing = max_refusing

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    def read_certificate(self) -> tuple[Callable[[], None], Sequence[str]]:
        """Read the certificate again; return what uses it for new connections, and its flag: none without TLS. Raises
        StartupFailed."""
        context, certificate, key = self.config.ssl, self.config.ssl_certfile, self.config.ssl_keyfile
        if context is None or certificate is None:
            return lambda: None, ()
        try:
            ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certificate, key, password=lambda: "")
        except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
            raise StartupFailed(f"--ssl-certfile {certificate}, --ssl-keyfile {key}: {error}") from error
        return partial(context.load_cert_chain, certificate, key, password=lambda: ""), ["--ssl-certfile"]

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        context = self.config.ssl
        if context is None:
            await super().startup(sockets)
        else:
            await super().startup(sockets=[])  # without sockets uvicorn starts no server of the event loop
            self.servers = [self._acceptor(sockets or [], context)]  # type: ignore[list-item]  # uvicorn only closes it
        self._on_listening()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        acceptors = [server for server in self.servers if isinstance(server, Acceptor)]
        for acceptor in acceptors:
            acceptor.stop()
        with suppress(TimeoutError):
            async with asyncio.timeout(LINGER_S):
                for acceptor in acceptors:
                    await acceptor.wait_closed()
        await super().shutdown(sockets)

    def _acceptor(self, sockets: list[socket.socket], context: ssl.SSLContext) -> Acceptor:
        connections, loop = self.server_state.connections, asyncio.get_running_loop()
        http: Any = self.config.http_protocol_class
        protocol = partial(http, config=self.config, server_state=self.server_state, app_state=self.lifespan.state)
        max_open, timeout_s = self._bounds.max_connections + self._max_refusing, self._bounds.header_timeout_s

        async def shake_hands(sock: socket.socket, ip: str) -> None:
            try:
                await loop.connect_accepted_socket(protocol, sock, ssl=context, ssl_handshake_timeout=timeout_s)
            except ConnectionAbortedError as error:  # the deadline
                logger.warning("a connection from %s is closed: %s", ip, error)
            except OSError as error:  # ssl.SSLError is one
                logger.debug("TLS handshake with %s failed: %s", ip, error)

        for sock in sockets:
            sock.listen(self.config.backlog)
        return Acceptor(sockets, shake_hands, limit=lambda: max_open - len(connections))


CLIENT_HEADER = b"x-medialane-client"


class _Connection(msgspec.Struct, array_like=True):
    scheme: str
    client: tuple[str, int] | None
    server: tuple[str, int | None] | None


def address_header(scope: Scope) -> tuple[bytes, bytes]:
    """Return the header for the request with this scope."""
    return CLIENT_HEADER, msgspec.json.encode(_Connection(scope["scheme"], scope.get("client"), scope.get("server")))


class RestoredClient:
    """An ASGI app whose requests come from a router, over a socket that only this user reaches: restores what the
    router has seen of the connection."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] in ("http", "websocket"):
            value = header(scope, CLIENT_HEADER)
            scope["headers"] = [(name, text) for name, text in scope["headers"] if name != CLIENT_HEADER]
            scope.update(_restored(value))  # in place, for the server's access log
        await self._app(scope, receive, send)


def _restored(value: bytes) -> dict[str, Any]:
    if not value:  # a probe of the supervisor
        return {}
    seen = msgspec.json.decode(value, type=_Connection)
    return {"scheme": seen.scheme, "client": seen.client, "server": seen.server}
