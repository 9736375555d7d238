"""Connects to a process that listens."""

from __future__ import annotations

import asyncio
import os
import socket
from asyncio.staggered import staggered_race
from functools import partial

from medialane.types.errors import NoWorkerReady, StartupFailed, WorkerLost
from medialane.wire.address import TcpAddress, UnixAddress, parse_address
from medialane.wire.security import Authentication, authenticate

#: How long one address of a host is tried before the next is, too.
ATTEMPT_DELAY_S = 0.25


async def dial(address: str, protocol: asyncio.BaseProtocol, authentication: Authentication | None = None) -> None:
    """Connect `protocol` to the process at `address`, over TCP when that is authenticated, which needs
    `authentication`. Raises

    * NoWorkerReady: no process listens at the address, and only then;
    * WorkerLost: the address is unreachable;
    * AuthenticationFailed: the peer is not authenticated, or does not accept us;
    * StartupFailed: the address is malformed, or beyond loopback and there is no secret.

    Cancellation and errors leave no connection behind.
    """
    target = parse_address(address)
    try:
        if isinstance(target, UnixAddress):
            await asyncio.get_running_loop().create_unix_connection(lambda: protocol, target.path)
        else:
            if authentication is None:
                raise StartupFailed(f"{address}: only unix:/path is supported here")
            await _dial_tcp(target, protocol, authentication)
    except (ConnectionRefusedError, FileNotFoundError):
        raise NoWorkerReady("no process listens at this address") from None
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno and error.errno > 0 else str(error)
        raise WorkerLost(f"the address cannot be reached: {reason}") from error


async def _dial_tcp(target: TcpAddress, protocol: asyncio.BaseProtocol, authentication: Authentication) -> None:
    """Connect to the first address of the host that accepts, "happy eyeballs" (RFC 8305): one that does not answer, of
    a dead IPv6 route say, only delays the next. Raises ConnectionRefusedError only if all of them refused."""
    loop = asyncio.get_running_loop()
    addresses = await loop.getaddrinfo(target.host, target.port, type=socket.SOCK_STREAM)
    connected: list[socket.socket] = []
    attempts = [
        partial(_connect, family, str(address[0]), target, authentication, connected=connected)
        for family, *_, address in addresses
    ]
    sock = None
    try:
        sock, _, errors = await staggered_race(attempts, ATTEMPT_DELAY_S)
    finally:
        for other in connected:  # the race may be cancelled when one has won, or two may end at once
            if other is not sock:
                other.close()
    if sock is None:
        others = [error for error in errors if error is not None and not isinstance(error, ConnectionRefusedError)]
        raise others[-1] if others else ConnectionRefusedError
    await authenticate(sock, lambda: protocol, authentication, dialled_host=target.host)


async def _connect(
    family: int, ip: str, target: TcpAddress, authentication: Authentication, *, connected: list[socket.socket]
) -> socket.socket:
    """Return the socket, and add it to `connected`, whose owner owns it. Raises OSError, and StartupFailed if the
    address needs a protection that is not set."""
    authentication.security.check_host(ip)
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setblocking(False)
        await asyncio.get_running_loop().sock_connect(sock, (ip, target.port))
        if sock.getsockname() == sock.getpeername():  # a free port in the ephemeral range may connect to itself (TCP)
            raise ConnectionRefusedError
    except BaseException:
        sock.close()
        raise
    connected.append(sock)
    return sock
