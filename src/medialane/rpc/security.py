"""What protects TCP connections: the shared secret and the TLS certificates, read from the files of the settings; and
the rule that addresses beyond loopback need a secret."""

from __future__ import annotations

import hashlib
import os
import ssl
import stat
from dataclasses import dataclass, field
from functools import cache
from ipaddress import IPv6Address, ip_address

from medialane.core.errors import AuthenticationFailed, StartupFailed
from medialane.rpc.address import TcpAddress, parse_address
from medialane.rpc.authentication import Handshake, Role, Secrets
from medialane.rpc.config import RpcConfig

MIN_SECRET_BYTES = 16
#: Largest file that is read: a secret, or a chain of certificates.
_MAX_FILE_BYTES = 1 << 20

_FILE, _VARIABLE = "--rpc-secret-file", "MEDIALANE_RPC_SECRET"


@dataclass(frozen=True)
class Tls:
    """Both sides present a certificate of the same CA. `certificate` is our own, in DER."""

    server: ssl.SSLContext
    client: ssl.SSLContext
    certificate: bytes = field(repr=False)

    def context(self, *, is_dialler: bool) -> ssl.SSLContext:
        return self.client if is_dialler else self.server

    def channel(self, peer_certificate: bytes | None, *, is_dialler: bool) -> bytes:
        """Return the identity of a TLS connection: of the dialler's and the listener's certificate."""
        if peer_certificate is None:
            raise AuthenticationFailed("the peer has presented no certificate")
        ends = (self.certificate, peer_certificate) if is_dialler else (peer_certificate, self.certificate)
        return hashlib.sha256(b"".join(hashlib.sha256(end).digest() for end in ends)).digest()


@dataclass(frozen=True)
class Security:
    secrets: Secrets = field(default_factory=Secrets)
    tls: Tls | None = None
    timeout_s: float = RpcConfig().handshake_timeout_s

    @staticmethod
    @cache
    def load(config: RpcConfig) -> Security:
        """Read the files of the settings, once per process. Raises StartupFailed naming the setting and the file."""
        return Security(_secrets(config), _tls(config), config.handshake_timeout_s)

    def authentication(self, protocol: str, role: Role, peer_role: Role) -> Authentication:
        """Return what a connection needs on which `protocol` is spoken by us as `role` with a `peer_role`."""
        return Authentication(self, protocol, role, peer_role)

    def check_host(self, host: str) -> None:
        """Raise StartupFailed if connections to or at `host`, a name or literal address, need a secret, and none is
        set. Of names, only `localhost` is trusted to be loopback."""
        if not self.secrets and not is_loopback(host):
            raise StartupFailed(f"{host} is not a loopback address: set a shared secret ({_FILE} or {_VARIABLE})")


@dataclass(frozen=True)
class Authentication:
    """How both sides of one kind of connection are authenticated."""

    security: Security
    protocol: str
    role: Role
    peer_role: Role

    def handshake(self, *, is_dialler: bool, peer_certificate: bytes | None) -> Handshake:
        """Start the handshake, after that of TLS. Raises AuthenticationFailed."""
        tls = self.security.tls
        return Handshake(
            self.security.secrets,
            is_dialler=is_dialler,
            protocol=self.protocol,
            role=self.role,
            peer_role=self.peer_role,
            channel=b"" if tls is None else tls.channel(peer_certificate, is_dialler=is_dialler),
        )


def is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        address = ip_address(host)
    except ValueError:
        return False
    mapped = address.ipv4_mapped if isinstance(address, IPv6Address) else None
    return (mapped or address).is_loopback


def check_address(address: str, config: RpcConfig) -> None:
    """Validate, before anything starts, an address to listen at or to connect to, and the files of the settings.

    Raises StartupFailed: malformed, or beyond loopback without a secret.
    """
    target = parse_address(address)
    security = Security.load(config)
    if isinstance(target, TcpAddress):
        security.check_host(target.host)


