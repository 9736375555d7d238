"""Connects to a worker or a store."""

from __future__ import annotations

import asyncio
import os
import socket

from medialane.core.errors import NoWorkerReady, StartupFailed, WorkerLost
from medialane.wire.address import TcpAddress, UnixAddress, parse_address
from medialane.wire.authenticating import authenticate
from medialane.wire.security import Authentication


async def dial(address: str, protocol: asyncio.Protocol, authentication: Authentication | None = None) -> None:
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


async def _dial_tcp(target: TcpAddress, protocol: asyncio.Protocol, authentication: Authentication) -> None:
    """Try every address of the host. Raises ConnectionRefusedError only if all of them refused: asyncio itself reports
    a mixture of errors as a plain OSError."""
    loop = asyncio.get_running_loop()
    found = await loop.getaddrinfo(target.host, target.port, type=socket.SOCK_STREAM)
    other: OSError | None = None
    for family, *_, address in found:
        try:
            await _connect(family, str(address[0]), target, protocol=protocol, authentication=authentication)
        except ConnectionRefusedError:
            continue
        except OSError as error:
            other = error
        else:
            return
    raise other or ConnectionRefusedError


async def _connect(
    family: int, ip: str, target: TcpAddress, *, protocol: asyncio.Protocol, authentication: Authentication
) -> None:
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
    await authenticate(sock, lambda: protocol, authentication, dialled_host=target.host)
