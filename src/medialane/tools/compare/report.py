"""The report of a comparison: figures by which two sides are compared, whether their answers are equal and where they
part, notes; as JSON and as a table.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import UTC, datetime
from itertools import takewhile
from typing import Literal, NamedTuple

import msgspec
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from medialane import __version__
from medialane.runtime.resources import percentile, versions
from medialane.tools.check.results import compare
from medialane.tools.compare.client import Reply, Served
from medialane.tools.compare.comparison import TrafficComparison, Turn
from medialane.tools.compare.traffic import Traffic


class Slo(msgspec.Struct, frozen=True):
    """What a request must keep to count for the goodput; the defaults are from vLLM's dashboards."""

    ttft_s: float = 1.0
    tpot_s: float = 0.1

    def is_kept(self, reply: Reply) -> bool:
        """A reply that is not streamed has to be there whole within the time to the first token."""
        first_s = reply.ttft_s if reply.ttft_s is not None else reply.seconds
        return reply.succeeded and first_s <= self.ttft_s and (reply.tpot_s or 0.0) <= self.tpot_s


class Spread(msgspec.Struct, frozen=True):
    mean: float
    p50: float
    p90: float
    p99: float

    @classmethod
    def of(cls, values: Iterable[float | None]) -> Spread | None:
        known = [value for value in values if value is not None]
        if not known:
            return None
        return cls(statistics.fmean(known), *(percentile(known, share) for share in (0.5, 0.9, 0.99)))


class SideSummary(msgspec.Struct, frozen=True):
    """What one server made of the traffic; None is what it does not say, or what does not apply.

    `prefix_share` is the part of the prompts' tokens that was in the KV cache, `mm_share` the part of the items that
    vLLM's cache of processed media had. `caches`, `embeddings`, `copied_bytes` (for each request with media) and
    `steps_ms` (mean durations) are medialane's. `late_s` is how much later than they should have been requests were
    sent (p99): what the client could not keep up with.
    """

    name: str
    num_requests: int
    num_succeeded: int
    errors: dict[str, int]
    wall_s: float
    requests_per_s: float
    output_tokens_per_s: float
    prompt_tokens: int
    output_tokens: int
    ttft_s: Spread | None
    tpot_s: Spread | None
    seconds: Spread | None
    goodput_per_s: float
    slo_share: float
    cpu_s_per_request: float | None
    prefix_share: float | None
    mm_share: float | None
    preemptions: int | None
    caches: dict[str, int]
    embeddings: dict[str, int]
    ways: dict[str, int]
    copied_bytes: float | None
    steps_ms: dict[str, float]
    late_s: float


def summarize(name: str, turns: Sequence[Turn], slo: Slo) -> SideSummary:
    replies = [reply for turn in turns for reply in turn.replies]
    good = [reply for reply in replies if reply.succeeded]
    wall_s = sum(turn.wall_s for turn in turns)
    cpus = [turn.cpu_s for turn in turns]
    known_cpu = [cpu for cpu in cpus if cpu is not None]
    counters: Counter[str] = Counter()
    for turn in turns:
        counters.update(turn.counters)
    served = [reply.served for reply in good if reply.served is not None]
    with_media = [each for each in served if each.caches]
    num_kept = sum(map(slo.is_kept, replies))
    return SideSummary(
        name=name,
        num_requests=len(replies),
        num_succeeded=len(good),
        errors=dict(Counter(_reason(reply) for reply in replies if not reply.succeeded).most_common(10)),
        wall_s=wall_s,
        requests_per_s=_rate(len(good), wall_s),
        output_tokens_per_s=_rate(sum(reply.num_tokens for reply in good), wall_s),
        prompt_tokens=sum(reply.prompt_tokens for reply in good),
        output_tokens=sum(reply.num_tokens for reply in good),
        ttft_s=Spread.of(reply.ttft_s for reply in good),
        tpot_s=Spread.of(reply.tpot_s for reply in good),
        seconds=Spread.of(reply.seconds for reply in good),
        goodput_per_s=_rate(num_kept, wall_s),
        slo_share=num_kept / len(replies) if replies else 0.0,
        cpu_s_per_request=sum(known_cpu) / len(replies) if replies and len(known_cpu) == len(cpus) else None,
        prefix_share=_share(counters, "prefix_hits", "prefix_queries"),
        mm_share=_share(counters, "mm_hits", "mm_queries"),
        preemptions=round(counters["preemptions"]) if "preemptions" in counters else None,
        caches=dict(Counter(cache for each in served for cache in each.caches)),
        embeddings=dict(Counter(outcome for each in served for outcome in each.embeddings)),
        ways=dict(Counter(f"{each.stage} ({each.transport})" for each in served if each.stage)),
        copied_bytes=statistics.fmean(each.copied_bytes for each in with_media) if with_media else None,
        steps_ms=_steps(served),
        late_s=percentile([reply.late_s for reply in replies], 0.99) if replies else 0.0,
    )


