"""What the name router in front of several models adds to a request: a gateway behind it, and one that clients reach
directly, in turns.

Both are `medialane gateway` processes over the same store and the same simulated worker, whose tokens cost no time.
Cases: a short text; an image of 6 MB in base64 (a body of 8 MB), whose features are cached, sent by clients that put
`model` before `messages`, where the router reads no further, and after them (OpenAI's), where it keeps the whole body.
One request at a time gives the latency, eight at a time the rate. `CPU` is user and system time of gateway and router;
a ratio is the median over adjacent turns, router / direct.
"""

from __future__ import annotations

import asyncio
import base64
import json
import os
import random
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path

import aiohttp
import uvloop
from PIL import Image

from harness import Bar, Options, Report, median
from load import cpu_seconds
from medialane.testing.tiny_model import TINY_MODEL_FLAGS, build_tiny_model, cache_folder
from medialane.wire import bind_http
from simulated_processes import START_S, Host, Process, gateways, host_store

ABOUT = "latency and CPU that the name router of several models adds: text, and an image of 8 MB"

ROUNDS, QUICK_ROUNDS = 9, 1
#: Of one turn.
NUM_TEXTS, NUM_IMAGES = 200, 16
CONCURRENCY = 8
DIRECT, ROUTED = "gateway", "router and gateway"
_SIZE = (2048, 1536)
_HEADERS = {"content-type": "application/json"}


@dataclass(frozen=True)
class Setup:
    name: str
    url: str
    pids: tuple[int, ...]


@dataclass(frozen=True)
class Turn:
    """Per request: latency of one at a time, wall time of several at a time, CPU time of each process."""

    latency_ms: float
    wall_ms: float
    cpu_ms: tuple[float, ...]


def run(options: Options) -> Report:
    return uvloop.run(_run(options))


async def _run(options: Options) -> Report:
    model = str(build_tiny_model(cache_folder(os.environ)))
    bodies = _bodies(model)
    rounds = options.rounds or (QUICK_ROUNDS if options.quick else ROUNDS)
    turns: dict[tuple[str, str], list[Turn]] = {}
    with tempfile.TemporaryDirectory(prefix="medialane-bench-") as folder:
        async with _setups(model, Path(folder)) as setups:
            for setup in setups:
                for body in bodies.values():
                    await _turn(setup, body, 2)  # the image is prepared
            for number in range(rounds):
                for case, body in bodies.items():
                    num = 8 if options.quick else NUM_TEXTS if case == "text" else NUM_IMAGES
                    for setup in setups if number % 2 == 0 else setups[::-1]:
                        turns.setdefault((case, setup.name), []).append(await _turn(setup, body, num))
    return _report(turns, list(bodies))


async def _turn(setup: Setup, body: bytes, num_requests: int) -> Turn:
    """Raises aiohttp.ClientResponseError for a wrong answer."""
    connector = aiohttp.TCPConnector(limit=CONCURRENCY)
    async with aiohttp.ClientSession(
        setup.url, connector=connector, headers=_HEADERS, raise_for_status=True
    ) as session:

        async def ask() -> float:
            started = time.perf_counter()
            async with session.post("/v1/chat/completions", data=BytesIO(body)) as response:
                await response.read()
            return time.perf_counter() - started

        before = [cpu_seconds([pid]) for pid in setup.pids]
        latencies = [await ask() for _ in range(num_requests)]
        cpu_s = [cpu_seconds([pid]) - then for pid, then in zip(setup.pids, before, strict=True)]
        todo = iter(range(num_requests))

        async def client() -> None:
            for _ in todo:
                await ask()

        started = time.perf_counter()
        await asyncio.gather(*(client() for _ in range(CONCURRENCY)))
        wall_s = time.perf_counter() - started
    each_ms = 1000 / num_requests
    return Turn(1000 * median(latencies), wall_s * each_ms, tuple(used * each_ms for used in cpu_s))


