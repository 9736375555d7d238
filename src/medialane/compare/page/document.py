"""Puts the page together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from html import escape
from importlib.resources import files
from typing import Final

from medialane.compare.agreement import Parting, Verdict
from medialane.compare.figures import Figure, figures, num_bytes, seconds
from medialane.compare.journal import Turn
from medialane.compare.page import charts
from medialane.compare.page.charts import Point
from medialane.compare.reply import Reply
from medialane.compare.report import CompareReport
from medialane.compare.table import agreed

#: The page must load nothing, and may run only the script below.
_POLICY: Final = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'"
_SCRIPT: Final = """\
document.querySelector("button").onclick = () => {
  const root = document.documentElement;
  const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  root.dataset.theme = dark ? "light" : "dark";
};"""
#: The order of a request.
_STEPS: Final = (
    "upload", "intake", "admission", "fetch", "decode", "process", "assemble", "encode", "route", "handover", "queue",
    "prefill",
)  # fmt: skip
_CARDS: Final = (
    "TTFT p50", "TTFT p99", "TPOT p50", "output tokens/s", "goodput, requests/s", "within the SLO",
    "CPU time per request",
)  # fmt: skip
_MOST_PARTINGS: Final = 30
_LEAST_MS: Final = 0.01

Replies = tuple[Sequence[Reply], Sequence[Reply]]


def page_of(report: CompareReport, turns: Sequence[Sequence[Turn]]) -> str:
    """Return the page. `turns` are those of each side."""
    replies, first = _succeeded(turns), _succeeded([each[:1] for each in turns])
    title = f"{report.baseline.name} and {report.other.name}: {report.model}"
    body = "\n".join([*_head(report), *_charts(report, replies, first), *_served(report), *_rest(report)])
    return (
        f'<!doctype html>\n<html lang="en">\n<meta charset="utf-8">\n<title>{escape(title)}</title>\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n'
        f"<style>\n{_style()}</style>\n<body>\n{body}\n<script>\n{_SCRIPT}\n</script>\n"
    )


def _succeeded(turns: Sequence[Sequence[Turn]]) -> Replies:
    first, second = ([reply for turn in each for reply in turn.replies if reply.succeeded] for each in turns)
    return first, second


@cache
def _style() -> str:
    return (files("medialane.compare.page") / "page.css").read_text()


def _head(report: CompareReport) -> Iterator[str]:
    a, b = escape(report.baseline.name), escape(report.other.name)
    yield (
        f'<header><div><h1><span class="a">{a}</span> and <span class="b">{b}</span> on the same traffic</h1>'
        f"<p>{escape(report.model)} · {report.num_requests:,} requests of {escape(report.requests)} "
        f"({escape(report.format)}), {escape(report.pace)} · {escape(report.made_at[:16].replace('T', ' '))} UTC</p>"
        "</div><button>Light / dark</button></header>"
    )
    if not report.is_whole:
        counts = ", ".join(f"{side.num_requests} replies of {side.name}" for side in report.sides)
        yield f'<p class="warning">Not complete: {escape(counts)} so far.</p>'
    yield f'<p class="lead">{escape(_lead(report))}</p>'
    yield f'<div class="cards">{"".join(_cards(report))}</div>'


def _lead(report: CompareReport) -> str:
    """Say the outcome in two sentences."""
    by_name = {each.name: each for each in figures(report)}
    said = []
    for name, text in (("TTFT p50", "the median time to the first token"), ("CPU time per request", "the CPU time")):
        if (figure := by_name.get(name)) is not None and figure.ratio is not None:
            said.append(f"{figure.ratio:.2f}x {text}")
    name = report.other.name
    first = f"{name} takes {' and '.join(said)} of {report.baseline.name}." if said else ""
    return f"{first} Answers: {agreed(report.agreement)}.".strip()


def _cards(report: CompareReport) -> Iterator[str]:
    by_name = {each.name: each for each in figures(report)}
    for name in _CARDS:
        if (figure := by_name.get(name)) is not None:
            yield _card(figure, report.baseline.name)
    agreement = report.agreement
    if agreement.num_compared:
        verdict = "better" if agreement.equal_share == 1 else "same"
        yield (
            f'<div class="card"><h3>answers equal<span class="chip {verdict}">'
            f"{'all' if agreement.equal_share == 1 else 'not all'}</span></h3>"
            f'<div class="value">{agreement.equal_share * 100:.4g} %</div>'
            f'<div class="than">{agreement.counts.get("equal", 0)} of {agreement.num_answered}</div></div>'
        )


def _card(figure: Figure, baseline: str) -> str:
    ratio = f'<span class="chip {figure.verdict}">{figure.ratio:.2f}x</span>' if figure.ratio is not None else ""
    return (
        f'<div class="card"><h3>{escape(figure.name)}{ratio}</h3>'
        f'<div class="value">{figure.text(figure.other)}</div>'
        f'<div class="than">{escape(baseline)}: {figure.text(figure.baseline)}</div></div>'
    )


def _charts(report: CompareReport, replies: Replies, first: Replies) -> Iterator[str]:
    """`first` are those of the first round, whose times are shown."""
    names = (report.baseline.name, report.other.name)
    legend = _legend(report)
    ttft = _values(replies, "ttft_s")
    tpot = _values(replies, "tpot_s")
    whole = _values(replies, "seconds")
    of_first = " (first round)" if report.rounds > 1 else ""
    drawn = []
    if any(ttft):
        chart = charts.cdf(ttft, seconds, "time to the first token", limit=report.slo.ttft_s, names=names)
        drawn.append(_section(f"Time to the first token{legend}", "Share of requests; dots are p50, p90, p99.", chart))
    if any(tpot):
        chart = charts.cdf(tpot, seconds, "time per output token", limit=report.slo.tpot_s, names=names)
        drawn.append(_section(f"Time per output token{legend}", "After the first, by request.", chart))
    if not any(ttft) and any(whole):
        chart = charts.cdf(whole, seconds, "time to the whole answer", names=names)
        drawn.append(_section(f"Time to the whole answer{legend}", "Share of requests.", chart))
    over_time = (_over_time(first[0]), _over_time(first[1]))
    if any(over_time):
        chart = charts.scatter(over_time, seconds, "time to the first token over time")
        drawn.append(
            _section(f"As the traffic went{legend}", f"Time to the first token of each request{of_first}.", chart)
        )
    tokens = (_tokens(first[0]), _tokens(first[1]))
    if any(point.y for each in tokens for point in each):
        chart = charts.rates(tokens, "output tokens per second")
        drawn.append(_section(f"Output tokens per second{legend}", f"By when answers were complete{of_first}.", chart))
    yield f'<div class="two">{"".join(drawn)}</div>'


def _values(replies: Replies, member: str) -> tuple[list[float], list[float]]:
    first, second = ([value for reply in each if (value := getattr(reply, member)) is not None] for each in replies)
    return first, second


def _over_time(replies: Sequence[Reply]) -> list[Point]:
    return [
        Point(reply.sent_s, reply.ttft_s, f"request {reply.number + 1}: {seconds(reply.ttft_s)}")
        for reply in replies
        if reply.ttft_s is not None
    ]


def _tokens(replies: Sequence[Reply]) -> list[Point]:
    return [Point(reply.sent_s + reply.seconds, reply.num_tokens, "") for reply in replies]


def _legend(report: CompareReport) -> str:
    a, b = escape(report.baseline.name), escape(report.other.name)
    return f'<span class="legend"><span><i class="a"></i>{a}</span><span><i class="b"></i>{b}</span></span>'


def _served(report: CompareReport) -> Iterator[str]:
    """Caches, and where the time of medialane's requests went."""
    drawn = []
    rows = [
        (f"KV cache, {side.name} (prompt tokens)", {"found": side.prefix_share, "computed": 1 - side.prefix_share})
        for side in report.sides
        if side.prefix_share is not None
    ]
    rows += [
        (f"processed media, {side.name} (vLLM's cache)", {"hit": side.mm_share, "miss": 1 - side.mm_share})
        for side in report.sides
        if side.mm_share is not None
    ]
    for side in report.sides:
        if side.caches:
            rows.append((f"processed media, {side.name} (arena, items)", _floats(side.caches)))
        if side.embeddings:
            rows.append((f"embeddings, {side.name} (items)", _floats(side.embeddings)))
    if rows:
        drawn.append(_section("Caches", "What was found, and what had to be computed.", charts.shares(rows)))
    for side in report.sides:
        steps = [(name, ms) for name in _STEPS if (ms := side.steps_ms.get(name, 0.0)) >= _LEAST_MS]
        if steps:
            chart = charts.bars([(name, ms, seconds(ms / 1000)) for name, ms in steps])
            copied = (
                "" if side.copied_bytes is None else f" {num_bytes(side.copied_bytes)} copied per request with media."
            )
            text = f"Mean of all requests, by the report of each.{copied}"
            drawn.append(_section(f"Where the time goes in {escape(side.name)}", text, chart))
    if drawn:
        yield f'<div class="two">{"".join(drawn)}</div>'


