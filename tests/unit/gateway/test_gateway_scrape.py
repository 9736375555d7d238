"""Scrapes of the gateway query its workers."""

import asyncio

import pytest

from medialane.gateway import ScrapeMiddleware, WorkerPool, WorkerScrape
from medialane.gateway.http import MIN_INTERVAL_S
from medialane.testing.fake_worker import FakeLink
from waiting import eventually


@pytest.fixture
def links():
    """The last one is not connected."""
    return [FakeLink("unix:/w0"), FakeLink("unix:/w1"), FakeLink("unix:/lost")]


@pytest.fixture
def scrape(links):
    pool = WorkerPool(links)
    for link in links[:2]:
        link.join()
    return WorkerScrape(pool)


def num_reads(links):
    return [len(link.client.sent) for link in links if link.client is not None]


async def test_every_connected_worker_is_scraped(scrape, links):
    await scrape.refresh()
    assert num_reads(links) == [1, 1]
    assert scrape.mirrors() == {link.name: link.client.calls.metrics for link in links[:2]}


async def test_metrics_of_a_removed_worker_disappear(scrape, links):
    await scrape.refresh()
    links[0].lose()
    assert list(scrape.mirrors()) == ["unix:/w1"]


async def test_frequent_scrapes_are_limited_to_the_interval(scrape, links, clock):
    async def send(_):
        pass

    middleware = ScrapeMiddleware(None, scrape.refresh, lambda: b"page", clock=clock)
    asked = {"type": "http", "path": "/metrics"}
    await asyncio.gather(*(middleware(asked, None, send) for _ in range(20)))
    assert num_reads(links) == [1, 1]
    clock.now += MIN_INTERVAL_S
    await middleware(asked, None, send)
    assert num_reads(links) == [2, 2]


async def test_cancelled_scrape_does_not_affect_the_next(scrape, links):
    links[0].worker.is_silent = True
    given_up = asyncio.create_task(scrape.refresh())
    await eventually(lambda: num_reads(links) == [1, 1])
    given_up.cancel()
    await asyncio.wait([given_up])
    links[0].worker.respond()
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