def _steps(served: Sequence[Served]) -> dict[str, float]:
    """Return the mean duration of each step, over all requests: one that has not had it counts 0."""
    names = dict.fromkeys(name for each in served for name in each.times_ms)
    return {name: statistics.fmean(each.times_ms.get(name, 0.0) for each in served) for name in names}


def _rate(count: float, seconds: float) -> float:
    return count / seconds if seconds else 0.0


def _share(counters: Counter[str], part: str, whole: str) -> float | None:
    return counters[part] / counters[whole] if counters.get(whole) else None


def _reason(reply: Reply) -> str:
    return f"{reply.status or 'no response'}: {reply.error[:120]}"


#: `equal`: every token, or the text of servers that return no token ids; `parts`: the beginning is equal; `refused`:
#: by both with the same status; `answered_by_one`: an error of the other, or another status.
Verdict = Literal["equal", "parts", "refused", "answered_by_one"]

_MAX_KEPT_PARTINGS = 100

_SHOWN_CHARS = 160


class Parting(msgspec.Struct, frozen=True, omit_defaults=True):
    """Two answers to one request that differ: after `position` tokens (characters without token ids) of `length`. The
    texts go on from some words before that."""

    id: str
    verdict: Verdict
    detail: str
    position: int = 0
    length: int = 0
    common: str = ""
    baseline: str = ""
    other: str = ""


class Agreement(msgspec.Struct, frozen=True):
    """Of `num_compared` requests that both servers have replied to. `common_share` is how much of the answers, in
    tokens, comes before they part."""

    num_compared: int
    counts: dict[Verdict, int]
    common_share: float
    partings: tuple[Parting, ...]


def agreement(traffic: Traffic, baseline: Iterable[Reply], other: Iterable[Reply]) -> Agreement:
    """Compare the replies to the same requests."""
    theirs = {reply.number: reply for reply in baseline}
    pairs = [(theirs[reply.number], reply) for reply in other if reply.number in theirs]
    counts: dict[Verdict, int] = {}
    partings, shares = list[Parting](), list[float]()
    for plain, ours in sorted(pairs, key=lambda pair: pair[0].number):
        found = _compared(traffic.requests[plain.number].id, plain, ours)
        counts[found.verdict] = counts.get(found.verdict, 0) + 1
        if found.verdict in ("equal", "parts"):
            shares.append(found.position / found.length if found.length else 1.0)
        if found.verdict in ("parts", "answered_by_one") and len(partings) < _MAX_KEPT_PARTINGS:
            partings.append(found)
    return Agreement(len(pairs), counts, sum(shares) / len(shares) if shares else 1.0, tuple(partings))


def _compared(name: str, plain: Reply, ours: Reply) -> Parting:
    if plain.succeeded and ours.succeeded:
        return _answers(name, plain, ours)
    if plain.status == ours.status and plain.status:
        return Parting(name, "refused", f"{plain.status}: {plain.error}")
    return Parting(name, "answered_by_one", f"{_said(plain)}; the other: {_said(ours)}")


