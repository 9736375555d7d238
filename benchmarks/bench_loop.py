"""`medialane bench loop`: lag of the gateway's event loop while 10 MB data URLs are received.

The gateway is a separate process with all components (vLLM's app, intake), and has a store, with preparers; a fake
worker responds.
This process sends 50 requests at a time, each with one photo of 7.5 MB as a data URL, at the lowest priority, as
clients run elsewhere. First all photos are new, then the same are sent again.

A task in the gateway sleeps for 1 ms repeatedly and records how late it wakes up. If the loop is blocked for 20 ms, it
makes one record where a clock ticking every millisecond would have made twenty (20, 19, 18, ... ms late): those are
added, so that a percentile is over time and not over records. `own` is the lag without the time in which the loop's
thread was runnable but had no core (schedstat, proc(5)): the part caused by the gateway itself.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
import time
from collections.abc import AsyncIterator, Sequence

import aiohttp
import msgspec
import pybase64
import uvloop

from gateway_process import Peers, gateway_process, until_ready, worker
from harness import Bar, Options, Report, median, percentile
from medialane.arena import ArenaConfig
from medialane.config import Config, process_environ
from medialane.gateway import GatewayConfig
from medialane.testing.sample_media import sample_jpeg
from medialane.testing.tiny_model import TINY_MODEL_FLAGS, build_tiny_model, cache_folder
from observers import LOGGING, Observers, start_observers

ABOUT = "event-loop lag of the gateway during 50 concurrent requests with 10 MB data URLs"

CONCURRENCY = 50
NUM_REQUESTS, QUICK_NUM_REQUESTS = 150, 50
IDLE_S = 3.0
TICK_S = 0.001

#: A photo of 12 megapixels and about 7.5 MB, which the processor scales down to fit the prompt.
WIDTH, HEIGHT, QUALITY = 4000, 3000, 98
FLAGS = (*TINY_MODEL_FLAGS, '--mm-processor-kwargs={"max_pixels": 1003520}', "--disable-uvicorn-access-log")

#: Start of a JPEG: the SOI marker, and a comment of nine characters. Its length is a multiple of three bytes, so that
#: its base64 can be prepended to that of the rest.
_HEAD = b"\xff\xd8\xff\xfe\x00\x0b%09d"

#: Time of the wake-up, lag, and the part of the lag spent waiting for a core: ns, ms, ms.
Lags = list[tuple[int, float, float]]


def run(options: Options) -> Report:
    model = str(build_tiny_model(cache_folder(process_environ())))
    # A slow machine takes more than the default for 50 photos: nothing is to be refused.
    config = Config(arena=ArenaConfig(size_bytes=1 << 30), gateway=GatewayConfig(queue_timeout_s=300))
    niceness = os.nice(0)
    with (
        tempfile.TemporaryDirectory(prefix="medialane-bench-") as folder,
        start_observers(is_on=options.observed) as observers,
    ):
        peers = Peers.in_folder(folder)
        if options.observed:
            config = msgspec.structs.replace(config, logging=LOGGING)
            os.environ.update(observers.environ)
        with gateway_process(model, peers, config=config, flags=[*FLAGS, *observers.flags], alongside=watch) as gateway:
            os.nice(19 - niceness)
            num_requests = QUICK_NUM_REQUESTS if options.quick else NUM_REQUESTS
            load = _load(model, peers, gateway.url, num_requests=num_requests, config=config, observers=observers)
            return _report(uvloop.run(load), gateway.end())


async def watch(lags: Lags) -> None:
    """Record the lag of the loop, which runs in the process's first thread."""
    with open("/proc/self/schedstat", "rb", buffering=0) as schedstat:  # noqa: ASYNC230 - procfs does no disk I/O
        while True:
            waited, started = _waited_ns(schedstat.fileno()), time.perf_counter_ns()
            await asyncio.sleep(TICK_S)
            now = time.perf_counter_ns()
            waited = _waited_ns(schedstat.fileno()) - waited
            lags.append((now, max(0.0, (now - started) / 1e6 - TICK_S * 1000), waited / 1e6))


