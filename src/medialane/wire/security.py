"""What protects TCP connections: the shared secret and TLS, the rule which addresses need them, and the handshake on a
connection (`authentication.py`), after TLS's if configured.

Beyond loopback both are needed, or `--rpc-insecure` instead of TLS: without TLS the handshake proves that the peer has
the secret, but nothing binds what follows to that peer. Whoever is dialled, at a stale address say, can relay the
handshake to a genuine listener, and then has an authenticated connection to it.

A connection begins with `AuthenticatingProtocol`. When the peer is authenticated, the transport gets the protocol that
uses it, whose `connection_made` is called then: a peer that is not authenticated costs no more than the handshake.

The certificates of the settings are loaded again whenever their files change. A connection keeps the context with which
its handshake began, whatever is loaded meanwhile. A context is therefore never modified: changed files make new ones.
Each context knows its own certificate, so that what a handshake proves is about the certificate that was presented in
it.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import socket
import ssl
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from ipaddress import IPv6Address, ip_address
from typing import NamedTuple, cast

from medialane.runtime.private_files import read, read_private
from medialane.types.errors import AuthenticationFailed, StartupFailed
from medialane.wire.address import TcpAddress, parse_address
from medialane.wire.authentication import Handshake, Role, Secrets
from medialane.wire.config import RpcConfig

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


# TLS

logger = logging.getLogger(__name__)

_FOOTER = b"-----END CERTIFICATE-----"


class TlsContext(ssl.SSLContext):
    """An SSLContext that knows our own certificate, in DER."""

    certificate: bytes


class _Contexts(NamedTuple):
    server: TlsContext
    client: TlsContext


class Tls:
    """Both sides present a certificate of the same CA. May be used by several threads."""

    def __init__(self, config: RpcConfig) -> None:
        """Load the files. Raises StartupFailed naming the setting and the file."""
        config.validate()  # all or none
        self._config = config
        self._lock = threading.Lock()
        self._files = _versions(config)
        self._contexts = _load(config)

    def context(self, *, is_dialler: bool) -> TlsContext:
        """Return the context of a new connection. If the files have changed, they are loaded first, which takes some
        milliseconds; unusable ones are logged, and the ones loaded before stay in use."""
        with self._lock:
            # Before they are read: what is replaced meanwhile is loaded for the next connection.
            if (files := _versions(self._config)) != self._files:
                self._files = files
                self._reload()
            return self._contexts.client if is_dialler else self._contexts.server

    def _reload(self) -> None:
        try:
            self._contexts = _load(self._config)
        except StartupFailed as error:
            logger.error("the new TLS files are not used, those loaded before are: %s", error.message)


def channel(connection: ssl.SSLObject | ssl.SSLSocket | None, *, is_dialler: bool) -> bytes:
    """Return the identity of a TLS connection, of the dialler's and the listener's certificate; empty without TLS.

    Raises AuthenticationFailed if the peer has presented none.
    """
    if connection is None:
        return b""
    theirs = connection.getpeercert(binary_form=True)
    if theirs is None:
        raise AuthenticationFailed("the peer has presented no certificate")
    ours = cast("TlsContext", connection.context).certificate
    ends = (ours, theirs) if is_dialler else (theirs, ours)
    return hashlib.sha256(b"".join(hashlib.sha256(end).digest() for end in ends)).digest()


def _versions(config: RpcConfig) -> list[tuple[int, ...]]:
    """Return what differs when a file has been written or replaced, also behind a symbolic link."""
    return [_version(path) for path in (config.tls_cert, config.tls_key, config.tls_ca)]


def _version(path: str) -> tuple[int, ...]:
    try:
        status = os.stat(path)
    except (OSError, ValueError):  # reading it reports the reason
        return ()
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns


def _load(config: RpcConfig) -> _Contexts:
    certificate = _check_files(config)
    server, client = (_context(config, certificate, is_server=is_server) for is_server in (True, False))
    until = _check_own_certificate(server, client, config.tls_cert)
    client.check_hostname = config.tls_check_hostname
    logger.info("the TLS certificate %s is valid until %s", config.tls_cert, until)
    return _Contexts(server, client)


def _check_files(config: RpcConfig) -> bytes:
    """Return our certificate in DER. Raises StartupFailed naming the file at fault."""
    read_private(config.tls_key, "--rpc-tls-key")
    ca, _ = read(config.tls_ca, "--rpc-tls-ca")
    chain, _ = read(config.tls_cert, "--rpc-tls-cert")
    for content, name in ((ca, f"--rpc-tls-ca {config.tls_ca}"), (chain, f"--rpc-tls-cert {config.tls_cert}")):
        try:
            ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(cadata=content.decode("ascii"))
        except (ssl.SSLError, ValueError) as error:
            raise StartupFailed(f"{name} has no certificates in PEM format") from error
    end = chain.index(_FOOTER) + len(_FOOTER)
    return ssl.PEM_cert_to_DER_cert(chain[chain.index(b"-----BEGIN CERTIFICATE-----") : end].decode("ascii"))


def _context(config: RpcConfig, certificate: bytes, *, is_server: bool) -> TlsContext:
    context = TlsContext(ssl.PROTOCOL_TLS_SERVER if is_server else ssl.PROTOCOL_TLS_CLIENT)
    context.certificate = certificate
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    try:
        context.load_verify_locations(config.tls_ca)
        context.load_cert_chain(config.tls_cert, config.tls_key, password=lambda: "")  # else it asks at the terminal
    except (ssl.SSLError, OSError) as error:
        reason = getattr(error, "reason", None) or "not a private key without a password, in PEM format"
        if reason == "KEY_VALUES_MISMATCH":
            reason = f"not the key of --rpc-tls-cert {config.tls_cert}"
        raise StartupFailed(f"--rpc-tls-key {config.tls_key}: {reason}") from error
    if is_server:
        context.num_tickets = 0  # sessions are not resumed
    return context


def _check_own_certificate(server_context: TlsContext, client_context: TlsContext, path: str) -> str:
    """Connect to ourselves, in memory: return until when the certificate is valid. Raises StartupFailed for one that
    peers would refuse, and for one that differs from `client_context`'s: the file was replaced while it was read."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    server = server_context.wrap_bio(to_server, to_client, server_side=True)
    client = client_context.wrap_bio(to_client, to_server)
    try:
        for side in (client, server, client, server):
            try:
                side.do_handshake()
            except ssl.SSLWantReadError:
                continue
    except ssl.SSLCertVerificationError as error:
        raise StartupFailed(f"--rpc-tls-cert {path} is not accepted by --rpc-tls-ca: {error.verify_message}") from error
    except ssl.SSLError as error:
        raise StartupFailed(f"--rpc-tls-cert {path}: {error.reason}") from error
    certificate = server.getpeercert()
    if certificate is None or {server.getpeercert(True), client.getpeercert(True)} != {client_context.certificate}:
        raise StartupFailed(f"--rpc-tls-cert {path} was replaced while it was read")
    return str(certificate["notAfter"])
