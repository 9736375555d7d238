"""Compare `medialane serve` of this checkout with that of another one, in turns: python benchmarks/compare_checkouts.py
FOLDER, where FOLDER is another checkout, e.g. made by `git worktree add`.

The cases are those of `medialane bench serve`. A figure is the median over the turns; a difference or ratio is the
median over pairs of neighbouring turns, because the speed of a shared machine drifts within a run. All is done twice,
with the other server started first: which one starts first makes a difference of a tenth.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import tempfile
from contextlib import AsyncExitStack
from pathlib import Path

import bench_serve
from harness import median, percentile, table
from load import Answered
from medialane.testing.tiny_model import build_tiny_model, cache_folder
from servers import Server, medialane_server


async def compare(other: Path, *, only: str, rounds: int, quick: bool) -> list[dict[str, object]]:
    """Return one row per case."""
    model = str(build_tiny_model(cache_folder(os.environ)))
    cases = [case for case in bench_serve.CASES if only in case.name]
    if not cases:
        raise SystemExit(f"no case has {only!r} in its name: {', '.join(case.name for case in bench_serve.CASES)}")
    sources = {"this": Path(__file__).parents[1] / "src", "other": other / "src"}
    pairs: dict[bench_serve.Case, list[tuple[Answered, Answered]]] = {case: [] for case in cases}
    for names in (("this", "other"), ("other", "this")):
        async with AsyncExitStack() as stack:
            log = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            started = {
                name: await stack.enter_async_context(
                    medialane_server(model, log / f"{name}.log", sources=sources[name])
                )
                for name in names
            }
            servers = started["this"], started["other"]
            for case, found in pairs.items():
                for i in range(rounds):
                    pair = await _turn(case, servers if i % 2 == 0 else servers[::-1], model=model, quick=quick)
                    found.append(pair if i % 2 == 0 else pair[::-1])
    return [_row(case, found) for case, found in pairs.items()]


def _row(case: bench_serve.Case, found: list[tuple[Answered, Answered]]) -> dict[str, object]:
    return {
        "case": case.name,
        "TTFT p50 ms": round(median(_p50(ours) for ours, _ in found), 3),
        "other's": round(median(_p50(theirs) for _, theirs in found), 3),
        "difference ms": round(median(_p50(ours) - _p50(theirs) for ours, theirs in found), 3),
        "req/s, ratio": round(median(ours.requests_per_s / theirs.requests_per_s for ours, theirs in found), 3),
        "CPU per request, ratio": round(
            median(ours.cpu_ms_per_request / theirs.cpu_ms_per_request for ours, theirs in found), 3
        ),
    }


async def _turn(
    case: bench_serve.Case, servers: tuple[Server, Server], *, model: str, quick: bool
) -> tuple[Answered, Answered]:
    sent = bench_serve.bodies(case, model, quick=quick)
    first, second = [await bench_serve.send_case(case, server, sent) for server in servers]
    return first, second


def _p50(answered: Answered) -> float:
    return 1000 * percentile(answered.ttft_s, 0.5)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="the other checkout")
    parser.add_argument("--only", default="", help="run the cases whose names contain this text")
    parser.add_argument("--rounds", type=int, default=5, help="turns of each server per case and order of starts")
    parser.add_argument("--quick", action="store_true", help="fewer requests")
    options = parser.parse_args()
    print(table(asyncio.run(compare(options.folder, only=options.only, rounds=options.rounds, quick=options.quick))))


if __name__ == "__main__":
    main()
