"""Tokens, placeholders and hashes of requests with media: `medialane render` beside vLLM's own render server.

Both run all the time, each with its defaults and on the same cores, and take turns, A B B A ...; a figure is the median
over the turns, a ratio that of the medians. What counts is the CPU time of all of a server's processes per request:
wall times depend on what else the machine does. Each of a client's requests waits for the answer of the one before.
Before a case is measured, all get one of its requests, and their tokens, placeholders and hashes must be equal.

vLLM hashes audio as decoded, so `medialane render` decodes it. A gateway in front of medialane's own workers answers
their keys, for which nothing is decoded: audio is measured with such a gateway, too, and the bar is its.

Two more measurements are of one gateway with a store and a fake worker: the lag of its event loop with 64 renders at a
time (as `bench loop`), and its CPU time for a chat completion with an image that it knows, as a data URL and as a
reference to media that were sent before.
"""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import count

import aiohttp
import msgspec
import pybase64
import uvloop

import render_bodies
from bench_loop import chunks, lag_bar, lag_rows, watch
from gateway_process import Peers, gateway_process, until_ready, worker
from harness import REPOSITORY, Bar, Options, Report, median, percentile
from load import cpu_seconds, process_tree
from medialane.arena import ArenaConfig
from medialane.config import Config, process_environ
from medialane.testing.tiny_model import TINY_MODEL_FLAGS, build_tiny_model, cache_folder
from render_bodies import Part, body
from servers import Server, render_servers, settle

sys.path.append(str(REPOSITORY / "tests" / "families"))  # the tests' tiny models
from tiny_families import FAMILIES

NAME = "render"
ABOUT = "tokens of requests with images, video and audio: medialane render beside vllm launch render"

#: Has hashes of its own.
GATEWAY = "medialane gateway"
OWN_HASHES = ("mm_hashes", GATEWAY)

RENDER = "/chat/completions/render"
_JSON = {"content-type": "application/json"}

#: Renders at a time, and how many of each phase, while the event loop is watched.
CONCURRENCY = 64
NUM_RENDERS, QUICK_NUM_RENDERS = 512, 128

#: Chat completions of one turn.
NUM_CHATS, QUICK_NUM_CHATS = 100, 30
MEDIA_PATH = "/medialane/v1/media"

#: No media are used twice in a run.
_NUMBERS = count(1)


@dataclass(frozen=True)
class Case:
    """Requests of one kind. `num` are sent to medialane in one turn, `num_plain` to vLLM: it needs many times as long.
    The bars are the least ratio of requests per CPU second, and the most of p50 and of CPU time; they are those of
    medialane's last server, if it has several."""

    name: str
    content: Callable[[int], list[Part]]
    num: int
    num_plain: int
    is_repeated: bool = False
    payload: str = "none"
    least_ratio: float | None = None
    most_latency: float | None = None
    most_cpu_ms: float | None = None

    def bodies(self, model: str, num: int) -> list[bytes]:
        numbers = [next(_NUMBERS)] * num if self.is_repeated else [next(_NUMBERS) for _ in range(num)]
        return [body(model, self.content(number), mm_payload=self.payload) for number in numbers]


_FOUR = f"{render_bodies.NUM_IMAGES} x {render_bodies.WIDTH}x{render_bodies.HEIGHT}"
IMAGES = [
    Case(f"{_FOUR}, new", render_bodies.images, 60, 6, least_ratio=10, most_latency=0.15),
    Case(f"{_FOUR}, known", render_bodies.images, 60, 6, is_repeated=True, most_cpu_ms=5),
    Case("4 images of a new size", render_bodies.sized_images, 8, 4),
    Case(f"{_FOUR}, new, tensors", render_bodies.images, 3, 2, payload="tensors"),
    Case(f"{_FOUR}, known, tensors", render_bodies.images, 3, 2, is_repeated=True, payload="tensors"),
    Case("video of 10 s, new", render_bodies.video, 20, 4, least_ratio=5),
]
AUDIO = [Case("audio of 60 s, new", render_bodies.audio, 20, 4, least_ratio=5)]


@dataclass
class Rendered:
    """One turn of a server."""

    seconds: list[float] = field(default_factory=list)
    cpu_s: float = 0.0
    headers: list[str] = field(default_factory=list)

    @property
    def cpu_ms_per_request(self) -> float:
        return 1000 * self.cpu_s / len(self.seconds)


def run(options: Options) -> Report:
    report = Report(NAME)
    asyncio.run(_side_by_side(report, options))
    _one_gateway(report, options)
    return report


async def _side_by_side(report: Report, options: Options) -> None:
    folder = cache_folder(os.environ)
    model = str(build_tiny_model(folder))
    async with render_servers(model, TINY_MODEL_FLAGS) as servers:
        for case in IMAGES:
            await _measure(report, case, servers=servers, model=model, options=options)
    omni = FAMILIES["qwen2_5_omni"]
    model = str(omni.build(folder))
    async with render_servers(model, omni.flags) as (ours, plain), _gateway(model, omni.flags) as gateway:
        for case in AUDIO:
            await _measure(report, case, servers=(ours, gateway, plain), model=model, options=options)


