"""A gateway's link to a worker, without a connection: a test is the worker."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import cache

import msgspec
from prometheus_client import CollectorRegistry

from medialane.gateway import GatewayConfig, WorkerLink
from medialane.gateway.worker_link import (
    ClientCalls,
    ClientReports,
    ClientRequests,
    RemoteRequest,
    ReportListener,
    RpcClient,
)
from medialane.observability import Metrics
from medialane.testing.fake_handler import FAKE_CARD
from medialane.types.admin import AdminResult
from medialane.types.errors import MedialaneError, WorkerLost, to_report
from medialane.types.request import EngineRequest, ModelCard
from medialane.types.stats import MetricChanges
from medialane.wire import (
    AdminDone,
    AdminFailed,
    Administer,
    ArenaMapped,
    Hello,
    MetricValues,
    ReadMetrics,
    Report,
    RpcConfig,
    Welcome,
)

#: The arena of the gateway's host.
ARENA = "arena"


class FakeRequests(ClientRequests):
    """Records what is submitted. A request stays in flight until a test removes it from `in_flight`."""

    def __init__(self) -> None:
        self.in_flight: dict[str, RemoteRequest] = {}
        self.submitted: list[EngineRequest] = []
        #: Called with each remote request, to answer it.
        self.answer: Callable[[RemoteRequest], None] = lambda _remote: None

    def __len__(self) -> int:
        return len(self.in_flight)

    def submit(self, request: EngineRequest) -> RemoteRequest:
        remote = RemoteRequest(request.request_id, max_queued_bytes=1 << 20, send_abort=lambda _request_id: None)
        self.submitted.append(request)
        self.in_flight[request.request_id] = remote
        self.answer(remote)
        return remote

    def fail_movable(self, error: MedialaneError) -> None:
        """Nothing moves."""


class FakeClient(RpcClient):
    """A registered connection that sends nothing: `sent` are the messages to the worker, and a test passes those of the
    worker to `reports.received` and `calls.received`. Administrative calls are answered by `admin_result`, reads of
    metrics by no change; with `is_silent`, neither until `respond`. With `send`, all of it is left to that."""

    def __init__(
        self,
        card: ModelCard,
        *,
        admin_result: AdminResult | MedialaneError = None,
        send: Callable[[msgspec.Struct], None] | None = None,
    ) -> None:
        self.welcome = Welcome("fake-worker", 0, card)
        self.sent: list[msgspec.Struct] = []
        self.admin_result = admin_result
        self.is_silent = False
        self.requests: FakeRequests = FakeRequests()
        self.reports = ClientReports(send or self._send)
        self.reports.open(card)
        self.calls = ClientCalls(send or self._send)
        self.on_change = lambda: None
        self._closed = asyncio.Event()
        self._unanswered: list[msgspec.Struct] = []

    @property
    def closed(self) -> asyncio.Event:
        return self._closed

    def report(self, message: Report) -> None:
        """As if the worker had sent it."""
        if self.reports.received(message):
            self.on_change()

    def respond(self) -> None:
        """Answer what has not been answered."""
        self.is_silent = False
        unanswered, self._unanswered = self._unanswered, []
        for message in unanswered:
            self._respond(message)

    def lost(self, error: MedialaneError) -> None:
        self._closed.set()
        self.reports.lost()
        self.calls.lost()
        self.on_change()

    def _send(self, message: msgspec.Struct) -> None:
        self.sent.append(message)
        if self.is_silent:
            self._unanswered.append(message)
        elif isinstance(message, Administer | ReadMetrics):
            asyncio.get_running_loop().call_soon(self._respond, message)

    def _respond(self, message: msgspec.Struct) -> None:
        match message:
            case Administer(call_id):
                self.calls.received(_answer(call_id, self.admin_result))
            case ReadMetrics():
                self.calls.received(MetricValues(MetricChanges()))


class FakeLink(WorkerLink):
    """Connected by `join`, and until `lose`: `worker` is then the connection."""

    def __init__(
        self,
        name: str,
        card: ModelCard = FAKE_CARD,
        *,
        same_host: bool = True,
        admin_result: AdminResult | MedialaneError = None,
        send: Callable[[msgspec.Struct], None] | None = None,
    ) -> None:
        hello = Hello(gateway_id="fake-gateway", processor=dict(card.processor))
        super().__init__(
            name, hello, rpc=RpcConfig(), config=GatewayConfig(), metrics=_metrics(), own_arena=lambda: ARENA
        )
        self.role = card.role
        self.worker = FakeClient(card, admin_result=admin_result, send=send)
        self.worker.report(ArenaMapped(ARENA if same_host else "arena elsewhere"))

    @property
    def reports(self) -> ReportListener:
        """What was registered for the reports of the worker that is connected."""
        if self._reports is None:
            raise LookupError(f"{self.name} has not joined")
        return self._reports

    def join(self, worker: FakeClient | None = None) -> None:
        """Connect; with another `worker`, to that."""
        self.worker = worker or self.worker
        self._use(self.worker)

    def lose(self) -> None:
        self.worker.lost(WorkerLost("the connection was lost"))


def _answer(call_id: int, result: AdminResult | MedialaneError) -> AdminDone | AdminFailed:
    if isinstance(result, MedialaneError):
        return AdminFailed(call_id, to_report(result))
    return AdminDone(call_id, result)


@cache
def _metrics() -> Metrics:
    return Metrics(CollectorRegistry())
