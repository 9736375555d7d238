"""How long servers take to start, and `medialane serve` to be back when its processes are killed; what memory they use.

Plain vLLM's server, an earlier `medialane serve` (commit 4f951fe, or the checkout of `--other`) and this one start in
turns, each alone on the machine; a figure is the median over the rounds. A start ends with the first answer to a
request with an image, which must be plain vLLM's. Python's files are in the page cache, but for the rows `cold`: before
these, the caches of all files below sys.prefix and the standard library are dropped.

Kills are SIGKILLs of processes that have been up for `restart-reset`: else a supervisor would wait. A gateway is
back when its port answers /v1/models (*accepts*), or a text request (*answers*): connections wait meanwhile.

Memory is what would be free if the process ended (unique set size), without shared memory, of which the arena is most.
As far as can be known from outside, what a process has at its start is told apart from what the load adds: indices,
caches, and the buffers of bodies, which it keeps.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

from harness import REPOSITORY, Bar, Options, Report, median
from medialane.testing.tiny_model import build_tiny_model, cache_folder
from servers import Server, medialane_server, plain_server, settle
from start_probe import (
    MB,
    Client,
    command,
    cpu_seconds,
    drop_page_cache,
    gateway_sockets,
    is_healthy,
    is_hit,
    kill,
    mixed_load,
    named,
    private_bytes,
    seconds_until,
    started_by,
    text_of,
    with_report,
)

NAME = "start"
ABOUT = "start to the first image answer, killed processes until they are back, memory of each process"

#: Before this, every process imported vLLM for itself, and the cache was lost with the store.
EARLIER = "4f951fe"
NUM_CACHED = 20
NUM_REQUESTS = 1000
#: Of two deaths of a process. After the second within a time that is a setting, it is restarted later.
CALM_S = 2.0

PLAIN, OTHER, ONE, TWO = "plain vLLM", "earlier", "--workers 1", "--workers 2"

_SEEDS = count(100_000)


@dataclass
class Run:
    """What has been measured: seconds by server or process, one per round."""

    model: str
    folder: Path
    other: Path | None
    quick: bool
    starts: dict[str, list[float]] = field(default_factory=dict)
    cpu: dict[str, list[float]] = field(default_factory=dict)
    back: dict[tuple[str, str], list[float]] = field(default_factory=dict)
    memory: list[dict[str, object]] = field(default_factory=list)
    #: Of the first image, by plain vLLM.
    right: str = ""
    share_of_hits: float = 1.0

    def add(self, server: str, what: str, seconds: float) -> None:
        print(f"  {server}, {what}: {seconds:.2f} s", flush=True)
        self.back.setdefault((server, what), []).append(seconds)

    def log(self, name: str) -> Path:
        return self.folder / f"{name.replace(' ', '-')}.log"


def run(options: Options) -> Report:
    with tempfile.TemporaryDirectory() as folder, _earlier(options.other, Path(folder)) as other:
        model = str(build_tiny_model(cache_folder(os.environ)))
        run = Run(model, Path(folder), other, options.quick)
        return asyncio.run(_run(run, options))


async def _run(run: Run, options: Options) -> Report:
    notes = []
    for number in range(options.rounds or (1 if options.quick else 3)):
        await _plain(run)
        await _other(run, is_first=number == 0)
        await _one_worker(run)
        await _two_workers(run)
    if not options.quick:
        notes.append(await _cold(run))
    await _gateways(run, options.num_requests or (NUM_REQUESTS // 5 if options.quick else NUM_REQUESTS))
    report = Report(NAME, _tables(run), _bars(run), notes)
    if run.other is None:
        report.notes.append(f"there is no commit {EARLIER} here, and no --other: nothing is compared with it")
    return report


@contextmanager
def _earlier(given: Path | None, folder: Path) -> Iterator[Path | None]:
    """Yield the sources of the other checkout; None if there is none."""
    if given is not None:
        yield given / "src"
        return
    archive = ["git", "-C", str(REPOSITORY), "archive", "--format=tar", EARLIER, "src"]
    with subprocess.Popen(archive, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        assert process.stdout is not None
        try:
            with tarfile.open(fileobj=process.stdout, mode="r|") as files:
                files.extractall(folder / "earlier", filter="data")
        except tarfile.ReadError:  # empty: no such commit
            yield None
            return
    yield folder / "earlier" / "src"


@asynccontextmanager
async def _started(
    run: Run, name: str, server: AbstractAsyncContextManager[Server]
) -> AsyncIterator[tuple[Server, Client]]:
    """Start a server, and measure until it has answered about an image."""
    began = time.perf_counter()
    async with server as started:
        client = Client(started.base_url, run.model)
        answer: list[str] = []

        async def answered() -> bool:
            found = await client.answers(client.image(1))
            answer.extend([] if found is None else [text_of(found)])
            return found is not None

        seconds = await seconds_until(answered, since=began)
        run.starts.setdefault(name, []).append(seconds)
        run.cpu.setdefault(name, []).append(cpu_seconds(started.pids()))
        print(f"  {name}: first answer after {seconds:.1f} s, {run.cpu[name][-1]:.1f} s of CPU", flush=True)
        run.right = run.right or answer[0]
        if answer[0] != run.right:
            raise RuntimeError(f"{name} has answered {answer[0]!r} instead of {run.right!r}")
        yield started, client


def _ours(run: Run, *settings: str, sources: Path | None = None) -> AbstractAsyncContextManager[Server]:
    here = Path(__file__).parents[1] / "src"
    return medialane_server(run.model, run.log("medialane"), sources=sources or here, settings=settings)


async def _plain(run: Run) -> None:
    async with _started(run, PLAIN, plain_server(run.model, run.log(PLAIN))):
        pass


async def _other(run: Run, *, is_first: bool) -> None:
    if run.other is None:
        return
    async with _started(run, OTHER, _ours(run, "--workers", "1", sources=run.other)) as (server, client):
        if is_first and not run.quick:
            await _killed_gateway(run, OTHER, server, client)
            await _killed_store(run, OTHER, server, client)
        await _killed_worker(run, OTHER, server, client)


async def _one_worker(run: Run) -> None:
    async with _started(run, ONE, _ours(run, "--workers", "1")) as (server, client):
        await _killed_gateway(run, ONE, server, client)
        share = await _killed_store(run, ONE, server, client)
        run.share_of_hits = min(run.share_of_hits, share)
        await _killed_worker(run, ONE, server, client)


async def _two_workers(run: Run) -> None:
    async with _started(run, TWO, _ours(run, "--workers", "2")) as (server, client):
        killed_at = kill(started_by(server.pids()[0]))
        new = client.image(next(_SEEDS))
        run.add(TWO, "all but serve: new image", await seconds_until(partial(client.answers, new), since=killed_at))


async def _killed_gateway(run: Run, name: str, server: Server, client: Client) -> None:
    await settle()
    (gateway,) = named(server.pids(), "gateway")
    killed_at = kill([gateway])
    accepts, answers = await asyncio.gather(
        seconds_until(client.accepts, since=killed_at),
        seconds_until(partial(client.answers, client.text(next(_SEEDS))), since=killed_at),
    )
    run.add(name, "gateway: accepts", accepts)
    run.add(name, "gateway: answers", answers)


async def _killed_store(run: Run, name: str, server: Server, client: Client) -> float:
    """Return the share of the cached images that are hits afterwards."""
    cached = [with_report(client.image(next(_SEEDS))) for _ in range(NUM_CACHED)]
    for body in cached:
        if await client.answers(body) is None:
            raise RuntimeError("an image is not answered")
    await settle()
    (store,) = named(server.pids(), "store")

    num_hits = 0

    async def answered(body: dict[str, Any]) -> bool:
        nonlocal num_hits
        answer = await client.answers(body)
        num_hits += answer is not None and is_hit(answer)
        return answer is not None

    killed_at = kill([store])
    hit, new = await asyncio.gather(
        seconds_until(partial(answered, cached[0]), since=killed_at),
        seconds_until(partial(client.answers, client.image(next(_SEEDS))), since=killed_at),
    )
    run.add(name, "store: cached image", hit)
    run.add(name, "store: new image", new)
    for body in cached[1:]:
        await answered(body)
    share = num_hits / NUM_CACHED
    print(f"  {name}, store: {share:.0%} of the cached images are hits", flush=True)
    return share


async def _killed_worker(run: Run, name: str, server: Server, client: Client) -> None:
    await settle()
    killed_at = kill(named(server.pids(), "worker"))
    new = client.image(next(_SEEDS))
    run.add(name, "worker: answers", await seconds_until(partial(client.answers, new), since=killed_at))


async def _cold(run: Run) -> str:
    """Start plain vLLM and ours without Python's files in the page cache; return what was dropped."""
    folders = [Path(sys.prefix), Path(sysconfig.get_path("stdlib"))]
    dropped = []
    for name, server in (
        (PLAIN, plain_server(run.model, run.log(PLAIN))),
        (ONE, _ours(run, "--workers", "1")),
    ):
        dropped.append(drop_page_cache(folders))
        async with _started(run, f"{name}, cold", server):
            pass
    sizes = " and ".join(f"{size / MB:.0f} MB" for size in dropped)
    return f"cold: posix_fadvise(DONTNEED) over environment and standard library has freed {sizes} of the page cache"


