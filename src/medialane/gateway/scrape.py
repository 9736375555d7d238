"""The workers' metrics, read when the gateway is scraped.

Pulled, not pushed: reading a registry takes a worker a few milliseconds, which are spent only for scrapes, and the
values are as fresh as those of the engine's own server.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import TYPE_CHECKING

from prometheus_client import CONTENT_TYPE_LATEST

from medialane.gateway.worker_pool import WorkerPool
from medialane.observability.collectors import Memory
from medialane.observability.worker_metrics import WORKER_LABEL, MetricMirror
from medialane.runtime.tasks import gather_or_cancel

if TYPE_CHECKING:  # types only: starlette is installed with vLLM
    from starlette.types import ASGIApp, Receive, Scope, Send

#: Path prefix of the metrics of vLLM's app, which serves every path below it, too.
PATH = "/metrics"

#: A worker that has not responded by then is exposed with its last values: scrapers have timeouts of their own.
TIMEOUT_S = 1.0

#: Scrapes are unauthenticated and not rate-limited; workers are queried at most once per interval.
MIN_INTERVAL_S = 0.25


class WorkerScrape:
    """The latest metrics of all connected workers."""

    def __init__(self, workers: WorkerPool, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._workers = workers
        self._clock = clock
        self._lock = asyncio.Lock()
        self._refreshed_at = float("-inf")

    async def refresh(self) -> None:
        """Query all workers for changed values, and wait for their responses, at most `TIMEOUT_S` seconds."""
        async with self._lock:
            if self._clock() - self._refreshed_at < MIN_INTERVAL_S:
                return
            clients = [link.client for link in self._workers.links.values()]
            await gather_or_cancel([client.calls.read_metrics(TIMEOUT_S) for client in clients if client is not None])
            self._refreshed_at = self._clock()

    def mirrors(self) -> dict[str, MetricMirror]:
        """Return the metrics of the connected workers, by address."""
        clients = {link.name: link.client for link in self._workers.links.values()}
        return {address: client.calls.metrics for address, client in clients.items() if client is not None}

    def memory(self) -> Iterator[Memory]:
        """Yield the memory of the connected workers' processes."""
        for name, mirror in self.mirrors().items():
            yield {WORKER_LABEL: name}, mirror.memory


class ScrapeMiddleware:
    """Refreshes the workers' metrics before a scrape is served. `page`, if given, returns what is served; otherwise
    vLLM's app serves this process's registry."""

    def __init__(
        self, app: ASGIApp, refresh: Callable[[], Awaitable[None]], page: Callable[[], bytes] | None = None
    ) -> None:
        self._app = app
        self._refresh = refresh
        self._page = page

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_scrape = scope["type"] == "http" and scope["path"].startswith(PATH)
        if is_scrape:
            await self._refresh()
        if not is_scrape or self._page is None:
            return await self._app(scope, receive, send)
        headers = [(b"content-type", CONTENT_TYPE_LATEST.encode())]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        return await send({"type": "http.response.body", "body": self._page()})
