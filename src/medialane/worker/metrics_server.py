"""What a worker shows to probes, scrapers and autoscalers over HTTP: `/metrics`, `/health` and `/ready`.

* `/metrics`: this process's registry, in which vLLM registers its series, unchanged, and the worker's own. Rank i of a
  data-parallel engine has port + i with the series that vLLM labels with this engine: an endpoint picker (llm-d's, say)
  treats each port as an endpoint, and reads a series without looking at its labels. Series without that label are on
  the first port. On a host without gateways, one of its workers also has the series of the host's store.
* `/health`: 200 while the engine responds, 503 while it is stalled, for liveness probes. The worker itself exits if
  that lasts.
* `/ready`: 200 while it serves requests: the engine responds, a gateway is registered, and it is not draining. For
  readiness probes, so that a rollout stops if new workers cannot reach the gateways.

Everything is computed when it is requested. A page is rendered in a thread, one at a time and not more often than
`MIN_INTERVAL_S`: it takes some milliseconds, and the event loop sends tokens meanwhile.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager

import msgspec
from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from medialane.observability.collectors import Memory, memory_metric, store_metrics
from medialane.types.errors import StartupFailed
from medialane.types.stats import StoreStats
from medialane.worker.config import WorkerConfig
from medialane.worker.engine import Engine
from medialane.worker.link import RpcServer
from medialane.worker.worker import Worker

#: vLLM's label of a data-parallel rank.
ENGINE_LABEL = "engine"
MIN_INTERVAL_S = 0.25
#: For open requests at shutdown.
SHUTDOWN_TIMEOUT_S = 1.0


class WorkerStatus(Collector):
    """A worker's problems and its own metrics, as of now."""

    def __init__(self, worker: Worker, engine: Engine, server: RpcServer) -> None:
        self._worker = worker
        self._engine = engine
        self._server = server
        self._store: StoreStats | None = None

    async def refresh(self) -> None:
        """Ask the store of this host for its state, if this process is to expose it."""
        self._store = await self._worker.exposed_store()

    def health_problems(self) -> list[str]:
        return ["the engine does not respond"] if self._worker.is_stalled else []

    def ready_problems(self) -> list[str]:
        unknown = [] if self._server.num_gateways else ["no gateway is registered"]
        draining = ["the worker is draining"] if self._worker.is_draining else []
        return [*self.health_problems(), *unknown, *draining]

    def collect(self) -> Iterable[Metric]:
        values = {
            "medialane_worker_engine_up": ("1 while the engine responds", not self._worker.is_stalled),
            "medialane_worker_gateways": ("Gateways that are registered with this worker", self._server.num_gateways),
            "medialane_worker_requests": ("Requests of all gateways in this worker", self._server.num_in_flight),
            "medialane_worker_arena_mapped": ("1 while the arena of this host is mapped", self._worker.has_arena),
        }
        gauges = [GaugeMetricFamily(name, text, value=float(value)) for name, (text, value) in values.items()]
        memory: list[Memory] = [({}, self._worker.memory())]
        if self._store is not None:
            memory.append(({}, self._store.memory))
        return [*gauges, self._embeddings(), memory_metric(memory), *store_metrics(self._store)]

    def _embeddings(self) -> Metric:
        text = "Media items loaded or encoded by the engine; embeddings saved, or that failed to load or save"
        family = CounterMetricFamily("medialane_worker_embeddings", text, labels=["outcome"])
        for outcome, number in msgspec.structs.asdict(self._engine.embedding_counts).items():
            family.add_metric([outcome], number)
        return family


@asynccontextmanager
async def metrics_served(
    status: WorkerStatus, config: WorkerConfig, *, num_ranks: int, registry: CollectorRegistry
) -> AsyncIterator[None]:
    """Serve until exit, if the configuration has a port. Raises StartupFailed if a port cannot be used."""
    async with AsyncExitStack() as stack:
        for rank in range(num_ranks if config.metrics_port else 0):
            sources: list[Collector | CollectorRegistry] = [_OfRank(registry, rank), *([] if rank else [status])]
            runner = web.AppRunner(
                _app(_Page(sources, status), status), access_log=None, shutdown_timeout=SHUTDOWN_TIMEOUT_S
            )
            await runner.setup()
            stack.push_async_callback(runner.cleanup)
            await _listen(runner, config.metrics_host, config.metrics_port + rank)
        yield


async def _listen(runner: web.AppRunner, host: str, port: int) -> None:
    try:
        await web.TCPSite(runner, host, port).start()
    except (OSError, OverflowError) as error:
        why = os.strerror(error.errno) if isinstance(error, OSError) and error.errno else str(error)
        raise StartupFailed(f"cannot serve metrics on {host} port {port}: {why} (--metrics-port)") from error


class _Page:
    """The exposition of some collectors. `get` is called on the event loop."""

    def __init__(self, sources: Sequence[Collector | CollectorRegistry], status: WorkerStatus) -> None:
        self._sources = sources
        self._status = status
        self._lock = asyncio.Lock()
        self._rendered_at = float("-inf")
        self._body = b""

    async def get(self) -> bytes:
        async with self._lock:
            if time.monotonic() - self._rendered_at >= MIN_INTERVAL_S:
                await self._status.refresh()
                self._body = await asyncio.to_thread(self._render)
                self._rendered_at = time.monotonic()
            return self._body

    def _render(self) -> bytes:
        return b"".join(generate_latest(source) for source in self._sources)


class _OfRank(Collector):
    """The samples of a registry that belong to one data-parallel rank; the first rank has the samples without a
    rank."""

    def __init__(self, registry: CollectorRegistry, rank: int) -> None:
        self._registry = registry
        self._ranks = {str(rank), *(() if rank else (None,))}

    def collect(self) -> Iterator[Metric]:
        for metric in self._registry.collect():
            samples = [sample for sample in metric.samples if sample.labels.get(ENGINE_LABEL) in self._ranks]
            if samples:
                of_rank = Metric(metric.name, metric.documentation, metric.type, metric.unit)
                of_rank.samples = samples
                yield of_rank


def _app(page: _Page, status: WorkerStatus) -> web.Application:
    async def metrics(_request: web.Request) -> web.Response:
        return web.Response(body=await page.get(), headers={"Content-Type": CONTENT_TYPE_LATEST})

    def probe(problems: Callable[[], list[str]]) -> Callable[[web.Request], Awaitable[web.Response]]:
        async def answer(_request: web.Request) -> web.Response:
            current = problems()
            body = msgspec.json.encode({"status": "unavailable", "problems": current}) if current else b""
            return web.Response(status=503 if current else 200, body=body, content_type="application/json")

        return answer

    app = web.Application()
    app.router.add_get("/metrics", metrics)
    app.router.add_get("/metrics/", metrics)
    app.router.add_get("/health", probe(status.health_problems))
    app.router.add_get("/live", probe(status.health_problems))  # an engine that hangs is started again
    app.router.add_get("/ready", probe(status.ready_problems))
    return app
