"""The report of a comparison: what is written as JSON and shown as a table."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import UTC, datetime

import msgspec

from medialane import __version__
from medialane.runtime.host import versions
from medialane.tools.compare.agreement import Agreement, agreement
from medialane.tools.compare.journal import Manifest, Turn
from medialane.tools.compare.summary import SideSummary, Slo, summarize
from medialane.tools.compare.traffic import Traffic

_LATE_S = 0.05
_FEW = 20


class CompareReport(msgspec.Struct, frozen=True):
    """The first of `sides` is the baseline. `agreement` compares the first round of both; `itself` is that of each side
    with its own second round, if there was one: what greedy answers of one server differ by anyway."""

    model: str
    requests: str
    format: str
    num_requests: int
    pace: str
    rounds: int
    is_whole: bool
    slo: Slo
    sides: tuple[SideSummary, ...]
    agreement: Agreement
    itself: dict[str, Agreement]
    notes: tuple[str, ...]
    vllm_flags: tuple[str, ...]
    machine: dict[str, object]
    versions: dict[str, str]
    medialane: str
    made_at: str

    @property
    def baseline(self) -> SideSummary:
        return self.sides[0]

    @property
    def other(self) -> SideSummary:
        return self.sides[1]


def make_report(
    manifest: Manifest,
    traffic: Traffic,
    turns: Sequence[Sequence[Turn]],
    *,
    slo: Slo,
    rounds: int,
    measured_on: dict[str, object],
) -> CompareReport:
    """`turns` are those of each side, in order, `measured_on` is `machine()` before the first."""
    sides = tuple(summarize(name, each, slo) for name, each in zip(manifest.sides, turns, strict=True))
    is_whole = all(turn.facts.is_whole for each in turns for turn in each) and all(
        len(each) == rounds for each in turns
    )
    first, second = (each[0].replies if each else () for each in turns)
    agreed = agreement(traffic, first, second)
    itself = {
        name: agreement(traffic, each[0].replies, each[1].replies)
        for name, each in zip(manifest.sides, turns, strict=True)
        if len(each) > 1
    }
    return CompareReport(
        model=manifest.model,
        requests=manifest.requests,
        format=traffic.format,
        num_requests=len(traffic.requests),
        pace=manifest.pace,
        rounds=rounds,
        is_whole=is_whole,
        slo=slo,
        sides=sides,
        agreement=agreed,
        itself=itself,
        notes=(*traffic.notes, *_notes(sides, agreed, is_whole=is_whole, as_sent=manifest.as_sent)),
        vllm_flags=manifest.vllm_flags,
        machine=measured_on,
        versions=versions(),
        medialane=__version__,
        made_at=datetime.now(UTC).isoformat(timespec="seconds"),
    )


def _notes(sides: Sequence[SideSummary], agreed: Agreement, *, is_whole: bool, as_sent: bool) -> Iterator[str]:
    if as_sent:
        yield "requests were sent as they are: answers that are sampled differ in any case"
    else:
        yield "requests were sent greedy (temperature 0, one choice) and streamed, to be comparable"
    if not is_whole:
        counts = ", ".join(f"{side.name} {side.num_requests}" for side in sides)
        yield f"the comparison is not complete: replies so far: {counts}"
    for side in sides:
        if side.num_parts > 1:
            yield f"{side.name}: interrupted, and continued with caches that were empty again"
        if side.late_s > _LATE_S:
            yield f"{side.name}: the client sent requests up to {side.late_s:.2f} s late (p99): it, too, was busy"
    if 0 < agreed.num_compared < _FEW:
        yield f"only {agreed.num_compared} requests were compared: percentiles mean little"
    if agreed.counts.get("parts"):
        yield (
            "answers may part without a fault where the engine computes in bfloat16 or batches differently: --rounds 2 "
            "says how often a server parts from itself, `medialane check` compares requests one at a time"
        )
