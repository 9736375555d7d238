"""The worker's end: listens, and keeps one session per connected gateway."""

from __future__ import annotations

import asyncio
import logging

from medialane.core.errors import StartupFailed, WorkerLost
from medialane.rpc.config import RpcConfig
from medialane.rpc.connection import Connection
from medialane.rpc.handler import Handler
from medialane.rpc.listener import Listener
from medialane.rpc.session import Session

logger = logging.getLogger(__name__)

#: Frames of a peer that has not been welcomed.
MAX_HELLO_BYTES = 64 * 1024
#: Connections that have not shown the token yet. A gateway does so at once; beyond this the oldest one is ended.
MAX_STRANGERS = 64
#: What cancelled tasks that have overrun their deadline still get.
LAST_PAUSE_S = 1.0


class RpcServer:
    """Serves `handler` to every gateway that connects. `serve` once, `close` always."""

    def __init__(self, handler: Handler, config: RpcConfig) -> None:
        self._handler = handler
        self._config = config
        self._listener: Listener | None = None
        self._sessions: dict[Session, asyncio.Task[None]] = {}
        self._strangers: dict[Session, None] = {}  # the oldest first
        self._request_ids: set[str] = set()
        self._closing = False

    @property
    def request_ids(self) -> set[str]:
        return self._request_ids

    @property
    def num_in_flight(self) -> int:
        """Requests that have not been released, of connections that are gone, too."""
        return sum(session.num_running for session in self._sessions)

    async def serve(self, address: str) -> str:
        """Listen; returns at once, with the address to connect to (the port chosen for port 0).

        Raises StartupFailed when the address cannot be had.
        """
        if self._listener is not None or self._closing:
            raise StartupFailed("an RpcServer serves once")
        if address.startswith("tcp://") and not self._config.token:
            logger.warning("listening at %s without a token: whoever reaches it may use this worker", address)
        self._listener = await Listener.listen(address, self._connection)
        return self._listener.address

    async def stop(self) -> None:
        """Fail and cancel every request, refuse registrations, and wait until all requests have let go, for
        `release_timeout_s` at the most. Those that have not are logged; what they read must not be given back, so this
        server goes on listening, and their connections stay. Idempotent.
        """
        self._closing = True
        for session in list(self._sessions):
            session.stop()
        if self._sessions:
            await asyncio.wait(self._sessions.values(), timeout=self._config.release_timeout_s)
        if self._sessions:
            logger.error("%d requests have not let go", self.num_in_flight)

    async def close(self) -> None:
        """Stop, if that was not done before, hang up, and stop listening last.

        A gateway that finds nobody listening takes it that nothing of its requests is read here any more. So where
        requests had not let go after `stop`, end whatever reads for them before this is called. They are
        cancelled again. Idempotent.
        """
        if not self._closing:
            await self.stop()
        await self._end_sessions()
        if self._listener is not None:
            listener, self._listener = self._listener, None
            listener.close()

    def admit(self, session: Session) -> None:
        """Run a new session, unless the worker shuts down (for `Session`)."""
        if self._closing:
            session.end(WorkerLost("the worker shuts down"))
            return
        self._strangers[session] = None
        if len(self._strangers) > MAX_STRANGERS:
            oldest = next(iter(self._strangers))
            del self._strangers[oldest]
            logger.warning("more than %d connections without a token: the oldest is ended", MAX_STRANGERS)
            oldest.end(WorkerLost("too many connections have not shown a token"))
        task = asyncio.get_running_loop().create_task(session.run(), name="rpc session")
        self._sessions[session] = task
        task.add_done_callback(lambda _: self._ended(session, task))

    def recognise(self, session: Session) -> None:
        """Count a gateway, which may have come again. Raises WorkerLost (for `Session`)."""
        self._strangers.pop(session, None)
        gateways = {s.gateway_id for s in self._sessions if s.gateway_id is not None}
        if len(gateways) > self._config.max_connections:
            logger.warning("more than %d gateways", self._config.max_connections)
            session.gateway_id = None
            raise WorkerLost("the worker has as many gateways as it may have")

    async def displace(self, session: Session) -> None:
        """End the gateway's other sessions and wait until nothing of them is left (for `Session`)."""
        others = [s for s in self._sessions if s is not session and s.gateway_id == session.gateway_id]
        for other in others:
            other.end(WorkerLost("the gateway has connected again"))
        if others:
            await asyncio.wait([self._sessions[other] for other in others])

    def _ended(self, session: Session, task: asyncio.Task[None]) -> None:
        del self._sessions[session]
        self._strangers.pop(session, None)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("a session has failed", exc_info=error)

    def _connection(self) -> Connection:
        session = Session(self, self._handler, self._config)
        return Connection(session, self._config, max_frame_bytes=min(MAX_HELLO_BYTES, self._config.max_frame_bytes))

    async def _end_sessions(self) -> None:
        for session in list(self._sessions):
            session.end(WorkerLost("the worker shuts down"))
        for cancelling in (False, True):
            late = set(self._sessions.values())
            if not late:
                return
            for task in late if cancelling else ():
                task.cancel()
            await asyncio.wait(late, timeout=LAST_PAUSE_S)
