"""uvicorn's server, and its HTTP protocol, with limits that they lack: on connections, header size, the time to receive
a header, and the number of pending TLS handshakes (`wire.listener`).

Theory of operation. uvicorn stops reading a connection whose body the app does not read, so what a client can
accumulate before its request reaches the app is a header (or trailer, or chunk extensions), pipelined requests, and
connections. The parser (httptools) buffers an incomplete header without a limit, and uvicorn adds none: its h11 limits
apply to another parser, and `limit_concurrency` counts a connection only after its header is complete. Here each of
them has a limit, and a header has a timeout. The same timeout applies to the rest of a body after the response is
complete: uvicorn would read and discard it forever, or, if the connection ends with the response, nothing, and then
the client's next bytes reset it. Some clients read only once they have sent everything, so `MAX_DISCARDED_BYTES` of
that rest are read; then the connection is reset. The response has arrived by then.

Bodies are limited where they are read (`bodies`). A client that does not read its response holds what that is made of:
it is disconnected when it has read nothing for as long as a body may take.

When the server stops, uvicorn would close idle connections at once, on which a request may be under way.

Behind the name router, the server restores the client's address. The name router's own header has it, not
`X-Forwarded-For`: that stays what the client has sent, so that a gateway trusts it, or not, as without a name router
(`FORWARDED_ALLOW_IPS`, `access`).
"""

from __future__ import annotations

import asyncio
import logging
import resource
import socket
import ssl
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec
import uvicorn
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from medialane.gateway.config import GatewayConfig
from medialane.gateway.http.responses import REQUEST_ID, error_body, error_headers, header, new_id
from medialane.observability.logging import request_id
from medialane.types.errors import (
    ClientTooSlow,
    HeaderTooLarge,
    InvalidBody,
    MedialaneError,
    StartupFailed,
    TargetTooLong,
    TooManyConnections,
)
from medialane.wire.listener import Acceptor

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Receive, Scope, Send

logger = logging.getLogger(__name__)

#: The default of vLLM's `--h11-max-header-count`.
MAX_HEADERS = 256

#: Path and query: what serves requests looks at each of its routes for a path, and shows paths in messages.
MAX_TARGET_BYTES = 8192

#: Pipelined requests on one connection. Each is a task, and a single read may contain thousands.
_MAX_PIPELINED = 16

#: Chunks of a body in one read: each takes half a microsecond, and 256 KiB may contain 40,000 of them.
_MAX_PIECES = 8192

#: Bytes of a body that are read and discarded after its response.
MAX_DISCARDED_BYTES = 1 << 20

#: How long a server that stops waits for the next request on an idle connection.
LINGER_S = 1

#: File descriptors reserved for other uses than client connections: workers, media hosts, preparers, libraries, and
#: connections that are being refused.
_OTHER_FILES = 512


def http_bounds(config: GatewayConfig, *, files_each: int = 1) -> GatewayConfig:
    """Return the limits of a server, whose connections need `files_each`: those configured, with as many connections as
    this process may have."""
    return msgspec.structs.replace(config, max_connections=_connections(config.max_connections, files_each))


