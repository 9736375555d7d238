"""The worker's side: listens or connects, and runs one session per connected gateway, each in a task of its own."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from medialane.types.errors import AlreadyJoined, MedialaneError, StartupFailed, WorkerDraining, WorkerLost
from medialane.wire.authentication import Role
from medialane.wire.config import RpcConfig
from medialane.wire.connection import Connection, check_version
from medialane.wire.dial import dial
from medialane.wire.listener import END_TIMEOUT_S, Listener, PendingConnections
from medialane.wire.protocol import PROTOCOL_VERSION, Hello, Join
from medialane.wire.security import Authentication, Security
from medialane.worker.handler import Handler
from medialane.worker.link import Session
from medialane.worker.reports import PendingWorkRelay

logger = logging.getLogger(__name__)

#: For a connection to a gateway: packets to a host that is down or cut off are lost silently.
DIAL_TIMEOUT_S = 3.0


class RpcServer:
    """Serves `handler` to every gateway that connects, after `serve`, and to those that it has joined. Call `close` in
    any case."""

    def __init__(self, handler: Handler, config: RpcConfig) -> None:
        self._handler = handler
        self._config = config
        self._listener: Listener | None = None
        self._sessions: dict[Session, asyncio.Task[None]] = {}
        self._unidentified = PendingConnections(_end_unidentified)
        self._gateway_ids: dict[Session, str] = {}  # of the identified ones
        self._request_ids: set[str] = set()
        self._relay = PendingWorkRelay()
        self._stopped = False

    @property
    def num_gateways(self) -> int:
        """Registered gateways."""
        return len(self._relay)

    @property
    def num_in_flight(self) -> int:
        """Requests that have not been released, including those of closed connections."""
        return sum(session.num_running for session in self._sessions)

    async def serve(self, address: str) -> str:
        """Start listening; return the address to connect to (with the port that the kernel chose for port 0).

        Raises StartupFailed if it cannot listen at the address, or the address needs a secret and there is none.
        """
        if self._listener is not None or self._stopped:
            raise StartupFailed("an RpcServer serves once")
        self._listener = await Listener.listen(address, self._open_connection, self._authentication())
        return self._listener.address

    async def join(self, address: str, join: Join, *, on_hello: Callable[[Hello], None] = lambda _: None) -> None:
        """Connect to the gateway that listens for workers at `address`, and serve it until the connection has ended and
        its requests are released. `on_hello` is called when it has registered.

        Raises what `dial` raises, and if the gateway has not registered: AlreadyJoined if it is connected through
        another address; WorkerLost if it may be tried again soon; another error if it refuses this worker until the
        configuration of either changes.
        """
        session = self._session(join, on_hello)
        try:
            async with asyncio.timeout(DIAL_TIMEOUT_S):
                await dial(address, session.connection, self._authentication())
        except TimeoutError:
            raise WorkerLost("the address does not respond") from None
        if (task := self._sessions.get(session)) is not None:
            await asyncio.wait([task])
        if not session.is_welcome:
            raise session.error or WorkerLost("the connection was lost")

    async def drain(self) -> None:
        """Report at once that the handler is draining, and wait until no request runs."""
        for session in self._sessions:
            session.beat()
        while running := [task for session in self._sessions for task in session.request_tasks]:
            await asyncio.wait(running)

    async def stop(self, error: MedialaneError | None = None) -> None:
        """Fail every request with `error`, by default WorkerDraining, and cancel it; refuse registrations, and wait up
        to `release_timeout_s` until all requests are released. Others are logged; their connections stay open until
        `close`. Idempotent.
        """
        self._stopped = True
        for session in list(self._sessions):
            session.stop(error or WorkerDraining("the worker is shutting down"))
        if self._sessions:
            await asyncio.wait(self._sessions.values(), timeout=self._config.release_timeout_s)
        if self._sessions:
            logger.error("%d requests have not been released", self.num_in_flight)

    async def close(self) -> None:
        """Stop if not yet stopped, close all connections, and stop listening last. Requests that `stop` has not seen
        released are cancelled again. Idempotent."""
        if not self._stopped:
            await self.stop()
        await self._end_sessions()
        if self._listener is not None:
            listener, self._listener = self._listener, None
            await listener.close()

    def _authentication(self) -> Authentication:
        return Authentication(Security.load(self._config), "rpc", Role.WORKER, Role.GATEWAY)

    def _open_connection(self) -> Connection:
        """Return the protocol for an accepted connection."""
        return self._session(None, lambda _: None).connection

    def _session(self, join: Join | None, on_hello: Callable[[Hello], None]) -> Session:
        return Session(
            self._handler,
            self._config,
            request_ids=self._request_ids,
            relay=self._relay,
            on_open=self._admit,
            identify=self._identify,
            join=join,
            on_hello=on_hello,
        )

    def drop_connections(self, error: WorkerLost) -> None:
        """End the session of every gateway, which connects again unless this server is closed."""
        for session in list(self._sessions):
            session.end(error)

    async def _end_sessions(self) -> None:
        """End every session now and wait for it; tasks that take too long are cancelled."""
        self.drop_connections(WorkerLost("the worker is shutting down"))
        for cancelling in (False, True):
            late = set(self._sessions.values())
            if not late:
                return
            for task in late if cancelling else ():
                task.cancel()
            await asyncio.wait(late, timeout=END_TIMEOUT_S)

    def _admit(self, session: Session) -> None:
        """Run a new session, unless the worker is shutting down."""
        if self._stopped:
            session.end(WorkerLost("the worker is shutting down"))
            return
        task = asyncio.get_running_loop().create_task(session.run(), name="rpc session")
        self._sessions[session] = task
        task.add_done_callback(lambda _: self._ended(session, task))
        self._unidentified.add(session, "a process that has not registered")

    async def _identify(self, session: Session, hello: Hello) -> None:
        """Check the version, and end the gateway's other sessions. Raises StartupFailed, WorkerLost."""
        check_version(hello.version, PROTOCOL_VERSION, ("gateway", "worker"))
        self._unidentified.discard(session)
        if len({*self._gateway_ids.values(), hello.gateway_id}) > self._config.max_connections:
            logger.warning("more than %d gateways", self._config.max_connections)
            raise WorkerLost("the worker has reached its limit of gateways")
        self._gateway_ids[session] = hello.gateway_id
        await self._replace_earlier(session, hello.gateway_id)

    async def _replace_earlier(self, session: Session, gateway_id: str) -> None:
        """End the gateway's other sessions and wait until all are released. Raises WorkerLost after a timeout, and
        AlreadyJoined if this worker has another connection to the gateway that it has joined."""
        others = [
            other for other, other_id in self._gateway_ids.items() if other is not session and other_id == gateway_id
        ]
        if session.has_joined and any(other.is_open for other in others):
            raise AlreadyJoined("the worker is connected to this gateway through another address")
        for other in others:
            other.end(WorkerLost("the gateway has reconnected"))
        if not others:
            return
        _, late = await asyncio.wait(
            [self._sessions[other] for other in others], timeout=self._config.release_timeout_s
        )
        if late:
            raise WorkerLost("requests of the gateway's earlier connection have not been released yet")

    def _ended(self, session: Session, task: asyncio.Task[None]) -> None:
        del self._sessions[session]
        self._unidentified.discard(session)
        self._gateway_ids.pop(session, None)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("a session has failed", exc_info=error)


def _end_unidentified(session: Session) -> None:
    session.end(WorkerLost("too many connections are not registered"))
