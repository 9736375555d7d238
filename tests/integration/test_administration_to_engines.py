"""From an operator to every worker's engine, and from engines' metrics to a scraper: over real sockets."""

import tempfile

import pytest
from gateway_parts import FakeWorker, Parts, request
from prometheus_client import Counter, generate_latest

from medialane.gateway import WorkerScrape, open_scope
from medialane.observability import engine_metrics
from medialane.types.admin import IsSleeping, ResetPrefixCache, Sleep
from medialane.types.errors import AdminCallIncomplete, GenerationFailed
from waiting import eventually


@pytest.fixture
async def workers(arena):
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        workers = [FakeWorker(f"{folder}/{n}.sock", arena=arena) for n in range(2)]
        for worker in workers:
            await worker.start()
        yield workers
        for worker in workers:
            await worker.close()


@pytest.fixture
async def parts(arena, workers):
    async with Parts(arena, None, workers) as parts:
        yield parts


async def test_administrative_call_reaches_every_engine(parts, workers):
    assert await parts.gateway.administer(Sleep(1, "wait")) == [None, None]
    assert [worker.engine.calls for worker in workers] == [[Sleep(1, "wait")]] * 2
    assert await parts.gateway.administer(IsSleeping()) == [True, True]


async def test_error_names_the_workers_that_failed_the_call(parts, workers):
    workers[1].engine.die(GenerationFailed("out of memory"))
    with pytest.raises(AdminCallIncomplete) as failed:
        await parts.gateway.administer(Sleep())
    assert f"1 of 2 workers executed the call; failed: {workers[1].address} (out of memory)" in failed.value.message
    await workers[0].close()
    await eventually(lambda: parts.links.num_ready == 1)
    with pytest.raises(AdminCallIncomplete, match="0 of 2"):
        await parts.gateway.administer(Sleep())


async def test_router_forgets_the_blocks_of_a_reset_cache(parts):
    stats = parts.gateway.routes.stats
    with open_scope():
        await parts.generate(request("r", list(range(100)), max_tokens=1), None)
    await eventually(lambda: stats().num_blocks > 0)
    await parts.gateway.administer(ResetPrefixCache())
    await eventually(lambda: stats().num_blocks == 0)


class Scraper:
    def __init__(self, parts):
        self._scrape = WorkerScrape(parts.links)
        self._registry = parts.registry
        parts.metrics.watch(lambda: engine_metrics(self._scrape.mirrors()))

    async def value(self, worker):
        """The worker's `vllm:prompt_tokens_total` at the gateway; None if absent."""
        await self._scrape.refresh()
        generate_latest(self._registry)
        labels = {"engine": "0", "worker": worker.address}
        return self._registry.get_sample_value("vllm:prompt_tokens_total", labels)


def counter(worker):
    return Counter("vllm:prompt_tokens", "Tokens", ["engine"], registry=worker.registry).labels("0")


async def test_scrape_returns_current_metrics_of_every_worker(parts, workers):
    scraper, (one, other) = Scraper(parts), map(counter, workers)
    one.inc(3)
    other.inc(5)
    assert [await scraper.value(worker) for worker in workers] == [3, 5]
    one.inc()
    assert [await scraper.value(worker) for worker in workers] == [4, 5]


async def test_counter_continues_after_a_lost_connection(parts, workers):
    scraper = Scraper(parts)
    counted = counter(workers[0])
    counted.inc(3)
    assert await scraper.value(workers[0]) == 3
    lost = parts.links.links[workers[0].address].client
    workers[0].drop_connections()
    await eventually(lambda: parts.links.links[workers[0].address].client not in (None, lost))
    counted.inc()
    assert await scraper.value(workers[0]) == 4


async def test_series_of_a_removed_worker_disappear_and_a_new_worker_has_its_own(parts, workers):
    scraper, counted = Scraper(parts), [counter(worker) for worker in workers]
    for one in counted:
        one.inc(9)
    assert await scraper.value(workers[0]) == 9
    await workers[0].close()
    await eventually(lambda: parts.links.num_ready == 1)
    assert [await scraper.value(worker) for worker in workers] == [None, 9]
    await workers[0].start()
    counter(workers[0]).inc()
    await eventually(lambda: parts.links.num_ready == 2)
    assert await scraper.value(workers[0]) == 1
