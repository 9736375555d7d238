"""Streams whose worker is lost: what is delivered, and how long it takes until the next token.

`simulated`: gateways and a store, each a process as a user starts it, and simulated workers behind proxies
(`link_proxy`). HTTP clients ask the same questions over and over, texts and images, while workers are lost: their
connections are cut (unix sockets and TCP), or their process is killed, or it is stopped (SIGSTOP), or their link drops
everything, which only heartbeats show. `vLLM`: `medialane serve` with two real workers of the tiny model, one of which
is killed in the middle of its streams, and restarted by `serve`.

Each question is asked once undisturbed. A simulated token follows from all that precede it, the real ones are greedy:
every answer's token ids, text and reason of its end must be those of the undisturbed one. Where they are not, missing
tokens belong to the right answer and were not delivered; repeated ones were delivered and do not belong to it.

Times are from the loss to the first token of the next worker, as the client reads it: tokens that the lost one had sent
before do not count.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import signal
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager
from dataclasses import dataclass, field
from difflib import SequenceMatcher
from itertools import count, pairwise
from pathlib import Path
from typing import Literal

import aiohttp
import uvloop

from harness import Bar, Options, Report, percentile
from link_proxy import LinkProxy
from load import data_url
from medialane.runtime.linux import has_title
from medialane.testing.sample_media import sample_jpeg
from medialane.testing.tiny_model import build_tiny_model, cache_folder
from medialane.tools.check import free_port
from servers import medialane_server
from simulated_processes import Host, Process, gateways, host_store
from stream_reader import Stream

ABOUT = "streams whose worker is lost: tokens lost, repeated or missing, and the time to the next one"

Kind = Literal["cut unix", "cut TCP", "kill -9", "SIGSTOP", "dropped link"]
_REAL = "kill -9 of vLLM"
#: Losses by kind. Restarts and heartbeats take seconds, so that there are fewer of these.
NUM_LOSSES: dict[Kind, int] = {"cut unix": 600, "cut TCP": 340, "kill -9": 20, "SIGSTOP": 20, "dropped link": 20}
QUICK_NUM_LOSSES: dict[Kind, int] = {"cut unix": 30, "cut TCP": 20, "kill -9": 2, "SIGSTOP": 2, "dropped link": 2}
NUM_REAL_LOSSES, QUICK_NUM_REAL_LOSSES = 20, 2
#: What the gateway does not see in its socket.
BY_HEARTBEATS: tuple[Kind, ...] = ("SIGSTOP", "dropped link")
MAX_BY_SOCKET_S, MAX_BY_HEARTBEATS_S = 0.3, 1.5

NUM_GATEWAYS = 2
NUM_CLIENTS = 16
NUM_WORKERS = 9
#: So that all workers have streams.
ROUTER = ("--router", "least-loaded")
NUM_TEXTS, NUM_IMAGES = 24, 8
NUM_TOKENS = 48
#: Of a tiny real model, which has a token every few ms.
NUM_REAL_TOKENS = 800
#: A stream takes three quarters of a second, in which it loses a worker or two.
WORKER = ("--simulated-step-ms", "15", "--simulated-prefill-token-ms", "0.02")
CUT_INTERVAL_S = 0.15
#: Longer than heartbeats take to notice; how long a worker is away; how long one takes to restart.
NOTICED_S, STOPPED_S, RESTART_S = 1.2, 2.0, 4.0
#: A gateway gives up an answer after more losses than this (--migration-limit), and after two without a token between.
#: One less is inflicted: a move to a worker whose connection is being cut counts, too, and is not seen here.
MAX_LOSSES = 2
#: So many workers have lost no connection for the time that gateways take to connect again.
NUM_STEADY, STEADY_S = 4, 2.0
ANSWER_S = 60.0
#: For tokens that a lost worker has sent before.
_SHORTLY_S = 0.1


@dataclass
class Hit:
    """A stream whose worker was lost when it had `num_ids` tokens; it was `sent_later` if only heartbeats show that."""

    kind: Kind
    stream: Stream
    lost_s: float
    num_ids: int
    sent_later: bool = False


class Worker:
    """A worker behind a proxy, and the streams that it has."""

    def __init__(self, link: LinkProxy, process: Process) -> None:
        self.link = link
        self.process = process
        self.is_away = False


@dataclass
class Load:
    """Clients that ask until they are stopped."""

    urls: Sequence[str]
    bodies: Sequence[bytes]
    right: list[tuple[list[int], str, str | None]] = field(default_factory=list)
    streams: list[Stream] = field(default_factory=list)
    questions: dict[Stream, int] = field(default_factory=dict)
    running: dict[int, Stream] = field(default_factory=dict)
    at: dict[int, str] = field(default_factory=dict)
    moves: dict[int, list[float]] = field(default_factory=dict)
    hits: list[Hit] = field(default_factory=list)
    #: When each worker was lost.
    lost_s: dict[str, float] = field(default_factory=dict)
    #: Workers that are lost, which no gateway knows yet.
    silent: dict[str, Kind] = field(default_factory=dict)
    #: A loss by heartbeats waits until all streams have recovered.
    is_quiet: bool = False
    num_losses: dict[str, int] = field(default_factory=dict)
    stopping: bool = False
    #: Times of real losses, the streams that ran then, and how many of these moved.
    killed: list[tuple[float, list[Stream], int]] = field(default_factory=list)
    numbers: count[int] = field(default_factory=lambda: count(1))

    async def learn(self, session: aiohttp.ClientSession) -> None:
        """Ask each question undisturbed, of several gateways in turn. Raises RuntimeError for an error."""
        for number, body in enumerate(self.bodies):
            stream = Stream(next(self.numbers))
            await stream.read(session, self.urls[number % len(self.urls)], body)
            if stream.error:
                raise RuntimeError(f"an undisturbed answer has failed: {stream.status} {stream.error}")
            self.right.append(stream.answer)

    async def ask(self, session: aiohttp.ClientSession, question: int) -> None:
        stream = Stream(next(self.numbers))
        self.running[stream.number] = stream
        self.questions[stream] = question
        async with asyncio.timeout(ANSWER_S):
            await stream.read(session, random.choice(self.urls), self.bodies[question])
        del self.running[stream.number]
        self.streams.append(stream)

    async def have_tokens(self, number: int) -> None:
        """Wait until each question has a running stream, with more tokens than this."""
        while sum(len(stream.ids) > number for stream in self.running.values()) < len(self.bodies):  # noqa: ASYNC110 - no event
            await asyncio.sleep(0.01)

    async def client(self, session: aiohttp.ClientSession, seed: int) -> None:
        drawn = random.Random(seed)
        while not self.stopping:
            await self.ask(session, drawn.randrange(len(self.bodies)))

    def sent(self, number: int, address: str) -> None:
        """An attempt of a request has gone to this worker."""
        now = time.perf_counter()
        self.at[number] = address
        self.moves.setdefault(number, []).append(now)
        if address in self.silent and number in self.running:
            stream = self.running[number]
            self.hits.append(Hit(self.silent[address], stream, now, len(stream.ids), sent_later=True))

    def at_worker(self, address: str) -> list[Stream]:
        return [stream for number, stream in self.running.items() if self.at.get(number) == address]

    def may_lose(self, address: str) -> bool:
        """Whether the streams there may lose a worker again, and there are some."""
        here = self.at_worker(address)
        return bool(here) and all(map(self._may_lose, here))

    def are_steady(self) -> bool:
        """Whether enough workers are connected to lose another one."""
        since_s = time.perf_counter() - STEADY_S
        num_lost = sum(at > since_s for at in self.lost_s.values())
        return num_lost <= NUM_WORKERS - 1 - NUM_STEADY

    @property
    def have_recovered(self) -> bool:
        """Whether all streams have a token since their last loss. Any stream may be sent to a lost worker that is
        silent, and a request that loses two workers before a token is refused."""
        return all(map(self._has_recovered, self.running.values()))

    def _may_lose(self, stream: Stream) -> bool:
        return sum(hit.stream is stream for hit in self.hits[-500:]) < MAX_LOSSES and self._has_recovered(stream)

    def _has_recovered(self, stream: Stream) -> bool:
        return all(hit.num_ids < len(stream.ids) for hit in self.hits[-500:] if hit.stream is stream)

    def lose(self, kind: Kind, address: str) -> None:
        now = self.lost_s[address] = time.perf_counter()
        self.num_losses[kind] = self.num_losses.get(kind, 0) + 1
        if sum(self.num_losses.values()) % 100 == 0:
            print(f"  {self.num_losses}", flush=True)
        self.hits += [Hit(kind, stream, now, len(stream.ids)) for stream in self.at_worker(address)]

    def next_tokens_s(self, kind: str) -> tuple[int, list[float]]:
        """Return the number of streams that such losses have met, and for streams that went on elsewhere the times from
        the loss to the next token."""
        if kind == _REAL:
            gaps = [gap for lost_s, streams, number in self.killed for gap in _longest_gaps(lost_s, streams)[:number]]
            return sum(number for *_, number in self.killed), gaps
        hits = [hit for hit in self.hits if hit.kind == kind and not hit.sent_later]
        return len(hits), [found for hit in hits if (found := self._next_token_s(hit)) is not None]

    def _next_token_s(self, hit: Hit) -> float | None:
        """None if the answer was complete."""
        moved = next((at for at in self.moves.get(hit.stream.number, ()) if at > hit.lost_s), None)
        if moved is None:
            return None
        return next((at - hit.lost_s for at in hit.stream.arrivals if at > moved), None)


def _longest_gaps(lost_s: float, streams: Sequence[Stream]) -> list[float]:
    """Return for each stream, the longest first, the time from a loss to the end of the longest pause that began until
    shortly after it: who has lost its worker is not seen from outside, but it has the longest."""
    ends = []
    for stream in streams:
        pauses = [(b - a, b) for a, b in pairwise(stream.arrivals) if b > lost_s and a < lost_s + _SHORTLY_S]
        ends += [max(pauses)[1] - lost_s] if pauses else []
    return sorted(ends, reverse=True)


def run(options: Options) -> Report:
    return uvloop.run(_run(options))


async def _run(options: Options) -> Report:
    random.seed(0)
    model = str(build_tiny_model(cache_folder(os.environ)))
    with tempfile.TemporaryDirectory(prefix="medialane-bench-", dir="/tmp") as folder:
        simulated = await _simulated(model, Path(folder), QUICK_NUM_LOSSES if options.quick else NUM_LOSSES)
        real = await _real(model, Path(folder), QUICK_NUM_REAL_LOSSES if options.quick else NUM_REAL_LOSSES)
    return _report(simulated, real)


# Simulated workers


async def _simulated(model: str, folder: Path, losses: dict[Kind, int]) -> Load:
    bodies = [_body(model, number, NUM_TOKENS) for number in range(NUM_TEXTS + NUM_IMAGES)]
    async with AsyncExitStack() as stack:
        host = await stack.enter_async_context(host_store(model, folder, ("--preparers", "1")))
        load = Load((), bodies)
        workers = await stack.enter_async_context(_workers(host, load))
        addresses = [worker.link.address for worker in workers]
        started = await stack.enter_async_context(gateways(host, addresses, number=NUM_GATEWAYS, settings=ROUTER))
        load.urls = [url for url, _ in started]
        session = await stack.enter_async_context(_session())
        await load.learn(session)
        async with asyncio.TaskGroup() as tasks:
            for seed in range(NUM_CLIENTS):
                tasks.create_task(load.client(session, seed))
            await _lose_all(load, workers, losses)
            load.stopping = True
    return load


@asynccontextmanager
async def _workers(host: Host, load: Load) -> AsyncIterator[list[Worker]]:
    """Three processes with two workers each at unix sockets, and three with one each at TCP ports."""
    targets: list[tuple[Process, str, bool]] = []
    with ExitStack() as stack:
        for number in range(3):
            sockets = [host.folder / f"worker-{number}-{index}.sock" for index in range(2)]
            listen = f"unix:{host.folder}/worker-{number}-{{}}.sock"
            command = host.worker_command(listen, ("--simulated-workers", "2", *WORKER))
            process = Process(command, host.folder / f"worker-{number}.log")
            stack.callback(process.end)
            targets += [(process, f"unix:{path}", False) for path in sockets]
        for number in range(3, 6):
            address = f"127.0.0.1:{free_port()}"
            process = Process(host.worker_command(address, WORKER), host.folder / f"worker-{number}.log")
            stack.callback(process.end)
            targets.append((process, address, True))
        for process, address, is_tcp in targets:
            if not is_tcp:
                await process.listens_at(Path(address.removeprefix("unix:")))
        workers = []
        for number, (process, target, is_tcp) in enumerate(targets):
            address = f"127.0.0.1:{free_port()}" if is_tcp else f"unix:{host.folder}/link-{number}.sock"
            link = LinkProxy(address, target, lambda request, address=address: load.sent(request, address))  # type: ignore[misc]
            await link.open()
            stack.callback(link.close)
            workers.append(Worker(link, process))
        yield workers


async def _lose_all(load: Load, workers: Sequence[Worker], losses: dict[Kind, int]) -> None:
    unix = [worker for worker in workers if worker.link.address.startswith("unix:")]
    tcp = [worker for worker in workers if worker not in unix]

    async def cut(kind: Kind, among: Sequence[Worker]) -> None:
        for _ in range(losses[kind]):
            await asyncio.sleep(random.uniform(0.5, 1.5) * CUT_INTERVAL_S * 2)
            worker = await _candidate(load, kind, among)
            load.lose(kind, worker.link.address)
            worker.link.cut()

    async def kill() -> None:
        for _ in range(losses["kill -9"]):
            await asyncio.sleep(random.uniform(0.5, 1.5))
            worker = await _candidate(load, "kill -9", tcp)
            worker.is_away = True
            load.lose("kill -9", worker.link.address)
            await asyncio.to_thread(worker.process.restart)
            await asyncio.sleep(RESTART_S)
            worker.is_away = False

    async def away(kind: Kind, begin: Callable[[Worker], object], end: Callable[[Worker], object]) -> None:
        for _ in range(losses[kind]):
            await asyncio.sleep(random.uniform(0.5, 1.5))
            worker = await _candidate(load, kind, tcp)
            worker.is_away = True
            load.lose(kind, worker.link.address)
            load.silent[worker.link.address] = kind
            begin(worker)
            await asyncio.sleep(NOTICED_S)
            del load.silent[worker.link.address]
            await asyncio.sleep(STOPPED_S - NOTICED_S)
            end(worker)
            await asyncio.sleep(STOPPED_S)
            worker.is_away = False

    def drop(worker: Worker) -> None:
        worker.link.drops = True

    jobs: list[Awaitable[None]] = [
        cut("cut unix", unix),
        cut("cut TCP", tcp),
        kill(),
        away("SIGSTOP", lambda w: w.process.send(signal.SIGSTOP), lambda w: w.process.send(signal.SIGCONT)),
        away("dropped link", drop, lambda w: w.link.restore()),
    ]
    await asyncio.gather(*jobs)


async def _candidate(load: Load, kind: Kind, among: Sequence[Worker]) -> Worker:
    """Wait for a worker that streams may lose. All streams recover before one that is silent: others are not
    lost meanwhile."""
    is_silent = kind in BY_HEARTBEATS
    while True:
        some = [worker for worker in among if not worker.is_away and load.may_lose(worker.link.address)]
        if not some or load.silent or (load.is_quiet and not is_silent) or not load.are_steady():
            await asyncio.sleep(0.01)
            continue
        if not is_silent or load.have_recovered:
            load.is_quiet = False
            return random.choice(some)
        load.is_quiet = True
        await asyncio.sleep(0.01)


# vLLM's workers


async def _real(model: str, folder: Path, num_losses: int) -> Load:
    """Kill one of two workers in the middle of four streams, and wait until it is back."""
    bodies = [_body(model, number, NUM_REAL_TOKENS) for number in range(4)]
    async with (
        medialane_server(model, folder / "serve.log", settings=("--workers", "2")) as server,
        _session() as session,
    ):
        load = Load((server.base_url,), bodies)
        await load.learn(session)
        for number in range(num_losses):
            await _until_ready(session, server.base_url)
            before = sum(await _values(session, server.base_url, "medialane_migrations_total"))
            async with asyncio.TaskGroup() as tasks:
                for question in range(len(bodies)):
                    tasks.create_task(load.ask(session, question))
                await load.have_tokens(10)
                streams = list(load.running.values())
                lost_s = _kill_worker(server.pids(), number % 2)
            moved = sum(await _values(session, server.base_url, "medialane_migrations_total")) - before
            load.num_losses[_REAL] = number + 1
            load.killed.append((lost_s, streams, moved))
    return load


def _kill_worker(pids: Sequence[int], number: int) -> float:
    """Kill the worker with this number; return when."""
    (pid,) = [pid for pid in pids if has_title(pid, f"worker {number}")]
    os.kill(pid, signal.SIGKILL)
    return time.perf_counter()


async def _until_ready(session: aiohttp.ClientSession, base_url: str) -> None:
    """Wait until both workers are connected."""
    async with asyncio.timeout(300):
        while (await _values(session, base_url, "medialane_worker_connected")).count(1) < 2:  # noqa: ASYNC110 - polls
            await asyncio.sleep(0.1)


async def _values(session: aiohttp.ClientSession, base_url: str, name: str) -> list[int]:
    """Return the values of a metric, whatever its labels."""
    async with session.get(f"{base_url.removesuffix('/v1')}/metrics") as response:
        text = await response.text()
    return [int(float(value)) for value in re.findall(rf"^{name}\{{[^}}]*\}} (\S+)$", text, re.MULTILINE)]


# Both


def _session() -> aiohttp.ClientSession:
    return aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=ANSWER_S))


def _body(model: str, number: int, num_tokens: int) -> bytes:
    content: list[dict[str, object]] = [{"type": "text", "text": f"Tell story number {number} about all that you see."}]
    if number >= NUM_TEXTS:
        url = data_url(sample_jpeg(number, 224, 168))
        content.insert(0, {"type": "image_url", "image_url": {"url": url}})
    body: dict[str, object] = {
        "model": model,
        "messages": [{"role": "user", "content": content}],
        "max_tokens": num_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "return_token_ids": True,
    }
    return json.dumps(body).encode()


def _wrong(load: Load) -> dict[str, int]:
    """Count what differs from the undisturbed answers."""
    wrong = {"streams lost": 0, "tokens missing": 0, "tokens repeated": 0, "texts wrong": 0}
    for stream in load.streams:
        ids, text, reason = load.right[load.questions[stream]]
        if stream.error:
            wrong["streams lost"] += 1
        elif stream.answer != (ids, text, reason):
            matched = sum(block.size for block in SequenceMatcher(None, ids, stream.ids, False).get_matching_blocks())
            wrong["tokens missing"] += len(ids) - matched
            wrong["tokens repeated"] += len(stream.ids) - matched
            wrong["texts wrong"] += (text, reason) != stream.answer[1:]
    return wrong


def _report(simulated: Load, real: Load) -> Report:
    report = Report("failover", {"losses": [], "answers": []})
    by_socket: list[float] = []
    by_heartbeats: list[float] = []
    for load in (simulated, real):
        for kind, number in load.num_losses.items():
            num_streams, times = load.next_tokens_s(kind)
            (by_heartbeats if kind in BY_HEARTBEATS else by_socket).extend(times if load is simulated else [])
            report.tables["losses"].append(
                {
                    "loss": kind,
                    "losses": number,
                    "streams": num_streams,
                    "continued": len(times),
                    "next token p50 s": percentile(times, 0.5) if times else 0.0,
                    "p99 s": percentile(times, 0.99) if times else 0.0,
                }
            )
    for name, load in (("simulated", simulated), ("vLLM", real)):
        wrong, num_losses = _wrong(load), sum(load.num_losses.values())
        report.tables["answers"].append({"workers": name, "losses": num_losses, "answers": len(load.streams), **wrong})
        for what, value in wrong.items():
            report.bars.append(Bar(f"{name}, {num_losses} losses: {what}", value, 0, "at most"))
        for stream in load.streams:
            if stream.error:
                hits = [f"{hit.kind} at token {hit.num_ids}" for hit in load.hits if hit.stream is stream]
                report.notes.append(f"{name}: a stream ended with {stream.error} at token {len(stream.ids)}: {hits}")
    for name, times, limit in (
        ("where the socket tells", by_socket, MAX_BY_SOCKET_S),
        ("by heartbeats over TCP", by_heartbeats, MAX_BY_HEARTBEATS_S),
    ):
        if times:
            report.bars.append(Bar(f"time to the next token {name}, p50 s", percentile(times, 0.5), limit, "at most"))
    return report
