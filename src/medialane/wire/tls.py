"""TLS of TCP connections: the certificates of the settings, loaded again whenever their files change.

A connection keeps the context with which its handshake began, whatever is loaded meanwhile. A context is therefore
never modified: changed files make new ones. Each context knows its own certificate, so that what a handshake proves
(`authentication.py`) is about the certificate that was presented in it.
"""

from __future__ import annotations

import hashlib
import logging
import os
import ssl
import threading
from typing import NamedTuple, cast

from medialane.runtime.private_files import read, read_private
from medialane.types.errors import AuthenticationFailed, StartupFailed
from medialane.wire.config import RpcConfig

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
