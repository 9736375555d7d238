"""`medialane store --replace`: has the store at an address hand over to the one that starts.

The running store compares whose arena the next one would take over. If that is its own, it exits at once, as if it were
killed: clients that write go on writing, and nothing in the arena changes until the next store has adopted it. So there
is one way in which stores succeed each other. If not, it refuses, and runs on.
"""

from __future__ import annotations

import asyncio
import os
import secrets
from contextlib import suppress

from medialane.core.errors import MedialaneError, StartupFailed
from medialane.store.client import StoreClient
from medialane.store.messages import StoreHello
from medialane.wire.address import parse_unix
from medialane.wire.config import RpcConfig
from medialane.wire.listener import has_listener

_EXIT_TIMEOUT_S = 10.0


def serve_lock(address: str) -> str:
    """Return the lock of the `medialane serve` in whose folder a store listens; empty if there is none."""
    lock = parse_unix(address).path.rpartition("/")[0] + "/owner.lock"
    return lock if os.path.exists(lock) else ""


def check_replace(address: str) -> None:
    """Raise StartupFailed unless a store runs at `address` that may be replaced by hand."""
    if serve_lock(address):
        raise StartupFailed(f"--replace: `medialane serve` runs the store at {address}, and would start it again")
    try:
        is_running = has_listener(parse_unix(address).path)
    except OSError as error:
        raise StartupFailed(f"--replace: {address}: {error.strerror}") from error
    if not is_running:
        raise StartupFailed(f"--replace: no store runs at {address}: start one without --replace")


async def replace(address: str, lineage: bytes, config: RpcConfig) -> None:
    """Return when the store at `address` has handed over, and its process has exited. Raises StartupFailed if it runs
    on."""
    hello = StoreHello(client_id=secrets.token_hex(16), replaces=lineage)
    try:
        client = await StoreClient.connect(address, hello, config, holds={}, on_passed=_ignore, on_reclaim=_ignore)
        try:
            async with asyncio.timeout(_EXIT_TIMEOUT_S):
                await _exit_of(client.welcome.pid)
                await client.closed.wait()
        finally:
            await client.close()
    except MedialaneError as error:
        raise StartupFailed(f"--replace: {address}: {error.message}") from error
    except TimeoutError as error:
        raise StartupFailed(f"--replace: {address}: the store did not exit within {_EXIT_TIMEOUT_S:g} s") from error


async def _exit_of(pid: int) -> None:
    """Wait until a process has exited, and so has no locks. No wait for one in a PID namespace that is invisible."""
    with suppress(ProcessLookupError):
        pidfd = os.pidfd_open(pid)
        loop, exited = asyncio.get_running_loop(), asyncio.Event()
        loop.add_reader(pidfd, exited.set)
        try:
            await exited.wait()
        finally:
            loop.remove_reader(pidfd)
            os.close(pidfd)


def _ignore(*_: object) -> None:
    """This client has no holds."""
