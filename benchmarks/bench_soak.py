"""`medialane bench soak`: checks for leaks and wrong answers over very many mixed requests, whose workers are lost.

A whole gateway with preparers runs in separate processes; fake workers respond, whose tokens follow from the prompt and
the seed (`answering_workers`). Requests are sent in batches: text, new and repeated images, by data URL and from a web
server, clips, audio, hostile input, and clients that disconnect early. Again and again the worker with the most
requests is cut off, in the middle of messages, and is back after some time, so that one request in a hundred loses its
worker. Every other answer must be there, with exactly the right tokens and text.
After each batch the load stops until nothing is in flight. Then nothing may be held at the store, and the sampled
values (memory of all processes, file descriptors, shared memory) should not change from sample to sample.

Growth is the slope over requests after the warm-up, the first third: the median of the slopes between all pairs of
samples (Theil-Sen estimator), which is robust against outliers. Memory is anonymous memory, with shared pages counted
once (`Pss_Anon`, proc(5)); the arena, which every process maps, is counted in its folder. The arena and the URL cache
are small, so that both are full and turn over before the warm-up ends.

Limits. Memory: 0.1 MiB in 1000 requests is 100 bytes per request; the smallest object of ours that a request could leak
takes several hundred, its prompt several KiB. File descriptors: a leak in one of ten thousand requests would be 0.1.
A gateway that is settling still grows by some MiB and descriptors, once (allocators, persistent connections): the limit
allows for that in addition, which is negligible over 100,000 requests but not over 300.
"""

from __future__ import annotations

import asyncio
import os
import random
import re
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from http import HTTPStatus
from itertools import combinations, islice
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import uvloop

from answering_workers import CuttableWorkers, RightAnswers, cuttable_workers
from gateway_process import GatewayProcess, Peers, gateway_process, until_ready
from harness import REPOSITORY, Bar, Options, Report, median
from load import process_tree
from medialane.arena import ArenaConfig
from medialane.config import Config, process_environ
from medialane.media import MediaConfig
from medialane.prepare import PrepareConfig
from medialane.testing.simulated.sequence import token_texts
from medialane.testing.tiny_model import cache_folder
from origin import origin
from soak_requests import NUM_TOKENS, Request, Requests, files

sys.path.append(str(REPOSITORY / "tests" / "families"))  # the tests' tiny models
from tiny_families import FAMILIES

ABOUT = "leaks: memory, descriptors and pins over thousands of mixed requests"

NUM_REQUESTS, QUICK_NUM_REQUESTS = 100_000, 5_000
#: The run ends after this time per request, or this time in total, with the results so far.
REQUEST_S, QUICK_TIME_S = 0.05, 300.0
PROGRESS_S = 15.0
NUM_LOOKS = 20
CONCURRENCY = 32
WARM_UP = 1 / 3
MIB = 1 << 20

#: Per 1000 requests, and once.
MOST_MIB, SETTLING_MIB = 0.1, 7.0
MOST_FDS, SETTLING_FDS = 0.1, 5.0
#: The arena's index and names are written, and so get memory, page by page.
SETTLING_SHM_MIB = 0.1

#: A request that takes longer has failed; requests in flight must have ended within this time after the last response.
ANSWER_S = 60.0
SETTLE_S = 20.0
#: Between two tokens of a response: clients disconnect, and workers are lost, while it is streamed.
TOKEN_S = 0.03
#: A worker is cut off after each CUT_AFTER requests, and is back after at most MAX_DOWN_S.
NUM_WORKERS = 4
CUT_AFTER = 400
MAX_DOWN_S = 1.0
LEAST_LOST = 0.01

#: Supports images, video and audio.
FAMILY = FAMILIES["qwen2_5_omni"]
FLAGS = (*FAMILY.flags, "--disable-uvicorn-access-log")
NUM_PREPARERS = 2


@dataclass(frozen=True)
class Sample:
    """All processes of the gateway at rest, after `num_requests`."""

    num_requests: int
    seconds: float
    anon_mib: float
    gateway_mib: float
    rss_mib: float
    num_fds: int
    num_processes: int
    shm_mib: float
    num_leases: float
    num_in_flight: float


class Progress:
    """Prints the progress at intervals."""

    def __init__(self, num_requests: int) -> None:
        self._num_requests = num_requests
        self._num_done = 0
        self._started = self._told = time.perf_counter()

    def step(self) -> None:
        self._num_done += 1
        now = time.perf_counter()
        if now - self._told < PROGRESS_S:
            return
        self._told = now
        rate = self._num_done / (now - self._started)
        left_s = (self._num_requests - self._num_done) / rate
        print(f"  {self._num_done} of {self._num_requests}, {rate:.1f} a second, {left_s:.0f} s left", flush=True)


