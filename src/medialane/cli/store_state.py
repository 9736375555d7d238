"""What the store of this host reports about itself."""

from __future__ import annotations

import asyncio
import secrets

from medialane.store.client import StoreClient
from medialane.store.messages import StoreHello, StoreStatus
from medialane.types.errors import MedialaneError, StartupFailed
from medialane.types.setting import format_bytes
from medialane.types.stats import HoldRecord
from medialane.wire.config import RpcConfig

_TIMEOUT_S = 3.0


async def read_store(address: str) -> StoreStatus:
    """Ask the store at a unix socket. Raises StartupFailed if it does not answer, or is of another release."""
    hello = StoreHello(client_id=secrets.token_hex(16))
    try:
        async with asyncio.timeout(_TIMEOUT_S):
            client = await StoreClient.connect(
                address, hello, RpcConfig(), holds={}, on_passed=_ignore, on_reclaim=_ignore
            )
            try:
                await client.refresh(_TIMEOUT_S)
            finally:
                await client.close()
    except MedialaneError as error:
        raise StartupFailed(f"{address}: {error.message}") from error
    except TimeoutError as error:
        raise StartupFailed(f"{address}: the media store did not respond within {_TIMEOUT_S:g} s") from error
    if client.status is None:
        raise StartupFailed(f"{address}: the media store closed the connection")
    return client.status


def hold_line(hold: HoldRecord) -> str:
    """Return what is known of a hold, for operators."""
    entry = f"{hold.state} {hold.kind} entry at {hold.offset} ({format_bytes(hold.size_bytes)})"
    key = f", key {hold.key[:12]}" if hold.key else ""
    return f"{hold.age_s:.1f} s: {entry}{key}: {hold.taker or 'the store itself'} [{hold.call_site}]"


def _ignore(*_: object) -> None:
    """This client has no holds."""