async def _gateways(run: Run, num_requests: int) -> None:
    """Two gateways: what they and the worker's front end use, and both killed."""
    flags = ("--workers", "1", "--gateways", "2", "--restart-reset", str(CALM_S))
    async with _started(run, "--gateways 2", _ours(run, *flags)) as (server, client):
        gateways = named(server.pids(), "gateway")
        sockets = gateway_sockets(gateways[0])
        processes = [*(("gateway", pid) for pid in gateways)]
        processes += [(kind, pid) for kind in ("worker", "store", "warm") for pid in named(server.pids(), kind)]
        processes += [("engine", pid) for pid in server.pids() if "EngineCore" in command(pid)]
        at_start = {pid: private_bytes(pid) for _, pid in processes}
        await mixed_load(client, num_requests)
        await settle()
        for kind, pid in processes:
            now = private_bytes(pid)
            row = {"process": kind, "at start MB": at_start[pid] / MB, "after MB": now / MB}
            run.memory.append({**row, "added by the load MB": (now - at_start[pid]) / MB, "requests": num_requests})
        killed_at = kill(gateways[:1])
        healthy = await seconds_until(partial(_all_healthy, sockets), since=killed_at)
        run.add("--gateways 2", "one gateway: is healthy", healthy)
        await asyncio.sleep(CALM_S)
        killed_at = kill(named(server.pids(), "gateway"))
        accepts = await seconds_until(client.accepts, since=killed_at)
        run.add("--gateways 2", "both gateways: accepts", accepts)


