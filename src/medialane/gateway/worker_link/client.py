"""The gateway's side: one connection to one worker, to which either side has connected.

`RpcClient` registers with the worker and dispatches its messages: outputs of requests (`ClientRequests`), what it
reports unasked (`ClientReports`), results of administrative calls (`ClientCalls`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from medialane.gateway.worker_link.client_calls import ClientCalls
from medialane.gateway.worker_link.client_reports import ClientReports
from medialane.gateway.worker_link.client_requests import ClientRequests
from medialane.types.errors import MedialaneError, NoWorkerReady, ProtocolViolation, WorkerLost, from_report, to_report
from medialane.wire.authentication import Role
from medialane.wire.config import RpcConfig
from medialane.wire.connection import Connection
from medialane.wire.dial import dial
from medialane.wire.protocol import (
    AdminDone,
    AdminFailed,
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
    Refused,
    Released,
    Welcome,
    decode_from_worker,
)
from medialane.wire.registration import Registration
from medialane.wire.security import Security

#: Frame size limit before the registration of a worker that has connected.
MAX_JOIN_BYTES = 64 * 1024


class RpcClient:
    """A connection registered with a worker. It does not reconnect: call `connect` again after `closed`.

    `requests`, `reports` and `calls` are what it is for; `on_change` is called when the worker has reported another
    state or arena, another number of gateways, or that it is still stalled; and when the connection is lost.
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
        authentication = Security.load(config).authentication("rpc", Role.GATEWAY, Role.WORKER)
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
