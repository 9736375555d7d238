"""What the store of this host reports about itself."""

from __future__ import annotations

import asyncio
import secrets

from medialane.core.errors import MedialaneError, StartupFailed
from medialane.store.client import StoreClient
from medialane.store.messages import StoreHello, StoreStatus
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


def _ignore(*_: object) -> None:
    """This client has no holds."""
