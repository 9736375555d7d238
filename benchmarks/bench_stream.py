"""Long responses through medialane and plain vLLM: each server with its defaults, alternating in one run.

The servers alternate in each case, A B, B A, ...; a figure is the median over the turns, a ratio the median of the
ratios of each pair of adjacent turns: the speed of a shared machine drifts by a factor of two within a run, so only
turns seconds apart are comparable. CPU time is that of all of a server's processes, busy-waiting included.

Inter-token times are measured where the client reads its socket. Events that are read together arrived in one burst:
for the median they share the gap before it, so that a server does not look faster for buffering tokens; for the 99th
percentile the first of them has the whole gap, which is the stall that a user sees, and the others none.

In the `loaded` cases other processes keep every core busy, or many clients stream at once. They measure how many events
a stream still has: a server that is short of CPU time may send several tokens in one event, which a user sees as a
jump.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import count, pairwise

import aiohttp

from harness import Bar, Options, Report, median, percentile
from load import Read, cpu_seconds, data_url, read_stream, shared_gaps
from medialane.testing.sample_media import sample_jpeg
from medialane.testing.tiny_model import build_tiny_model, cache_folder
from servers import Server, both_servers, settle

NAME = "stream"
ABOUT = "responses of 64 and 256 tokens through medialane and plain vLLM: tokens/s, inter-token time, CPU"

_SIZE = (512, 384)
_ROUNDS = 5
_ROUNDS_QUICK = 1
#: Columns of the table.
_KEYS = ("tokens/s", "gap_p50_ms", "gap_p99_ms", "cpu_ms/token", "events")
#: Body fields for both servers: the model generates until max_tokens.
_SAMPLING = {"temperature": 0, "ignore_eos": True}


@dataclass(frozen=True)
class Case:
    kind: str
    num_tokens: int
    concurrency: int
    streamed: bool
    loaded: bool = False
    """Whether other processes keep every core busy."""

    @property
    def name(self) -> str:
        name = f"{self.kind} {self.num_tokens} c={self.concurrency} {'streamed' if self.streamed else 'whole'}"
        return f"{name} loaded" if self.loaded else name

    @property
    def counts_events(self) -> bool:
        """Whether the case is about events alone: the CPU is short, so times depend on the scheduler's whims."""
        return self.loaded or self.concurrency > 16

    @property
    def num_requests(self) -> int:
        """Enough for a turn of at least half a second."""
        if self.counts_events:
            return self.concurrency
        each = {1: 6, 4: 6, 16: 3}[self.concurrency] if self.num_tokens == 64 else {1: 2, 4: 2, 16: 1}[self.concurrency]
        return each * self.concurrency


CASES = [
    Case(kind, num_tokens, concurrency, streamed)
    for kind in ("text", "image")
    for num_tokens in (64, 256)
    for concurrency in (1, 4, 16)
    for streamed in (True, False)
]
CASES += [
    *(Case("text", 24, concurrency, streamed=True, loaded=True) for concurrency in (1, 8)),
    Case("image", 24, 8, streamed=True, loaded=True),
    Case("text", 24, 64, streamed=True),
]


@dataclass
class Turn:
    """The measurements of one turn of a case."""

    num_tokens: int = 0
    wall_s: float = 0.0
    cpu_s: float = 0.0
    gaps_s: list[float] = field(default_factory=list)
    shared_gaps_s: list[float] = field(default_factory=list)
    num_events: list[int] = field(default_factory=list)

    def note(self, reads: Sequence[Read]) -> None:
        """Record the reads of one stream."""
        self.num_events.append(sum(read.num_events for read in reads))
        self.shared_gaps_s += shared_gaps(reads)
        for (before, _), (now, num_events) in pairwise(reads):
            self.gaps_s += [now - before, *[0.0] * (num_events - 1)]


def run(options: Options) -> Report:
    return asyncio.run(_run(options))


async def _run(options: Options) -> Report:
    model = str(build_tiny_model(cache_folder(os.environ)))
    report = Report(NAME)
    async with both_servers(model, observed=options.observed) as (ours, theirs):
        for server in (ours, theirs):
            await _turn(server, Case("image", 64, 4, streamed=True), model)
        for case in CASES:
            await _measure(report, case, servers=(ours, theirs), model=model, options=options)
    return report


