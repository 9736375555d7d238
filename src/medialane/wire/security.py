"""What protects TCP connections: the shared secret and TLS (`tls.py`), and the rule which addresses need them.

Beyond loopback both are needed, or `--rpc-insecure` instead of TLS: without TLS the handshake proves that the peer has
the secret, but nothing binds what follows to that peer. Whoever is dialled, at a stale address say, can relay the
handshake to a genuine listener, and then has an authenticated connection to it.
"""

from __future__ import annotations

import ssl
from dataclasses import dataclass, field
from functools import cache
from ipaddress import IPv6Address, ip_address

from medialane.runtime.private_files import read_private
from medialane.types.errors import StartupFailed
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

    def authentication(self, protocol: str, role: Role, peer_role: Role) -> Authentication:
        """Return what a connection needs on which `protocol` is spoken by us as `role` with a `peer_role`."""
        return Authentication(self, protocol, role, peer_role)

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
    """How both sides of one kind of connection are authenticated."""

    security: Security
    protocol: str
    role: Role
    peer_role: Role

    def handshake(self, *, is_dialler: bool, tls: ssl.SSLObject | ssl.SSLSocket | None) -> Handshake:
        """Start the handshake, after that of `tls`, if the connection uses it. Raises AuthenticationFailed."""
        return Handshake(
            self.security.secrets,
            is_dialler=is_dialler,
            protocol=self.protocol,
            role=self.role,
            peer_role=self.peer_role,
            channel=channel(tls, is_dialler=is_dialler),
        )


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