@asynccontextmanager
async def _gateway(model: str, flags: Sequence[str]) -> AsyncIterator[Server]:
    """Run a gateway with a store and a fake worker."""
    config = Config()
    with tempfile.TemporaryDirectory(prefix="medialane-bench-") as folder:
        peers = Peers.in_folder(folder)
        flags = (*flags, "--enable-scale-out", "--disable-uvicorn-access-log")
        with gateway_process(model, peers, config=config, flags=flags) as gateway:
            async with worker(peers, config), _session() as session:
                await until_ready(session, gateway.url)
                yield Server(GATEWAY, f"{gateway.url}/v1", lambda: process_tree(gateway.pid))


async def _measure(report: Report, case: Case, *, servers: tuple[Server, ...], model: str, options: Options) -> None:
    """Add one row for each server, the last of which is vLLM's, and the bars of this case."""
    await _check_equal(case, servers, model)
    turns: dict[str, list[Rendered]] = {server.name: [] for server in servers}
    for turn in range(options.rounds or (2 if options.quick else 5)):
        num = max(2, case.num // 4) if options.quick else case.num
        bodies = case.bodies(model, num)
        for server in servers if turn % 2 == 0 else servers[::-1]:
            sent = bodies[: case.num_plain] if server is servers[-1] else bodies
            await settle()
            turns[server.name].append(await _send(server, sent, warms_up=case.is_repeated))
    rows = [_row(case, server.name, turns[server.name]) for server in servers]
    report.tables.setdefault("render", []).extend(rows)
    report.bars += _bars(case, *rows[-2:])
    used = " and ".join(f"{float(str(row['cpu ms/request'])):.3g}" for row in rows)
    print(f"  {case.name}: CPU of {used} ms", flush=True)


async def _check_equal(case: Case, servers: Sequence[Server], model: str) -> None:
    """Send the same request to all. Raises RuntimeError if their tokens or placeholders differ."""
    (sent,) = case.bodies(model, 1)
    answers = []
    async with _session() as session:
        for server in servers:
            async with session.post(f"{server.base_url}{RENDER}", data=sent, headers=_JSON) as response:
                answers.append(msgspec.json.decode(await _ok(response)))
    *ours, plain = answers
    for server, answer in zip(servers, ours, strict=False):
        for name in ("mm_placeholders", "mm_hashes"):
            is_equal = answer["features"][name] == plain["features"][name]
            if answer["token_ids"] != plain["token_ids"] or not (is_equal or (name, server.name) == OWN_HASHES):
                raise RuntimeError(f"{case.name}: tokens or {name} of {server.name} are not those of vLLM")


async def _send(server: Server, bodies: Sequence[bytes], *, warms_up: bool) -> Rendered:
    """Send all, one after the other, and measure; the first one once before, if it `warms_up`."""
    rendered = Rendered()
    async with _session() as session:

        async def render(sent: bytes) -> str:
            async with session.post(f"{server.base_url}{RENDER}", data=sent, headers=_JSON) as response:
                await _ok(response)
                return response.headers.get("x-medialane-media", "")

        if warms_up:
            await render(bodies[0])
        before = cpu_seconds(server.pids())
        for sent in bodies:
            started = time.perf_counter()
            rendered.headers.append(await render(sent))
            rendered.seconds.append(time.perf_counter() - started)
        rendered.cpu_s = cpu_seconds(server.pids()) - before
    return rendered


def _session() -> aiohttp.ClientSession:
    return aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=300))


async def _ok(response: aiohttp.ClientResponse) -> bytes:
    answer = await response.read()
    if response.status != 200:
        raise RuntimeError(f"{response.status}: {answer[:500]!r}")
    return answer


def _row(case: Case, server: str, turns: Sequence[Rendered]) -> dict[str, object]:
    cpu_ms = median(turn.cpu_ms_per_request for turn in turns)
    headers = {header for turn in turns for header in turn.headers}
    return {
        "case": case.name,
        "server": server,
        "requests/CPU s": 1000 / cpu_ms if cpu_ms else float("inf"),
        "cpu ms/request": cpu_ms,
        "p50 ms": 1000 * median(median(turn.seconds) for turn in turns),
        "p99 ms": 1000 * median(percentile(turn.seconds, 0.99) for turn in turns),
        "media": " and ".join(sorted(headers)),
    }


def _bars(case: Case, ours: dict[str, object], plain: dict[str, object]) -> list[Bar]:
    def ratio(key: str) -> float:
        return float(str(ours[key])) / float(str(plain[key]))

    bars = []
    if case.least_ratio is not None:
        name = f"{case.name}: requests per CPU second / vLLM's"
        bars.append(Bar(name, ratio("requests/CPU s"), case.least_ratio, "at least"))
    if case.most_latency is not None:
        bars.append(Bar(f"{case.name}: p50 / vLLM's", ratio("p50 ms"), case.most_latency, "at most"))
    if case.most_cpu_ms is not None:
        bars.append(
            Bar(f"{case.name}: CPU ms per request", float(str(ours["cpu ms/request"])), case.most_cpu_ms, "at most")
        )
    return bars