def _connections(configured: int, files_each: int) -> int:
    """Raise RLIMIT_NOFILE as needed and return the configured number of connections, or as many as it allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = configured * files_each + _OTHER_FILES
    if soft < needed and hard > soft:
        soft = min(needed, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    if soft >= needed:
        return configured
    allowed = max(soft - _OTHER_FILES, soft // 2) // files_each
    logger.warning(
        "the limit of open files (%d) allows %d connections, fewer than --gateway-max-connections %d",
        soft,
        allowed,
        configured,
    )
    return allowed


class BoundedHttpProtocol(HttpToolsProtocol):
    """One connection. uvicorn's `h11_max_incomplete_event_size` limits header bytes as well as `bounds` do."""

    def __init__(
        self,
        *args: Any,
        bounds: GatewayConfig,
        max_headers: int,
        is_stopping: Callable[[], bool] = bool,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self._bounds = bounds
        self._max_headers = max_headers
        self._is_stopping = is_stopping
        self._max_header_bytes = min(bounds.max_header_bytes, self.config.h11_max_incomplete_event_size or 1 << 62)
        self._deadline: asyncio.TimerHandle | None = None
        self._write_deadline: asyncio.TimerHandle | None = None
        self._header_bytes = 0
        self._num_headers = 0
        #: Bytes fed to the parser since its last callback.
        self._unparsed_bytes = 0
        self._num_pieces = 0
        self._discarded_bytes = 0
        self._error: MedialaneError | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # uvicorn's signature
        super().connection_made(transport)
        if len(self.connections) > self._bounds.max_connections:
            self._refuse(TooManyConnections("too many connections"))
        else:
            self._set_deadline()

    def connection_lost(self, exc: Exception | None) -> None:
        self._clear_deadline()
        self._clear_write_deadline()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        """The client reads more slowly than the response is made: not at all for too long ends the connection, also one
        that is being closed."""
        super().pause_writing()
        self._write_deadline = self.loop.call_later(self._bounds.body_timeout_s, self.transport.abort)

    def resume_writing(self) -> None:
        self._clear_write_deadline()
        super().resume_writing()

    def data_received(self, data: bytes) -> None:
        if self._error is not None:
            return
        self._unparsed_bytes += len(data)
        self._num_pieces = 0
        super().data_received(data)
        if self._unparsed_bytes > self._max_header_bytes:
            self._refuse(self._too_large())

    def send_400_response(self, msg: str) -> None:
        """Called by uvicorn when the parser fails, in particular when one of our callbacks raises."""
        if self._error is not None:
            self._refuse(self._error)
        else:
            super().send_400_response(msg)

    def on_message_begin(self) -> None:
        if len(self.pipeline) >= _MAX_PIPELINED:
            self._fail(TooManyConnections("too many pipelined requests"))
        self._header_bytes = self._num_headers = self._discarded_bytes = 0
        if self._deadline is None:
            self._set_deadline()
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        self._count_header(len(url))
        if self._header_bytes > MAX_TARGET_BYTES:
            self._fail(TargetTooLong(f"the path and query of the request have more than {MAX_TARGET_BYTES} bytes"))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._num_headers += 1
        self._count_header(len(name) + len(value) + 4)
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._clear_deadline()
        self._unparsed_bytes = 0
        super().on_headers_complete()
        if self.cycle is not None:
            self.cycle.transport = _RequestTransport(self.transport, self.cycle)  # type: ignore[assignment]  # in part
            if self._is_stopping():
                self.cycle.keep_alive = False  # the response tells the client

    def on_body(self, body: bytes) -> None:
        self._unparsed_bytes = 0
        self._num_pieces += 1
        if self._num_pieces > _MAX_PIECES:
            self._fail(InvalidBody("the request body is sent in too many small chunks"))
        super().on_body(body)
        if self.cycle.response_complete:
            self._discarded_bytes += len(body)
            if self._discarded_bytes > MAX_DISCARDED_BYTES and not self.transport.is_closing():
                self._reset()

    def on_message_complete(self) -> None:
        self._unparsed_bytes = 0
        self._clear_deadline()
        super().on_message_complete()
        if self.cycle is not None and self.cycle.response_complete and not self.cycle.keep_alive:
            self.transport.close()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.cycle.response_complete and self.cycle.more_body:
            self._set_deadline()

    def _reset(self) -> None:
        """Close the connection without reading what the client has sent. TLS would wait for the client's part of it."""
        if self.transport.get_write_buffer_size():
            self.transport.close()  # sends the rest of the response first
        else:
            self.transport.abort()

    def shutdown(self) -> None:
        """Called by uvicorn when the server has stopped to listen. A client may be sending its next request: only what
        stays idle is closed, any response from now on says `Connection: close`."""
        self.timeout_keep_alive = min(self.timeout_keep_alive, LINGER_S)
        if self.cycle is None or self.cycle.response_complete:
            self._unset_keepalive_if_required()
            self.timeout_keep_alive_task = self.loop.call_later(LINGER_S, self.timeout_keep_alive_handler)
        elif not self.cycle.response_started:
            self.cycle.keep_alive = False

    def _count_header(self, num_bytes: int) -> None:
        self._header_bytes += num_bytes
        if self._header_bytes > self._max_header_bytes or self._num_headers > self._max_headers:
            self._fail(self._too_large())

    def _too_large(self) -> MedialaneError:
        return HeaderTooLarge(
            f"the request header has more than {self._max_header_bytes} bytes or {self._max_headers} lines"
        )

    def _fail(self, error: MedialaneError) -> None:
        """Stop the parser by raising `error`; the rest of its input is discarded."""
        self._error = error
        raise error

    def _set_deadline(self) -> None:
        self._clear_deadline()
        self._deadline = self.loop.call_later(self._bounds.header_timeout_s, self._expire)

    def _clear_write_deadline(self) -> None:
        if self._write_deadline is not None:
            self._write_deadline.cancel()
            self._write_deadline = None

    def _clear_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _expire(self) -> None:
        if self._unparsed_bytes or self.cycle is not None:
            self._refuse(ClientTooSlow("the request header was sent too slowly"))
        else:  # idle: a response would be mistaken for the answer to the client's next request
            self.transport.close()

    def _refuse(self, error: MedialaneError) -> None:
        """Close the connection, after an error response if one can still be sent."""
        self._error = error
        self._clear_deadline()
        if self.transport.is_closing():
            return
        token = request_id.set(new_id())
        logger.warning("connection from %s rejected: %s", self.client[0] if self.client else "unknown", error.message)
        if self.cycle is None or (self.cycle.response_complete and not self.cycle.more_body):
            self.transport.write(_response(error))
        request_id.reset(token)
        self.transport.close()


class _RequestTransport:
    """The transport of one request: a response that ends the connection ends it when the rest of the request's body has
    been received."""

    def __init__(self, transport: asyncio.Transport, cycle: RequestResponseCycle) -> None:
        self._transport = transport
        self._cycle = cycle
        self.write = transport.write
        self.is_closing = transport.is_closing

    def close(self) -> None:
        if not (self._cycle.response_complete and self._cycle.more_body):
            self._transport.close()


def _response(error: MedialaneError) -> bytes:
    body = error_body(error)
    headers = {"content-type": "application/json", "content-length": str(len(body)), "connection": "close"}
    headers[REQUEST_ID.decode()] = request_id.get()
    lines = [f"{name}: {value}\r\n".encode() for name, value in (headers | error_headers(error)).items()]
    return b"".join([STATUS_LINE[error.status], *lines, b"\r\n", body])


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
        bounds: GatewayConfig,
        max_headers: int = MAX_HEADERS,
        is_behind_router: bool = False,
        on_listening: Callable[[], None] = lambda: None,
        max_refusing: int = MAX_REFUSING,
    ) -> None:
        """With `is_behind_router`, requests come from the name router, which names their client."""
        if not config.loaded:
            config.load()
        if is_behind_router:
            config.loaded_app = RestoredClient(config.loaded_app)
            config.timeout_keep_alive = ROUTER_KEEP_ALIVE_S
        config.http_protocol_class = partial(  # type: ignore[assignment]  # a factory
            BoundedHttpProtocol, bounds=bounds, max_headers=max_headers, is_stopping=lambda: self.should_exit
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
    """An ASGI app whose requests come from the name router, over a socket that only this user reaches: restores
    what the name router has seen of the connection."""

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