def _waited_ns(schedstat: int) -> int:
    return int(os.pread(schedstat, 100, 0).split()[1])


async def _load(
    model: str, peers: Peers, url: str, *, num_requests: int, config: Config, observers: Observers
) -> dict[str, tuple[int, int]]:
    """Send all requests, twice. Returns the start and end of each phase."""
    phases = {}
    encoded = pybase64.b64encode(sample_jpeg(0, WIDTH, HEIGHT, quality=QUALITY)[2:])
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    async with worker(peers, config), aiohttp.ClientSession(connector=connector) as session:
        await until_ready(session, url)
        with observers.watching(url):
            started = time.perf_counter_ns()
            await asyncio.sleep(IDLE_S)
            phases["idle"] = (started, time.perf_counter_ns())
            await _send_all(session, url, model=model, encoded=encoded, numbers=range(-CONCURRENCY, 0))  # warm-up
            for phase in ("new images", "the same again"):
                started = time.perf_counter_ns()
                await _send_all(session, url, model=model, encoded=encoded, numbers=range(num_requests))
                phases[phase] = (started, time.perf_counter_ns())
    return phases


async def _send_all(
    session: aiohttp.ClientSession, url: str, *, model: str, encoded: bytes, numbers: Sequence[int]
) -> None:
    todo = iter(numbers)

    async def client() -> None:
        for number in todo:
            body = _body(model, encoded, number)
            headers = {"content-type": "application/json", "content-length": str(len(body))}
            async with session.post(f"{url}/v1/chat/completions", data=chunks(body), headers=headers) as response:
                answer = await response.read()
                assert response.status == 200, answer[:500]

    async with asyncio.TaskGroup() as clients:
        for _ in range(CONCURRENCY):
            clients.create_task(client())


def _body(model: str, encoded: bytes, number: int) -> bytes:
    """Build a request about photo `number`: its bytes are unique, its pixels always the same."""
    before, after = msgspec.json.encode(
        {
            "model": model,
            "max_tokens": 3,
            "messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "URL"}}]}],
        }
    ).split(b"URL")
    return b"".join([before, b"data:image/jpeg;base64,", pybase64.b64encode(_HEAD % number), encoded, after])


async def chunks(body: bytes) -> AsyncIterator[bytes]:
    for start in range(0, len(body), 1 << 18):
        yield body[start : start + (1 << 18)]


def _ticks(lags: Sequence[float]) -> list[float]:
    """Return the lag of each millisecond, in ms."""
    return [lag - late for lag in lags for late in range(int(lag) + 1)]


def lag_rows(phases: dict[str, tuple[int, int]], lags: Lags) -> list[dict[str, object]]:
    """Return a row for each phase, whose start and end are given."""
    rows: list[dict[str, object]] = []
    for phase, (begin, end) in phases.items():
        found = [(lag, max(0.0, lag - waited)) for when, lag, waited in lags if begin <= when < end]
        ticks, own = _ticks([lag for lag, _ in found]), _ticks([lag for _, lag in found])
        rows.append(
            {
                "phase": phase,
                "seconds": (end - begin) / 1e9,
                "lag p50 ms": median(ticks),
                "p90 ms": percentile(ticks, 0.9),
                "p99 ms": percentile(ticks, 0.99),
                "worst ms": max(ticks),
                "own p99 ms": percentile(own, 0.99),
                "own worst ms": max(own),
            }
        )
    return rows


def lag_bar(name: str, rows: list[dict[str, object]]) -> Bar:
    worst = max(float(row["p99 ms"]) for row in rows)  # type: ignore[arg-type]
    return Bar(f"{name}: event-loop lag p99, ms", worst, 10, "at most")


def _report(phases: dict[str, tuple[int, int]], lags: Lags) -> Report:
    rows = lag_rows(phases, lags)
    return Report("loop", {f"{CONCURRENCY} at a time": rows}, [lag_bar("loop", rows)])
