"""Shows a report on the terminal: figures by which two sides are compared, then what the answers are, then notes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, NamedTuple

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from medialane.tools.compare.agreement import Agreement
from medialane.tools.compare.report import CompareReport
from medialane.tools.compare.summary import SideSummary, Spread

_Sense = Literal["lower", "higher", "none"]
_Verdict = Literal["better", "worse", "same"]

#: Nearer to one another, two figures of one run are the same.
_SAME = 0.03
_COLOURS: dict[_Verdict, str] = {"better": "green", "worse": "red", "same": "default"}
_MAX_PARTINGS = 5
#: Shorter steps are not shown.
_LEAST_MS = 0.01


def show(report: CompareReport, console: Console) -> None:
    """Print the figures, then what the answers are, then notes."""
    table = Table("", escape(report.baseline.name), escape(report.other.name), "ratio")
    for column in table.columns[1:]:
        column.justify = "right"
    for each in _figures(report):
        if each.baseline is None and each.other is None:
            continue
        coloured = f"[{_COLOURS[each.verdict]}]{each.ratio_text}[/]" if each.ratio_text else ""
        table.add_row(each.name, each.text(each.baseline), each.text(each.other), coloured)
    console.print(table)
    for line in _lines(report):
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def _lines(report: CompareReport) -> Iterator[str]:
    """Say in words what is not in the table."""
    yield f"SLO: TTFT {_seconds(report.slo.ttft_s)}, TPOT {_seconds(report.slo.tpot_s)}"
    yield f"answers: {_agreed(report.agreement)}"
    for parting in report.agreement.partings[:_MAX_PARTINGS]:
        texts = f": {parting.baseline[:40]!r}, {parting.other[:40]!r}" if parting.verdict == "parts" else ""
        yield f"  {parting.id}: {parting.detail}{texts}"
    for name, itself in report.itself.items():
        yield f"{name} with its own second round: {_agreed(itself)}"
    for side in report.sides:
        for reason, count in side.errors.items():
            yield f"{side.name}: {count} x {reason}"
        for names in (side.ways, side.embeddings):
            if names:
                yield f"{side.name}: {', '.join(f'{count} {name}' for name, count in names.items())}"
        if steps := [f"{name} {_seconds(ms / 1000)}" for name, ms in side.steps_ms.items() if ms >= _LEAST_MS]:
            yield f"{side.name}, mean time: {', '.join(steps)}"
    for note in report.notes:
        yield f"note: {note}"


def _agreed(found: Agreement) -> str:
    """Say how many answers are equal, and what the others are."""
    if not found.num_compared:
        return "none to compare"
    counts = [f"{found.counts.get('equal', 0)} of {found.num_compared} equal"]
    if parted := found.counts.get("parts"):
        counts.append(f"{parted} part ({found.common_share * 100:.1f} % of all tokens come before that)")
    if refused := found.counts.get("refused"):
        counts.append(f"{refused} refused by both")
    if one := found.counts.get("answered_by_one"):
        counts.append(f"{one} answered by one of them")
    return ", ".join(counts)


class _Figure(NamedTuple):
    """A figure of both sides, None where it is not known; `text` is how one is written."""

    name: str
    baseline: float | None
    other: float | None
    unit: str = ""
    sense: _Sense = "lower"

    @property
    def ratio(self) -> float | None:
        """Of the other to the baseline."""
        return self.other / self.baseline if self.baseline and self.other is not None else None

    @property
    def ratio_text(self) -> str:
        """Empty if it says nothing."""
        return "" if self.ratio is None or self.sense == "none" else f"{self.ratio:.2f}x"

    @property
    def verdict(self) -> _Verdict:
        """Of the other one."""
        if self.ratio is None or self.sense == "none" or abs(self.ratio - 1) < _SAME:
            return "same"
        return "better" if (self.ratio < 1) == (self.sense == "lower") else "worse"

    def text(self, value: float | None) -> str:
        if value is None:
            return "-"
        match self.unit:
            case "s":
                return _seconds(value)
            case "%":
                return f"{value * 100:.0f} %" if value in (0, 1) else f"{value * 100:.1f} %"
            case "bytes":
                return _num_bytes(value)
        return f"{value:,.0f}" if value == int(value) or value >= 1000 else f"{value:.3g}"


def _seconds(value: float) -> str:
    return f"{value:.3g} s" if value >= 1 else f"{value * 1000:.3g} ms"


def _num_bytes(value: float) -> str:
    for unit in ("B", "kB", "MB"):
        if value < 1000:
            return f"{value:.3g} {unit}"
        value /= 1000
    return f"{value:.3g} GB"


def _figures(report: CompareReport) -> Iterator[_Figure]:
    a, b = report.baseline, report.other
    yield _Figure("requests answered", a.num_succeeded, b.num_succeeded, sense="none")
    yield _Figure("requests/s", a.requests_per_s, b.requests_per_s, sense=_if_free(report))
    yield _Figure("output tokens/s", a.output_tokens_per_s, b.output_tokens_per_s, sense=_if_free(report))
    yield _Figure("goodput, requests/s", a.goodput_per_s, b.goodput_per_s, sense="higher")
    yield _Figure("within the SLO", a.slo_share, b.slo_share, "%", "higher")
    for name, member in (("TTFT", "ttft_s"), ("TPOT", "tpot_s"), ("whole answer", "seconds")):
        for share in ("p50", "p90", "p99"):
            yield _Figure(f"{name} {share}", _of(a, member, share), _of(b, member, share), "s")
    yield _Figure("CPU time per request", a.cpu_s_per_request, b.cpu_s_per_request, "s")
    yield _Figure("bytes copied per request with media", a.copied_bytes, b.copied_bytes, "bytes")
    yield _Figure("prompt tokens found in the KV cache", a.prefix_share, b.prefix_share, "%", "higher")
    yield _Figure("items found processed (vLLM's cache)", a.mm_share, b.mm_share, "%", "none")
    yield _Figure("items found processed (arena)", _hits(a), _hits(b), "%", "none")
    yield _Figure("preemptions", a.preemptions, b.preemptions, sense="none")


def _if_free(report: CompareReport) -> _Sense:
    """At the times of the traffic, both servers do what is asked of them."""
    return "higher" if report.pace.endswith("at a time") else "none"


def _of(side: SideSummary, member: str, share: str) -> float | None:
    spread: Spread | None = getattr(side, member)
    return None if spread is None else float(getattr(spread, share))


def _hits(side: SideSummary) -> float | None:
    total = side.caches.get("hit", 0) + side.caches.get("miss", 0)
    return side.caches.get("hit", 0) / total if total else None