def _one_gateway(report: Report, options: Options) -> None:
    model = str(build_tiny_model(cache_folder(process_environ())))
    config = Config(arena=ArenaConfig(size_bytes=1 << 30))
    flags = (*TINY_MODEL_FLAGS, "--enable-scale-out", "--disable-uvicorn-access-log")
    with tempfile.TemporaryDirectory(prefix="medialane-bench-") as folder:
        peers = Peers.in_folder(folder)
        with gateway_process(model, peers, config=config, flags=flags, alongside=watch) as gateway:
            requests = GatewayRequests(gateway.url, gateway.pid, model, options)
            os.nice(19 - os.nice(0))  # as clients that run elsewhere
            uvloop.run(requests.run(peers, config))
            rows = lag_rows(requests.phases, gateway.end())
    report.tables[f"event loop, {CONCURRENCY} renders at a time"] = rows
    report.bars.append(lag_bar(f"{CONCURRENCY} renders at a time", rows))
    report.tables["CPU of the gateway for a chat completion"] = requests.chats
    if requests.ratio is None:
        report.notes.append(f"no row for references to media: this checkout has no PUT {MEDIA_PATH}")
    else:
        report.bars.append(
            Bar("reference / data URL of a known image: CPU of the gateway", requests.ratio, 0.6, "at most")
        )


class GatewayRequests:
    """What is sent to one gateway, and what that has cost. `ratio` is None if it accepts no references to media."""

    def __init__(self, url: str, pid: int, model: str, options: Options) -> None:
        self._url = url
        self._pid = pid
        self._model = model
        self._is_quick = options.quick
        self._turns = options.rounds or (2 if options.quick else 5)
        self.phases: dict[str, tuple[int, int]] = {}
        self.chats: list[dict[str, object]] = []
        self.ratio: float | None = None

    async def run(self, peers: Peers, config: Config) -> None:
        async with worker(peers, config), aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
            await until_ready(session, self._url)
            await self._render_many(session)
            await self._chat(session)

    async def _render_many(self, session: aiohttp.ClientSession) -> None:
        num = QUICK_NUM_RENDERS if self._is_quick else NUM_RENDERS
        bodies = [body(self._model, render_bodies.images(next(_NUMBERS)), mm_payload="none") for _ in range(num)]
        await self._post_all(session, f"/v1{RENDER}", bodies[:1], at_a_time=1)
        for phase in ("new images", "the same again"):
            started = time.perf_counter_ns()
            await self._post_all(session, f"/v1{RENDER}", bodies, at_a_time=CONCURRENCY)
            self.phases[phase] = started, time.perf_counter_ns()

    async def _chat(self, session: aiohttp.ClientSession) -> None:
        """Compare a known image as data URL with a reference to it."""
        sent = {"data URL": render_bodies.small_image(0)}
        if (url := await self._upload(session)) is not None:
            sent["reference"] = [{"type": "image_url", "image_url": {"url": url}}, sent["data URL"][1]]
        num = QUICK_NUM_CHATS if self._is_quick else NUM_CHATS
        cpu_ms: dict[str, list[float]] = {name: [] for name in sent}
        for turn in range(self._turns):
            for name, content in list(sent.items())[:: 1 if turn % 2 == 0 else -1]:
                bodies = [body(self._model, content, max_tokens=1)] * num
                await self._post_all(session, "/v1/chat/completions", bodies[:2], at_a_time=1)
                before = cpu_seconds([self._pid])
                await self._post_all(session, "/v1/chat/completions", bodies, at_a_time=1)
                cpu_ms[name].append(1000 * (cpu_seconds([self._pid]) - before) / num)
        self.chats = [{"image": name, "cpu ms/request": median(each)} for name, each in cpu_ms.items()]
        if url is not None:
            self.ratio = median(cpu_ms["reference"]) / median(cpu_ms["data URL"])

    async def _upload(self, session: aiohttp.ClientSession) -> str | None:
        """Send the image once, and return its reference; None if the gateway has no such endpoint."""
        (image, _) = render_bodies.small_image(0)
        encoded = msgspec.json.decode(msgspec.json.encode(image))["image_url"]["url"].partition(",")[2]
        data, headers = pybase64.b64decode(encoded), {"content-type": "image/jpeg"}
        async with session.put(f"{self._url}{MEDIA_PATH}", data=data, headers=headers) as response:
            answer = await response.read()
            if response.status in (404, 405):
                return None
            if not response.ok:
                raise RuntimeError(f"{response.status}: {answer[:500]!r}")
            return f"medialane:media/{msgspec.json.decode(answer)['hash']}"

    async def _post_all(
        self, session: aiohttp.ClientSession, path: str, bodies: Sequence[bytes], *, at_a_time: int
    ) -> None:
        todo = iter(bodies)

        async def client() -> None:
            for sent in todo:
                headers = _JSON | {"content-length": str(len(sent))}
                async with session.post(f"{self._url}{path}", data=chunks(sent), headers=headers) as response:
                    await _ok(response)

        async with asyncio.TaskGroup() as clients:
            for _ in range(at_a_time):
                clients.create_task(client())
