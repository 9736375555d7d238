"""Addresses of workers and gateways: `unix:/path` or `tcp://host:port`."""

from __future__ import annotations

import os
from typing import NamedTuple

from medialane.core.errors import StartupFailed
from medialane.core.host import ascii_host

#: sockaddr_un.sun_path has 108 bytes including its terminating zero (unix(7)).
MAX_UNIX_PATH_BYTES = 107


class UnixAddress(NamedTuple):
    path: str


class TcpAddress(NamedTuple):
    """`host` is an ASCII name or a literal address (IPv6 without brackets); with port 0 the kernel chooses one."""

    host: str
    port: int


def parse_address(address: str) -> UnixAddress | TcpAddress:
    """Parse an address. Raises StartupFailed, and nothing else, with the reason."""
    if address.startswith("unix:"):
        return _unix(address.removeprefix("unix:"))
    if address.startswith("tcp://"):
        return _tcp(address)
    raise StartupFailed(f"worker address {address!r} must be unix:/path or tcp://host:port")


def _unix(path: str) -> UnixAddress:
    if not path.startswith("/") or "\0" in path:
        raise StartupFailed(f"worker address unix:{path} needs an absolute path")
    try:
        num_bytes = len(os.fsencode(path))
    except UnicodeEncodeError:
        raise StartupFailed(f"worker address {'unix:' + path!r} is not a path") from None
    if num_bytes > MAX_UNIX_PATH_BYTES:
        raise StartupFailed(f"the path of worker address unix:{path} is longer than {MAX_UNIX_PATH_BYTES} bytes")
    return UnixAddress(path)


def _tcp(address: str) -> TcpAddress:
    host, colon, port = address.removeprefix("tcp://").rpartition(":")
    if not (host and colon and port.isascii() and port.isdigit() and len(port) <= 5 and int(port) < 1 << 16):
        raise StartupFailed(f"worker address {address!r} must be tcp://host:port, with a port below 65536")
    bracketed = host.startswith("[") and host.endswith("]")
    host = host[1:-1] if bracketed else host
    if bracketed != (":" in host):
        raise StartupFailed(f"worker address {address!r}: IPv6 addresses, and no other hosts, need brackets")
    try:
        return TcpAddress(ascii_host(host), int(port))
    except ValueError as error:
        raise StartupFailed(f"worker address {address!r}: {error}") from None


def format_tcp(host: str, port: int) -> str:
    """Format an address that `parse_address` accepts."""
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


def consecutive_ports(address: str, count: int, setting: str) -> list[str]:
    """Return `count` TCP addresses with ports that count up. Raises StartupFailed naming `setting`."""
    target = parse_address(address)
    if not isinstance(target, TcpAddress):
        raise StartupFailed(f"{setting} must be tcp://host:port")
    if count == 1:
        return [address]
    if not 0 < target.port <= 65536 - count:
        raise StartupFailed(f"{setting} needs {count} ports: choose one from 1 to {65536 - count}")
    return [format_tcp(target.host, target.port + i) for i in range(count)]
