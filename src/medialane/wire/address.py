"""Addresses in settings, and of processes: `unix:/path`, `tcp://HOST:PORT` or just `HOST:PORT`.

Each is parsed here, whatever setting it is of. Errors name the setting, and an address that would be right.
"""

from __future__ import annotations

import os
from typing import NamedTuple

from medialane.types.errors import StartupFailed
from medialane.types.setting import ascii_host

#: sockaddr_un.sun_path has 108 bytes including its terminating zero (unix(7)).
MAX_UNIX_PATH_BYTES = 107

#: Longest name of a process in an address.
_MAX_NAME = 200

_TCP = "HOST:PORT, such as 10.0.0.1:7100 or [fd00::1]:7100"
_UNIX = "unix:/path, such as unix:/run/medialane/store.sock"


class UnixAddress(NamedTuple):
    path: str


class TcpAddress(NamedTuple):
    """`host` is an ASCII name or a literal address (IPv6 without brackets); with port 0 the kernel chooses one."""

    host: str
    port: int


def parse_address(address: str, setting: str = "address", *, to_connect: bool = False) -> UnixAddress | TcpAddress:
    """Parse the value of `setting`; `to_connect` to it needs a port other than 0. Raises StartupFailed, and nothing
    else, naming the setting and the reason."""
    if address.startswith("unix:"):
        return parse_unix(address, setting)
    if "/" in address.removeprefix("tcp://") or ":" not in address:
        raise StartupFailed(f"{setting}: {address!r} must be {_TCP}, or {_UNIX}")
    return parse_tcp(address, setting, to_connect=to_connect)


def parse_unix(address: str, setting: str = "address") -> UnixAddress:
    """Parse an address that can only be a unix socket. As `parse_address`."""
    path = address.removeprefix("unix:")
    if path == address or not path.startswith("/") or "\0" in path:
        raise StartupFailed(f"{setting}: {address!r} must be {_UNIX}")
    try:
        num_bytes = len(os.fsencode(path))
    except UnicodeEncodeError:
        raise StartupFailed(f"{setting}: {address!r} must be {_UNIX}") from None
    if num_bytes > MAX_UNIX_PATH_BYTES:
        raise StartupFailed(f"{setting}: the path of {address!r} is longer than {MAX_UNIX_PATH_BYTES} bytes")
    return UnixAddress(path)


def parse_tcp(address: str, setting: str = "address", *, to_connect: bool = False) -> TcpAddress:
    """Parse an address that can only be TCP. As `parse_address`."""
    host, colon, port = address.removeprefix("tcp://").rpartition(":")
    if not (host and colon and port.isascii() and port.isdigit() and len(port) <= 5 and int(port) < 1 << 16):
        raise StartupFailed(f"{setting}: {address!r} must be {_TCP}, with a port below 65536")
    if to_connect and not int(port):
        raise StartupFailed(f"{setting}: {address!r} needs the port that is listened on, not 0")
    bracketed = host.startswith("[") and host.endswith("]")
    host = host[1:-1] if bracketed else host
    if bracketed != (":" in host):
        raise StartupFailed(f"{setting}: {address!r}: IPv6 addresses, and no other hosts, need brackets: {_TCP}")
    try:
        return TcpAddress(ascii_host(host), int(port))
    except ValueError as error:
        raise StartupFailed(f"{setting}: {address!r}: {error}; it must be {_TCP}") from None


def parse_named(text: str, setting: str) -> tuple[str, str]:
    """Parse `NAME=ADDRESS` or `ADDRESS` of a process to connect to; return its name, by default its address, and the
    address. As `parse_address`."""
    name, equals, address = text.partition("=")
    if not equals or ":" in name:
        name, address = "", text
    elif not name.isprintable() or not 0 < len(name) <= _MAX_NAME:
        raise StartupFailed(f"{setting}: {text!r}: a name has 1 to {_MAX_NAME} printable characters: NAME=ADDRESS")
    target = parse_address(address, setting, to_connect=True)
    if isinstance(target, TcpAddress):
        address = format_tcp(*target)
    return name or address.removeprefix("tcp://"), address


def format_tcp(host: str, port: int) -> str:
    """Format an address that `parse_address` accepts."""
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


def consecutive_ports(address: str, count: int, setting: str) -> list[str]:
    """Return `count` TCP addresses with ports that count up. Raises StartupFailed naming `setting`."""
    target = parse_tcp(address, setting)
    if count == 1:
        return [format_tcp(*target)]
    if not 0 < target.port <= 65536 - count:
        raise StartupFailed(f"{setting} needs {count} ports: choose one from 1 to {65536 - count}")
    return [format_tcp(target.host, target.port + i) for i in range(count)]
