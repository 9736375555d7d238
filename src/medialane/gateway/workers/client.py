"""The gateway's side: one connection to one worker, to which either side has connected.

`RpcClient` registers with the worker and dispatches its messages: outputs of requests (`ClientRequests`), what it
reports unasked (`ClientReports`), results of administrative calls (`ClientCalls`). The worker's side
is `worker.link`.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable

import msgspec

from medialane.gateway.workers.reports import ClientReports
from medialane.observability.worker_metrics import MetricMirror
from medialane.types.admin import AdminCall, AdminResult
from medialane.types.errors import (
    ErrorReport,
    GenerationFailed,
    HandoverFailed,
    MedialaneError,
    NoWorkerReady,
    Permits,
    ProtocolViolation,
    Unavailable,
    WorkerBusy,
    WorkerDraining,
    WorkerLost,
    from_report,
    to_report,
)
from medialane.types.request import EngineRequest, OutputDelta, merge_deltas
from medialane.wire.authentication import Role
from medialane.wire.config import RpcConfig
from medialane.wire.connection import Connection, Registration, dial
from medialane.wire.payload import OutgoingRequest, PooledOutput, split
from medialane.wire.protocol import (
    Abort,
    AdminDone,
    AdminFailed,
    Administer,
    ArenaMapped,
    Drain,
    EncoderCleared,
    Failed,
    FromWorker,
    Gateways,
    Hello,
    Join,
    KvBlocks,
    LoadReport,
    MetricValues,
    Output,
    Pending,
    PendingEnded,
    Ping,
    Pong,
    ReadMetrics,
    Refused,
    Released,
    Submit,
    Welcome,
    decode_from_worker,
)
from medialane.wire.security import Authentication, Security

#: Frame size limit before the registration of a worker that has connected.
MAX_JOIN_BYTES = 64 * 1024


class RpcClient:
    """A connection registered with a worker. It does not reconnect: call `connect` again after `closed`.

    `requests`, `reports` and `calls` are what it is for; `on_change` is called when the worker has reported another
    state, arena or encoder, or that it is still stalled; and when the connection is lost.
    """

    welcome: Welcome

    def __init__(self, config: RpcConfig, *, on_open: Callable[[RpcClient], None] | None = None) -> None:
        """`on_open` is called when a worker has connected, which then sends `join`."""
        self._config = config
        self._on_open = on_open
        self._is_registering = False
        #: The first message of a worker that has connected.
        self.join: asyncio.Future[Join] = asyncio.get_running_loop().create_future()
        max_first_bytes = config.max_frame_bytes if on_open is None else min(MAX_JOIN_BYTES, config.max_frame_bytes)
        self.connection = Connection(self, config, max_frame_bytes=max_first_bytes)
        self._registration: Registration[Welcome] = Registration(
            self.connection,
            closed=WorkerLost("registration was cancelled"),
            too_late=WorkerLost("the worker did not respond in time"),
        )
        self.requests = ClientRequests(self.connection, config)
        self.reports = ClientReports(self.connection.send)
        self.calls = ClientCalls(self.connection.send)
        self.on_change: Callable[[], None] = lambda: None
        self._num_pings = 0

    @classmethod
    async def connect(cls, address: str, hello: Hello, config: RpcConfig) -> RpcClient:
        """Connect and register.

        When this returns, the requests of this gateway's earlier connections have ended. Raises

        * NoWorkerReady: no process listens at the address, and only then: the worker has exited or is not up yet;
        * WorkerLost: unreachable, no response within `connect_timeout_s`, disconnected, or temporarily refused;
        * AuthenticationFailed: one side did not accept the other's secret or certificate (TCP);
        * StartupFailed and others: refused until the configuration changes (version, model);
        * ProtocolViolation: the listener is not a worker.

        Cancellation and errors leave no connection behind.
        """
        client = cls(config)
        authentication = Authentication(Security.load(config), "rpc", Role.GATEWAY, Role.WORKER)
        await client.register(hello, connecting=dial(address, client.connection, authentication))
        return client

    async def register(self, hello: Hello, *, connecting: Awaitable[None] | None = None) -> None:
        """Register with a worker that has connected, or to which `connecting` connects. Returns and raises like
        `connect`."""
        self._is_registering = True
        self.welcome = await self._registration.run(
            hello, timeout_s=self._config.connect_timeout_s, connecting=connecting
        )

    def refuse(self, error: MedialaneError) -> None:
        """Refuse a worker that has connected, instead of `register`."""
        self.connection.send(Refused(to_report(error)))
        self.connection.close()

    def leave(self) -> None:
        """Close the connection, if it is not closing already. Requests in flight are cancelled at the worker and raise
        WorkerLost here."""
        if not self.connection.is_closing:
            self.connection.end(WorkerLost("the connection was closed"))

    async def close(self) -> None:
        """Close the connection now, as `leave`, and wait for that. Idempotent."""
        self.connection.end(WorkerLost("the connection was closed"))
        await self.closed.wait()

    @property
    def closed(self) -> asyncio.Event:
        """Set when the connection is closed, by either side."""
        return self.connection.closed

    # The methods below are called by the connection; see connection.Peer.

    def opened(self, connection: Connection) -> None:
        if self._on_open is not None:
            self._on_open(self)

    def received(self, frame: memoryview) -> None:
        message = decode_from_worker(frame)
        if not self._is_registering:
            self._joined(message)
            return
        match message:
            case Output(delta):
                self.requests.on_output(delta, len(frame))
            case Released(request_id):
                self.requests.on_released(request_id)
            case Failed(request_id, report):
                self.requests.on_failed(request_id, report)
            case LoadReport() | ArenaMapped() | KvBlocks() | Pending() | PendingEnded() | Gateways() | EncoderCleared():
                if self.reports.received(message):
                    self.on_change()
            case AdminDone() | AdminFailed() | MetricValues():
                self.calls.received(message)
            case Pong():
                pass  # any received bytes count as liveness
            case Welcome() | Refused() | Join():
                self._answered(message)

    def drain(self) -> None:
        """Have the worker stop: it soon reports that it drains."""
        self.connection.send(Drain())

    def beat(self) -> None:
        self._num_pings += 1
        self.connection.send(Ping(self._num_pings))

    def lost(self, error: MedialaneError) -> None:
        self._registration.lost(error)
        self.join.cancel()
        self.reports.lost()
        self.calls.lost()
        self.requests.lost(is_draining=self.reports.state == "draining")
        self.on_change()

    def _joined(self, message: FromWorker) -> None:
        if not isinstance(message, Join) or self.join.done():
            raise ProtocolViolation(f"unexpected {type(message).__name__}")
        self.join.set_result(message)

    def _answered(self, message: Welcome | Refused | Join) -> None:
        match message:
            case Welcome(card=card):
                self.reports.open(card)
                self._registration.welcome(message)
            case Refused(report):
                self.connection.end(_refusal(from_report(report)))
            case Join():
                raise ProtocolViolation("a second Join")


def _refusal(error: MedialaneError) -> MedialaneError:
    """Convert NoWorkerReady, which is reserved for "no process listens": this worker has just responded."""
    return WorkerLost(error.message) if isinstance(error, NoWorkerReady) else error


class ClientRequests:
    """Requests from `submit` until the worker has released them; `len` is their number.

    The `on_...` methods are called for messages of the worker. They raise ProtocolViolation if the request is not in
    flight.
    """

    def __init__(self, connection: Connection, config: RpcConfig) -> None:
        self._connection = connection
        self._config = config
        self._requests: dict[str, RemoteRequest] = {}
        self._permits = Permits()
        self._outgoing: dict[str, OutgoingRequest] = {}

    def __len__(self) -> int:
        return len(self._requests)

    @property
    def num_unsent_bytes(self) -> int:
        """Bytes of inline tensors that are still to be sent."""
        return sum(outgoing.num_bytes_left for outgoing in self._outgoing.values())

    def submit(self, request: EngineRequest) -> RemoteRequest:
        """Send a request. Errors are raised by its iteration. If it cannot be sent, these are

        * WorkerLost: the connection is closed;
        * WorkerBusy: `max_in_flight` or `max_write_buffer_bytes` is reached;
        * HandoverFailed: with its inline tensors it exceeds the message size limit.

        The caller holds the inline tensors until the iteration has ended or `abort` was called. Raises
        GenerationFailed, with no effect, if a request with this id is in flight.
        """
        request_id = request.request_id
        if request_id in self._requests:
            raise GenerationFailed("a request with this id is already running")
        remote = RemoteRequest(
            request_id,
            max_queued_bytes=self._config.max_queued_bytes,
            mergeable=not request.cumulative,
            pooled=PooledOutput(self._config.max_pooled_bytes) if request.is_pooling else None,
            send_abort=self._abort,
        )
        try:
            self._check_capacity()
            self._send(request)
        except MedialaneError as error:
            remote.on_error(error)
            remote.on_release()
        else:
            self._requests[request_id] = remote
            self._permits.take(request_id)
        return remote

    def on_output(self, delta: OutputDelta, num_bytes: int) -> None:
        self._request(delta.request_id).on_output(delta, num_bytes)

    def on_failed(self, request_id: str, report: ErrorReport) -> None:
        self._request(request_id).on_error(from_report(report))

    def on_released(self, request_id: str) -> None:
        remote = self._request(request_id)
        self._end(request_id)
        remote.on_release()

    def fail(self, error: MedialaneError, *, only_movable: bool = False) -> None:
        """Abort all requests, or the ones that another worker can take over; their iterations raise `error`."""
        for remote in list(self._requests.values()):
            if remote.can_move or not only_movable:
                remote.abort(error)

    def lost(self, *, is_draining: bool) -> None:
        """Fail all requests: the connection is closed. A worker that `is_draining` has ended as planned."""
        for outgoing in list(self._outgoing.values()):
            outgoing.cancel()
        requests, self._requests = self._requests, {}
        for remote in requests.values():
            remote.on_error(
                WorkerDraining("the worker has stopped")
                if is_draining
                else WorkerLost("the worker was lost during generation")
            )

    def _end(self, request_id: str) -> RemoteRequest:
        self._permits.free(request_id)
        return self._requests.pop(request_id)

    def _request(self, request_id: str) -> RemoteRequest:
        try:
            return self._requests[request_id]
        except KeyError:
            raise ProtocolViolation("a message about a request that is not in flight") from None

    def _check_capacity(self) -> None:
        if self._connection.closed.is_set():
            raise WorkerLost("the worker was lost before the request was sent")
        if len(self._requests) >= self._config.max_in_flight:
            message = "the worker has reached its limit of concurrent requests"
            raise WorkerBusy(message, retry_after_s=self._permits.promise())
        if self._connection.num_buffered_bytes + self.num_unsent_bytes > self._config.max_write_buffer_bytes:
            raise WorkerBusy("the worker is overloaded", retry_after_s=self._permits.promise())

    def _send(self, request: EngineRequest) -> None:
        message, tensors = split(request)
        try:
            if tensors:
                self._send_in_pieces(message, tensors)
            else:
                self._connection.send(Submit(request), at_once=True)
        except ProtocolViolation:
            raise HandoverFailed("the request exceeds the message size limit") from None

    def _send_in_pieces(self, request: EngineRequest, tensors: list[memoryview]) -> None:
        """Raises ProtocolViolation, with nothing sent, if the request is larger than allowed."""
        request_id = request.request_id

        def ended() -> None:
            del self._outgoing[request_id]

        outgoing = OutgoingRequest(request, tensors, ended, max_bytes=self._config.max_frame_bytes)
        self._outgoing[request_id] = outgoing
        self._connection.send_in_pieces(outgoing)

    def _abort(self, request_id: str) -> None:
        if (outgoing := self._outgoing.get(request_id)) is not None:  # not yet submitted to the worker
            outgoing.cancel()
            self._end(request_id).on_release()
        elif request_id in self._requests:
            self._connection.send(Abort(request_id))


class ClientCalls:
    """The calls of one connection. `metrics` are the worker's as of the last `read_metrics`."""

    def __init__(self, send: Callable[[msgspec.Struct], None]) -> None:
        self._send = send
        self._waiting: dict[int, asyncio.Future[AdminResult]] = {}
        self._num_calls = 0
        self._reading: asyncio.Future[None] | None = None
        self._lost = False
        self.metrics = MetricMirror()

    async def administer(self, call: AdminCall, timeout_s: float) -> AdminResult:
        """Run `call` on the worker's engine. A cancelled or timed-out call may still be executed there.

        Raises the error that the worker reports, WorkerLost if the connection is closed, Unavailable after `timeout_s`.
        """
        if self._lost:
            raise WorkerLost("the worker is not connected")
        self._num_calls += 1
        call_id = self._num_calls
        result: asyncio.Future[AdminResult] = asyncio.get_running_loop().create_future()
        self._waiting[call_id] = result
        try:
            self._send(Administer(call_id, call))
            async with asyncio.timeout(timeout_s):
                return await result
        except TimeoutError:
            raise Unavailable(f"no response within {timeout_s:g} s") from None
        finally:
            del self._waiting[call_id]

    async def read_metrics(self, timeout_s: float) -> bool:
        """Update `metrics`. Return False if the worker did not respond before the timeout: they are unchanged then, and
        a late response is still applied."""
        if self._lost:
            return False
        if self._reading is None:
            self._reading = asyncio.get_running_loop().create_future()
            self._send(ReadMetrics())
        done, _ = await asyncio.wait({self._reading}, timeout=timeout_s)
        return bool(done) and not self._lost

    def received(self, message: AdminDone | AdminFailed | MetricValues) -> None:
        """Apply a response. Raises ProtocolViolation if there was no such call."""
        if isinstance(message, MetricValues):
            self._take(message)
            return
        if not 0 < message.call_id <= self._num_calls:
            raise ProtocolViolation("a response to an unknown administrative call")
        result = self._waiting.get(message.call_id)
        if result is None or result.done():
            return  # cancelled or timed out
        if isinstance(message, AdminFailed):
            result.set_exception(from_report(message.error))
        else:
            result.set_result(message.result)

    def lost(self) -> None:
        """Fail all calls: the connection is closed."""
        self._lost = True
        for result in self._waiting.values():
            if not result.done():
                result.set_exception(WorkerLost("the worker was lost before it responded"))
        if self._reading is not None:
            self._reading.set_result(None)
            self._reading = None

    def _take(self, message: MetricValues) -> None:
        if self._reading is None:
            raise ProtocolViolation("metrics that were not requested")
        try:
            self.metrics.apply(message.changes)
        except ValueError as error:
            raise ProtocolViolation(f"invalid metrics: {error}") from error
        if not message.more:
            self._reading.set_result(None)
            self._reading = None


