"""The requests of one gateway at the worker, one task each, from Submit to Released (`SessionRequests`); and its
administrative calls and reads of metrics (`SessionCalls`). What the worker implements for them is `Handler`.

A request's task is cancelled at most once: a second cancellation would interrupt the generator while it waits for the
engine to release the request. Its last step sends Released, so in the same write as the final Output; its done
callback does so otherwise: a task that is cancelled before its first step never runs any code.

Each administrative call or metric read runs as a task, too. When the connection is closed, the tasks are cancelled; a
call that the engine has started still completes.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from typing import Protocol

import msgspec

from medialane.observability.logging import request_id, trace_id, trace_of
from medialane.runtime.tasks import TAKER
from medialane.types.admin import AdminCall, AdminResult, clears_encoder_cache
from medialane.types.errors import (
    ErrorReport,
    GenerationFailed,
    InvalidFeature,
    MedialaneError,
    Permits,
    ProtocolViolation,
    Unavailable,
    WorkerBusy,
    WorkerDraining,
    report_of,
    to_report,
)
from medialane.types.kv_blocks import KvChange
from medialane.types.request import EncoderCard, EngineRequest, OutputDelta, WorkerLoad
from medialane.types.stats import MetricChanges
from medialane.wire.config import RpcConfig
from medialane.wire.connection import Connection
from medialane.wire.payload import IncomingPayload, check_size, join
from medialane.wire.protocol import (
    AdminDone,
    AdminFailed,
    Administer,
    Command,
    Drain,
    Failed,
    Hello,
    MetricValues,
    Output,
    ReadMetrics,
    Released,
    Submit,
    UnreadableSubmit,
    Welcome,
)

logger = logging.getLogger(__name__)


class _Running:
    """One request in flight."""

    def __init__(self, request: EngineRequest) -> None:
        self.request = request
        self.task: asyncio.Task[None] | None = None
        self.finished = False
        self._stopped = False

    def stop(self) -> None:
        if self.task is not None and not self._stopped:
            self._stopped = True
            # Not at once: it must begin, or nobody says that it leaves KV blocks unread.
            asyncio.get_running_loop().call_soon(self.task.cancel)


class SessionRequests:
    """`len` is the number of requests that have not been released; `payload` receives the tensors of the next one.

    `request_ids` are in flight on any connection of the worker: this adds and removes its own. The requests run
    as tasks of `tasks`, which must have been entered. `on_change` is called when one has started or was released.
    """

    def __init__(
        self,
        handler: Handler,
        connection: Connection,
        *,
        config: RpcConfig,
        request_ids: set[str],
        tasks: asyncio.TaskGroup,
        on_change: Callable[[], None],
    ) -> None:
        self._handler = handler
        self._connection = connection
        self._max_in_flight = config.max_in_flight
        self._max_pooled_bytes = config.max_pooled_bytes
        self._request_ids = request_ids
        self._tasks = tasks
        self._on_change = on_change
        self._running: dict[str, _Running] = {}
        self._permits = Permits()
        self._stopping = False
        self.payload = IncomingPayload(config.max_frame_bytes)

    def __len__(self) -> int:
        return len(self._running)

    @property
    def is_drained(self) -> bool:
        """Whether `stop` was called and everything has been released."""
        return self._stopping and not self._running

    @property
    def tasks(self) -> list[asyncio.Task[None]]:
        """The tasks of running requests."""
        return [running.task for running in self._running.values() if running.task is not None]

    def submit(self, message: Submit) -> None:
        """Start the request, or refuse it."""
        try:
            request = join(message.request, self.payload.take()) if message.with_payload else message.request
            self._check(request.request_id)
        except MedialaneError as error:
            self._refuse(message.request.request_id, error)
        else:
            self._start(_Running(request))

    def refuse_unreadable(self, message: UnreadableSubmit) -> None:
        if message.with_payload:
            self.payload.drop()
        self._refuse(message.request.request_id, InvalidFeature("the request cannot be decoded"))

    def abort(self, request_id: str) -> None:
        running = self._running.get(request_id)
        if running is not None:  # else Released was sent before the abort arrived
            running.stop()

    def stop(self, error: MedialaneError) -> None:
        """Shut down: fail every request with `error` and cancel it, refuse new ones."""
        self._stopping = True
        report = to_report(error)
        for running in self._running.values():
            self._fail(running, report)
            running.stop()

    def cancel(self) -> None:
        """Cancel every request: the connection is closed."""
        for running in self._running.values():
            running.stop()

    def _check(self, request_id: str) -> None:
        """Raise why a request with this id cannot be started, if it cannot."""
        if request_id in self._request_ids:
            raise GenerationFailed("a request with this id is already running")
        if self._stopping or self._handler.is_draining:
            raise WorkerDraining("the worker is shutting down")
        if len(self._running) >= self._max_in_flight:
            message = "the worker has reached its limit of concurrent requests"
            raise WorkerBusy(message, retry_after_s=self._permits.promise())

    def _refuse(self, request_id: str, error: MedialaneError) -> None:
        self._connection.send(Failed(request_id, to_report(error)))
        if request_id not in self._running:  # else Released belongs to the running request with this id
            self._connection.send(Released(request_id))

    def _start(self, running: _Running) -> None:
        request_id = running.request.request_id
        self._running[request_id] = running
        self._permits.take(request_id)
        self._request_ids.add(request_id)
        running.task = self._tasks.create_task(self._run(running), name=f"request {request_id}")
        running.task.add_done_callback(lambda _: self._ended(running))
        self._on_change()

    async def _run(self, running: _Running) -> None:
        TAKER.set(running.request.request_id)
        request_id.set(running.request.request_id)
        trace_id.set(trace_of((running.request.trace_headers or {}).get("traceparent", "")))
        try:
            async with aclosing(self._handler.run(running.request)) as deltas:
                async for delta in deltas:
                    self._send(delta)
                    running.finished = running.finished or delta.finished
                    if self._connection.paused:
                        await self._connection.writable()
            if not running.finished:
                raise GenerationFailed("the engine ended the output before it was finished")
        except WorkerBusy as error:  # it had no place, and waits for a running one
            self._permits.withdraw(running.request.request_id)
            self._fail(running, to_report(WorkerBusy(error.message, retry_after_s=self._permits.promise())))
        except Exception as error:  # noqa: BLE001 - the supervisor: whatever a handler raises fails this request alone
            self._fail(running, report_of(error, "request"))
        self._released(running)

    def _send(self, delta: OutputDelta) -> None:
        if delta.pooled is not None:
            check_size(delta.pooled, self._max_pooled_bytes)
        try:
            self._connection.send(Output(delta))
        except ProtocolViolation:
            raise GenerationFailed("one output step exceeds the message size limit") from None

    def _fail(self, running: _Running, report: ErrorReport) -> None:
        if not running.finished:
            running.finished = True
            self._connection.send(Failed(running.request.request_id, report))

    def _ended(self, running: _Running) -> None:
        # A cancelled task keeps its exception, whose frames refer to `running` and to the tensors that were being read:
        # a cycle, which would keep shared memory mapped until the next full garbage collection.
        running.task = None
        self._released(running)

    def _released(self, running: _Running) -> None:
        """Idempotent."""
        request_id = running.request.request_id
        if self._running.get(request_id) is not running:
            return
        del self._running[request_id]
        self._permits.free(request_id)
        self._request_ids.discard(request_id)
        self._connection.send(Released(request_id))
        self._on_change()


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


class Handler(Protocol):
    """The interface that a worker implements for its connections; called from the event loop only. Request ids are
    unique across connections."""

    @property
    def encoder(self) -> EncoderCard | None:
        """The engine's encoder now: an administrative call may replace the card's."""
        ...

    @property
    def is_stalled(self) -> bool:
        """Whether the engine hangs: requests are better sent to another worker."""
        ...

    @property
    def is_draining(self) -> bool:
        """Whether the worker stops, and takes no new requests."""
        ...

    @property
    def has_unknown_blocks(self) -> bool:
        """Whether the engine's KV blocks cannot be compared with prompts, so that none are reported."""
        ...

    async def register(self, hello: Hello) -> Welcome:
        """Register a gateway whose version is ours and whose earlier requests are all released.

        Raises MedialaneError to refuse it. Cancelled when the gateway disconnects or the timeout expires; the gateway
        may then register again.
        """
        ...

    def drain(self) -> None:
        """Stop: accept no new requests, and end when the running ones have ended, or after a timeout. Idempotent."""
        ...

    def run(self, request: EngineRequest) -> AsyncGenerator[OutputDelta, None]:
        """Run one request; the last delta is `finished`. Raises MedialaneError, before the first delta or later.

        When the generator ends, the request's media are no longer read, and Released is sent to the gateway. It is
        cancelled once, at any await, when the request is aborted or its gateway is lost, and may then take time to
        release the media.
        """
        ...

    def loads(self) -> Sequence[WorkerLoad]:
        """Return the load of each data-parallel rank, in order. Must be cheap: called at every change."""
        ...

    def watch_arena(self, listener: Callable[[str | None], None]) -> Callable[[], None]:
        """Call `listener` with the arena that the worker has mapped, now and after each change, until the returned
        function is called."""
        ...

    def watch_blocks(self, listener: Callable[[KvChange], None]) -> Callable[[], None]:
        """Call `listener` with each change of the engine's KV blocks until the returned function is called."""
        ...

    async def administer(self, call: AdminCall) -> AdminResult:
        """Run `call` on the engine. Raises MedialaneError. Cancelled when the gateway disconnects; a call that has
        started may still complete."""
        ...

    def metrics(self) -> Callable[[], list[MetricChanges]]:
        """Return a reader of this process's metrics for one gateway. Each call of the reader returns the changes since
        its last call. It may be called from any thread, but not concurrently."""
        ...

    def held_blocks(self) -> Mapping[int, Sequence[int]]:
        """Return the block ids that each rank holds now, empty ranks included. Listeners have been called for all
        earlier changes when it returns. The returned sequences do not change."""
        ...
