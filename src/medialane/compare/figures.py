"""The figures by which two sides are compared: their names, units, and which direction is better."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, NamedTuple

from medialane.compare.report import CompareReport
from medialane.compare.summary import SideSummary, Spread

Sense = Literal["lower", "higher", "none"]
Verdict = Literal["better", "worse", "same"]

#: Nearer to one another, two figures of one run are the same.
_SAME = 0.03


class Figure(NamedTuple):
    """A figure of both sides, None where it is not known; `text` is how one is written."""

    name: str
    baseline: float | None
    other: float | None
    unit: str = ""
    sense: Sense = "lower"

    @property
    def ratio(self) -> float | None:
        """Of the other to the baseline."""
        return self.other / self.baseline if self.baseline and self.other is not None else None

    @property
    def ratio_text(self) -> str:
        """Empty if it says nothing."""
        return "" if self.ratio is None or self.sense == "none" else f"{self.ratio:.2f}x"

    @property
    def verdict(self) -> Verdict:
        """Of the other one."""
        if self.ratio is None or self.sense == "none" or abs(self.ratio - 1) < _SAME:
            return "same"
        return "better" if (self.ratio < 1) == (self.sense == "lower") else "worse"

    def text(self, value: float | None) -> str:
        if value is None:
            return "-"
        match self.unit:
            case "s":
                return seconds(value)
            case "%":
                return f"{value * 100:.0f} %" if value in (0, 1) else f"{value * 100:.1f} %"
            case "bytes":
                return num_bytes(value)
        return f"{value:,.0f}" if value == int(value) or value >= 1000 else f"{value:.3g}"


def seconds(value: float) -> str:
    return f"{value:.3g} s" if value >= 1 else f"{value * 1000:.3g} ms"


def num_bytes(value: float) -> str:
    for unit in ("B", "kB", "MB"):
        if value < 1000:
            return f"{value:.3g} {unit}"
        value /= 1000
    return f"{value:.3g} GB"


def figures(report: CompareReport) -> list[Figure]:
    """Return the figures that at least one side has."""
    return [each for each in _figures(report) if each.baseline is not None or each.other is not None]


def _figures(report: CompareReport) -> Iterator[Figure]:
    a, b = report.baseline, report.other
    yield Figure("requests answered", a.num_succeeded, b.num_succeeded, sense="none")
    yield Figure("requests/s", a.requests_per_s, b.requests_per_s, sense=_if_free(report))
    yield Figure("output tokens/s", a.output_tokens_per_s, b.output_tokens_per_s, sense=_if_free(report))
    yield Figure("goodput, requests/s", a.goodput_per_s, b.goodput_per_s, sense="higher")
    yield Figure("within the SLO", a.slo_share, b.slo_share, "%", "higher")
    for name, member in (("TTFT", "ttft_s"), ("TPOT", "tpot_s"), ("whole answer", "seconds")):
        for share in ("p50", "p90", "p99"):
            yield Figure(f"{name} {share}", _of(a, member, share), _of(b, member, share), "s")
    yield Figure("CPU time per request", a.cpu_s_per_request, b.cpu_s_per_request, "s")
    yield Figure("bytes copied per request with media", a.copied_bytes, b.copied_bytes, "bytes")
    yield Figure("prompt tokens found in the KV cache", a.prefix_share, b.prefix_share, "%", "higher")
    yield Figure("items found processed (vLLM's cache)", a.mm_share, b.mm_share, "%", "none")
    yield Figure("items found processed (arena)", _hits(a), _hits(b), "%", "none")
    yield Figure("preemptions", a.preemptions, b.preemptions, sense="none")


def _if_free(report: CompareReport) -> Sense:
    """At the times of the traffic, both servers do what is asked of them."""
    return "higher" if report.pace.endswith("at a time") else "none"


def _of(side: SideSummary, member: str, share: str) -> float | None:
    spread: Spread | None = getattr(side, member)
    return None if spread is None else float(getattr(spread, share))


def _hits(side: SideSummary) -> float | None:
    total = side.caches.get("hit", 0) + side.caches.get("miss", 0)
    return side.caches.get("hit", 0) / total if total else None