async def _measure(report: Report, case: Case, *, servers: tuple[Server, Server], model: str, options: Options) -> None:
    turns: dict[str, list[Turn]] = {server.name: [] for server in servers}
    for number in range(options.rounds or (_ROUNDS_QUICK if options.quick else _ROUNDS)):
        for server in servers if number % 2 == 0 else servers[::-1]:
            await settle()
            with _busy_cores() if case.loaded else ExitStack():
                turns[server.name].append(await _turn(server, case, model))
    figures = {name: [_figures(turn, case) for turn in found] for name, found in turns.items()}
    for name, found in figures.items():
        row = {key: median(each[key] for each in found) for key in found[0]}
        report.tables.setdefault(NAME, []).append({"case": case.name, "server": name, **dict.fromkeys(_KEYS), **row})
    report.bars += _bars(case, *(figures[server.name] for server in servers))


@contextmanager
def _busy_cores() -> Iterator[None]:
    """Run two processes for each core that compute all the time."""
    with ExitStack() as stack:
        for _ in range(2 * len(os.sched_getaffinity(0))):
            process = stack.enter_context(subprocess.Popen([sys.executable, "-c", "while True: pass"]))
            stack.callback(process.kill)
        yield


async def _turn(server: Server, case: Case, model: str) -> Turn:
    """Send all requests of a case, `concurrency` at a time. Raises RuntimeError for an incomplete response."""
    turn = Turn()
    bodies = iter([_body(case, model) for _ in range(case.num_requests)])
    before = cpu_seconds(server.pids())
    started = time.perf_counter()
    connector = aiohttp.TCPConnector(limit=case.concurrency)
    headers = {"content-type": "application/json"}
    async with aiohttp.ClientSession(headers=headers, connector=connector) as session:

        async def client() -> None:
            for body in bodies:
                await _ask(session, f"{server.base_url}/chat/completions", body=body, case=case, turn=turn)

        await asyncio.gather(*(client() for _ in range(case.concurrency)))
    turn.wall_s = time.perf_counter() - started
    turn.cpu_s = cpu_seconds(server.pids()) - before
    return turn


async def _ask(session: aiohttp.ClientSession, url: str, *, body: bytes, case: Case, turn: Turn) -> None:
    async with session.post(url, data=body) as response:
        if case.streamed:
            event, reads = await read_stream(response)
            turn.note(reads)
        else:
            event = await response.read()
    num_tokens = json.loads(event)["usage"]["completion_tokens"] if response.status == 200 else 0
    if num_tokens != case.num_tokens:
        raise RuntimeError(f"{case.name}: {response.status}, {num_tokens} tokens: {event[:500]!r}")
    turn.num_tokens += num_tokens


#: All prompts of a run differ; their first blocks and the image are the same.
_NUMBERS = count(1)


def _body(case: Case, model: str) -> bytes:
    text = f"Count all objects and name their colours. This is question {next(_NUMBERS)}."
    content: list[dict[str, object]] = [{"type": "text", "text": text}]
    if case.kind == "image":
        content.insert(0, {"type": "image_url", "image_url": {"url": data_url(sample_jpeg(1, *_SIZE))}})
    body: dict[str, object] = {"model": model, "messages": [{"role": "user", "content": content}], **_SAMPLING}
    body |= {"max_tokens": case.num_tokens, "stream": case.streamed}
    if case.streamed:
        body["stream_options"] = {"include_usage": True}
    return json.dumps(body).encode()


def _figures(turn: Turn, case: Case) -> dict[str, float]:
    figures = {"tokens/s": turn.num_tokens / turn.wall_s, "cpu_ms/token": 1000 * turn.cpu_s / turn.num_tokens}
    if case.streamed:
        figures["events"] = median(turn.num_events)
    if case.streamed and not case.counts_events:  # there, all events of a stream may arrive together
        figures["gap_p50_ms"] = 1000 * median(turn.shared_gaps_s)
        figures["gap_p99_ms"] = 1000 * percentile(turn.gaps_s, 0.99)
    return figures


def _bars(case: Case, ours: Sequence[dict[str, float]], theirs: Sequence[dict[str, float]]) -> list[Bar]:
    def ratio(key: str) -> float:
        return median(a[key] / b[key] for a, b in zip(ours, theirs, strict=True))

    if case.counts_events:
        return [Bar(f"{case.name}: events of a stream / plain", ratio("events"), 0.8, "at least")]
    bars = [
        Bar(f"{case.name}: tokens/s / plain", ratio("tokens/s"), 0.97, "at least"),
        Bar(f"{case.name}: CPU per token / plain", ratio("cpu_ms/token"), 1.05, "at most"),
    ]
    if case.streamed:
        bars.append(Bar(f"{case.name}: inter-token p50 / plain", ratio("gap_p50_ms"), 1.05, "at most"))
        bars.append(Bar(f"{case.name}: inter-token p99 / plain", ratio("gap_p99_ms"), 1.2, "at most"))
    return bars
