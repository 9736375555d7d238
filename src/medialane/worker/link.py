"""One gateway's connection at the worker: registration, then requests (`SessionRequests`), administrative calls
(`SessionCalls`), and reports (`SessionReports`).

A session ends, and `run` returns, when the connection is closed **and** all of its requests are released. The Welcome
of the gateway's next session waits for that.

Each administrative call or metric read runs as a task of the session. When the connection is closed, the tasks are
cancelled; a call that the engine has started still completes.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

import msgspec

from medialane.types.admin import clears_encoder_cache
from medialane.types.errors import (
    MedialaneError,
    ProtocolViolation,
    Unavailable,
    WorkerLost,
    from_report,
    report_of,
    to_report,
)
from medialane.types.request import EncoderCard
from medialane.types.stats import MetricChanges
from medialane.wire.config import RpcConfig
from medialane.wire.connection import Connection
from medialane.wire.framing import raw_data
from medialane.wire.protocol import (
    Abort,
    AdminDone,
    AdminFailed,
    Administer,
    Command,
    Drain,
    DropPayload,
    Hello,
    Join,
    MetricValues,
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
from medialane.worker.handler import Handler
from medialane.worker.reports import PendingWorkRelay, SessionReports
from medialane.worker.requests import SessionRequests

logger = logging.getLogger(__name__)

#: Frame size limit before registration.
MAX_HELLO_BYTES = 64 * 1024


class Session:
    """`relay` has the worker's registered gateways. `join` is sent first if this worker connects to the gateway;
    `on_hello` is called when it has registered. `on_open` is called when the connection has opened, and starts
    `run` as a task or calls `end`. `identify` checks the gateway's Hello and returns when its earlier sessions have
    ended; it raises MedialaneError to refuse it."""

    def __init__(
        self,
        handler: Handler,
        config: RpcConfig,
        *,
        request_ids: set[str],
        relay: PendingWorkRelay,
        on_open: Callable[[Session], None],
        identify: Callable[[Session, Hello], Awaitable[None]],
        join: Join | None = None,
        on_hello: Callable[[Hello], None] = lambda _: None,
    ) -> None:
        self._handler = handler
        self._config = config
        self._relay = relay
        self._on_open = on_open
        self._identify = identify
        self._join = join
        self._on_hello = on_hello
        #: Why the gateway was not registered, or was lost.
        self.error: MedialaneError | None = None
        self._hello: asyncio.Future[Hello] = asyncio.get_running_loop().create_future()
        self._registered: Hello | None = None
        self._is_welcome = False
        self._tasks = asyncio.TaskGroup()
        max_hello_bytes = min(MAX_HELLO_BYTES, config.max_frame_bytes)
        self.connection = Connection(self, config, max_frame_bytes=max_hello_bytes)
        self._calls = SessionCalls(handler, self.connection.send, self._tasks, on_encoder_cleared=relay.encoder_cleared)
        self._reports = SessionReports(
            handler,
            self.connection,
            relay=relay,
            max_frame_bytes=config.max_frame_bytes,
            max_pending=config.max_in_flight,
        )
        self._requests = SessionRequests(
            handler,
            self.connection,
            config=config,
            request_ids=request_ids,
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

    @property
    def is_welcome(self) -> bool:
        """Whether the gateway was registered."""
        return self._is_welcome

    @property
    def num_running(self) -> int:
        """Requests that have not been released."""
        return len(self._requests)

    async def run(self) -> None:
        """Return when the connection is closed and its requests are released."""
        try:
            async with self._tasks:
                registration = self._tasks.create_task(self._registration(), name="rpc registration")
                await self.connection.closed.wait()
                registration.cancel()
                self._calls.cancel()
                self._requests.cancel()
        finally:
            self.connection.end(WorkerLost("the session has ended"))

    @property
    def request_tasks(self) -> list[asyncio.Task[None]]:
        return self._requests.tasks

    def stop(self, error: MedialaneError) -> None:
        """Shut down: fail every request with `error` and cancel it, and close the connection when they are released."""
        self._requests.stop(error)
        self._disconnect_if_drained()

    def end(self, error: MedialaneError) -> None:
        """Close the connection, which cancels its requests."""
        self.connection.end(error)

    # The methods below are called by the connection; see connection.Peer.

    def opened(self, connection: Connection) -> None:
        if self._join is not None:
            self.connection.send(self._join)
        self._on_open(self)

    def received(self, frame: memoryview) -> None:
        if (piece := raw_data(frame)) is not None:
            self._requests.payload.add(piece)
            return
        message = decode_to_worker(frame)
        if self._is_welcome:
            self._act(message)
        elif isinstance(message, Hello) and not self._hello.done():
            self._hello.set_result(message)
        elif isinstance(message, Refused) and self.has_joined:
            self.connection.end(from_report(message.error))
        else:
            raise _unexpected(message)

    def beat(self) -> None:
        if self._is_welcome:
            self._reports.report_load()

    def lost(self, error: MedialaneError) -> None:
        if self._is_welcome and self._registered is not None:
            logger.info("gateway %s disconnected: %s", self._registered.gateway_id, error.message)
        self.error = self.error or error
        self._requests.payload.drop()
        self._reports.stop()

    def _act(self, message: ToWorker | UnreadableSubmit) -> None:
        match message:
            case Submit():
                self._requests.submit(message)
            case Payload():
                self._requests.payload.begin(message.sizes)
            case DropPayload():
                self._requests.payload.drop()
            case Abort():
                self._requests.abort(message.request_id)
            case Ping():
                self.connection.send(Pong(message.n))
            case ResyncBlocks() | Pending() | PendingEnded():
                self._reports.received(message)
            case Administer() | ReadMetrics() | Drain():
                self._calls.start(message)
            case UnreadableSubmit():
                self._requests.refuse_unreadable(message)
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
        await self._identify(self, hello)
        self._registered = hello
        return await self._handler.register(hello)

    def _refuse(self, error: MedialaneError) -> None:
        self.error = error
        self.connection.send(Refused(to_report(error)))
        self.connection.close()

    def _welcome(self, hello: Hello, welcome: Welcome) -> None:
        self._is_welcome = True
        self.connection.send(welcome)
        self.connection.accept_large_frames()
        self.connection.start_heartbeat()
        self._reports.start()
        logger.info("gateway %s is registered", hello.gateway_id)
        self._on_hello(hello)

    def _requests_changed(self) -> None:
        self._relay.load_changed()
        self._disconnect_if_drained()

    def _disconnect_if_drained(self) -> None:
        if self._requests.is_drained:
            self.connection.close()


def _unexpected(message: ToWorker | UnreadableSubmit) -> ProtocolViolation:
    return ProtocolViolation(f"unexpected {type(message).__name__}")


#: Most administrative calls in flight on one connection; they are rare.
MAX_CALLS = 64


class SessionCalls:
    """Used on the event loop. The calls run as tasks of `tasks`, which must have been entered."""

    def __init__(
        self,
        handler: Handler,
        send: Callable[[msgspec.Struct], None],
        tasks: asyncio.TaskGroup,
        *,
        on_encoder_cleared: Callable[[EncoderCard | None], None],
    ) -> None:
        self._handler = handler
        self._on_encoder_cleared = on_encoder_cleared
        self._send = send
        self._tasks = tasks
        self._changed_metrics = handler.metrics()
        self._calls: set[asyncio.Task[None]] = set()
        self._reading: asyncio.Task[None] | None = None

    def start(self, message: Command) -> None:
        """Handle `message`, if necessary in a task. Raises ProtocolViolation for a second metric read in flight."""
        if isinstance(message, Drain):
            logger.warning("an operator asks this worker to drain")
            self._handler.drain()
        elif isinstance(message, ReadMetrics):
            if self._reading is not None and not self._reading.done():
                raise ProtocolViolation("metrics were requested while a read is in flight")
            self._reading = self._tasks.create_task(self._read(), name="read metrics")
        elif len(self._calls) >= MAX_CALLS:
            error = Unavailable("the worker has reached its limit of concurrent administrative calls")
            self._send(AdminFailed(message.call_id, to_report(error)))
        else:
            name = f"administrative call {type(message.call).__name__}"
            task = self._tasks.create_task(self._do(message), name=name)
            self._calls.add(task)
            task.add_done_callback(self._calls.discard)

    def cancel(self) -> None:
        """Cancel all tasks: the connection is closed."""
        for task in self._calls:
            task.cancel()
        if self._reading is not None:
            self._reading.cancel()

    async def _do(self, message: Administer) -> None:
        logger.info("administrative call: %s", message.call)
        before = self._handler.encoder
        try:
            result = await self._handler.administer(message.call)
        except asyncio.CancelledError:
            self._note_cleared(before, clears_encoder_cache(message.call))  # the engine may still complete the call
            raise
        except Exception as error:  # noqa: BLE001 - the supervisor: whatever a handler raises fails this call alone
            self._note_cleared(before)
            self._send(AdminFailed(message.call_id, report_of(error, "administrative call")))
        else:
            self._note_cleared(before, clears_encoder_cache(message.call))
            self._send(AdminDone(message.call_id, result))

    def _note_cleared(self, before: EncoderCard | None, is_cleared: bool = False) -> None:
        encoder = self._handler.encoder
        if is_cleared or encoder != before:
            self._on_encoder_cleared(encoder)

    async def _read(self) -> None:
        pieces: list[MetricChanges] = []
        try:
            # In a thread: it takes some milliseconds, which would delay tokens of other requests.
            pieces = await asyncio.to_thread(self._changed_metrics)
        except Exception as error:  # noqa: BLE001 - a third-party collector in the registry
            report_of(error, "reading of metrics")
        for piece in pieces:
            self._send(MetricValues(piece, more=True))
        self._send(MetricValues(MetricChanges()))
