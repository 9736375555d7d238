"""End-to-end comparison with plain vLLM and with vLLM's Rust front end, one worker, each server with its defaults
(`servers`), alternating in one run.

On a machine where engine and all other processes share the cores the measure is cost: requests per second of a closed
loop, and the CPU time of all of a server's processes per request, busy-waiting included. The servers alternate in each
case, A B C C B A ...; a figure is the median over the turns, a ratio that of the medians.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import count
from pathlib import Path

from harness import Bar, Options, Report, median, percentile
from load import Answered, data_url, image_request, random_text, send, text_request
from medialane.testing.sample_media import sample_jpeg
from medialane.testing.tiny_model import build_tiny_model, cache_folder
from peers import RUST, SHORT_NAMES, rivals, rust_front_end
from servers import OURS, PLAIN, Server, settle

NAME = "serve"
ABOUT = "requests with images, or of text, through medialane, plain vLLM, vLLM's Rust front end: requests/s, TTFT, CPU"

SIZES = ((512, 384), (1024, 768))
#: Of a request without images: a question of some 60 tokens, and an answer.
NUM_WORDS, NUM_TOKENS = 20, 32

_PER_S, _TTFT, _CPU = "req/s", "TTFT p50", "CPU per request"
_COLUMNS = {_PER_S: "req/s", _TTFT: "ttft_p50_ms", _CPU: "cpu_ms/req"}
#: Targets of the larger images, by whether they are repeated, and the number of clients (`_targets`).
_LARGE = {
    (True, 8): ((PLAIN, _PER_S, 1.8), (RUST, _PER_S, 4.5)),
    (False, 8): ((PLAIN, _PER_S, 1.15), (RUST, _PER_S, 1.0)),
    (False, 1): ((PLAIN, _TTFT, 1.0), (RUST, _TTFT, 1.08)),
}


@dataclass(frozen=True)
class Case:
    """Requests with one image of this size, or without one, which is what medialane costs those who send no media."""

    size: tuple[int, int] | None
    repeated: bool
    concurrency: int

    @property
    def name(self) -> str:
        if self.size is None:
            return f"text c={self.concurrency}"
        kind = "repeated" if self.repeated else "new"
        return f"{self.size[0]}x{self.size[1]} {kind} c={self.concurrency}"

    def num_requests(self, *, quick: bool) -> int:
        images = {(True, 1): 60, (True, 8): 160, (False, 1): 12, (False, 8): 24}
        full = {1: 40, 8: 160}[self.concurrency] if self.size is None else images[self.repeated, self.concurrency]
        return max(8, full // 4) if quick else full


CASES = [Case(size, repeated, c) for size in SIZES for repeated in (True, False) for c in (1, 8)]
CASES += [Case(None, False, c) for c in (1, 8)]


def run(options: Options) -> Report:
    report = Report(NAME)
    return asyncio.run(_run(options, report, rust_front_end(report)))


async def _run(options: Options, report: Report, rust: Path | None) -> Report:
    model = str(build_tiny_model(cache_folder(os.environ)))
    async with rivals(model, rust, observed=options.observed) as servers:
        for case in CASES:
            await _measure(report, case, servers=servers, model=model, options=options)
    return report


async def _measure(report: Report, case: Case, *, servers: tuple[Server, ...], model: str, options: Options) -> None:
    """Add one row per server and the bars of this case."""
    rounds: dict[str, list[Answered]] = {server.name: [] for server in servers}
    for turn in range(options.rounds or (2 if options.quick else 5)):
        sent = bodies(case, model, quick=options.quick)
        for server in servers if turn % 2 == 0 else servers[::-1]:
            rounds[server.name].append(await send_case(case, server, sent))
    rows = {name: _row(case, name, found) for name, found in rounds.items()}
    report.tables.setdefault("serve", []).extend(rows.values())
    report.bars += _bars(case, rows)


#: Seeds of new images and texts: none is used twice in a run.
_SEEDS = count(1000)


async def send_case(case: Case, server: Server, sent: list[bytes]) -> Answered:
    """Send `bodies` of this case to an idle server."""
    await settle()
    if case.repeated:
        await send(server.base_url, sent[:2], concurrency=1, pids=server.pids)
    return await send(server.base_url, sent, concurrency=case.concurrency, pids=server.pids)


def bodies(case: Case, model: str, *, quick: bool) -> list[bytes]:
    """Return the requests of one turn."""
    num = case.num_requests(quick=quick)
    if case.size is None:
        return [text_request(model, random_text(next(_SEEDS), NUM_WORDS), num_tokens=NUM_TOKENS) for _ in range(num)]
    if case.repeated:
        return [image_request(model, data_url(sample_jpeg(1, *case.size)))] * num
    return [image_request(model, data_url(sample_jpeg(next(_SEEDS), *case.size))) for _ in range(num)]


def _row(case: Case, server: str, found: list[Answered]) -> dict[str, object]:
    return {
        "case": case.name,
        "server": server,
        "req/s": median(a.requests_per_s for a in found),
        "ttft_p50_ms": 1000 * median(median(a.ttft_s) for a in found),
        "ttft_p99_ms": 1000 * median(percentile(a.ttft_s, 0.99) for a in found),
        "cpu_ms/req": median(a.cpu_ms_per_request for a in found),
    }


def _bars(case: Case, rows: Mapping[str, dict[str, object]]) -> Iterator[Bar]:
    for peer, figure, limit in _targets(case):
        if peer in rows:
            ours, theirs = (float(str(rows[name][_COLUMNS[figure]])) for name in (OURS, peer))
            name = f"{case.name}: {figure} / {SHORT_NAMES[peer]}"
            yield Bar(name, ours / theirs, limit, "at least" if figure == _PER_S else "at most")


def _targets(case: Case) -> Iterator[tuple[str, str, float]]:
    """Yield a peer, a figure, and the limit of ours divided by the peer's."""
    yield PLAIN, _CPU, 1.1
    if case.concurrency == 8 and case.size != SIZES[-1]:
        yield PLAIN, _PER_S, 1.0
    if case.repeated and case.concurrency == 8:
        yield PLAIN, _TTFT, 1.0
    if case.size is None:
        yield PLAIN, _TTFT, 1.25  # text passes one process more, the worker
    if case.size == SIZES[-1]:
        yield from _LARGE.get((case.repeated, case.concurrency), ())
