"""The worker's end: listens, and keeps one session per connected gateway."""

from __future__ import annotations

import logging

from medialane.core.errors import StartupFailed
from medialane.rpc.config import RpcConfig
from medialane.rpc.handler import Handler
from medialane.rpc.listener import Listener
from medialane.rpc.session_registry import SessionRegistry

logger = logging.getLogger(__name__)


class RpcServer:
    """Serves `handler` to every gateway that connects. `serve` once, `close` always."""

    def __init__(self, handler: Handler, config: RpcConfig) -> None:
        self._has_token = bool(config.token)
        self._listener: Listener | None = None
        self._sessions = SessionRegistry(handler, config)
        self._stopped = False

    @property
    def num_in_flight(self) -> int:
        """Requests that have not been released, of connections that are gone, too."""
        return self._sessions.num_in_flight

    async def serve(self, address: str) -> str:
        """Listen; returns at once, with the address to connect to (the port chosen for port 0).

        Raises StartupFailed when the address cannot be had.
        """
        if self._listener is not None or self._stopped:
            raise StartupFailed("an RpcServer serves once")
        if address.startswith("tcp://") and not self._has_token:
            logger.warning("listening at %s without a token: anyone who can connect may use this worker", address)
        self._listener = await Listener.listen(address, self._sessions.open_connection)
        return self._listener.address

    async def stop(self) -> None:
        """Fail and cancel every request, refuse registrations, and wait until all requests have let go, for
        `release_timeout_s` at the most. Those that have not are logged; what they read must not be given back, so this
        server goes on listening, and their connections stay. Idempotent.
        """
        self._stopped = True
        await self._sessions.stop()
        if any(self._sessions):
            logger.error("%d requests have not been released", self.num_in_flight)

    async def close(self) -> None:
        """Stop, if that was not done before, hang up, and stop listening last.

        A gateway that finds nobody listening takes it that nothing of its requests is read here any more. So where
        requests had not let go after `stop`, end whatever reads for them before this is called. They are
        cancelled again. Idempotent.
        """
        if not self._stopped:
            await self.stop()
        await self._sessions.end()
        if self._listener is not None:
            listener, self._listener = self._listener, None
            listener.close()