def _floats(counts: dict[str, int]) -> dict[str, float]:
    return {name: float(count) for name, count in sorted(counts.items())}


def _rest(report: CompareReport) -> Iterator[str]:
    yield _section("Answers", "", "".join(_answers(report)))
    yield _section("All figures", "", _table(report))
    yield _section("How it was measured", "", _facts(report))


def _answers(report: CompareReport) -> Iterator[str]:
    rows = [(f"{report.other.name} and {report.baseline.name}", report.agreement)]
    rows += [(f"{name} and itself, in its second round", found) for name, found in report.itself.items()]
    names: dict[Verdict, str] = {
        "equal": "equal",
        "parts": "part",
        "refused": "refused by both",
        "answered_by_one": "answered by one",
    }
    yield charts.shares(
        [
            (f"{name}: {agreed(found)}", {text: float(found.counts.get(key, 0)) for key, text in names.items()})
            for name, found in rows
            if found.num_compared
        ]
    )
    partings = report.agreement.partings
    if not partings:
        return
    shown = "".join(_parting(each, report) for each in partings[:_MOST_PARTINGS])
    more = len(partings) - _MOST_PARTINGS
    rest = f"<p>{more} more are in report.json.</p>" if more > 0 else ""
    is_open = " open" if len(partings) <= 5 else ""
    yield f"<details{is_open}><summary>Where they part: {len(partings)}</summary>{shown}{rest}</details>"


