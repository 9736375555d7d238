"""`/metrics`: of this gateway, of the others that share its port, and of the workers.

Theory of operation. The kernel gives each connection to one of the gateways, hence a scrape reaches any of them. Each
gateway serves its own figures, labelled with its index, over a unix socket. The gateway that is scraped reads what the
others have and merges it family by family; figures of the host (store, workers), which are the same in every gateway,
it adds once. A gateway that does not respond within `SCRAPE_TIMEOUT_S` is exposed with its last values: counters summed
over gateways must not decrease while one restarts.

The socket also serves `/health`, by which a supervisor checks this gateway and not any of them, and what a gateway
knows of its own requests (`operators`).

The workers' metrics are pulled, not pushed: reading a registry takes a worker a few milliseconds, which are spent only
for scrapes, and the values are as fresh as at the engine's own server.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, TypeVar

import aiohttp
import msgspec
from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from medialane.gateway.http.responses import send_response
from medialane.gateway.workers.pool import WorkerPool
from medialane.observability.collectors import Memory, up_metrics
from medialane.observability.metrics import Metrics
from medialane.observability.worker_metrics import WORKER_LABEL, MetricMirror
from medialane.runtime.tasks import gather_or_cancel
from medialane.wire.listener import bind_unix

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Receive, Scope, Send

logger = logging.getLogger(__name__)

T = TypeVar("T")

GATEWAY_LABEL = "gateway"

#: Where a gateway answers the others about its requests, and how long they wait for that.
ASK_PATH = "/operators"
ASK_TIMEOUT_S = 0.5
#: A thousand requests have 1.2 MB.
_MAX_ANSWER_BYTES = 32 << 20

#: Asks the other gateways of a port for a path: their answers by index, None of a gateway that does not answer.
AskOthers = Callable[[str], Awaitable[Mapping[str, bytes | None]]]


def decoded(answer: bytes | None, kind: type[T]) -> T | None:
    """Return what another gateway has answered; None for nothing, and for what one of another version says."""
    try:
        return None if answer is None else msgspec.json.decode(answer, type=kind)
    except msgspec.DecodeError:
        return None


async def no_others(_path: str) -> Mapping[str, bytes | None]:
    """Of a gateway that has its port for itself."""
    return {}


#: Start of a family in the text format: newlines in help texts and label values are escaped.
_FAMILY = re.compile(rb"^(?=# HELP )", re.MULTILINE)


class GatewayMetrics:
    """One gateway's view of the group. `sockets` are the paths of all gateways' sockets, `index` is its own place
    there; `health` returns status and body of `/health`. `refresh_own` precedes each read of this gateway's figures."""

    def __init__(
        self,
        sockets: Sequence[str],
        index: int,
        *,
        metrics: Metrics,
        health: Callable[[], tuple[int, bytes]],
        refresh_own: Callable[[], Coroutine[Any, Any, None]],
    ) -> None:
        self._socket = sockets[index]
        self._others = {str(i): path for i, path in enumerate(sockets) if i != index}
        self._own = _Labelled(metrics.registry, str(index))
        self._host = metrics.host
        self._health = health
        self._refresh_own = refresh_own
        #: The latest text of each other gateway, by label.
        self._texts: dict[str, bytes] = {}
        self._up = {str(i): float(i == index) for i in range(len(sockets))}
        #: What other gateways may ask by `ask_others`, by the path before the query.
        self.answers: dict[str, Callable[[str], Awaitable[bytes]]] = {}
        metrics.watch(lambda: up_metrics(self._up), of_host=True)

    def page(self) -> bytes:
        """Return the metrics of all gateways, as of the last `refresh`, and of the host."""
        return merge([generate_latest(self._own), *self._texts.values(), generate_latest(self._host)])

    async def refresh(self) -> None:
        """Read the other gateways' metrics; takes at most `SCRAPE_TIMEOUT_S`."""
        others = [self._read(label, path) for label, path in self._others.items()]
        await gather_or_cancel([self._refresh_own(), *others])

    async def _read(self, label: str, socket: str) -> None:
        self._up[label] = 0.0
        if (text := await _answer(socket, "GET", METRICS_PATH, timeout_s=SCRAPE_TIMEOUT_S)) is not None:
            self._texts[label], self._up[label] = text, 1.0

    async def ask_others(self, path: str) -> dict[str, bytes | None]:
        """Ask the other gateways for what is among their `answers`; None is from one that does not answer in time."""
        asked = [
            _answer(socket, "POST", ASK_PATH, path.encode(), timeout_s=ASK_TIMEOUT_S)
            for socket in self._others.values()
        ]
        return dict(zip(self._others, await gather_or_cancel(asked), strict=True))

    @asynccontextmanager
    async def endpoint(self) -> AsyncIterator[None]:
        """Serve this gateway's own metrics and health on its socket. The socket's folder must be private."""
        app = web.Application()
        app.router.add_get(METRICS_PATH, self._answer_metrics)
        app.router.add_get("/health", self._answer_health)
        app.router.add_post(ASK_PATH, self._answer_sibling)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=SCRAPE_TIMEOUT_S)
        await runner.setup()
        try:
            await web.SockSite(runner, bind_unix(self._socket)).start()
            yield
        finally:
            await runner.cleanup()

    async def _answer_metrics(self, _request: web.Request) -> web.Response:
        await self._refresh_own()
        return web.Response(body=generate_latest(self._own))

    async def _answer_sibling(self, request: web.Request) -> web.Response:
        path = (await request.read()).decode()
        if (answer := self.answers.get(path.partition("?")[0])) is None:
            return web.Response(status=404)
        return web.Response(body=await answer(path))

    async def _answer_health(self, _request: web.Request) -> web.Response:
        status, body = self._health()
        return web.Response(status=status, body=body)


