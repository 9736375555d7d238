"""The worker's side: listens, and runs one session per connected gateway."""

from __future__ import annotations

import logging

from medialane.core.errors import StartupFailed
from medialane.rpc.config import RpcConfig
from medialane.rpc.handler import Handler
from medialane.rpc.listener import Listener
from medialane.rpc.session_registry import SessionRegistry

logger = logging.getLogger(__name__)


class RpcServer:
    """Serves `handler` to every gateway that connects. Call `serve` once, and `close` in any case."""

    def __init__(self, handler: Handler, config: RpcConfig) -> None:
        self._has_token = bool(config.token)
        self._listener: Listener | None = None
        self._sessions = SessionRegistry(handler, config)
        self._stopped = False

    @property
    def num_in_flight(self) -> int:
        """Requests that have not been released, including those of closed connections."""
        return self._sessions.num_in_flight

    async def serve(self, address: str) -> str:
        """Start listening; return the address to connect to (with the port that the kernel chose for port 0).

        Raises StartupFailed if it cannot listen at the address.
        """
        if self._listener is not None or self._stopped:
            raise StartupFailed("an RpcServer serves once")
        if address.startswith("tcp://") and not self._has_token:
            logger.warning("listening at %s without a token: anyone who can connect may use this worker", address)
        self._listener = await Listener.listen(address, self._sessions.open_connection)
        return self._listener.address

    async def stop(self) -> None:
        """Fail and cancel every request, refuse registrations, and wait up to `release_timeout_s` until all requests
        are released. Others are logged; gateways must not reuse the memory that they read, so this server keeps
        listening, and their connections stay open. Idempotent.
        """
        self._stopped = True
        await self._sessions.stop()
        if any(self._sessions):
            logger.error("%d requests have not been released", self.num_in_flight)

    async def close(self) -> None:
        """Stop if not yet stopped, close all connections, and stop listening last.

        A gateway that finds no listener assumes that its media are no longer read. So if requests were not released by
        `stop`, terminate the engine that reads for them before calling this. They are cancelled again. Idempotent.
        """
        if not self._stopped:
            await self.stop()
        await self._sessions.end()
        if self._listener is not None:
            listener, self._listener = self._listener, None
            listener.close()
