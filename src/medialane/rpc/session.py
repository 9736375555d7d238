"""One gateway's connection at the worker: registration, then one task per request.

A session lives from accept until the connection is gone **and** every request of it has let go; `run` returns then, and
nothing earlier may take its end for granted. That is what the Welcome of the gateway's next session waits for.

A request's task is cancelled at most once: a second cancellation would interrupt the generator while it waits for the
engine to let go. Its done callback, not the task's own code, sends Released: a task that is cancelled before its first
step never runs any code.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
from collections.abc import Callable
from contextlib import aclosing
from typing import Protocol

from medialane.core.errors import (
    ErrorReport,
    GenerationFailed,
    InvalidFeature,
    MedialaneError,
    NoWorkerReady,
    ProtocolViolation,
    StartupFailed,
    WorkerLost,
    to_report,
)
from medialane.core.kv_events import KvChange
from medialane.core.request import EngineRequest, OutputDelta, WorkerLoad
from medialane.rpc.block_feed import BlockFeed
from medialane.rpc.config import RpcConfig
from medialane.rpc.connection import Connection
from medialane.rpc.framing import raw_data
from medialane.rpc.handler import Handler
from medialane.rpc.messages import (
    PROTOCOL_VERSION,
    Abort,
    Administer,
    DropPayload,
    Failed,
    Hello,
    LoadReport,
    Output,
    Payload,
    Ping,
    Pong,
    ReadMetrics,
    Refused,
    Released,
    ResyncBlocks,
    Submit,
    ToWorker,
    UnreadableSubmit,
    Welcome,
    decode_to_worker,
)
from medialane.rpc.payload import IncomingPayload, join
from medialane.rpc.session_calls import SessionCalls

logger = logging.getLogger(__name__)

#: Changes of load are reported after this pause, together.
LOAD_REPORT_PAUSE_S = 0.02


class Host(Protocol):
    """What a session needs to know of the server that it belongs to."""

    @property
    def request_ids(self) -> set[str]:
        """Requests under way on any connection; sessions add and remove theirs."""
        ...

    def admit(self, session: Session) -> None:
        """A connection has come: run the session, or end it."""
        ...

    def recognise(self, session: Session) -> None:
        """The session's gateway has shown the token: count it. Raises WorkerLost if there are too many."""
        ...

    async def displace(self, session: Session) -> None:
        """End the other sessions of the same gateway and wait until nothing of them is left."""
        ...


class _Running:
    """One request under way."""

    def __init__(self, request: EngineRequest) -> None:
        self.request = request
        self.task: asyncio.Task[None] | None = None
        self.finished = False
        self._stopped = False

    def stop(self) -> None:
        if self.task is not None and not self._stopped:
            self._stopped = True
            self.task.cancel()


