"""What protects TCP connections: the shared secret and TLS (`tls.py`), the rule which addresses need them, and the
handshake on a connection (`authentication.py`), after TLS's if configured.

Beyond loopback both are needed, or `--rpc-insecure` instead of TLS: without TLS the handshake proves that the peer has
the secret, but nothing binds what follows to that peer. Whoever is dialled, at a stale address say, can relay the
handshake to a genuine listener, and then has an authenticated connection to it.

A connection begins with `AuthenticatingProtocol`. When the peer is authenticated, the transport gets the protocol that
uses it, whose `connection_made` is called then: a peer that is not authenticated costs no more than the handshake.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from ipaddress import IPv6Address, ip_address
from typing import cast

from medialane.runtime.private_files import read_private
from medialane.types.errors import AuthenticationFailed, StartupFailed
from medialane.wire.address import TcpAddress, parse_address
from medialane.wire.authentication import Handshake, Role, Secrets
from medialane.wire.config import RpcConfig
from medialane.wire.tls import Tls, channel

MIN_SECRET_BYTES = 16

_FILE, _VARIABLE = "--rpc-secret-file", "MEDIALANE_RPC_SECRET"
_SECRET = f"a shared secret ({_FILE} or {_VARIABLE})"
_TLS = (
    "TLS (--rpc-tls-cert, --rpc-tls-key, --rpc-tls-ca; `medialane certs` makes the files) or, instead of TLS, "
    "--rpc-insecure, with which anyone on the network path can read everything and take over connections"
)


@dataclass(frozen=True)
class Security:
    secrets: Secrets = field(default_factory=Secrets)
    tls: Tls | None = None
    is_insecure: bool = False
    timeout_s: float = RpcConfig().handshake_timeout_s

    @staticmethod
    @cache
    def load(config: RpcConfig) -> Security:
        """Read the files of the settings, once per process. Raises StartupFailed naming the setting and the file."""
        tls = Tls(config) if config.tls_cert or config.tls_key or config.tls_ca else None
        return Security(_secrets(config), tls, config.insecure, config.handshake_timeout_s)

    def check_host(self, host: str, setting: str = "") -> None:
        """Raise StartupFailed, which names the `setting`, if connections to or at `host`, a name or literal address,
        are not protected as they must be. Of names, only `localhost` is trusted to be loopback."""
        if is_loopback(host):
            return
        has_tls = self.tls is not None or self.is_insecure
        missing = " and ".join(what for what, has in ((_SECRET, self.secrets), (_TLS, has_tls)) if not has)
        if missing:
            where = f"{setting}: " if setting else ""
            raise StartupFailed(f"{where}{host} is not a loopback address: it needs {missing}")


@dataclass(frozen=True)
class Authentication:
    """How both sides are authenticated of connections on which `protocol` is spoken by us as `role` with a
    `peer_role`."""

    security: Security
    protocol: str
    role: Role
    peer_role: Role


def is_loopback(host: str) -> bool:
    """Return whether a server that is bound to this address, or has this name, is reached from its machine only."""
    if host == "localhost":
        return True
    try:
        address = ip_address(host)
    except ValueError:
        return False
    mapped = address.ipv4_mapped if isinstance(address, IPv6Address) else None
    return (mapped or address).is_loopback


def check_address(address: str, setting: str, config: RpcConfig) -> None:
    """Validate, before anything starts, an address to connect to, and the files of the settings.

    Raises StartupFailed naming `setting`: malformed, or beyond loopback without the protection that it needs there.
    """
    target, security = parse_address(address, setting, to_connect=True), Security.load(config)
    if isinstance(target, TcpAddress):
        security.check_host(target.host, f"{setting} {address}")


def _secrets(config: RpcConfig) -> Secrets:
    if config.shared_secret and config.secret_file:
        raise StartupFailed(f"{_VARIABLE} and {_FILE} are both set: use one of them")
    if config.shared_secret:
        return _parse_secrets(config.shared_secret.encode(), _VARIABLE)
    if config.secret_file:
        return _parse_secrets(read_private(config.secret_file, _FILE), f"{_FILE} {config.secret_file}")
    return Secrets()


def _parse_secrets(text: bytes, source: str) -> Secrets:
    lines = [stripped for line in text.splitlines() if (stripped := line.strip())]
    if not 1 <= len(lines) <= 2:
        raise StartupFailed(f"{source} has {len(lines)} lines: one secret, or two while it is being replaced")
    if min(map(len, lines)) < MIN_SECRET_BYTES:
        raise StartupFailed(f"{source}: a secret must have at least {MIN_SECRET_BYTES} bytes (openssl rand -hex 32)")
    return Secrets(lines)


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
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        async with asyncio.timeout(authentication.security.timeout_s):
            await _connect(sock, protocol, authentication, dialled_host=dialled_host)
            await protocol.result
    except BaseException as error:
        protocol.abort()
        sock.close()
        if isinstance(error, TimeoutError):
            message = "the peer did not authenticate itself in time (--rpc-handshake-timeout)"
            raise AuthenticationFailed(message) from None
        if isinstance(error, OSError):
            raise _closed_in_handshake(error) from None
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
        given, tls = self._authentication, transport.get_extra_info("ssl_object")
        try:
            self._handshake = Handshake(
                given.security.secrets,
                is_dialler=self._is_dialler,
                protocol=given.protocol,
                role=given.role,
                peer_role=given.peer_role,
                channel=channel(tls, is_dialler=self._is_dialler),
            )
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
        self._fail(_closed_in_handshake(exc))

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


def _closed_in_handshake(error: Exception | None) -> AuthenticationFailed:
    """Return the error for a connection that was closed in the handshake."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return AuthenticationFailed(f"the peer's certificate is not accepted: {error.verify_message}")
    if isinstance(error, ssl.SSLError):
        return AuthenticationFailed(f"TLS failed ({error.reason}): do both sides have --rpc-tls-cert, of one CA?")
    return AuthenticationFailed(
        "the peer closed the connection in the handshake: are --rpc-secret-file and --rpc-tls-ca equal on both sides?"
    )