class Soak:
    """Sends requests in batches and samples the processes after each."""

    def __init__(
        self,
        gateway: GatewayProcess,
        workers: CuttableWorkers,
        right: RightAnswers,
        *,
        session: aiohttp.ClientSession,
        shm: Path,
    ) -> None:
        self.workers = workers
        self.migrations: dict[str, float] = {}
        self._right = right
        self._random = random.Random(0)
        self.samples: list[Sample] = []
        self.statuses: Counter[str] = Counter()
        self.wrong: Counter[str] = Counter()
        self._gateway = gateway
        self._session = session
        self._shm = shm
        self._num_sent = 0
        self._num_begun = 0
        self._progress = Progress(0)

    async def run(self, requests: Requests, num_requests: int, time_s: float) -> None:
        started = time.perf_counter()
        self._progress = Progress(num_requests)
        todo = iter(requests.make(num_requests))
        batch = max(1, num_requests // NUM_LOOKS)
        await self._sample(started)
        while self._num_sent < num_requests and time.perf_counter() - started < time_s:
            await self._send_all(list(islice(todo, batch)))
            await self._settle()
            await self._sample(started)
        self.migrations = _by_outcome(await self._metrics())

    async def _send_all(self, requests: Sequence[Request]) -> None:
        todo = iter(requests)

        async def client() -> None:
            for request in todo:
                await self._send(request)
                self._progress.step()

        async with asyncio.TaskGroup() as clients:
            for _ in range(CONCURRENCY):
                clients.create_task(client())
        self._num_sent += len(requests)

    async def _send(self, request: Request) -> None:
        self._num_begun += 1
        if self._num_begun % CUT_AFTER == 0:
            self.workers.cut_busiest(self._random.uniform(0, MAX_DOWN_S))
        try:
            async with asyncio.timeout(ANSWER_S if request.patience_s is None else request.patience_s):
                outcome = await self.ask(request)
        except TimeoutError:
            outcome = "given up" if request.patience_s is not None else "no answer"
        except aiohttp.ClientError as error:
            outcome = type(error).__name__
        self._note(request, outcome)

    async def ask(self, request: Request) -> str:
        """Return the status, or for an answer what is wrong with it."""
        headers = {"content-type": "application/json"}
        url = f"{self._gateway.url}/v1/chat/completions"
        async with self._session.post(url, data=request.body, headers=headers) as response:
            raw = await response.read()
        if response.status != HTTPStatus.OK:
            return str(response.status)
        return self._fault(request, raw) or "200"

    def _fault(self, request: Request, raw: bytes) -> str:
        """Return what differs from the right answer; empty if nothing does."""
        events = events_of(raw)
        if not events or "error" in events[-1]:
            return f"error {events[-1]['error']['code']}" if events else "cut off"
        prompt = next(found["prompt_token_ids"] for found in events if found.get("prompt_token_ids"))
        for index in range(request.num_choices):
            choices = [choice for found in events for choice in found["choices"] if choice["index"] == index]
            tokens = [token for choice in choices for token in choice.get("token_ids") or ()]
            right = self._right.tokens(prompt, NUM_TOKENS, request.seed + index)
            if tokens != right:
                return "wrong tokens"
            content = [choice.get("delta") or choice["message"] for choice in choices]
            if "".join(part.get("content") or "" for part in content) != self._right.text(right):
                return "wrong text"
            if [choice["finish_reason"] for choice in choices if choice["finish_reason"]] != ["length"]:
                return "wrong end"
        usage = events[-1]["usage"]
        num_tokens = usage["prompt_tokens"], usage["completion_tokens"]
        return "" if num_tokens == (len(prompt), NUM_TOKENS * request.num_choices) else "wrong usage"

    def _note(self, request: Request, outcome: str) -> None:
        self.statuses[outcome] += 1
        if outcome != "given up" and not (outcome.isdigit() and int(outcome) in request.expected):
            self.wrong[f"{request.kind}: {outcome}"] += 1

    @property
    def num_different(self) -> int:
        """Answers that are there, but not right."""
        return sum(number for name, number in self.wrong.items() if ": wrong " in name)

    async def _settle(self) -> None:
        """Wait until nothing is in flight, up to a timeout; what is left is visible in the sample."""
        with suppress(TimeoutError):
            async with asyncio.timeout(SETTLE_S):
                while any(await self._in_flight()):  # noqa: ASYNC110 - polls another process
                    await asyncio.sleep(0.1)

    async def _in_flight(self) -> tuple[float, float]:
        """Return the pins on entries and the requests at the workers."""
        text = await self._metrics()
        return _metric(text, "medialane_arena_leases"), _metric(text, "medialane_worker_in_flight")

    async def _metrics(self) -> str:
        async with self._session.get(f"{self._gateway.url}/metrics") as response:
            return await response.text()

    async def _sample(self, started: float) -> None:
        leases, in_flight = await self._in_flight()
        pids = process_tree(self._gateway.pid)
        memory = {pid: _memory(pid) for pid in pids}
        sample = Sample(
            num_requests=self._num_sent,
            seconds=time.perf_counter() - started,
            anon_mib=sum(anon for anon, _ in memory.values()),
            gateway_mib=memory[self._gateway.pid][0],
            rss_mib=sum(rss for _, rss in memory.values()),
            num_fds=sum(_num_fds(pid) for pid in pids),
            num_processes=len(pids),
            shm_mib=_used_mib(self._shm),
            num_leases=leases,
            num_in_flight=in_flight,
        )
        self.samples.append(sample)
        print(
            f"  {sample.num_requests} requests, {sample.seconds:.0f} s: {sample.anon_mib:.0f} MiB, "
            f"{sample.num_fds} fds, {sample.num_leases:g} leases",
            flush=True,
        )


def run(options: Options) -> Report:
    model = str(FAMILY.build(cache_folder(process_environ())))
    num_requests = options.num_requests or (QUICK_NUM_REQUESTS if options.quick else NUM_REQUESTS)
    time_s = max(QUICK_TIME_S, num_requests * REQUEST_S)
    print(f"  starting the gateway; then {num_requests} requests, {time_s / 60:.0f} minutes at most", flush=True)
    with _shared_memory() as shm, tempfile.TemporaryDirectory(prefix="medialane-bench-") as folder:
        config = Config(
            arena=ArenaConfig(size_bytes=128 * MIB, directory=str(shm)),
            media=MediaConfig(allowed_media_networks=("127.0.0.1/32",), max_cached_urls=256),
            prepare=PrepareConfig(num_preparers=NUM_PREPARERS),
        )
        peers = Peers.in_folder(folder, num_workers=NUM_WORKERS)
        with origin(files()) as files_url, gateway_process(model, peers, config=config, flags=FLAGS) as gateway:
            soak = uvloop.run(
                _soak(
                    gateway,
                    model,
                    files_url=files_url,
                    peers=peers,
                    config=config,
                    shm=shm,
                    num_requests=num_requests,
                    time_s=time_s,
                )
            )
            gateway.end()
        left = [path.name for path in shm.iterdir()]
    return _report(soak, num_requests, len(left))


@contextmanager
def _shared_memory() -> Iterator[Path]:
    """Create a private folder, so that other shared memory is not counted."""
    folder = Path(tempfile.mkdtemp(prefix="medialane-soak-", dir=ArenaConfig().directory))
    try:
        yield folder
    finally:
        shutil.rmtree(folder)


async def _soak(
    gateway: GatewayProcess,
    model: str,
    *,
    files_url: str,
    peers: Peers,
    config: Config,
    shm: Path,
    num_requests: int,
    time_s: float,
) -> Soak:
    connector, right = aiohttp.TCPConnector(limit=0), RightAnswers(token_texts(model))
    async with (
        cuttable_workers(peers, config, right, delay_s=TOKEN_S) as workers,
        aiohttp.ClientSession(connector=connector) as session,
    ):
        await until_ready(session, gateway.url)
        soak = Soak(gateway, workers, right, session=session, shm=shm)
        await soak.run(Requests(model, files_url), num_requests, time_s)
    return soak


def events_of(raw: bytes) -> list[Any]:
    """Return the whole answer, or the events of a stream; empty if that was cut off."""
    if not raw.startswith(b"data: "):
        return [msgspec.json.decode(raw)]
    lines = [line.removeprefix(b"data: ") for line in raw.split(b"\n") if line.startswith(b"data: ")]
    return [msgspec.json.decode(line) for line in lines[:-1]] if lines[-1] == b"[DONE]" else []


def _metric(text: str, name: str) -> float:
    """Return the sum over all labels."""
    return sum(float(found) for found in re.findall(rf"^{name}(?:{{[^}}]*}})? (\S+)$", text, re.MULTILINE))


def _by_outcome(text: str) -> dict[str, float]:
    """Return the requests whose worker was lost, by what became of them."""
    counts: dict[str, float] = {}
    for outcome, number in re.findall(r'^medialane_migrations_total{outcome="(\w+)",[^}]*} (\S+)$', text, re.MULTILINE):
        counts[outcome] = counts.get(outcome, 0.0) + float(number)
    return counts


def _memory(pid: int) -> tuple[float, float]:
    """Return MiB of anonymous memory, with shared pages counted proportionally, and of resident memory."""
    text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    anon, rss = (int(re.findall(rf"^{name}:\s+(\d+) kB", text, re.MULTILINE)[0]) for name in ("Pss_Anon", "Rss"))
    return anon / 1024, rss / 1024


def _num_fds(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


def _used_mib(folder: Path) -> float:
    return sum(path.stat().st_blocks * 512 for path in folder.iterdir()) / MIB


def slope(points: Sequence[tuple[float, float]]) -> float:
    """Return the Theil-Sen slope of y over x: the median of the slopes between all pairs of points."""
    return median((y2 - y1) / (x2 - x1) for (x1, y1), (x2, y2) in combinations(points, 2))


def _report(soak: Soak, num_requests: int, num_left: int) -> Report:
    sent = soak.samples[-1].num_requests
    warm = [sample for sample in soak.samples if sample.num_requests >= sent * WARM_UP]
    grown = {
        name: 1000 * slope([(sample.num_requests, float(getattr(sample, name))) for sample in warm])
        for name in ("anon_mib", "gateway_mib", "rss_mib", "num_fds", "shm_mib", "num_leases", "num_processes")
    }
    rows: list[dict[str, object]] = [
        {
            "requests": sample.num_requests,
            "s": sample.seconds,
            "memory MiB": sample.anon_mib,
            "gateway's": sample.gateway_mib,
            "RSS": sample.rss_mib,
            "fds": sample.num_fds,
            "processes": sample.num_processes,
            "shm MiB": sample.shm_mib,
            "leases": sample.num_leases,
            "at worker": sample.num_in_flight,
        }
        for sample in soak.samples
    ]
    outcomes = [{"outcome": name, "requests": number} for name, number in sorted(soak.statuses.items())]
    outcomes += [
        {"outcome": "workers cut off", "requests": soak.workers.num_cut},
        {"outcome": "requests at a worker that was cut off", "requests": soak.workers.num_lost},
        *({"outcome": f"moved: {outcome}", "requests": number} for outcome, number in soak.migrations.items()),
    ]
    num_different = soak.num_different
    leases = max(sample.num_leases for sample in soak.samples)
    in_flight = max(sample.num_in_flight for sample in soak.samples)
    bars = [
        Bar("soak: part of the requests that were sent in time", sent / num_requests, 0.5, "at least"),
        Bar(
            "soak: memory growth, MiB in 1000 requests",
            grown["anon_mib"],
            _most(MOST_MIB, SETTLING_MIB, sent),
            "at most",
        ),
        Bar(
            "soak: file descriptors, growth in 1000 requests",
            grown["num_fds"],
            _most(MOST_FDS, SETTLING_FDS, sent),
            "at most",
        ),
        Bar(
            "soak: shared memory, growth in MiB in 1000 requests",
            grown["shm_mib"],
            _most(0.0, SETTLING_SHM_MIB, sent),
            "at most",
        ),
        Bar("soak: most leases held at rest", leases, 0, "at most"),
        Bar("soak: most requests left at the worker at rest", in_flight, 0, "at most"),
        Bar("soak: files left in shared memory after the stop", num_left, 0, "at most"),
        Bar("soak: requests lost, or ended by an error", sum(soak.wrong.values()) - num_different, 0, "at most"),
        Bar("soak: answers with a missing, repeated or other token, text or count", num_different, 0, "at most"),
        Bar("soak: part of the requests that lost a worker", soak.workers.num_lost / sent, LEAST_LOST, "at least"),
    ]
    notes = [f"wrong: {name}, {number} times" for name, number in soak.wrong.most_common(10)]
    slopes: list[dict[str, object]] = [{"of": name, "growth in 1000 requests": value} for name, value in grown.items()]
    return Report("soak", {"at rest": rows, "answers": outcomes, "slopes after the warm-up": slopes}, bars, notes)


def _most(growing: float, settling: float, num_requests: int) -> float:
    """Return the limit of a slope, per 1000 requests."""
    return growing + settling * 1000 / num_requests