#: Deltas that are queued for the consumer and delivered one by one. More are merged: the client reads too slowly, or
#: this process is short of CPU time for seconds, and what merging saves lets it catch up.
MAX_SEPARATE_DELTAS = 64


class RemoteRequest:
    """Async iterator over the output deltas, for one consumer. Created by `ClientRequests.submit`.

    Deltas are delivered as they were received, although several may have arrived while this process was busy: to a
    client each is an event. If `mergeable`, more than `MAX_SEPARATE_DELTAS` are merged. The parts of a `pooled` output
    are one delta.

    The iteration ends after the finished delta. It raises the error reported by the worker, WorkerLost if the
    connection is closed first, GenerationFailed after `abort` or if more than `max_queued_bytes` are queued for a slow
    consumer. Deltas received before an error of the worker are returned first. A consumer that stops early must call
    `abort`: leaving the loop does not stop the worker.
    """

    def __init__(
        self,
        request_id: str,
        *,
        max_queued_bytes: int,
        mergeable: bool = True,
        pooled: PooledOutput | None = None,
        send_abort: Callable[[str], None],
    ) -> None:
        self.request_id = request_id
        #: By time.perf_counter, just before it is written: the worker may have its first token before this process runs
        #: again.
        self.sent_at = time.perf_counter()
        self._max_queued_bytes = max_queued_bytes
        self._mergeable = mergeable
        self._pooled = pooled
        self._send_abort = send_abort
        self._queue: deque[tuple[OutputDelta, int]] = deque()
        self._num_queued_bytes = 0
        self._waiter: asyncio.Future[None] | None = None
        self._complete = False
        #: Whether the worker has sent any output.
        self.has_output = False
        #: Whether the answer can go on at another worker once it has begun.
        self.can_continue = False
        #: Called with parameters of KV blocks that the worker keeps, even if nobody waits for its output any more.
        self.on_kept: Callable[[bytes], None] = lambda _params: None
        self._error: MedialaneError | None = None

    def __aiter__(self) -> RemoteRequest:
        return self

    async def __anext__(self) -> OutputDelta:
        while not self._queue:
            if self._error is not None:
                raise self._error
            if self._complete:
                raise StopAsyncIteration
            if self._waiter is not None:
                raise RuntimeError("a RemoteRequest has one consumer")
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        if self._mergeable and len(self._queue) > MAX_SEPARATE_DELTAS:
            deltas = [delta for delta, _ in self._queue]
            self._queue.clear()
            self._num_queued_bytes = 0
            return merge_deltas(deltas)
        delta, nbytes = self._queue.popleft()
        self._num_queued_bytes -= nbytes
        return delta

    @property
    def has_next(self) -> bool:
        """Whether an output has arrived that was not returned yet."""
        return bool(self._queue)

    @property
    def can_move(self) -> bool:
        """Whether another worker can take over: it has delivered nothing, or what it has can be continued."""
        return self.can_continue or self._pooled is not None or not self.has_output

    def abort(self, error: MedialaneError | None = None) -> None:
        """Abort the request at the worker; the iteration raises `error`, by default GenerationFailed. No effect once
        the output is complete or has failed. Idempotent. Afterwards its inline tensors are no longer read."""
        self._give_up(error or GenerationFailed("the request was aborted"))

    # The methods below are called by ClientRequests.

    def on_output(self, delta: OutputDelta, nbytes: int) -> None:
        if delta.kv_params:
            self.on_kept(delta.kv_params)
        if self._complete:
            return  # sent before our abort arrived
        self.has_output = True
        if self._pooled is not None:
            self._on_pooled(self._pooled, delta)
            return
        if self._queue and self._num_queued_bytes + nbytes > self._max_queued_bytes:
            self._give_up(GenerationFailed("the response is read too slowly"))
            return
        self._queue.append((delta, nbytes))
        self._num_queued_bytes += nbytes
        self._complete = delta.finished
        self._wake()

    def on_error(self, error: MedialaneError) -> None:
        if not self._complete:
            self._complete = True
            self._error = error
            self._wake()

    def on_release(self) -> None:
        self.on_error(GenerationFailed("the worker released the request before its output was complete"))

    def _on_pooled(self, output: PooledOutput, part: OutputDelta) -> None:
        try:
            whole = output.add(part)
        except MedialaneError as error:
            self._give_up(error)
            return
        if whole is not None:
            self._queue.append((whole, 0))
            self._complete = True
            self._wake()

    def _give_up(self, error: MedialaneError) -> None:
        if self._complete:
            return
        self._queue.clear()
        self._num_queued_bytes = 0
        self.on_error(error)
        self._send_abort(self.request_id)

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
