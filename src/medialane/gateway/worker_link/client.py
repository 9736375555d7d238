"""The gateway's side: one connection to one worker, to which either side has connected.

`RpcClient` registers with the worker and dispatches its messages: outputs of requests (`ClientRequests`), load and KV
blocks (`ClientReports`), results of administrative calls (`ClientCalls`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from medialane.core.admin import AdminCall, AdminResult
from medialane.core.errors import MedialaneError, NoWorkerReady, ProtocolViolation, WorkerLost, from_report, to_report
from medialane.core.kv_events import KvChange
from medialane.core.pending_work import PendingWork
from medialane.core.request import EncoderCard, EngineRequest, WorkerLoad
from medialane.gateway.worker_link.client_calls import ClientCalls
from medialane.gateway.worker_link.client_reports import ClientReports
from medialane.gateway.worker_link.client_requests import ClientRequests
from medialane.gateway.worker_link.remote_request import RemoteRequest
from medialane.observability.worker_metrics import MetricMirror
from medialane.wire.authentication import Role
from medialane.wire.config import RpcConfig
from medialane.wire.connection import Connection
from medialane.wire.dial import dial
from medialane.wire.protocol import (
    AdminDone,
    AdminFailed,
    ArenaMapped,
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
    Refused,
    Released,
    Welcome,
    decode_from_worker,
)
from medialane.wire.security import Security

#: Frame size limit before the registration of a worker that has connected.
MAX_JOIN_BYTES = 64 * 1024


class RpcClient:
    """A connection registered with a worker. It does not reconnect: call `connect` again after `closed`."""

    welcome: Welcome

    def __init__(self, config: RpcConfig, *, on_open: Callable[[RpcClient], None] | None = None) -> None:
        """`on_open` is called when a worker has connected, which then sends `join`."""
        self._config = config
        self._on_open = on_open
        self._is_registering = False
        #: The first message of a worker that has connected.
        self.join: asyncio.Future[Join] = asyncio.get_running_loop().create_future()
        self._welcome: asyncio.Future[Welcome] = asyncio.get_running_loop().create_future()
        max_first_bytes = config.max_frame_bytes if on_open is None else min(MAX_JOIN_BYTES, config.max_frame_bytes)
        self._connection = Connection(self, config, max_frame_bytes=max_first_bytes)
        self._requests = ClientRequests(self._connection, config)
        self._reports = ClientReports(self._connection.send)
        self._calls = ClientCalls(self._connection.send)
        self._on_lost: Callable[[], None] | None = None
        self._on_arena: Callable[[], None] | None = None
        #: The arena that the worker has mapped.
        self.arena: str | None = None
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
        await client._register(hello, address)
        return client

    async def register(self, hello: Hello) -> None:
        """Register with a worker that has connected. Returns and raises like `connect`."""
        await self._register(hello, None)

    def refuse(self, error: MedialaneError) -> None:
        """Refuse a worker that has connected, instead of `register`."""
        self._connection.send(Refused(to_report(error)))
        self._connection.close()

    def leave(self) -> None:
        """Close the connection, if it is not closing already. Requests in flight raise WorkerLost."""
        if not self._connection.is_closing:
            self._connection.end(WorkerLost("the connection was closed"))

    @property
    def connection(self) -> Connection:
        return self._connection

    @property
    def closed(self) -> asyncio.Event:
        """Set when the connection is closed, by either side."""
        return self._connection.closed

    @property
    def loads(self) -> Sequence[WorkerLoad]:
        """The last reported load of each rank; empty before the first report."""
        return self._reports.loads

    @property
    def is_stalled(self) -> bool:
        """Whether the worker has reported that its engine hangs."""
        return self._reports.is_stalled

    @property
    def has_unknown_blocks(self) -> bool:
        """Whether the worker has reported that its KV blocks cannot be compared with prompts."""
        return self._reports.has_unknown_blocks

    @property
    def encoder(self) -> EncoderCard | None:
        """The worker's encoder, if its embeddings are kept."""
        return self._reports.encoder

    @property
    def num_block_gaps(self) -> int:
        """How often changes of KV blocks were missing, so that snapshots were requested."""
        return self._reports.num_block_gaps

    @property
    def num_in_flight(self) -> int:
        """Requests that the worker has not released."""
        return len(self._requests)

    @property
    def num_gateways(self) -> int:
        """The gateways that are registered with the worker, including this one."""
        return self._reports.num_gateways

    def announce(self, work: PendingWork) -> Callable[[bool], None]:
        """See `ClientReports.announce`. Pointless unless `num_gateways` is above 1."""
        return self._reports.announce(work)

    def submit(self, request: EngineRequest) -> RemoteRequest:
        """Send a request. Errors are raised by its iteration. If it cannot be sent, these are

        * WorkerLost: the connection is closed;
        * NoWorkerReady: `max_in_flight` or `max_write_buffer_bytes` is reached;
        * HandoverFailed: with its inline tensors it exceeds the message size limit.

        The caller holds the inline tensors until the iteration has ended or `abort` was called. Raises
        GenerationFailed, with no effect, if a request with this id is in flight.
        """
        return self._requests.submit(request)

    def fail_unanswered(self, error: MedialaneError) -> None:
        """Abort the requests of which the worker has sent no output; their iterations raise `error`."""
        self._requests.fail_unanswered(error)

    def watch(
        self,
        *,
        on_blocks: Callable[[KvChange], None],
        on_loads: Callable[[Sequence[WorkerLoad]], None],
        on_pending: Callable[[int, PendingWork], None] | None = None,
        on_pending_ended: Callable[[int, bool], None] | None = None,
        on_encoder_cleared: Callable[[], None] | None = None,
        on_arena: Callable[[], None] | None = None,
        on_lost: Callable[[], None] | None = None,
    ) -> None:
        """Register callbacks until the connection is closed: `on_blocks` for the worker's blocks and their changes, in
        order, one per iteration of the event loop; `on_loads` for each report; `on_pending` with a number and the work
        that another gateway has sent to the worker, `on_pending_ended` with its number and whether it was computed;
        `on_encoder_cleared` when an administrative call of any gateway has emptied the encoder caches; `on_arena` when
        the worker has mapped another arena, or none; finally `on_lost`, when `closed` is set.
        `on_blocks` also gets changes received earlier. Call once, on an open connection."""
        self._on_lost, self._on_arena = on_lost, on_arena
        self._reports.watch(
            on_blocks=on_blocks,
            on_loads=on_loads,
            on_pending=on_pending,
            on_pending_ended=on_pending_ended,
            on_encoder_cleared=on_encoder_cleared,
        )

    @property
    def metrics(self) -> MetricMirror:
        """The worker's metrics, as of the last `read_metrics`."""
        return self._calls.metrics

    async def administer(self, call: AdminCall, timeout_s: float) -> AdminResult:
        """See `ClientCalls.administer`."""
        return await self._calls.administer(call, timeout_s)

    async def read_metrics(self, timeout_s: float) -> bool:
        """See `ClientCalls.read_metrics`."""
        return await self._calls.read_metrics(timeout_s)

    async def wait_closed(self) -> None:
        await self.closed.wait()

    async def close(self) -> None:
        """Close the connection. Requests in flight are cancelled at the worker and raise WorkerLost here.
        Idempotent."""
        self._connection.end(WorkerLost("the connection was closed"))
        await self.closed.wait()

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
                self._requests.on_output(delta, len(frame))
            case Released(request_id):
                self._requests.on_released(request_id)
            case Failed(request_id, report):
                self._requests.on_failed(request_id, report)
            case ArenaMapped(arena):
                self._mapped(arena)
            case LoadReport() | KvBlocks() | Pending() | PendingEnded() | Gateways() | EncoderCleared():
                self._reports.received(message)
            case AdminDone() | AdminFailed() | MetricValues():
                self._calls.received(message)
            case Pong():
                pass  # any received bytes count as liveness
            case Welcome() | Refused() | Join():
                self._answered(message)

    def beat(self) -> None:
        self._num_pings += 1
        self._connection.send(Ping(self._num_pings))

    def lost(self, error: MedialaneError) -> None:
        if not self._welcome.done():
            self._welcome.set_exception(error)
            self._welcome.exception()  # a worker that has connected may be lost before anything waits for this
        self.join.cancel()
        self._reports.lost()
        self._calls.lost()
        self._requests.lost()
        if self._on_lost is not None:
            self._on_lost()

    async def _register(self, hello: Hello, address: str | None) -> None:
        """Send `hello`, after connecting to `address` if it is given."""
        self._is_registering = True
        try:
            async with asyncio.timeout(self._config.connect_timeout_s):
                if address is not None:
                    security = Security.load(self._config)
                    await dial(address, self._connection, security.authentication("rpc", Role.GATEWAY, Role.WORKER))
                self._connection.send(hello)
                self.welcome = await self._welcome
        except BaseException as error:  # includes cancellation
            self._welcome.cancel()
            self._connection.end(WorkerLost("registration was cancelled"))
            if isinstance(error, TimeoutError):
                raise WorkerLost("the worker did not respond in time") from None
            raise

    def _joined(self, message: FromWorker) -> None:
        if not isinstance(message, Join) or self.join.done():
            raise ProtocolViolation(f"unexpected {type(message).__name__}")
        self.join.set_result(message)

    def _mapped(self, arena: str | None) -> None:
        self.arena = arena
        if self._on_arena is not None:
            self._on_arena()

    def _answered(self, welcome: Welcome | Refused | Join) -> None:
        if isinstance(welcome, Refused):
            self._connection.end(_refusal(from_report(welcome.error)))
            return
        if isinstance(welcome, Join) or self._welcome.done():
            raise ProtocolViolation(f"a second {type(welcome).__name__}")
        self._connection.accept_large_frames()
        self._reports.open(welcome.card)
        self._welcome.set_result(welcome)
        self._connection.start_heartbeat()


def _refusal(error: MedialaneError) -> MedialaneError:
    """Convert NoWorkerReady, which is reserved for "no process listens": this worker has just responded."""
    return WorkerLost(error.message) if isinstance(error, NoWorkerReady) else error