async def _all_healthy(sockets: list[str]) -> bool:
    return all([await is_healthy(path) for path in sockets])


def _tables(run: Run) -> dict[str, list[dict[str, object]]]:
    starts: list[dict[str, object]] = [
        {"server": name, "first image s": median(found), "CPU s": median(run.cpu[name]), "rounds": len(found)}
        for name, found in run.starts.items()
    ]
    back: list[dict[str, object]] = [
        {"server": server, "killed": what, "s": median(found), "worst s": max(found), "rounds": len(found)}
        for (server, what), found in run.back.items()
    ]
    return {"starts": starts, "killed": back, "private memory": run.memory}


def _bars(run: Run) -> list[Bar]:
    def start(name: str) -> float:
        return median(run.starts[name])

    def back(what: str, server: str = ONE) -> float:
        return median(run.back[server, what])

    def most(kind: str) -> float:
        return max(float(str(row["after MB"])) for row in run.memory if row["process"] == kind)

    bars = [
        Bar("--workers 1, first image / plain vLLM", start(ONE) / start(PLAIN), 0.85, "at most"),
        Bar("--workers 2 / --workers 1, first image", start(TWO) / start(ONE), 1.15, "at most"),
        Bar("killed gateway accepts again, s", back("gateway: accepts"), 1.0, "at most"),
        Bar("killed gateway answers again, s", back("gateway: answers"), 1.0, "at most"),
        Bar("one of two gateways killed, is back, s", back("one gateway: is healthy", "--gateways 2"), 1.0, "at most"),
        Bar("both gateways killed, port accepts, s", back("both gateways: accepts", "--gateways 2"), 1.0, "at most"),
        Bar("killed store, cached image is a hit, s", back("store: cached image"), 1.5, "at most"),
        Bar("killed store, new image is answered, s", back("store: new image"), 3.0, "at most"),
        Bar("killed store, share of entries that are hits", run.share_of_hits, 1.0, "at least"),
        Bar("private MB of a gateway", most("gateway"), 200.0, "at most"),
        Bar("private MB of a worker's front end", most("worker"), 250.0, "at most"),
    ]
    if run.other is not None:
        ratio = back("worker: answers") / back("worker: answers", OTHER)
        bars.append(Bar("killed worker answers / earlier", ratio, 0.7, "at most"))
    return bars