def _parting(parting: Parting, report: CompareReport) -> str:
    head = f'<div class="parting"><b>{escape(parting.id)}</b><p>{escape(parting.detail)}</p>'
    if not (parting.baseline or parting.other):
        return f"{head}</div>"
    common = f'<span class="common">{escape(parting.common)}</span>'
    rows = "".join(
        f"<dt>{escape(name)}</dt><dd>{common}<mark>{escape(text) or '(ends)'}</mark></dd>"
        for name, text in ((report.baseline.name, parting.baseline), (report.other.name, parting.other))
    )
    return f"{head}<dl>{rows}</dl></div>"


def _table(report: CompareReport) -> str:
    a, b = escape(report.baseline.name), escape(report.other.name)
    head = f'<tr><th></th><th><i class="a"></i>{a}</th><th><i class="b"></i>{b}</th><th>ratio</th></tr>'
    rows = []
    for each in figures(report):
        chip = f'<span class="chip {each.verdict}">{each.ratio_text}</span>' if each.ratio_text else ""
        values = f"<td>{each.text(each.baseline)}</td><td>{each.text(each.other)}</td>"
        rows.append(f"<tr><td>{escape(each.name)}</td>{values}<td>{chip}</td></tr>")
    return f'<div class="scroll"><table><thead>{head}</thead><tbody>{"".join(rows)}</tbody></table></div>'


def _facts(report: CompareReport) -> str:
    flags = " ".join(report.vllm_flags) or "none"
    versions = ", ".join(f"{name} {version}" for name, version in report.versions.items())
    machine = ", ".join(f"{name} {value}" for name, value in _machine(report).items())
    ways = [f"{side.name}: {count} {way}" for side in report.sides for way, count in side.ways.items()]
    rows = [
        ("traffic", f"{report.num_requests} requests of {report.requests} ({report.format}), {report.pace}"),
        ("rounds", str(report.rounds)),
        ("SLO", f"TTFT {seconds(report.slo.ttft_s)}, TPOT {seconds(report.slo.tpot_s)}"),
        ("vLLM flags of both", flags),
        ("handed over", "; ".join(ways) or "not reported"),
        ("machine", machine),
        ("versions", versions),
    ]
    rows += [
        (f"errors of {side.name}", "; ".join(f"{count} x {reason}" for reason, count in side.errors.items()))
        for side in report.sides
        if side.errors
    ]
    items = "".join(f"<dt>{escape(name)}</dt><dd>{escape(text)}</dd>" for name, text in rows)
    notes = "".join(f"<li>{escape(note)}</li>" for note in report.notes)
    return f'<dl class="facts">{items}</dl><ul class="notes">{notes}</ul>'


def _machine(report: CompareReport) -> dict[str, object]:
    facts = dict(report.machine)
    memory = facts.pop("memory_bytes", None)
    named = {"num_cores": "cores", "load_before": "load", "cpu": "CPU"}
    shown = {named.get(name, name): value for name, value in facts.items()}
    if isinstance(memory, int):
        shown["memory"] = num_bytes(memory)
    return {name: round(value, 2) if isinstance(value, float) else value for name, value in shown.items()}


def _section(title: str, text: str, content: str) -> str:
    return f"<section><h2>{title}</h2>{f'<p>{escape(text)}</p>' if text else ''}{content}</section>"
