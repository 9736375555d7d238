"""Shared by all benchmarks: their command line, the description of the machine, tables, bars, the JSON file.

A benchmark module, `bench_<name>.py`, has `ABOUT` and `run(options) -> Report`. Peers alternate in one run, and the
ratio is what counts: the machine's speed drifts.
"""

from __future__ import annotations

import argparse
import importlib
import statistics
import subprocess
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import msgspec

from medialane.runtime.resources import machine as machine
from medialane.runtime.resources import percentile as percentile
from medialane.runtime.resources import versions
from medialane.types.errors import StartupFailed

REPOSITORY = Path(__file__).resolve().parents[1]

_PREFIX = "bench_"
_ALL = "all"
#: Takes a quarter of an hour or more, or installs a peer: runs only by name.
_NOT_IN_ALL = frozenset({"first_answer", "render_start", "sessions", "soak", "start", "text"})


class Bar(msgspec.Struct):
    """The requirement of a figure: `value` must be at least or at most `limit`."""

    name: str
    value: float
    limit: float
    sense: Literal["at least", "at most"]
    ok: bool = False

    def __post_init__(self) -> None:
        self.ok = self.value >= self.limit if self.sense == "at least" else self.value <= self.limit


@dataclass
class Options:
    """Options of all benchmarks. `quick` runs fewer rounds: a smoke test, whose figures are not meaningful.

    `num_requests` is for benchmarks that send many: None is the benchmark's default. `other` is the folder of another
    checkout, for benchmarks that compare with one. `observed`: our servers have what watches them in production
    (`observers`), for benchmarks that have such servers.
    """

    quick: bool = False
    rounds: int | None = None
    num_requests: int | None = None
    other: Path | None = None
    observed: bool = False


@dataclass
class Report:
    """Results as rows (one dict each, with the same keys in every row of a table), and the bars."""

    name: str
    tables: dict[str, list[dict[str, object]]] = field(default_factory=dict)
    bars: list[Bar] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def add_arguments(parser: argparse.ArgumentParser, folder: Path) -> None:
    known = ", ".join([*names(folder), _ALL])
    parser.add_argument("name", metavar="NAME", help=f"benchmark: {known} (all but {', '.join(sorted(_NOT_IN_ALL))})")
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="write machine, versions, commit, results and bars to this file"
    )
    parser.add_argument(
        "--quick", action="store_true", help="fewer rounds, as a smoke test: figures are not meaningful"
    )
    parser.add_argument(
        "--other",
        type=Path,
        metavar="FOLDER",
        help="start: another checkout, to compare with (default: commit 4f951fe)",
    )
    parser.add_argument(
        "--observed",
        action="store_true",
        help="serve, stream, loop: our servers with the page open, a log of requests and a tenth of the traces",
    )
    parser.add_argument("--requests", type=int, metavar="N", help="soak: how many requests (default: 100000)")


def run(args: argparse.Namespace, folder: Path) -> int:
    """Run the benchmark, or all of `folder`; 0 if every bar is reached, 1 if one is missed. The JSON file is written
    after each, so that no result is lost. Raises StartupFailed."""
    wanted = _wanted(folder, args.name)
    if args.requests is not None and args.requests < 1:
        raise StartupFailed("--requests must be positive")
    if args.other is not None and not (args.other / "src" / "medialane").is_dir():
        raise StartupFailed(f"--other {args.other}: not a checkout of medialane")
    if args.json is not None and not args.json.parent.is_dir():
        raise StartupFailed(f"--json {args.json}: there is no folder {args.json.parent}")
    measured_on = machine()
    options = Options(quick=args.quick, num_requests=args.requests, other=args.other, observed=args.observed)
    reports: list[Report] = []
    for name in wanted:
        benchmark: Any = importlib.import_module(_PREFIX + name)
        print(f"running {name}: {benchmark.ABOUT}", flush=True)
        report: Report = benchmark.run(options)
        print(show(report), flush=True)
        reports.append(report)
        if args.json is not None:
            args.json.write_bytes(document(reports, measured_on))
    return 0 if all(bar.ok for report in reports for bar in report.bars) else 1


def names(folder: Path) -> list[str]:
    """Return the names of the benchmarks in a folder."""
    return sorted(path.stem.removeprefix(_PREFIX) for path in folder.glob(f"{_PREFIX}*.py"))


def _wanted(folder: Path, name: str) -> list[str]:
    known = names(folder)
    if name == _ALL:
        return [each for each in known if each not in _NOT_IN_ALL]
    if name not in known:
        raise StartupFailed(f"there is no benchmark {name!r}; there are {', '.join(known)} and {_ALL}")
    return [name]


def document(reports: Sequence[Report], measured_on: dict[str, object]) -> bytes:
    """Return the JSON of one or several reports. `measured_on` is `machine()` before the first of them."""
    found = {
        "machine": measured_on,
        "versions": versions(),
        "commit": commit(),
        "results": {report.name: report.tables for report in reports},
        "bars": [bar for report in reports for bar in report.bars],
        "notes": {report.name: report.notes for report in reports},
    }
    return msgspec.json.format(msgspec.json.encode(found), indent=2)


def commit() -> str:
    """Return the measured commit, marked if files differ from it."""
    head = _run("git", "rev-parse", "--short", "HEAD")
    return head + ("+changes" if _run("git", "status", "--porcelain", "--untracked-files=no") else "")


def _run(*command: str) -> str:
    """Return its output, empty if it fails."""
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)
    return "" if done.returncode else done.stdout.strip()


def median(values: Iterable[float]) -> float:
    return statistics.median(values)


def table(rows: Sequence[dict[str, object]]) -> str:
    """Format rows as aligned text."""
    if not rows:
        return "(no rows)"
    names = list(rows[0])
    cells = [names, *[[_cell(row[name]) for name in names] for row in rows]]
    widths = [max(len(row[i]) for row in cells) for i in range(len(names))]
    lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in cells]
    return "\n".join([lines[0], "  ".join("-" * w for w in widths), *lines[1:]])


def show(report: Report) -> str:
    """Format the whole report as text."""
    parts = [f"# {report.name}"]
    for name, rows in report.tables.items():
        parts += [f"\n{name}", table(rows)]
    parts += [f"\nbars of {report.name}:"]
    for bar in report.bars:
        parts.append(f"  {'ok  ' if bar.ok else 'MISS'} {bar.name}: {bar.value:.3g} ({bar.sense} {bar.limit:g})")
    return "\n".join(parts + report.notes)


def _cell(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