def _bodies(model: str) -> dict[str, bytes]:
    noise = random.Random(1).randbytes(_SIZE[0] * _SIZE[1] * 3)
    encoded = BytesIO()
    Image.frombytes("RGB", _SIZE, noise).save(encoded, "JPEG", quality=97, subsampling=0)
    url = "data:image/jpeg;base64," + base64.b64encode(encoded.getvalue()).decode()
    parts = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "What is in the picture?"}]
    options = {"max_tokens": 1, "temperature": 0}
    text, image = ({"messages": [{"role": "user", "content": content}]} for content in ("Hello, who are you?", parts))
    return {
        "text": json.dumps({**text, "model": model, **options}).encode(),
        "8 MB, model first": json.dumps({"model": model, **image, **options}).encode(),
        "8 MB, model last": json.dumps({**image, **options, "model": model}).encode(),
    }


@asynccontextmanager
async def _setups(model: str, folder: Path) -> AsyncIterator[list[Setup]]:
    async with AsyncExitStack() as stack:
        host = await stack.enter_async_context(host_store(model, folder))
        path = folder / "worker.sock"
        settings = ["--simulated-step-ms", "0", "--simulated-prefill-token-ms", "0"]
        worker = Process(host.worker_command(f"unix:{path}", settings), folder / "worker.log")
        stack.callback(worker.end)
        await worker.listens_at(path)
        behind = _gateway(host, f"unix:{path}")
        stack.callback(behind.end)
        ((url, pid),) = await stack.enter_async_context(gateways(host, [f"unix:{path}"], number=1))
        router, routed = _router(model, folder)
        stack.callback(router.end)
        await _until_healthy(routed)
        yield [Setup(DIRECT, url.removesuffix("/v1"), (pid,)), Setup(ROUTED, routed, (behind.pid, router.pid))]


def _gateway(host: Host, worker: str) -> Process:
    command = ["-m", "medialane", "gateway", host.model, "--store", host.store_address, "--worker", worker]
    flags = ["--http-socket", str(host.folder / "http.sock"), "--", *TINY_MODEL_FLAGS, "--disable-uvicorn-access-log"]
    return Process([*command, *flags], host.folder / "gateway-behind.log")


def _router(model: str, folder: Path) -> tuple[Process, str]:
    """Start it in front of the model, and of another one that does not run; return its URL, too."""
    served = [
        {"label": "vision", "names": [model], "sockets": [str(folder / "http.sock")]},
        {"label": "other", "names": ["other"], "sockets": [str(folder / "other.sock")]},
    ]
    (folder / "models.json").write_text(json.dumps(served))
    with bind_http("127.0.0.1", 0) as sock:
        port = sock.getsockname()[1]
    command = ["-m", "medialane", "name-router", str(folder / "models.json"), "--port", str(port)]
    return Process(command, folder / "router.log"), f"http://127.0.0.1:{port}"


async def _until_healthy(url: str) -> None:
    """Wait until the model is served; the other one never is."""
    async with asyncio.timeout(START_S), aiohttp.ClientSession() as session:
        while True:
            try:
                async with session.get(f"{url}/health") as response:
                    if response.status == 200:
                        return
            except aiohttp.ClientConnectionError:
                pass  # the router starts
            await asyncio.sleep(0.2)


def _report(turns: dict[tuple[str, str], list[Turn]], cases: list[str]) -> Report:
    report = Report("names", {"times": [], "ratios": []})
    for (case, name), found in turns.items():
        cpu = [median(values) for values in zip(*(turn.cpu_ms for turn in found), strict=True)]
        report.tables["times"].append({
            "case": case,
            "by": name,
            "latency ms": median(turn.latency_ms for turn in found),
            f"wall ms, {CONCURRENCY} at a time": median(turn.wall_ms for turn in found),
            "gateway CPU ms": cpu[0],
            "router CPU ms": cpu[1] if len(cpu) > 1 else 0.0,
        })  # fmt: skip
    for case in cases:
        pairs = list(zip(turns[case, ROUTED], turns[case, DIRECT], strict=True))
        latency = median(a.latency_ms / b.latency_ms for a, b in pairs)
        report.tables["ratios"].append({
            "case": case,
            "latency": latency,
            "added latency ms": median(a.latency_ms - b.latency_ms for a, b in pairs),
            "wall": median(a.wall_ms / b.wall_ms for a, b in pairs),
            "CPU": median(sum(a.cpu_ms) / sum(b.cpu_ms) for a, b in pairs),
        })  # fmt: skip
        limit = 1.5 if case == "text" else 1.7
        report.bars.append(Bar(f"{case}: latency through the router / direct", latency, limit, "at most"))
    return report