def _answers(name: str, plain: Reply, ours: Reply) -> Parting:
    if plain.document is not None or ours.document is not None:
        difference = compare(ours.document, plain.document)
        if not difference.first and not difference.largest:
            return Parting(name, "equal", "")
        detail = difference.first or f"numbers differ by up to {difference.largest:.3g}"
        return Parting(name, "parts", detail, length=1)
    has_ids = bool(plain.token_ids and ours.token_ids)
    a, b = (plain.token_ids, ours.token_ids) if has_ids else (plain.text, ours.text)
    position, length = _common(a, b), max(len(a), len(b))
    if position == length:
        return Parting(name, "equal", "", position, length)
    unit = "tokens" if has_ids else "characters"
    at = _common(plain.text, ours.text)
    start = max(0, at - _SHOWN_CHARS // 2)
    return Parting(
        name,
        "parts",
        f"equal for {position} of {length} {unit}",
        position,
        length,
        common=plain.text[start:at],
        baseline=plain.text[at : at + _SHOWN_CHARS],
        other=ours.text[at : at + _SHOWN_CHARS],
    )


def _common(a: Sequence[object], b: Sequence[object]) -> int:
    """Return how many items both begin with."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=False)))


def _said(reply: Reply) -> str:
    if reply.succeeded:
        return "answered"
    return f"{reply.status}: {reply.error}" if reply.status else reply.error


_MAX_PARTINGS = 5
#: Shorter steps are not shown.
_LEAST_MS = 0.01


def show(report: CompareReport, console: Console) -> None:
    """Print the figures, then what the answers are, then notes."""
    table = Table("", escape(report.baseline.name), escape(report.other.name), "ratio")
    for column in table.columns[1:]:
        column.justify = "right"
    for name, baseline, other, text in _figures(report.baseline, report.other):
        if baseline is not None or other is not None:
            ratio = f"{other / baseline:.2f}x" if baseline and other is not None else ""
            table.add_row(name, *("-" if value is None else text(value) for value in (baseline, other)), ratio)
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
    text: Callable[[float], str]


def _figures(a: SideSummary, b: SideSummary) -> Iterator[_Figure]:
    yield _Figure("requests answered", a.num_succeeded, b.num_succeeded, _number)
    yield _Figure("requests/s", a.requests_per_s, b.requests_per_s, _number)
    yield _Figure("output tokens/s", a.output_tokens_per_s, b.output_tokens_per_s, _number)
    yield _Figure("goodput, requests/s", a.goodput_per_s, b.goodput_per_s, _number)
    yield _Figure("within the SLO", a.slo_share, b.slo_share, _percent)
    for name, member in (("TTFT", "ttft_s"), ("TPOT", "tpot_s"), ("whole answer", "seconds")):
        for share in ("p50", "p90", "p99"):
            yield _Figure(f"{name} {share}", _of(a, member, share), _of(b, member, share), _seconds)
    yield _Figure("CPU time per request", a.cpu_s_per_request, b.cpu_s_per_request, _seconds)
    yield _Figure("bytes copied per request with media", a.copied_bytes, b.copied_bytes, _num_bytes)
    yield _Figure("prompt tokens found in the KV cache", a.prefix_share, b.prefix_share, _percent)
    yield _Figure("items found processed (vLLM's cache)", a.mm_share, b.mm_share, _percent)
    yield _Figure("items found processed (arena)", _hits(a), _hits(b), _percent)
    yield _Figure("preemptions", a.preemptions, b.preemptions, _number)


def _number(value: float) -> str:
    return f"{value:,.0f}" if value == int(value) or value >= 1000 else f"{value:.3g}"


def _percent(value: float) -> str:
    return f"{value * 100:.0f} %" if value in (0, 1) else f"{value * 100:.1f} %"


def _seconds(value: float) -> str:
    return f"{value:.3g} s" if value >= 1 else f"{value * 1000:.3g} ms"


def _num_bytes(value: float) -> str:
    for unit in ("B", "kB", "MB"):
        if value < 1000:
            return f"{value:.3g} {unit}"
        value /= 1000
    return f"{value:.3g} GB"


def _of(side: SideSummary, member: str, share: str) -> float | None:
    spread: Spread | None = getattr(side, member)
    return None if spread is None else float(getattr(spread, share))


def _hits(side: SideSummary) -> float | None:
    total = side.caches.get("hit", 0) + side.caches.get("miss", 0)
    return side.caches.get("hit", 0) / total if total else None


_LATE_S = 0.05
_FEW = 20


class CompareReport(msgspec.Struct, frozen=True):
    """The first of `sides` is the baseline. `agreement` compares the first round of both; `itself` is the agreement of
    each side with its own second round, if there was one: what greedy answers of one server differ by anyway."""

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
    comparison: TrafficComparison,
    *,
    model: str,
    requests: str,
    vllm_flags: Sequence[str],
    slo: Slo,
    measured_on: dict[str, object],
) -> CompareReport:
    """`requests` is the name of the file, `measured_on` is `machine()` before the first turn."""
    traffic, names = comparison.traffic, [side.name for side in comparison.sides]
    by_name = dict(zip(names, comparison.turns, strict=True))
    sides = tuple(summarize(name, turns, slo) for name, turns in zip(names, comparison.turns, strict=True))
    all_turns = [turn for turns in comparison.turns for turn in turns]
    is_whole = len(all_turns) == 2 * comparison.rounds and all(turn.is_whole for turn in all_turns)
    first, second = (turns[0].replies if turns else () for turns in comparison.turns)
    agreed = agreement(traffic, first, second)
    return CompareReport(
        model=model,
        requests=requests,
        format=traffic.format,
        num_requests=len(traffic.requests),
        pace=str(comparison.pace),
        rounds=comparison.rounds,
        is_whole=is_whole,
        slo=slo,
        sides=sides,
        agreement=agreed,
        itself={
            name: agreement(traffic, turns[0].replies, turns[1].replies)
            for name, turns in by_name.items()
            if len(turns) > 1
        },
        notes=(*traffic.notes, *_notes(sides, agreed, is_whole=is_whole, as_sent=comparison.as_sent)),
        vllm_flags=tuple(vllm_flags),
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
        if side.late_s > _LATE_S:
            yield f"{side.name}: the client sent requests up to {side.late_s:.2f} s late (p99): it, too, was busy"
    if 0 < agreed.num_compared < _FEW:
        yield f"only {agreed.num_compared} requests were compared: percentiles mean little"
    if agreed.counts.get("parts"):
        yield (
            "answers may part without a fault where the engine computes in bfloat16 or batches differently: --rounds 2 "
            "says how often a server parts from itself, `medialane check` compares requests one at a time"
        )
