"""What it costs one gateway to be seen: the record of each request, its line in the log, and an open page.

`record` is what a request adds while nobody looks: its record, kept and counted when it ends. An open page asks for one
document a second: the gateway's part of a server with 1000 workers and 500 requests a second (as many as are kept, and
as many that run), added up and encoded. CPU times of this thread, the least of several turns.
"""

from __future__ import annotations

import asyncio
import io
import logging
import time
from collections.abc import Callable, Sequence

import msgspec
from prometheus_client import CollectorRegistry

from harness import Bar, Options, Report
from medialane.gateway import GatewayConfig, HandoverPath, InlineTransport, WorkerLink, WorkerPool
from medialane.gateway.operators import GatewayView, own_part, whole_state
from medialane.gateway.records import RecentRequests, RequestRecord, log_end
from medialane.observability import ACCESS_LOGGER, JsonFormatter, LimitedHandler, Metrics, PlainFormatter
from medialane.types.feature import Feature, StagedItem
from medialane.types.media import STAGES, MediaRef, MediaSize
from medialane.types.request import Endpoint, OutputDelta, RoutingDecision, WorkerLoad
from medialane.wire import Hello, RpcConfig

ABOUT = "CPU time of a gateway for records of requests, their lines in the log, and an open page with 1000 workers"

NUM_WORKERS, NUM_REQUESTS, REQUESTS_PER_S = 1000, 1000, 500
TURNS, QUICK_TURNS = 40, 3

_REFS = (
    MediaRef("image", "messages[0].content[0].image_url.url", data=b"1" * 1000),
    MediaRef("image", "messages[0].content[1].image_url.url", url="https://images.example.org/a/photo.jpg"),
)
_PATH = HandoverPath(STAGES["features"], InlineTransport(lambda _: memoryview(b""), 0))


def run(options: Options) -> Report:
    turns = QUICK_TURNS if options.quick else TURNS
    recent = RecentRequests()
    records = {
        "text": _us(lambda: _request(recent, 0, ()), turns),
        "two items": _us(lambda: _request(recent, 0, _REFS), turns),
    }
    record = _request(recent, 0, ())
    formatters = {"JSON": JsonFormatter("gateway"), "text": PlainFormatter()}
    lines = {name: _line_us(formatter, record, turns) for name, formatter in formatters.items()}
    page_ms = asyncio.run(_page_ms(turns))
    rows: list[dict[str, object]] = [{"what": f"record, {name}", "us": us} for name, us in records.items()]
    rows += [{"what": f"line in the log, {name}", "us": us} for name, us in lines.items()]
    rows.append({"what": "document of an open page", "us": 1000 * page_ms})
    share = records["two items"] * REQUESTS_PER_S / 1e6
    bars = [
        Bar(f"page closed, {REQUESTS_PER_S} requests/s of two items: share of a core", share, 0.01, "at most"),
        Bar(f"page open, {NUM_WORKERS} workers: share of a core", share + page_ms / 1000, 0.05, "at most"),
    ]
    return Report("operators", {"CPU": rows}, bars)


def _us(work: Callable[[], object], turns: int, num: int = 500) -> float:
    """Return the CPU time of `work`, in us."""
    best = float("inf")
    for _ in range(turns):
        started = time.thread_time()
        for _ in range(num):
            work()
        best = min(best, (time.thread_time() - started) / num)
    return 1e6 * best


_SENT = RoutingDecision("node-0/0", "idle", num_tokens=99)


def _request(
    recent: RecentRequests,
    number: int,
    refs: Sequence[MediaRef],
    *,
    sent: RoutingDecision = _SENT,
    ends: bool = True,
) -> RequestRecord:
    """Record a request as a gateway does, from its arrival to its end."""
    record = RequestRecord()
    record.id = f"request-{number}"
    recent.begin(record)
    record.path, record.tenant = "/v1/chat/completions", f"tenant-{number % 10}"
    record.received(refs, model="model", streams=True)
    for ref in refs:
        with record.finding(ref):
            pass
    record.prepared(_ITEMS[: len(refs)], (99, 99)[: len(refs)])
    record.sending(sent, _PATH)
    record.prompt_sent()
    now = time.perf_counter()
    if ends:
        record.answered(_DELTA, sent, 99, {}, times=(now, now))
        record.status = 200
        record.ended(is_disconnected=False)
        recent.end(record)
    return record


#: What the gateway has made, whether it is recorded or not.
_FEATURE = Feature("image", "a" * 64, b"", (), size=MediaSize(width=640, height=480))
_ITEMS = [StagedItem(ref, _FEATURE, is_hit=True) for ref in _REFS]
_DELTA = OutputDelta("request", [], num_cached_tokens=9)


def _line_us(formatter: logging.Formatter, record: RequestRecord, turns: int) -> float:
    """Return the CPU time of a request's line, in us."""
    handler = LimitedHandler(io.StringIO())
    handler.setFormatter(formatter)
    logger = logging.getLogger(ACCESS_LOGGER)
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False
    try:
        return _us(lambda: log_end("POST", "/v1/chat/completions", record), turns)
    finally:
        logger.removeHandler(handler)


async def _page_ms(turns: int) -> float:
    """Return the CPU time of one document, in ms."""
    recent = RecentRequests()
    for number in range(NUM_REQUESTS + REQUESTS_PER_S):
        sent = RoutingDecision(_worker(number), "idle", num_tokens=99)
        _request(recent, number, _REFS, sent=sent, ends=number < NUM_REQUESTS)
    metrics = Metrics(CollectorRegistry())
    hello, rpc, config = Hello(gateway_id="bench"), RpcConfig(), GatewayConfig()
    pool = WorkerPool(
        [WorkerLink(_worker(n), hello, rpc=rpc, config=config, metrics=metrics) for n in range(NUM_WORKERS)]
    )
    endpoints = [Endpoint(_worker(n), _worker(n), True, WorkerLoad(), 1) for n in range(NUM_WORKERS)]
    own, best = GatewayView("0", up=True), float("inf")
    for _ in range(turns):
        started = time.thread_time()
        parts = {"0": await own_part(own, recent, pool)}
        state = await whole_state(parts, model="m", endpoints=endpoints, encoder_caches={}, store=None)
        msgspec.json.encode(state)
        best = min(best, time.thread_time() - started)
    return 1000 * best


def _worker(number: int) -> str:
    return f"node-{number // 8}/{number % 8}"
