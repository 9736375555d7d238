"""A worker's HTTP endpoints for probes and scrapers."""

import asyncio
import contextlib

import aiohttp
import msgspec
import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from fake_engine import FAKE_CARD, FakeEngine
from medialane.gateway.workers import RpcClient
from medialane.tools.check import free_port
from medialane.types.errors import StartupFailed
from medialane.types.stats import ArenaStats, PoolStats, PullStats, StoreStats
from medialane.wire import Hello, RpcConfig
from medialane.worker import RpcServer, Worker, WorkerConfig
from medialane.worker.media import NoArena
from medialane.worker.metrics_server import WorkerStatus, metrics_served
from waiting import eventually


class Serving:
    def __init__(self, tmp_path, num_ranks=1, host_arena=None):
        self.registry = CollectorRegistry()
        self.engine = FakeEngine(card=msgspec.structs.replace(FAKE_CARD, data_parallel_size=num_ranks))
        self.worker = Worker(
            self.engine,
            WorkerConfig(ping_interval_s=0.01, stall_timeout_s=0.2),
            arena_directory="/dev/shm",
            host_arena=host_arena,
            registry=self.registry,
        )
        self.server = RpcServer(self.worker, RpcConfig())
        self.address = f"unix:{tmp_path}/w"
        self.port = free_port(num_ranks)
        self.num_ranks = num_ranks

    @contextlib.asynccontextmanager
    async def run(self):
        await self.server.serve(self.address)
        config = WorkerConfig(metrics_port=self.port)
        status = WorkerStatus(self.worker, self.engine, self.server)
        try:
            async with (
                metrics_served(status, config, num_ranks=self.num_ranks, registry=self.registry),
                aiohttp.ClientSession() as self.session,
            ):
                yield self
        finally:
            await self.server.close()
            self.worker.close()

    async def get(self, path, rank=0):
        async with self.session.get(f"http://127.0.0.1:{self.port + rank}{path}") as response:
            return response.status, await response.text(), response.headers["Content-Type"]


@pytest.fixture
async def serving(tmp_path):
    async with Serving(tmp_path).run() as serving:
        yield serving


async def test_all_series_of_the_process_and_those_of_the_worker_are_exposed(serving):
    Gauge("vllm:num_requests_running", "text", ["engine"], registry=serving.registry).labels("0").set(3)
    Counter("other", "text", registry=serving.registry).inc()
    Histogram("vllm:seconds", "text", ["engine"], buckets=(1, 2), registry=serving.registry).labels("0").observe(1)
    status, text, kind = await serving.get("/metrics")
    assert (status, kind.partition(";")[0]) == (200, "text/plain")
    assert 'vllm:num_requests_running{engine="0"} 3.0' in text
    assert "other_total 1.0" in text
    assert 'vllm:seconds_bucket{engine="0",le="2.0"} 1.0' in text
    assert "medialane_worker_gateways 0.0" in text
    assert "medialane_worker_engine_up 1.0" in text
    assert 'medialane_worker_embeddings_total{outcome="encoded"} 0.0' in text
    assert (await serving.get("/metrics/"))[1] == text


async def test_each_rank_has_a_port_with_its_own_series(tmp_path):
    async with Serving(tmp_path, num_ranks=3).run() as serving:
        gauge = Gauge("vllm:num_requests_running", "text", ["engine"], registry=serving.registry)
        Counter("process_seconds", "text", registry=serving.registry)
        for rank in range(3):
            gauge.labels(str(rank)).set(10 + rank)
        for rank in range(3):
            _, text, _ = await serving.get("/metrics", rank)
            found = [line for line in text.splitlines() if line.startswith("vllm:")]
            assert found == [f'vllm:num_requests_running{{engine="{rank}"}} {10.0 + rank}']
            assert ("process_seconds_total" in text, "medialane_worker_gateways" in text) == (rank == 0, rank == 0)
            assert (await serving.get("/health", rank))[0] == 200


async def test_worker_is_ready_while_a_gateway_is_registered(serving):
    status, body, kind = await serving.get("/ready")
    assert (status, kind) == (503, "application/json")
    assert msgspec.json.decode(body) == {"status": "unavailable", "problems": ["no gateway is registered"]}
    client = await RpcClient.connect(serving.address, Hello(gateway_id="g"), RpcConfig())
    assert (await serving.get("/ready"))[:2] == (200, "")
    assert "medialane_worker_gateways 1.0" in (await serving.get("/metrics"))[1]
    await client.close()
    await eventually(lambda: serving.server.num_gateways == 0)
    assert (await serving.get("/ready"))[0] == 503


async def test_worker_is_unhealthy_while_its_engine_is_stalled(serving):
    assert (await serving.get("/health"))[:2] == (200, "")
    watching = asyncio.create_task(serving.worker.watch())
    serving.engine.stall()
    await eventually(lambda: serving.worker.is_stalled)
    for path in ("/health", "/ready"):
        status, body, _ = await serving.get(path)
        assert status == 503
        assert "the engine does not respond" in msgspec.json.decode(body)["problems"]
    assert "medialane_worker_engine_up 0.0" in (await serving.get("/metrics"))[1]
    serving.engine.resume()
    await eventually(lambda: not serving.worker.is_stalled)
    assert (await serving.get("/health"))[:2] == (200, "")
    watching.cancel()
    await asyncio.wait([watching])


async def test_page_is_rendered_outside_of_the_event_loop_and_not_for_every_scrape(serving, monkeypatch):
    loops = []

    class Slow:
        def collect(self):
            with contextlib.suppress(RuntimeError):
                loops.append(asyncio.get_running_loop())
            rendered.append(1)
            return ()

        def describe(self):
            return ()

    rendered = []
    serving.registry.register(Slow())
    await asyncio.gather(*(serving.get("/metrics") for _ in range(5)))
    assert (len(rendered), loops) == (1, [])


async def test_port_in_use_fails_the_start_by_name(serving):
    status = WorkerStatus(serving.worker, serving.engine, serving.server)
    config = WorkerConfig(metrics_port=serving.port)
    with pytest.raises(StartupFailed, match="--metrics-port"):
        async with metrics_served(status, config, num_ranks=1, registry=serving.registry):
            pass


async def test_nothing_is_served_without_a_port(serving):
    status = WorkerStatus(serving.worker, serving.engine, serving.server)
    async with metrics_served(status, WorkerConfig(), num_ranks=1, registry=serving.registry):
        pass


class StoreOfThisHost(NoArena):
    """Its state is exposed here while `stats` is set."""

    stats = StoreStats(
        ArenaStats(*range(100, 116)),
        PoolStats(0, 0, 0, 0, 0, 0, 0, 0),
        PullStats({"tcp": 3, "nixl": 4}, {"tcp": 300}, {"nixl": 1}, num_quarantined=2),
    )

    async def exposed_stats(self):
        return self.stats


async def test_worker_exposes_the_store_of_its_host_unless_another_process_does(tmp_path):
    store = StoreOfThisHost()
    async with Serving(tmp_path, num_ranks=2, host_arena=store).run() as serving:
        text = (await serving.get("/metrics"))[1]
        assert 'medialane_store_pulls_total{mover="tcp"} 3.0' in text
        assert 'medialane_store_pulls_total{mover="nixl"} 4.0' in text
        assert "medialane_store_quarantined_ranges 2.0" in text
        assert 'medialane_arena_bytes{kind="size"} 100.0' in text
        assert "medialane_store" not in (await serving.get("/metrics", rank=1))[1]
        store.stats = None
        while "medialane_store" in (await serving.get("/metrics"))[1]:
            pass  # a page is rendered only now and then
