"""More load than the engines can serve: what is delivered in time, of what the gateways admit.

Simulated workers, so slow that all processes together use less than half of the CPU (`CPU share`, of all cores): it is
admission that is measured, not the machine. Gateways, a store and preparers as users start them; requests arrive
whatever becomes of earlier ones, as a Poisson process of a constant rate, or with a step from half the capacity to
three times the capacity and back. Capacity is the rate in a closed loop. Goodput counts requests whose first token came
within the limit; the time of an admitted request without a token counts until its client gives up. `engines' share` is
the part of the engines' time that those requests took: by their number alone, refusing the dear ones would look good.

`no control`: a worker accepts all. `vLLM's caps`: workers refuse as vLLM with --max-num-queued-tokens, set as its
documentation says: to the tokens that a worker prefills within the limit, as measured. `TTFT limit`:
--gateway-ttft-limit and --gateway-queue-requests. `tenants`: a client of texts alone, and beside one whose images would
take three times the capacity. `shares`: two tenants that ask the same, one ten times as often. `vLLM`: one real worker
of the tiny model at three times its capacity, which has no CPU to spare: reported, not judged.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
import uvloop

from harness import Bar, Options, Report
from load import cpu_seconds, process_tree
from medialane.testing.tiny_model import build_tiny_model, cache_folder
from overload_requests import MEDIA, MIX, TEXT, Answers, Bodies, Clients, Flow, steadily
from servers import medialane_server
from simulated_processes import Host, Process, gateways, host_store

ABOUT = "up to 5 times the load that simulated engines can serve: goodput with and without admission"

LIMIT_S = 1.0
NUM_WORKERS = 4
#: A text takes an engine 0.25 s, a new image 0.1 s, a known one half of that. Steps are short beside a text: it waits
#: for the one that runs when it comes, whatever the gateway does.
WORKER = (
    *("--simulated-workers", str(NUM_WORKERS), "--simulated-step-ms", "5", "--simulated-prefill-token-ms", "1"),
    *("--simulated-prefill-pair-ns", "0", "--simulated-embedding-ms", "4"),
    *("--simulated-max-num-batched-tokens", "128"),
)
CAPS = "--simulated-max-num-queued-tokens"
#: No queue in gateways.
UNLIMITED = ("--gateway-queue-requests", "0")
NO_CONTROL, VLLM_CAPS, TTFT_LIMIT = "no control", "vLLM's caps", "TTFT limit"

POISSON, STEP = "Poisson", "step"
LOADS = (0.5, 1.0, 2.0, 3.0, 5.0)
FEWER_LOADS = (1.0, 3.0, 5.0)
QUICK_LOADS = (1.0, 3.0)
NUM_GATEWAYS = 4
#: Arrivals of the first seconds are not counted: queues are not full yet.
WARM_S, COUNTED_S = 2.0, 7.0
QUICK_WARM_S, QUICK_COUNTED_S = 2.0, 3.0
CAPACITY_S = 5.0
CLIENTS_PER_WORKER = 6
#: Of the capacity, of the client of texts.
TEXT_LOAD, MEDIA_OVERLOAD = 0.4, 3.0
#: Of the capacity, of the tenant that asks less often.
HALF_LOAD = 0.65
_SETTLE_S = 0.5

MIN_GOODPUT = {3.0: 0.9, 5.0: 0.85}
MAX_TTFT, MAX_TEXT_TTFT, MAX_REFUSAL_MS, MAX_CPU_SHARE, MAX_UNFAIR, MAX_AFTER_S = 1.2, 1.5, 10.0, 0.5, 0.1, 2.0
JUDGED_LOADS = (3.0, 5.0)

GOODPUT, SHARE, SERVICE = "goodput/s", "engines' share", "tokens of 10 times / once"

Row = dict[str, object]


@dataclass
class Bench:
    """What all measurements share. `capacity` is in requests per second."""

    host: Host
    clients: Clients
    quick: bool
    capacity: float = 0.0
    rows: list[Row] = field(default_factory=list)
    tenants: list[Row] = field(default_factory=list)
    shares: list[Row] = field(default_factory=list)

    @property
    def warm_s(self) -> float:
        return QUICK_WARM_S if self.quick else WARM_S

    @property
    def counted_s(self) -> float:
        return QUICK_COUNTED_S if self.quick else COUNTED_S

    async def measure(self, mode: str, setup: Setup, loads: Sequence[float]) -> None:
        """Measure each load, the lowest first, then a step."""
        for load in loads:
            await self._measure(mode, setup, POISSON, load=load, rate=steadily(load * self.capacity))
        if self.quick:
            return
        begins_s, ends_s = self.warm_s + self.counted_s / 4, self.warm_s + self.counted_s * 3 / 4

        def step(at_s: float) -> float:
            return self.capacity * (3.0 if begins_s < at_s < ends_s else 0.5)

        await self._measure(mode, setup, STEP, load=3.0, rate=step, ends_s=ends_s)

    async def _measure(
        self,
        mode: str,
        setup: Setup,
        arrivals: str,
        *,
        load: float,
        rate: Callable[[float], float],
        ends_s: float = 0.0,
    ) -> None:
        pids = setup.pids()
        before, began_s = cpu_seconds(pids), time.perf_counter()
        flow = Flow(MIX, rate, setup.key)
        (answers,) = await self.clients.send(setup.urls, [flow], warm_s=self.warm_s, seconds=self.counted_s)
        wall_s = time.perf_counter() - began_s
        share = (cpu_seconds(pids) - before) / wall_s / len(os.sched_getaffinity(0))
        self.rows.append(
            {
                "mode": mode,
                "gateways": len(setup.urls),
                "arrivals": arrivals,
                "load": load,
                **_figures(answers),
                "CPU share": share,
                "refuses after the step s": max(0.0, answers.last_refusal_s - ends_s) if ends_s else 0.0,
            }
        )
        print("  " + ", ".join(f"{name} {value}" for name, value in self.rows[-1].items()), flush=True)
        await asyncio.sleep(_SETTLE_S)

    async def measure_tenants(self, mode: str, setup: Setup) -> None:
        """Measure the texts' client alone, and beside images that are three times the capacity."""
        text = Flow(TEXT, steadily(TEXT_LOAD * self.capacity), setup.key)
        media = Flow(MEDIA, steadily(MEDIA_OVERLOAD * self.capacity), setup.other_key)
        seconds = self.counted_s * (1 if self.quick else 2)
        for name, flows in (("alone", [text]), ("with 3x media", [text, media])):
            answers, *_ = await self.clients.send(setup.urls, flows, warm_s=self.warm_s, seconds=seconds)
            row: Row = {"mode": mode, "gateways": len(setup.urls), "texts": name, **_figures(answers)}
            self.tenants.append(row)
            print("  " + ", ".join(f"{name} {value}" for name, value in row.items()), flush=True)
            await asyncio.sleep(_SETTLE_S)

    async def measure_shares(self, mode: str, setup: Setup) -> None:
        """Measure two tenants that ask the same, one of them ten times as often; both ask for more than a half."""
        rate = HALF_LOAD * self.capacity
        flows = [Flow(MIX, steadily(10 * rate), setup.key), Flow(MIX, steadily(rate), setup.other_key)]
        seconds = self.counted_s * (1 if self.quick else 2)
        often, seldom = await self.clients.send(setup.urls, flows, warm_s=self.warm_s, seconds=seconds)
        row: Row = {"mode": mode, "gateways": len(setup.urls)}
        row |= {"10 times tokens": often.tokens_served, "once tokens": seldom.tokens_served}
        row |= {"10 times engines' s": often.work_s, "once engines' s": seldom.work_s}
        row[SERVICE] = often.tokens_served / seldom.tokens_served
        self.shares.append(row)
        print("  " + ", ".join(f"{name} {value}" for name, value in row.items()), flush=True)
        await asyncio.sleep(_SETTLE_S)