class Session:
    def __init__(self, host: Host, handler: Handler, config: RpcConfig) -> None:
        self._host = host
        self._handler = handler
        self._config = config
        self._loop = asyncio.get_running_loop()
        self._hello: asyncio.Future[Hello] = self._loop.create_future()
        self._running: dict[str, _Running] = {}
        self._payload = IncomingPayload(config.max_frame_bytes)
        self._feed = BlockFeed(handler.held_blocks, max_frame_bytes=config.max_frame_bytes)
        self._calls = SessionCalls(handler, lambda message: self._connection.send(message), _report)
        self._unwatch: Callable[[], None] | None = None
        self._is_open = False
        self._stopping = False
        self._reported: tuple[WorkerLoad, ...] = ()
        self._reporting: asyncio.TimerHandle | None = None
        self._connection: Connection  # from `opened` on, which comes before everything else
        self._tasks: asyncio.TaskGroup  # from `run` on
        self._known: Hello | None = None  # of whom the handler has been told
        self.gateway_id: str | None = None

    @property
    def num_running(self) -> int:
        return len(self._running)

    async def run(self) -> None:
        """Live until the connection is gone and its requests have let go."""
        try:
            async with asyncio.TaskGroup() as tasks:
                self._tasks = tasks
                registration = tasks.create_task(self._registration(), name="rpc registration")
                await self._connection.closed.wait()
                registration.cancel()
                self._calls.cancel()
                for running in self._running.values():
                    running.stop()
        finally:
            self._connection.end(WorkerLost("the session has ended"))
            if self._known is not None:
                self._handler.left(self._known)

    def stop(self) -> None:
        """The worker shuts down: fail and cancel every request, and hang up when they have let go."""
        self._stopping = True
        report = to_report(WorkerLost("the worker shuts down"))
        for running in self._running.values():
            if not running.finished:
                self._connection.send(Failed(running.request.request_id, report))
                running.finished = True
            running.stop()
        self._hang_up_if_done()

    def end(self, error: MedialaneError) -> None:
        """Drop the connection; the requests are cancelled."""
        self._connection.end(error)

    def opened(self, connection: Connection) -> None:
        self._connection = connection
        self._host.admit(self)

    def received(self, frame: memoryview) -> None:
        if (piece := raw_data(frame)) is not None:
            self._payload.add(piece)
        else:
            self._act(decode_to_worker(frame))

    def _act(self, message: ToWorker | UnreadableSubmit) -> None:
        match message:
            case Submit() if self._is_open:
                self._submit(message)
            case Payload() if self._is_open:
                self._payload.begin(message.sizes)
            case DropPayload() if self._is_open:
                self._payload.drop()
            case Abort() if self._is_open:
                self._abort(message.request_id)
            case Ping() if self._is_open:
                self._connection.send(Pong(message.n))
            case ResyncBlocks() if self._is_open:
                self._feed.resync()
                self._tell_blocks()
            case Administer() | ReadMetrics() if self._is_open:
                self._calls.start(message, self._tasks)
            case UnreadableSubmit() if self._is_open:
                self._refuse_unreadable(message)
            case Hello() if not self._hello.done():
                self._hello.set_result(message)
            case _:
                raise ProtocolViolation(f"{type(message).__name__} is out of place")

    def beat(self) -> None:
        self._reported = tuple(self._handler.loads())
        self._connection.send(LoadReport(self._reported))

    def lost(self, error: MedialaneError) -> None:
        if self._is_open:
            logger.info("gateway %s is gone: %s", self.gateway_id, error.message)
        self._payload.drop()
        if self._unwatch is not None:
            self._unwatch()
            self._unwatch = None
        if self._reporting is not None:
            self._reporting.cancel()

    async def _registration(self) -> None:
        try:
            async with asyncio.timeout(self._config.heartbeat_timeout_s):
                hello = await self._hello
            async with asyncio.timeout(self._config.connect_timeout_s):
                welcome = await self._register(hello)
        except TimeoutError:
            self._hang_up(to_report(WorkerLost("registration took too long")))
        except Exception as error:  # noqa: BLE001 - the supervisor: whatever a handler raises refuses this gateway alone
            self._hang_up(_report(error, "registration"))
        else:
            self._open(welcome)

    async def _register(self, hello: Hello) -> Welcome:
        if hello.version != PROTOCOL_VERSION:
            raise StartupFailed(f"gateway speaks protocol {hello.version}, worker {PROTOCOL_VERSION}: same release?")
        if not hmac.compare_digest(hello.token.encode(), self._config.token.encode()):
            raise StartupFailed("gateway and worker have different tokens")
        self.gateway_id = hello.gateway_id
        self._host.recognise(self)
        try:
            async with asyncio.timeout(self._config.release_timeout_s):
                await self._host.displace(self)
        except TimeoutError:
            raise WorkerLost("requests of the gateway's earlier connection have not let go yet") from None
        self._known = hello
        return await self._handler.register(hello)

    def _open(self, welcome: Welcome) -> None:
        self._is_open = True
        self._connection.send(welcome)
        self._connection.accept_large_frames()
        self._connection.start_heartbeat()
        self.beat()
        if not self._connection.closed.is_set():
            self._unwatch = self._handler.watch_blocks(self._blocks_changed)
            self._tell_blocks()
        logger.info("gateway %s is registered (shared memory: %s)", self.gateway_id, "yes" if welcome.shm else "no")

    def _hang_up(self, report: ErrorReport) -> None:
        self._connection.send(Refused(report))
        self._connection.close()

    def _hang_up_if_done(self) -> None:
        if self._stopping and not self._running:
            self._connection.close()

    def _submit(self, message: Submit) -> None:
        try:
            request = join(message.request, self._payload.take()) if message.with_payload else message.request
        except InvalidFeature as error:
            self._refuse(message.request.request_id, error)
            return
        request_id = request.request_id
        if request_id in self._host.request_ids:
            self._refuse(request_id, GenerationFailed("a request with this id is under way"))
        elif self._stopping:
            self._refuse(request_id, WorkerLost("the worker shuts down"))
        elif len(self._running) >= self._config.max_in_flight:
            self._refuse(request_id, NoWorkerReady("the worker has as many requests as it may have"))
        else:
            self._start(_Running(request))

    def _refuse(self, request_id: str, error: MedialaneError) -> None:
        self._connection.send(Failed(request_id, to_report(error)))
        if request_id not in self._running:  # the promise of Released belongs to the one that runs
            self._connection.send(Released(request_id))

    def _refuse_unreadable(self, message: UnreadableSubmit) -> None:
        if message.with_payload:
            self._payload.drop()
        self._refuse(message.request.request_id, InvalidFeature("the request's content cannot be read"))

    def _start(self, running: _Running) -> None:
        request_id = running.request.request_id
        self._running[request_id] = running
        self._host.request_ids.add(request_id)
        running.task = self._tasks.create_task(self._drive(running), name=f"request {request_id}")
        running.task.add_done_callback(lambda _: self._released(request_id))
        self._load_changed()

    async def _drive(self, running: _Running) -> None:
        try:
            async with aclosing(self._handler.run(running.request)) as deltas:
                async for delta in deltas:
                    self._answer(delta)
                    running.finished = running.finished or delta.finished
                    if self._connection.paused:
                        await self._connection.writable()
            if not running.finished:
                raise GenerationFailed("the engine ended the answer before it was finished")
        except Exception as error:  # noqa: BLE001 - the supervisor: whatever a handler raises fails this request alone
            report = _report(error, "request")
            if not running.finished:
                running.finished = True
                self._connection.send(Failed(running.request.request_id, report))

    def _answer(self, delta: OutputDelta) -> None:
        try:
            self._connection.send(Output(delta))
        except ProtocolViolation:
            raise GenerationFailed("one step of the answer is larger than a message may be") from None

    def _abort(self, request_id: str) -> None:
        running = self._running.get(request_id)
        if running is not None:  # else it crossed its Released
            running.stop()

    def _released(self, request_id: str) -> None:
        del self._running[request_id]
        self._host.request_ids.discard(request_id)
        self._connection.send(Released(request_id))
        self._load_changed()
        self._hang_up_if_done()

    def _blocks_changed(self, change: KvChange) -> None:
        self._feed.push(change)
        self._tell_blocks()

    def _tell_blocks(self) -> None:
        if self._feed.wants_turn():
            self._connection.send_in_pieces(self._feed)

    def _load_changed(self) -> None:
        if self._reporting is None and not self._connection.closed.is_set():
            self._reporting = self._loop.call_later(LOAD_REPORT_PAUSE_S, self._report_load)

    def _report_load(self) -> None:
        self._reporting = None
        if tuple(self._handler.loads()) != self._reported:
            self.beat()


def _report(error: Exception, what: str) -> ErrorReport:
    if isinstance(error, MedialaneError):
        return to_report(error)
    logger.error("%s failed: %r", what, error, exc_info=error)
    return to_report(GenerationFailed(f"the worker failed this {what}"))
