"""Scrapes of the gateway query its workers."""

import asyncio
from types import SimpleNamespace

import pytest

from medialane.gateway import ScrapeMiddleware, WorkerPool, WorkerScrape
from medialane.gateway.scrape import MIN_INTERVAL_S
from waiting import eventually


class Calls:
    def __init__(self):
        self.metrics = object()
        self.num_reads = 0
        self.answers = asyncio.Event()
        self.answers.set()

    async def read_metrics(self, timeout_s):
        self.num_reads += 1
        await self.answers.wait()
        return True


class Link:
    def __init__(self, name, calls):
        self.name, self.client = name, None if calls is None else SimpleNamespace(calls=calls)


@pytest.fixture
def links():
    return [Link("unix:/w0", Calls()), Link("unix:/w1", Calls()), Link("unix:/lost", None)]


@pytest.fixture
def scrape(links, clock):
    return WorkerScrape(WorkerPool(links), clock=clock)


def num_reads(links):
    return [link.client.calls.num_reads for link in links if link.client is not None]


async def test_every_connected_worker_is_scraped(scrape, links):
    await scrape.refresh()
    assert num_reads(links) == [1, 1]
    assert scrape.mirrors() == {link.name: link.client.calls.metrics for link in links[:2]}


async def test_metrics_of_a_removed_worker_disappear(scrape, links):
    await scrape.refresh()
    links[0].client = None
    assert list(scrape.mirrors()) == ["unix:/w1"]


async def test_frequent_scrapes_are_limited_to_the_interval(scrape, links, clock):
    await asyncio.gather(*(scrape.refresh() for _ in range(20)))
    assert num_reads(links) == [1, 1]
    clock.now += MIN_INTERVAL_S
    await scrape.refresh()
    assert num_reads(links) == [2, 2]


async def test_cancelled_scrape_does_not_affect_the_next(scrape, links):
    links[0].client.calls.answers.clear()
    given_up = asyncio.create_task(scrape.refresh())
    await eventually(lambda: num_reads(links) == [1, 1])
    given_up.cancel()
    await asyncio.wait([given_up])
    links[0].client.calls.answers.set()
    await scrape.refresh()
    assert num_reads(links) == [2, 2]


@pytest.mark.parametrize(
    ("kind", "path", "asks"), [("http", "/metrics", 1), ("http", "/v1/models", 0), ("lifespan", "/metrics", 0)]
)
async def test_only_a_scrape_waits_for_the_workers(kind, path, asks):
    seen = []

    async def refresh():
        seen.append("refresh")

    async def app(*_):
        seen.append("app")

    await ScrapeMiddleware(app, refresh)({"type": kind, "path": path}, None, None)
    assert seen == ["refresh"] * asks + ["app"]


async def test_page_replaces_that_of_the_app():
    seen, sent = [], []

    async def refresh():
        seen.append("refresh")

    async def app(*_):
        seen.append("app")

    async def send(message):
        sent.append(message)

    scrape = ScrapeMiddleware(app, refresh, lambda: b"page")
    await scrape({"type": "http", "path": "/metrics"}, None, send)
    assert seen == ["refresh"]
    assert (sent[0]["status"], sent[1]["body"]) == (200, b"page")
    await scrape({"type": "http", "path": "/v1/models"}, None, send)
    assert seen == ["refresh", "app"]