@dataclass(frozen=True)
class Setup:
    """Gateways that share the load; `pids` are all processes that take part, this one included."""

    urls: Sequence[str]
    pids: Callable[[], list[int]]
    key: str = ""
    other_key: str = ""


def run(options: Options) -> Report:
    return uvloop.run(_run(options))


async def _run(options: Options) -> Report:
    model = str(build_tiny_model(cache_folder(os.environ)))
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="medialane-bench-", dir="/tmp")))
        session = await stack.enter_async_context(_session())
        clients = Clients(session, Bodies(model))
        async with host_store(model, folder, ("--preparers", "2")) as host:
            bench = Bench(host, clients, options.quick)
            await _uncontrolled(bench, session)
            for number in (1,) if options.quick else (1, NUM_GATEWAYS):
                await _controlled(bench, session, number)
        real = [] if options.quick else await _real(model, folder, clients)
    return _report(bench, real)


async def _uncontrolled(bench: Bench, session: aiohttp.ClientSession) -> None:
    """Measure what gateways do without admission of ours, and vLLM's caps with the same gateways."""
    number = 1 if bench.quick else NUM_GATEWAYS
    async with (
        _workers(bench.host, "plain") as worker,
        _gateways(bench, session, worker, number=number, settings=UNLIMITED) as setup,
    ):
        first = Setup(setup.urls[:1], setup.pids)
        total = CLIENTS_PER_WORKER * NUM_WORKERS
        measured = await bench.clients.closed_loop(first.urls[0], number=total, warm_s=CAPACITY_S, seconds=CAPACITY_S)
        bench.capacity, max_tokens = measured.requests, round(LIMIT_S * measured.tokens / NUM_WORKERS)
        print(f"  capacity: {bench.capacity:.1f} requests/s; {CAPS} {max_tokens}", flush=True)
        for mode, settings in ((NO_CONTROL, ()), (VLLM_CAPS, (CAPS, str(max_tokens)))):
            if settings:
                worker.restart(settings)
                await _until_ready(session, setup.urls)
            await bench.measure(mode, first, QUICK_LOADS if bench.quick else FEWER_LOADS)
            if number > 1:
                await bench.measure(mode, setup, JUDGED_LOADS)
            if mode == NO_CONTROL and not bench.quick:
                await bench.measure_tenants(mode, first)