def _secrets(config: RpcConfig) -> Secrets:
    if config.shared_secret and config.secret_file:
        raise StartupFailed(f"{_VARIABLE} and {_FILE} are both set: use one of them")
    if config.shared_secret:
        return _parse_secrets(config.shared_secret.encode(), _VARIABLE)
    if config.secret_file:
        return _parse_secrets(_read_private(config.secret_file, _FILE), f"{_FILE} {config.secret_file}")
    return Secrets()


def _parse_secrets(text: bytes, source: str) -> Secrets:
    lines = [stripped for line in text.splitlines() if (stripped := line.strip())]
    if not 1 <= len(lines) <= 2:
        raise StartupFailed(f"{source} has {len(lines)} lines: one secret, or two while it is being replaced")
    if min(map(len, lines)) < MIN_SECRET_BYTES:
        raise StartupFailed(f"{source}: a secret must have at least {MIN_SECRET_BYTES} bytes (openssl rand -hex 32)")
    return Secrets(lines)


def _read(path: str, setting: str) -> tuple[bytes, int]:
    """Return the content and the mode of a regular file. Raises StartupFailed."""
    try:
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            if not stat.S_ISREG(mode):
                raise StartupFailed(f"{setting} {path} is not a file")
            return file.read(_MAX_FILE_BYTES), stat.S_IMODE(mode)
    except (OSError, ValueError) as error:  # ValueError: a zero byte in the path
        reason = os.strerror(error.errno) if isinstance(error, OSError) and error.errno else str(error)
        raise StartupFailed(f"cannot read {setting} {path}: {reason}") from error


def _read_private(path: str, setting: str) -> bytes:
    content, mode = _read(path, setting)
    if mode & stat.S_IRWXO:
        raise StartupFailed(f"{setting} {path} has mode {mode:04o}, so any user can access it: chmod o-rwx")
    return content


def _tls(config: RpcConfig) -> Tls | None:
    if not (config.tls_cert or config.tls_key or config.tls_ca):
        return None
    config.validate()  # all or none
    certificate = _check_files(config)
    server, client = _context(config, is_server=True), _context(config, is_server=False)
    _check_own_certificate(server, client, config.tls_cert)
    client.check_hostname = config.tls_check_hostname
    return Tls(server, client, certificate)


def _check_files(config: RpcConfig) -> bytes:
    """Return our certificate in DER. Raises StartupFailed naming the file at fault."""
    _read_private(config.tls_key, "--rpc-tls-key")
    ca, _ = _read(config.tls_ca, "--rpc-tls-ca")
    chain, _ = _read(config.tls_cert, "--rpc-tls-cert")
    for content, name in ((ca, f"--rpc-tls-ca {config.tls_ca}"), (chain, f"--rpc-tls-cert {config.tls_cert}")):
        try:
            ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(cadata=content.decode("ascii"))
        except (ssl.SSLError, ValueError) as error:
            raise StartupFailed(f"{name} has no certificates in PEM format") from error
    end = chain.index(footer := b"-----END CERTIFICATE-----") + len(footer)
    return ssl.PEM_cert_to_DER_cert(chain[chain.index(b"-----BEGIN CERTIFICATE-----") : end].decode("ascii"))


def _context(config: RpcConfig, *, is_server: bool) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if is_server else ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_verify_locations(config.tls_ca)
    try:
        context.load_cert_chain(config.tls_cert, config.tls_key, password=lambda: "")  # else it asks at the terminal
    except (ssl.SSLError, OSError) as error:
        reason = getattr(error, "reason", None) or "not a private key without a password, in PEM format"
        if reason == "KEY_VALUES_MISMATCH":
            reason = f"not the key of --rpc-tls-cert {config.tls_cert}"
        raise StartupFailed(f"--rpc-tls-key {config.tls_key}: {reason}") from error
    if is_server:
        context.num_tickets = 0  # sessions are not resumed
    return context


def _check_own_certificate(server_context: ssl.SSLContext, client_context: ssl.SSLContext, path: str) -> None:
    """Connect to ourselves, in memory: raise StartupFailed for a certificate that peers would refuse."""
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
