"""Connects to a worker or a store."""

from __future__ import annotations

import asyncio
import os
import socket

from medialane.core.errors import NoWorkerReady, WorkerLost
from medialane.rpc.address import TcpAddress, UnixAddress, parse_address


async def dial(address: str, protocol: asyncio.Protocol) -> None:
    """Connect `protocol` to the process at `address`. Raises

    * NoWorkerReady: no process listens at the address, and only then;
    * WorkerLost: the address is unreachable;
    * StartupFailed: the address is malformed.
    """
    target = parse_address(address)
    try:
        if isinstance(target, UnixAddress):
            await asyncio.get_running_loop().create_unix_connection(lambda: protocol, target.path)
        else:
            await _dial_tcp(target, protocol)
    except (ConnectionRefusedError, FileNotFoundError):
        raise NoWorkerReady("no process listens at this address") from None
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno and error.errno > 0 else str(error)
        raise WorkerLost(f"the address cannot be reached: {reason}") from error


async def _dial_tcp(target: TcpAddress, protocol: asyncio.Protocol) -> None:
    """Try every address of the host. Raises ConnectionRefusedError only if all of them refused: asyncio itself reports
    a mixture of errors as a plain OSError."""
    loop = asyncio.get_running_loop()
    found = await loop.getaddrinfo(target.host, target.port, type=socket.SOCK_STREAM)
    other: OSError | None = None
    for *_, address in found:
        try:
            await loop.create_connection(lambda: protocol, str(address[0]), target.port)
        except ConnectionRefusedError:
            continue
        except OSError as error:
            other = error
        else:
            return
    raise other or ConnectionRefusedError