async def _controlled(bench: Bench, session: aiohttp.ClientSession, number: int) -> None:
    """Measure our admission with so many gateways."""
    path = bench.host.folder / "keys"
    tenants = {"texts": "key-of-texts", "images": "key-of-images"}
    lines = [json.dumps({"name": name, "sha256": _sha256(key)}) for name, key in tenants.items()]
    path.write_text("\n".join(lines))
    path.chmod(0o600)
    settings = ("--gateway-ttft-limit", str(LIMIT_S), "--gateway-queue-requests", "256", "--keys", str(path))
    async with (
        _workers(bench.host, f"limited-{number}") as worker,
        _gateways(bench, session, worker, number=number, settings=settings) as setup,
    ):
        setup = Setup(setup.urls, setup.pids, *tenants.values())
        # Refuses nothing until it has learned.
        learned = Flow(MIX, steadily(0.7 * bench.capacity), setup.key)
        await bench.clients.send(setup.urls, [learned], warm_s=0, seconds=bench.warm_s + bench.counted_s)
        loads = QUICK_LOADS if bench.quick else LOADS if number == 1 else FEWER_LOADS
        await bench.measure(TTFT_LIMIT, setup, loads)
        await bench.measure_tenants(TTFT_LIMIT, setup)
        await bench.measure_shares(TTFT_LIMIT, setup)


class _Workers:
    """A process of simulated workers, which can be restarted with other settings."""

    def __init__(self, host: Host, name: str) -> None:
        self.sockets = [host.folder / f"{name}-worker-{number}.sock" for number in range(NUM_WORKERS)]
        self._host = host
        self.name = name
        self._process = self._start(())

    @property
    def pid(self) -> int:
        return self._process.pid

    def restart(self, settings: Sequence[str]) -> None:
        self._process.end()
        self._process = self._start(settings)

    def end(self) -> None:
        self._process.end()

    async def listen(self) -> None:
        for path in self.sockets:
            await self._process.listens_at(path)

    def _start(self, settings: Sequence[str]) -> Process:
        listen = f"unix:{self._host.folder}/{self.name}-worker-{{}}.sock"
        command = self._host.worker_command(listen, (*WORKER, *settings))
        return Process(command, self._host.folder / f"{self.name}.log")


@asynccontextmanager
async def _workers(host: Host, name: str) -> AsyncIterator[_Workers]:
    workers = _Workers(host, name)
    try:
        await workers.listen()
        yield workers
    finally:
        workers.end()


@asynccontextmanager
async def _gateways(
    bench: Bench,
    session: aiohttp.ClientSession,
    workers: _Workers,
    *,
    number: int,
    settings: Sequence[str] = (),
) -> AsyncIterator[Setup]:
    addresses = [f"unix:{path}" for path in workers.sockets]
    async with gateways(bench.host, addresses, number=number, settings=settings, name=workers.name) as started:
        setup = Setup([url for url, _ in started], lambda: _all_pids(bench.host, workers, [pid for _, pid in started]))
        await _until_ready(session, setup.urls)
        yield setup


def _all_pids(host: Host, workers: _Workers, gateway_pids: Sequence[int]) -> list[int]:
    trees = [process_tree(pid) for pid in (host.store.pid, *gateway_pids)]
    return [os.getpid(), workers.pid, *(pid for tree in trees for pid in tree)]


async def _until_ready(session: aiohttp.ClientSession, urls: Sequence[str]) -> None:
    """Wait until each gateway is connected to all workers; any of them shows it for all."""
    async with asyncio.timeout(60):
        for url in urls:
            while await _num_connected(session, url) < NUM_WORKERS * len(urls):  # noqa: ASYNC110 - polls
                await asyncio.sleep(0.1)


async def _num_connected(session: aiohttp.ClientSession, url: str) -> int:
    async with session.get(f"{url.removesuffix('/v1')}/metrics") as response:
        lines = (await response.text()).splitlines()
    return sum(line.startswith("medialane_worker_connected{") and line.endswith(" 1.0") for line in lines)