async def _answer(socket: str, method: str, path: str, body: bytes = b"", *, timeout_s: float) -> bytes | None:
    """Return what another gateway answers; None if it does not in time, or if that is too long."""
    timeout = aiohttp.ClientTimeout(total=timeout_s)
    try:
        async with (
            aiohttp.ClientSession(connector=aiohttp.UnixConnector(socket), timeout=timeout) as session,
            session.request(method, f"http://gateway{path}", data=body, raise_for_status=True) as response,
        ):
            return await response.read() if (response.content_length or 0) <= _MAX_ANSWER_BYTES else None
    except (aiohttp.ClientError, TimeoutError) as error:
        logger.debug("the gateway at %s does not answer: %r", socket, error)
        return None


class _Labelled(Collector):
    """All samples of a registry with one gateway's label."""

    def __init__(self, registry: CollectorRegistry, index: str) -> None:
        self._registry = registry
        self._index = index

    def collect(self) -> Iterator[Metric]:
        for metric in self._registry.collect():
            labelled = Metric(metric.name, metric.documentation, metric.type, metric.unit)
            labelled.samples = [
                sample._replace(labels={**sample.labels, GATEWAY_LABEL: self._index})  # a named tuple
                for sample in metric.samples
            ]
            yield labelled


def merge(texts: Iterable[bytes]) -> bytes:
    """Merge pages in Prometheus's text format: the samples of a family, which may occur only once, are joined under the
    header of its first occurrence."""
    families: dict[bytes, list[bytes]] = {}
    for text in texts:
        for family in filter(None, _FAMILY.split(text)):
            help_line, type_line, samples = family.split(b"\n", 2)
            name = help_line.split(b" ", 3)[2]
            families.setdefault(name, [help_line + b"\n" + type_line + b"\n"]).append(samples)
    return b"".join(piece for pieces in families.values() for piece in pieces)


#: Path prefix of the metrics of vLLM's app, which serves every path below it, too.
METRICS_PATH = "/metrics"

#: A worker that has not responded by then is exposed with its last values: scrapers have timeouts of their own.
SCRAPE_TIMEOUT_S = 1.0

#: Scrapes are unauthenticated and not rate-limited; workers and other gateways are asked at most once per interval.
MIN_INTERVAL_S = 0.25


class WorkerScrape:
    """The latest metrics of all connected workers."""

    def __init__(self, workers: WorkerPool) -> None:
        self._workers = workers

    async def refresh(self) -> None:
        """Query all workers for changed values, and wait for their responses, at most `SCRAPE_TIMEOUT_S` seconds."""
        clients = [link.client for link in self._workers.links.values()]
        await gather_or_cancel(
            [client.calls.read_metrics(SCRAPE_TIMEOUT_S) for client in clients if client is not None]
        )

    def mirrors(self) -> dict[str, MetricMirror]:
        """Return the metrics of the connected workers, by address."""
        clients = {link.name: link.client for link in self._workers.links.values()}
        return {address: client.calls.metrics for address, client in clients.items() if client is not None}

    def memory(self) -> Iterator[Memory]:
        """Yield the memory of the connected workers' processes."""
        for name, mirror in self.mirrors().items():
            yield {WORKER_LABEL: name}, mirror.memory


class ScrapeMiddleware:
    """Refreshes what is exposed, at most every `MIN_INTERVAL_S`, before a scrape is served. `page`, if given, returns
    what is served; otherwise vLLM's app serves this process's registry."""

    def __init__(
        self,
        app: ASGIApp,
        refresh: Callable[[], Awaitable[None]],
        page: Callable[[], bytes] | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._app = app
        self._refresh = refresh
        self._page = page
        self._clock = clock
        self._lock = asyncio.Lock()
        self._refreshed_at = float("-inf")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_scrape = scope["type"] == "http" and scope["path"].startswith(METRICS_PATH)
        if is_scrape:
            async with self._lock:
                if self._clock() - self._refreshed_at >= MIN_INTERVAL_S:
                    await self._refresh()
                    self._refreshed_at = self._clock()
        if not is_scrape or self._page is None:
            return await self._app(scope, receive, send)
        return await send_response(send, 200, self._page(), [(b"content-type", CONTENT_TYPE_LATEST.encode())])
