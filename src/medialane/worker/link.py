"""The worker's end of its connections to gateways: it listens or connects (`RpcServer`), and runs one `Session` per
connected gateway, each in a task of its own.

A session is registration, then requests (`SessionRequests`), administrative calls (`SessionCalls`), and reports
(`SessionReports`). It ends, and `run` returns, when the connection is closed **and** all of its requests are released.
The Welcome of the gateway's next session waits for that.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from medialane.types.errors import (
    AlreadyJoined,
    MedialaneError,
    ProtocolViolation,
    StartupFailed,
    WorkerDraining,
    WorkerLost,
    from_report,
    report_of,
    to_report,
)
from medialane.wire.authentication import Role
from medialane.wire.config import RpcConfig
from medialane.wire.connection import Connection, check_version, dial, raw_data
from medialane.wire.listener import END_TIMEOUT_S, Listener, PendingConnections
from medialane.wire.protocol import (
    PROTOCOL_VERSION,
    Abort,
    Administer,
    Drain,
    DropPayload,
    Hello,
    Join,
    Payload,
    Pending,
    PendingEnded,
    Ping,
    Pong,
    ReadMetrics,
    Refused,
    ResyncBlocks,
    Submit,
    ToWorker,
    UnreadableSubmit,
    Welcome,
    decode_to_worker,
)
from medialane.wire.security import Authentication, Security
from medialane.worker.reports import PendingWorkRelay, SessionReports
from medialane.worker.requests import Handler, SessionCalls, SessionRequests

logger = logging.getLogger(__name__)

#: Frame size limit before registration.
MAX_HELLO_BYTES = 64 * 1024


class Session:
    """One gateway's connection. `join` is sent first if this worker connects to the gateway; `on_hello` is called when
    it has registered."""

    def __init__(
        self, server: RpcServer, join: Join | None = None, on_hello: Callable[[Hello], None] = lambda _: None
    ) -> None:
        handler, config = server.handler, server.config
        self._server = server
        self._handler = handler
        self._config = config
        self._join = join
        self._on_hello = on_hello
        #: Why the gateway was not registered, or was lost.
        self.error: MedialaneError | None = None
        self._hello: asyncio.Future[Hello] = asyncio.get_running_loop().create_future()
        self._registered: Hello | None = None
        #: Whether the gateway was registered.
        self.is_welcome = False
        self._tasks = asyncio.TaskGroup()
        max_hello_bytes = min(MAX_HELLO_BYTES, config.max_frame_bytes)
        self.connection = Connection(self, config, max_frame_bytes=max_hello_bytes)
        self._calls = SessionCalls(
            handler, self.connection.send, self._tasks, on_encoder_cleared=server.relay.encoder_cleared
        )
        self._reports = SessionReports(handler, self.connection, config, relay=server.relay)
        self.requests = SessionRequests(
            handler,
            self.connection,
            config=config,
            request_ids=server.request_ids,
            tasks=self._tasks,
            on_change=self._requests_changed,
        )

    @property
    def has_joined(self) -> bool:
        """Whether this worker has connected to the gateway, and not the gateway to this worker."""
        return self._join is not None

    @property
    def is_open(self) -> bool:
        return not self.connection.closed.is_set()

    async def run(self) -> None:
        """Return when the connection is closed and its requests are released."""
        try:
            async with self._tasks:
                registration = self._tasks.create_task(self._registration(), name="rpc registration")
                await self.connection.closed.wait()
                registration.cancel()
                self._calls.cancel()
                self.requests.cancel()
        finally:
            self.connection.end(WorkerLost("the session has ended"))

    def stop(self, error: MedialaneError) -> None:
        """Shut down: fail every request with `error` and cancel it, and close the connection when they are released."""
        self.requests.stop(error)
        self._disconnect_if_drained()

    def end(self, error: MedialaneError) -> None:
        """Close the connection, which cancels its requests."""
        self.connection.end(error)

    # The methods below are called by the connection; see connection.Peer.

    def opened(self, connection: Connection) -> None:
        if self._join is not None:
            self.connection.send(self._join)
        self._server.admit(self)

    def received(self, frame: memoryview) -> None:
        if (piece := raw_data(frame)) is not None:
            self.requests.payload.add(piece)
            return
        message = decode_to_worker(frame)
        if self.is_welcome:
            self._act(message)
        elif isinstance(message, Hello) and not self._hello.done():
            self._hello.set_result(message)
        elif isinstance(message, Refused) and self.has_joined:
            self.connection.end(from_report(message.error))
        else:
            raise _unexpected(message)

    def beat(self) -> None:
        if self.is_welcome:
            self._reports.report_load()

    def lost(self, error: MedialaneError) -> None:
        if self.is_welcome and self._registered is not None:
            logger.info("gateway %s disconnected: %s", self._registered.gateway_id, error.message)
        self.error = self.error or error
        self.requests.payload.drop()
        self._reports.stop()

    def _act(self, message: ToWorker | UnreadableSubmit) -> None:
        match message:
            case Submit():
                self.requests.submit(message)
            case Payload():
                self.requests.payload.begin(message.sizes)
            case DropPayload():
                self.requests.payload.drop()
            case Abort():
                self.requests.abort(message.request_id)
            case Ping():
                self.connection.send(Pong(message.n))
            case ResyncBlocks() | Pending() | PendingEnded():
                self._reports.received(message)
            case Administer() | ReadMetrics() | Drain():
                self._calls.start(message)
            case UnreadableSubmit():
                self.requests.refuse_unreadable(message)
            case Hello() | Refused():
                raise _unexpected(message)

    async def _registration(self) -> None:
        try:
            async with asyncio.timeout(self._config.heartbeat_timeout_s):
                hello = await self._hello
            async with asyncio.timeout(self._config.connect_timeout_s):
                welcome = await self._register(hello)
        except TimeoutError:
            self._refuse(WorkerLost("registration took too long"))
        except Exception as error:  # noqa: BLE001 - the supervisor: whatever a handler raises refuses this gateway alone
            self._refuse(from_report(report_of(error, "registration")))
        else:
            self._welcome(hello, welcome)

    async def _register(self, hello: Hello) -> Welcome:
        await self._server.identify(self, hello)
        self._registered = hello
        return await self._handler.register(hello)

    def _refuse(self, error: MedialaneError) -> None:
        self.error = error
        self.connection.send(Refused(to_report(error)))
        self.connection.close()

    def _welcome(self, hello: Hello, welcome: Welcome) -> None:
        self.is_welcome = True
        self.connection.send(welcome)
        self.connection.accept_large_frames()
        self.connection.start_heartbeat()
        self._reports.start()
        logger.info("gateway %s is registered", hello.gateway_id)
        self._on_hello(hello)

    def _requests_changed(self) -> None:
        self._server.relay.load_changed()
        self._disconnect_if_drained()

    def _disconnect_if_drained(self) -> None:
        if self.requests.is_drained:
            self.connection.close()


def _unexpected(message: ToWorker | UnreadableSubmit) -> ProtocolViolation:
    return ProtocolViolation(f"unexpected {type(message).__name__}")


#: For a connection to a gateway: packets to a host that is down or cut off are lost silently.
DIAL_TIMEOUT_S = 3.0


class RpcServer:
    """Serves `handler` to every gateway that connects, after `serve`, and to gateways that it has joined. Call `close`
    in any case."""

    def __init__(self, handler: Handler, config: RpcConfig) -> None:
        self.handler = handler
        self.config = config
        #: Relays pending work and load between the registered gateways.
        self.relay = PendingWorkRelay()
        #: Of the requests in flight on any connection.
        self.request_ids: set[str] = set()
        self._listener: Listener | None = None
        self._sessions: dict[Session, asyncio.Task[None]] = {}
        self._unidentified: PendingConnections[Session] = PendingConnections(
            lambda session: session.end(WorkerLost("too many connections are not registered"))
        )
        self._gateway_ids: dict[Session, str] = {}  # of the identified ones
        self._stopped = False

    @property
    def num_gateways(self) -> int:
        """Registered gateways."""
        return len(self.relay)

    @property
    def num_in_flight(self) -> int:
        """Requests that have not been released, including requests of closed connections."""
        return sum(len(session.requests) for session in self._sessions)

    async def serve(self, address: str) -> str:
        """Start listening; return the address to connect to (with the port that the kernel chose for port 0).

        Raises StartupFailed if it cannot listen at the address, or the address needs a secret and there is none.
        """
        if self._listener is not None or self._stopped:
            raise StartupFailed("an RpcServer serves once")
        self._listener = await Listener.listen(address, lambda: Session(self).connection, self._authentication())
        return self._listener.address

    async def join(self, address: str, join: Join, *, on_hello: Callable[[Hello], None] = lambda _: None) -> None:
        """Connect to the gateway that listens for workers at `address`, and serve it until the connection has ended and
        its requests are released. `on_hello` is called when it has registered.

        Raises what `dial` raises, and if the gateway has not registered: AlreadyJoined if it is connected through
        another address; WorkerLost if it may be tried again soon; another error if it refuses this worker until the
        configuration of either changes.
        """
        session = Session(self, join, on_hello)
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
        while running := [task for session in self._sessions for task in session.requests.tasks]:
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
            await asyncio.wait(self._sessions.values(), timeout=self.config.release_timeout_s)
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
        return Authentication(Security.load(self.config), "rpc", Role.WORKER, Role.GATEWAY)

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

    def admit(self, session: Session) -> None:
        """Run a new session, unless the worker is shutting down."""
        if self._stopped:
            session.end(WorkerLost("the worker is shutting down"))
            return
        task = asyncio.get_running_loop().create_task(session.run(), name="rpc session")
        self._sessions[session] = task
        task.add_done_callback(lambda _: self._ended(session, task))
        self._unidentified.add(session, "a process that has not registered")

    async def identify(self, session: Session, hello: Hello) -> None:
        """Check the version, and end the gateway's other sessions. Raises StartupFailed, WorkerLost."""
        check_version(hello.version, PROTOCOL_VERSION, ("gateway", "worker"))
        self._unidentified.discard(session)
        if len({*self._gateway_ids.values(), hello.gateway_id}) > self.config.max_connections:
            logger.warning("more than %d gateways", self.config.max_connections)
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
        _, late = await asyncio.wait([self._sessions[other] for other in others], timeout=self.config.release_timeout_s)
        if late:
            raise WorkerLost("requests of the gateway's earlier connection have not been released yet")

    def _ended(self, session: Session, task: asyncio.Task[None]) -> None:
        del self._sessions[session]
        self._unidentified.discard(session)
        self._gateway_ids.pop(session, None)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("a session has failed", exc_info=error)