async def _real(model: str, folder: Path, clients: Clients) -> list[Row]:
    """Return rows for one worker of vLLM at three times its capacity, without and with the limit."""
    rows: list[Row] = []
    rate = 0.0
    for mode, settings in ((NO_CONTROL, UNLIMITED), (TTFT_LIMIT, ("--gateway-ttft-limit", str(LIMIT_S)))):
        log = folder / f"serve-{len(rows)}.log"
        async with medialane_server(model, log, settings=("--workers", "1", *settings)) as server:
            if not rate:
                measured = await clients.closed_loop(
                    server.base_url, number=CLIENTS_PER_WORKER, warm_s=CAPACITY_S, seconds=CAPACITY_S
                )
                rate = measured.requests
            else:
                learned = Flow(MIX, steadily(0.7 * rate))
                await clients.send([server.base_url], [learned], warm_s=0, seconds=WARM_S + COUNTED_S)
            flow = Flow(MIX, steadily(3 * rate))
            (answers,) = await clients.send([server.base_url], [flow], warm_s=WARM_S, seconds=COUNTED_S)
            figures = {name: value for name, value in _figures(answers).items() if name != SHARE}
            rows.append({"mode": mode, "capacity/s": rate, "load": 3.0, **figures})
    return rows


def _session() -> aiohttp.ClientSession:
    return aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=120))


def _sha256(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


def _figures(answers: Answers) -> Row:
    return {
        "offered/s": len(answers.streams) / answers.seconds,
        GOODPUT: answers.goodput(LIMIT_S),
        SHARE: answers.good_work(LIMIT_S) / NUM_WORKERS,
        "admitted": len(answers.ttfts_s),
        "ttft p50 s": answers.ttft_s(0.5),
        "ttft p99 s": answers.ttft_s(0.99),
        "refused": len(answers.refused),
        "refusal p99 ms": 1000 * answers.refusal_s(0.99),
        "failed": len(answers.failed),
    }


def _report(bench: Bench, real: list[Row]) -> Report:
    report = Report("overload", {"loads": bench.rows, "tenants": bench.tenants, "shares": bench.shares})
    if real:
        report.tables["vLLM"] = real
    for number in sorted({int(str(row["gateways"])) for row in bench.rows}):
        rows = [row for row in bench.rows if row["gateways"] == number]
        for name in (GOODPUT, SHARE):
            best = max(_number(row, name) for row in rows if row["arrivals"] == POISSON)
            for row in rows:
                row[f"{name} of best"] = _number(row, name) / best
        report.bars += _bars(number, [row for row in rows if row["mode"] == TTFT_LIMIT])
        alone, beside = (
            _number(row, "ttft p99 s")
            for row in bench.tenants
            if (row["mode"], row["gateways"]) == (TTFT_LIMIT, number)
        )
        (service,) = (_number(row, SERVICE) for row in bench.shares if row["gateways"] == number)
        report.bars.append(Bar(_name(number, f"{SERVICE}, off 1"), abs(service - 1), MAX_UNFAIR, "at most"))
        report.bars.append(
            Bar(_name(number, "texts' TTFT p99 with 3x media / alone"), beside / alone, MAX_TEXT_TTFT, "at most")
        )
    return report


def _bars(number: int, rows: Sequence[Row]) -> list[Bar]:
    bars = []
    for row in rows:
        if row["arrivals"] == POISSON and row["load"] in JUDGED_LOADS:
            for figure in (GOODPUT, SHARE):
                name = _name(number, f"{figure} at {row['load']:g}x, of the best")
                least = MIN_GOODPUT[float(str(row["load"]))]
                bars.append(Bar(name, _number(row, f"{figure} of best"), least, "at least"))
    ttft = max(_number(row, "ttft p99 s") for row in rows)
    refusal = max(_number(row, "refusal p99 ms") for row in rows)
    share = max(_number(row, "CPU share") for row in rows)
    after_s = max(_number(row, "refuses after the step s") for row in rows)
    return [
        *bars,
        Bar(_name(number, "TTFT p99 of admitted requests / limit, any load"), ttft / LIMIT_S, MAX_TTFT, "at most"),
        Bar(_name(number, "refusals, p99 at any load, ms"), refusal, MAX_REFUSAL_MS, "at most"),
        Bar(_name(number, "refuses after a step ends, s"), after_s, MAX_AFTER_S, "at most"),
        Bar(_name(number, "CPU share, any load"), share, MAX_CPU_SHARE, "at most"),
    ]


def _name(number: int, figure: str) -> str:
    return f"{number} gateway{'s' if number > 1 else ''}: {figure}"


def _number(row: Row, name: str) -> float:
    return float(str(row[name]))
