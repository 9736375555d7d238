"""`medialane bench loop`: how long the gateway's event loop keeps callbacks waiting while 10 MB data URLs pass.

The gateway is a process of its own with everything in it (vLLM's app, intake, arena, preparers); a fake worker answers.
50 requests at a time, each with one photo of 7.5 MB as a data URL, come from this process, with the lowest priority:
clients run elsewhere. First all photos are new, then the same come again.

In the gateway a task sleeps 1 ms at a time and notes how much later than that it went on. A loop that is blocked for
20 ms makes one such note where a clock that ticks every millisecond would have made twenty (20, 19, 18, ... ms late):
those are put in, so that a percentile is about moments and not about notes. `own` is the lag without the time in which
the loop's thread could have run and had no core (schedstat, proc(5)): what the gateway itself makes others wait.
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

from gateway_process import gateway_process, until_ready, worker
from harness import Bar, Options, Report, median, percentile
from medialane.arena import ArenaConfig
from medialane.cli.sample_images import sample_jpeg
from medialane.config import Config, process_environ
from medialane.vllm_bridge.tiny_model import TINY_MODEL_FLAGS, build_tiny_model, cache_folder

ABOUT = "event-loop lag of the gateway while 50 requests with 10 MB data URLs pass at a time"

CONCURRENCY = 50
NUM_REQUESTS, QUICK_NUM_REQUESTS = 150, 50
IDLE_S = 3.0
TICK_S = 0.001

#: A photo of 12 megapixels and some 7.5 MB, of which the model takes what fits its prompt.
WIDTH, HEIGHT, QUALITY = 4000, 3000, 98
FLAGS = (*TINY_MODEL_FLAGS, '--mm-processor-kwargs={"max_pixels": 1003520}', "--disable-uvicorn-access-log")

#: Begins a JPEG: start of image, and a comment of nine characters. As long as it is a multiple of three bytes, its
#: base64 can stand before that of the rest.
_HEAD = b"\xff\xd8\xff\xfe\x00\x0b%09d"

#: When the loop went on, how late it was, and for how long of that it waited for a core: ns, ms, ms.
Lags = list[tuple[int, float, float]]


def run(options: Options) -> Report:
    model = str(build_tiny_model(cache_folder(process_environ())))
    config = Config(arena=ArenaConfig(size_bytes=1 << 30))
    niceness = os.nice(0)
    with tempfile.TemporaryDirectory(prefix="medialane-bench-") as folder:
        address = f"unix://{folder}/worker"
        with gateway_process(model, address, config=config, flags=FLAGS, alongside=watch) as gateway:
            os.nice(19 - niceness)
            num_requests = QUICK_NUM_REQUESTS if options.quick else NUM_REQUESTS
            phases = uvloop.run(_load(model, address, gateway.url, num_requests))
            return _report(phases, gateway.end())


async def watch(lags: Lags) -> None:
    """Note how late the loop is, which runs in the process's first thread."""
    with open("/proc/self/schedstat", "rb", buffering=0) as schedstat:  # noqa: ASYNC230 - no disk behind it
        while True:
            waited, started = _waited_ns(schedstat.fileno()), time.perf_counter_ns()
            await asyncio.sleep(TICK_S)
            now = time.perf_counter_ns()
            waited = _waited_ns(schedstat.fileno()) - waited
            lags.append((now, max(0.0, (now - started) / 1e6 - TICK_S * 1000), waited / 1e6))


def _waited_ns(schedstat: int) -> int:
    return int(os.pread(schedstat, 100, 0).split()[1])


async def _load(model: str, address: str, url: str, num_requests: int) -> dict[str, tuple[int, int]]:
    """All requests, twice. Returns when each phase began and ended."""
    phases = {}
    encoded = pybase64.b64encode(sample_jpeg(0, WIDTH, HEIGHT, quality=QUALITY)[2:])
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    async with worker(address), aiohttp.ClientSession(connector=connector) as session:
        await until_ready(session, url)
        started = time.perf_counter_ns()
        await asyncio.sleep(IDLE_S)
        phases["idle"] = (started, time.perf_counter_ns())
        await _send_all(
            session, url, model=model, encoded=encoded, numbers=range(-CONCURRENCY, 0)
        )  # everything for the first time
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
            async with session.post(f"{url}/v1/chat/completions", data=_chunks(body), headers=headers) as response:
                answer = await response.read()
                assert response.status == 200, answer[:500]

    async with asyncio.TaskGroup() as clients:
        for _ in range(CONCURRENCY):
            clients.create_task(client())


def _body(model: str, encoded: bytes, number: int) -> bytes:
    """A request about photo `number`: its bytes are like no other's, its pixels are the same."""
    before, after = msgspec.json.encode(
        {
            "model": model,
            "max_tokens": 3,
            "messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "URL"}}]}],
        }
    ).split(b"URL")
    return b"".join([before, b"data:image/jpeg;base64,", pybase64.b64encode(_HEAD % number), encoded, after])


async def _chunks(body: bytes) -> AsyncIterator[bytes]:
    for start in range(0, len(body), 1 << 18):
        yield body[start : start + (1 << 18)]


def _ticks(lags: Sequence[float]) -> list[float]:
    """By how many ms each millisecond was late."""
    return [lag - late for lag in lags for late in range(int(lag) + 1)]


def _report(phases: dict[str, tuple[int, int]], lags: Lags) -> Report:
    rows = []
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
    worst = max(float(row["p99 ms"]) for row in rows)  # type: ignore[arg-type]
    return Report(
        "loop", {f"{CONCURRENCY} at a time": rows}, [Bar("loop: event-loop lag p99, ms", worst, 10, "at most")]
    )
