"""Shared by all benchmarks: the description of the machine, tables, bars, the JSON file.

A benchmark module, `bench_<name>.py`, has `ABOUT` and `run(options) -> Report`. Peers alternate in one run, and the
ratio is what counts: the machine's speed drifts.
"""

from __future__ import annotations

import statistics
import subprocess
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import msgspec

from medialane.runtime.host import machine as machine
from medialane.runtime.host import percentile as percentile
from medialane.runtime.host import versions

REPOSITORY = Path(__file__).resolve().parents[1]


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
