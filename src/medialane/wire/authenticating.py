"""The handshake on asyncio's TCP connections (`authentication.py`), with TLS before it if configured.

A connection begins with `AuthenticatingProtocol`. When the peer is authenticated, the transport gets the protocol that
uses it, whose `connection_made` is called then: a peer that is not authenticated costs no more than the handshake.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import cast

from medialane.types.errors import AuthenticationFailed
from medialane.wire.authentication import Handshake
from medialane.wire.security import Authentication


async def authenticate(
    sock: socket.socket,
    make_protocol: Callable[[], asyncio.BaseProtocol],
    authentication: Authentication,
    *,
    dialled_host: str | None = None,
) -> None:
    """Authenticate the peer of a connected non-blocking socket, then connect `make_protocol()` to it.

    `dialled_host` is None on the listener's side. Owns `sock`. Raises AuthenticationFailed, at the latest after
    `--rpc-handshake-timeout`. Cancellation and errors leave no connection behind.
    """
    protocol = AuthenticatingProtocol(make_protocol, authentication, is_dialler=dialled_host is not None)
    try:
        with handshake_errors():
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            async with asyncio.timeout(authentication.security.timeout_s):
                await _connect(sock, protocol, authentication, dialled_host=dialled_host)
                await protocol.result
    except BaseException:
        protocol.abort()
        sock.close()
        raise


async def _connect(
    sock: socket.socket, protocol: asyncio.BaseProtocol, authentication: Authentication, *, dialled_host: str | None
) -> None:
    """Connect `protocol`, over TLS if configured: returns after the handshake of TLS."""
    loop, security = asyncio.get_running_loop(), authentication.security
    context = security.tls.context(is_dialler=dialled_host is not None) if security.tls is not None else None
    timeout_s = security.timeout_s + 1 if context is not None else None  # the caller's timeout comes first
    if dialled_host is None:
        await loop.connect_accepted_socket(
            lambda: protocol, sock, ssl=context, ssl_handshake_timeout=timeout_s, ssl_shutdown_timeout=timeout_s
        )
    else:
        await loop.create_connection(
            lambda: protocol,
            sock=sock,
            ssl=context,
            server_hostname=dialled_host if context is not None else None,
            ssl_handshake_timeout=timeout_s,
            ssl_shutdown_timeout=timeout_s,
        )


class AuthenticatingProtocol(asyncio.Protocol):
    """Authenticates the peer, then gives the transport to a new `make_protocol()`. `result` is done then, or has the
    error: the caller calls `abort`."""

    def __init__(
        self, make_protocol: Callable[[], asyncio.BaseProtocol], authentication: Authentication, *, is_dialler: bool
    ) -> None:
        self._make_protocol = make_protocol
        self._authentication = authentication
        self._is_dialler = is_dialler
        self._transport: asyncio.Transport | None = None
        self._handshake: Handshake | None = None
        self.result: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def abort(self) -> None:
        """Disconnect the peer without telling it why."""
        self.result.cancel()
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        if self.result.done():  # aborted while connecting
            self._transport.abort()
            return
        tls = transport.get_extra_info("ssl_object")
        try:
            self._handshake = self._authentication.handshake(is_dialler=self._is_dialler, tls=tls)
        except AuthenticationFailed as error:
            self._fail(error)
            return
        self._transport.write(self._handshake.greeting)

    def data_received(self, data: bytes) -> None:
        if self._handshake is None or self._transport is None or self.result.done():
            return
        try:
            answer = self._handshake.receive(data)
        except AuthenticationFailed as error:
            self._fail(error)
            return
        if answer:
            self._transport.write(answer)
        if self._handshake.is_complete:
            self._complete(self._transport, self._handshake.rest)

    def connection_lost(self, exc: Exception | None) -> None:
        self._fail(closed_in_handshake(exc))

    def _complete(self, transport: asyncio.Transport, rest: bytes) -> None:
        self.result.set_result(None)
        protocol = self._make_protocol()
        transport.set_protocol(protocol)
        protocol.connection_made(transport)
        if rest and not transport.is_closing():
            cast("asyncio.Protocol", protocol).data_received(rest)  # one with buffers must have the method, too

    def _fail(self, error: AuthenticationFailed) -> None:
        if self._transport is not None:
            self._transport.abort()
        if not self.result.done():
            self.result.set_exception(error)


@contextmanager
def handshake_errors() -> Iterator[None]:
    """Convert a timeout, and errors of the socket and of TLS, to AuthenticationFailed."""
    try:
        yield
    except TimeoutError:
        message = "the peer did not authenticate itself in time (--rpc-handshake-timeout)"
        raise AuthenticationFailed(message) from None
    except OSError as error:
        raise closed_in_handshake(error) from None


def closed_in_handshake(error: Exception | None) -> AuthenticationFailed:
    """Return the error for a connection that was closed in the handshake."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return AuthenticationFailed(f"the peer's certificate is not accepted: {error.verify_message}")
    if isinstance(error, ssl.SSLError):
        return AuthenticationFailed(f"TLS failed ({error.reason}): do both sides have --rpc-tls-cert, of one CA?")
    return AuthenticationFailed(
        "the peer closed the connection in the handshake: are --rpc-secret-file and --rpc-tls-ca equal on both sides?"
    )
