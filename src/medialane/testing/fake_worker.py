"""Workers for tests: a deterministic handler without an engine, for real connections (`FakeHandler`); and a gateway's
link to a worker without a connection (`FakeLink`), for which a test is the worker.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from functools import cache

import msgspec
from prometheus_client import CollectorRegistry

from medialane.gateway import GatewayConfig, WorkerLink
from medialane.gateway.workers import (
    ClientCalls,
    ClientReports,
    ClientRequests,
    RemoteRequest,
    RpcClient,
)
from medialane.observability import Metrics
from medialane.observability.worker_metrics import MetricReader
from medialane.types.admin import AdminCall, AdminResult
from medialane.types.errors import MedialaneError, WorkerLost, to_report
from medialane.types.kv_blocks import KvChange
from medialane.types.request import CompletionDelta, EncoderCard, EngineRequest, ModelCard, OutputDelta, WorkerLoad
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

FAKE_CARD = ModelCard(model="fake", max_model_len=4096, block_size=16, processor={})


class FakeHandler:
    """Outputs `token_ids` for every request, one delta each, the last one finished.

    It waits `delay_s` before each token, and `release_s` after the last token or a cancellation before the generator
    ends. `error` is raised instead of token number `fail_at`, `refusal` by `register`. Calls are recorded in `hellos`,
    `requests`, `num_tokens` (sent), `num_active` (generators that have not ended) and `num_cancelled`.
    `card` may be replaced by one with another encoder.
    All blocks belong to the first rank: `blocks`, changed by `change_blocks`. Administrative calls are recorded in
    `calls` and return `admin_result` after `delay_s`; `registry` holds its metrics.
    """

    def __init__(
        self,
        token_ids: Sequence[int] = (1, 2, 3),
        *,
        worker_id: str = "fake-worker",
        card: ModelCard = FAKE_CARD,
        delay_s: float = 0.0,
        release_s: float = 0.0,
        error: Exception | None = None,
        fail_at: int = 0,
        refusal: MedialaneError | None = None,
    ) -> None:
        self._token_ids = tuple(token_ids)
        self.card = card
        self._welcome = Welcome(worker_id, os.getpid(), card)
        self._delay_s = delay_s
        self._release_s = release_s
        self._error = error
        self._fail_at = fail_at
        self.is_stalled = False
        self.is_draining = False
        self.has_unknown_blocks = False
        self._refusal = refusal
        self.hellos: list[Hello] = []
        self.requests: list[EngineRequest] = []
        self.blocks: dict[int, None] = {}
        self.arena: str | None = None
        self.arena_listeners: list[Callable[[str | None], None]] = []
        self.block_listeners: list[Callable[[KvChange], None]] = []
        self.num_tokens = 0
        self.num_active = 0
        self.num_cancelled = 0
        self.calls: list[AdminCall] = []
        self.admin_result: AdminResult | Exception = None
        self.registry = CollectorRegistry()

    @property
    def encoder(self) -> EncoderCard | None:
        return self.card.encoder

    async def register(self, hello: Hello) -> Welcome:
        self.hellos.append(hello)
        if self._refusal is not None:
            raise self._refusal
        return self._welcome

    async def run(self, request: EngineRequest) -> AsyncGenerator[OutputDelta, None]:
        self.requests.append(request)
        self.num_active += 1
        try:
            for number, token_id in enumerate(self._token_ids):
                await asyncio.sleep(self._delay_s)
                if self._error is not None and number == self._fail_at:
                    raise self._error
                self.num_tokens += 1
                yield self._delta(request, number, token_id)
        except (asyncio.CancelledError, GeneratorExit):
            self.num_cancelled += 1
            raise
        finally:
            try:
                if self._release_s:
                    await asyncio.sleep(self._release_s)
            finally:
                self.num_active -= 1

    def drain(self) -> None:
        self.is_draining = True

    def loads(self) -> list[WorkerLoad]:
        ranks = self._welcome.card.data_parallel_size
        return [WorkerLoad(num_running=self.num_active)] + [WorkerLoad()] * (ranks - 1)

    def watch_arena(self, listener: Callable[[str | None], None]) -> Callable[[], None]:
        self.arena_listeners.append(listener)
        listener(self.arena)
        return lambda: self.arena_listeners.remove(listener)

    def map_arena(self, arena: str | None) -> None:
        """Change `arena` and notify the listeners."""
        self.arena = arena
        for listener in list(self.arena_listeners):
            listener(arena)

    def watch_blocks(self, listener: Callable[[KvChange], None]) -> Callable[[], None]:
        self.block_listeners.append(listener)
        return lambda: self.block_listeners.remove(listener)

    async def administer(self, call: AdminCall) -> AdminResult:
        self.calls.append(call)
        await asyncio.sleep(self._delay_s)
        if isinstance(self.admin_result, Exception):
            raise self.admin_result
        return self.admin_result

    def metrics(self) -> Callable[[], list[MetricChanges]]:
        return MetricReader(self.registry).read

    def held_blocks(self) -> Mapping[int, Sequence[int]]:
        return {0: list(self.blocks)}

    def change_blocks(self, stored: Iterable[int] = (), removed: Iterable[int] = (), *, clear: bool = False) -> None:
        """Change the blocks and notify the listeners; parameters as in KvChange, `clear` is its `snapshot`."""
        stored, removed = list(stored), list(removed)
        if clear:
            self.blocks.clear()
        self.blocks.update(dict.fromkeys(stored))
        for block_id in removed:
            self.blocks.pop(block_id, None)
        packed = [b"".join(block_id.to_bytes(8, "little") for block_id in ids) for ids in (stored, removed)]
        for listener in list(self.block_listeners):
            listener(KvChange(0, packed[0], packed[1], snapshot=clear))

    def _delta(self, request: EngineRequest, number: int, token_id: int) -> OutputDelta:
        finished = number == len(self._token_ids) - 1
        completion = CompletionDelta(0, f"<{token_id}>", [token_id], finish_reason="stop" if finished else None)
        prompt = request.prompt.token_ids if number == 0 else None
        return OutputDelta(request.request_id, [completion], finished=finished, prompt_token_ids=prompt)


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

    def fail(self, error: MedialaneError, *, only_movable: bool = False) -> None:
        """Nothing is aborted."""


class FakeClient(RpcClient):
    """A registered connection that sends nothing: `sent` are the messages to the worker, and a test passes messages of
    the worker to `reports.received` and `calls.received`. Administrative calls are answered by `admin_result`, reads of
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
