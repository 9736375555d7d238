"""What the check found: two answers compared, one result for each case, and the report, which is written as JSON, and
shown as a table: a row for each case."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import msgspec
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from medialane.tools.check.case import Answer, Case, EndpointKind

#: Members that differ between servers for equal outputs: names, dates, cache hits.
VOLATILE = frozenset(
    (
        "id",
        "created",
        "created_at",
        "completed_at",
        "system_fingerprint",
        "prompt_tokens_details",
        "input_tokens_details",
        "request_id",
    )
)
_MAX_SHOWN = 60


@dataclass(frozen=True)
class Difference:
    """`largest` is the largest difference of two fractional numbers at the same place. `first` describes the first
    other difference; empty if there is none."""

    largest: float = 0.0
    first: str = ""


def compare(ours: Any, plain: Any) -> Difference:
    """Compare two JSON values except for volatile members."""
    largest, first = 0.0, ""
    for difference in _differences(ours, plain, ""):
        if isinstance(difference, str):
            first = first or difference.removeprefix(".")
        else:
            largest = max(largest, difference)
    return Difference(largest, first)


def _differences(ours: Any, plain: Any, at: str) -> Iterator[str | float]:
    if isinstance(ours, dict) and isinstance(plain, dict):
        yield from _of_objects(ours, plain, at)
    elif isinstance(ours, list) and isinstance(plain, list):
        for number, (one, other) in enumerate(zip(ours, plain, strict=False)):
            yield from _differences(one, other, f"{at}[{number}]")
        if len(ours) != len(plain):
            yield f"{at}: {len(ours)} values instead of {len(plain)}"
    elif _is_number(ours) and _is_number(plain) and (isinstance(ours, float) or isinstance(plain, float)):
        if not (math.isnan(ours) and math.isnan(plain)) and ours != plain:
            distance = abs(ours - plain)
            yield math.inf if math.isnan(distance) else float(distance)
    elif ours != plain or type(ours) is not type(plain):
        yield f"{at}: {_short(ours)} instead of {_short(plain)}"


def _of_objects(ours: dict[str, Any], plain: dict[str, Any], at: str) -> Iterator[str | float]:
    for name in [*plain, *(name for name in ours if name not in plain)]:
        if name in VOLATILE:
            continue
        place = f"{at}.{name}"
        if name not in ours:
            yield f"{place} is missing"
        elif name not in plain:
            yield f"{place} is not in plain vLLM's answer"
        else:
            yield from _differences(ours[name], plain[name], place)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _MAX_SHOWN else text[: _MAX_SHOWN - 3] + "..."


#: `close`: equal but for numbers within the tolerance. `refused`: by both, with the same status, or with any by
#: medialane where plain vLLM fails (5xx, or its engine ends). `answered`: by medialane only; plain vLLM refuses or
#: fails. `skipped`: an option without effect in plain vLLM, which medialane refuses.
Verdict = Literal["equal", "close", "refused", "answered", "skipped", "differs"]

_CLIENT_ERROR, _SERVER_ERROR = 400, 500


class CaseResult(msgspec.Struct, frozen=True, omit_defaults=True):
    """`largest_difference` is between two numbers, such as logprobs; `has_effect` is false for a variation of a case
    that plain vLLM answers like the case itself. The last fields are from medialane's report on the request;
    `embeddings` is what the worker did about the items' embeddings, each outcome once; `prefill` whether another worker
    has computed the prompt, of which the worker of the answer has read `transferred_tokens`."""

    kind: str
    case: str
    verdict: Verdict
    plain_status: int
    status: int
    largest_difference: float = 0.0
    detail: str = ""
    has_effect: bool = True
    stage: str = ""
    transport: str = ""
    cache: str = ""
    embeddings: tuple[str, ...] = ()
    prefill: str = ""
    transferred_tokens: int = 0


class CheckReport(msgspec.Struct, frozen=True, omit_defaults=True):
    """`limits` are the most items of each modality in a prompt; `notes` what is missing or proves little, and why.
    `no_embeddings` is why the worker keeps no outputs of its encoder; empty if it does. `predicted` are the modalities
    for which an item's tokens are known from the size of its media (None in reports of older versions)."""

    model: str
    medialane: str
    vllm: str
    vllm_flags: tuple[str, ...]
    kinds: tuple[str, ...]
    limits: dict[str, int]
    results: tuple[CaseResult, ...]
    notes: tuple[str, ...] = ()
    seconds: float = 0.0
    no_embeddings: str = ""
    predicted: tuple[str, ...] | None = None

    @property
    def passed(self) -> bool:
        """Whether no answer differs, plain vLLM has answered at all, and prompts are computed by other workers, if
        there are some, and none of them again."""
        is_split = not self.prefills or ("split" in self.prefills and not self.computed_twice)
        return not self.count("differs") and self.num_equal > 0 and is_split

    @property
    def prefills(self) -> dict[str, int]:
        """In how many cases another worker has computed the prompt, or why not; empty if there was none."""
        return dict(Counter(result.prefill for result in self.results if result.prefill))

    @property
    def computed_twice(self) -> list[CaseResult]:
        """Cases of which the worker of the answer has read nothing that another one has computed for it."""
        return [each for each in self.results if each.prefill == "split" and not each.transferred_tokens]

    @property
    def num_transferred(self) -> int:
        return sum(result.transferred_tokens for result in self.results)

    @property
    def num_equal(self) -> int:
        return self.count("equal") + self.count("close")

    def count(self, verdict: Verdict) -> int:
        return sum(result.verdict == verdict for result in self.results)

    @property
    def stages(self) -> dict[str, int]:
        """How many cases were served in each stage and transport."""
        return dict(Counter(f"{result.stage} ({result.transport})" for result in self.results if result.stage))

    @property
    def embeddings(self) -> dict[str, int]:
        """In how many cases each outcome of embeddings was seen. `loaded` are items that were sent without pixels."""
        return dict(Counter(outcome for result in self.results for outcome in result.embeddings))


def judge(
    kind: EndpointKind, case: Case, ours: Answer, plain: Answer, *, varied: Answer | None, tolerance: float
) -> CaseResult:
    """Compare two answers to one case. `varied` is plain vLLM's answer to the case that it varies."""
    has_effect = not _same(kind, plain, varied)
    verdict, largest, detail = _verdict(kind, ours, plain, tolerance)
    if verdict == "differs" and case.varies and not has_effect and _CLIENT_ERROR <= ours.status < _SERVER_ERROR:
        verdict, detail = "skipped", f"no effect in plain vLLM; medialane: {ours.status}: {ours.error}"
    items, prefill = ours.report.get("items", ()), ours.report.get("prefill", {})
    caches = {item["cache"] for item in items}
    return CaseResult(
        kind=kind.name,
        case=case.name,
        verdict=verdict,
        plain_status=plain.status,
        status=ours.status,
        largest_difference=largest,
        detail=detail,
        has_effect=has_effect,
        stage=ours.report.get("stage", ""),
        transport=ours.report.get("transport", ""),
        cache=caches.pop() if len(caches) == 1 else "mixed" if caches else "",
        embeddings=tuple(sorted({item["embedding"] for item in items if "embedding" in item})),
        prefill=prefill.get("outcome", ""),
        transferred_tokens=prefill.get("transferred_tokens", 0),
    )


def _verdict(kind: EndpointKind, ours: Answer, plain: Answer, tolerance: float) -> tuple[Verdict, float, str]:
    if _has_failed(plain) and ours.status >= _CLIENT_ERROR:
        return "refused", 0.0, f"{_described(plain)}; medialane: {_described(ours)}"
    if ours.succeeded and not plain.succeeded:
        return "answered", 0.0, f"plain vLLM: {_described(plain)}"
    if ours.status != plain.status:
        return "differs", 0.0, f"{_described(ours)} instead of {_described(plain)}"
    if not plain.succeeded:
        other = "" if ours.error == plain.error else f"; medialane: {ours.error}"
        return "refused", 0.0, f"{plain.status}: {plain.error}{other}"
    difference = compare(kind.compared(ours), kind.compared(plain))
    if difference.first:
        return "differs", difference.largest, difference.first
    if difference.largest > tolerance:
        return "differs", difference.largest, f"numbers differ by up to {difference.largest:.3g}"
    return ("close" if difference.largest else "equal"), difference.largest, ""


def _same(kind: EndpointKind, plain: Answer, varied: Answer | None) -> bool:
    if varied is None or not (plain.succeeded and varied.succeeded):
        return False
    difference = compare(kind.compared(plain), kind.compared(varied))
    return difference.first == "" and difference.largest == 0


def _has_failed(plain: Answer) -> bool:
    """Whether it ended, or has an error of its own."""
    return not plain.status or plain.status >= _SERVER_ERROR


def _described(answer: Answer) -> str:
    if not answer.status:
        return str(answer.document)
    return f"{answer.status}: {answer.error}" if answer.error else str(answer.status)


#: A warning of medialane in a line of the log of `medialane serve`, after the name of the process.
_WARNING = re.compile(r"\[[^\]]+\] [\d-]+ [\d:]+ (?:WARNING|ERROR|CRITICAL) medialane\.\S+ (.*)")
_MAX_WARNINGS = 10


def logged_notes(log: str) -> Iterator[str]:
    """Name what medialane has warned of, such as a stage that it does not use, and why. For people: no verdict depends
    on it."""
    messages = dict.fromkeys(match[1] for line in log.splitlines() if (match := _WARNING.match(line)))
    for message in list(messages)[:_MAX_WARNINGS]:
        yield f"medialane logged: {message}"


def weak_notes(results: Iterable[CaseResult]) -> Iterator[str]:
    """Name what the answers do not depend on: there, equal answers prove little."""
    for result in results:
        if "another " in result.case and not result.has_effect:
            yield f'{result.kind}: plain vLLM answers "{result.case}" as it answers the first one'


def encode(report: msgspec.Struct) -> bytes:
    """Return a report of any kind as JSON."""
    return msgspec.json.format(msgspec.json.encode(report), indent=1) + b"\n"


_OF_VERDICT: dict[Verdict, str] = {
    "equal": "green",
    "close": "green",
    "refused": "green",
    "answered": "green",
    "skipped": "dim",
    "differs": "red",
}


def show(report: CheckReport, console: Console) -> None:
    """Print one row per case, then what differs, the stages that were used, notes, and the outcome."""
    table = Table("endpoint", "case", "answer", "stage", "cache")
    for result in report.results:
        table.add_row(*_row(result))
    console.print(table)
    for result in report.results:
        if result.verdict in ("differs", "answered", "skipped"):
            _print(console, f"{result.verdict}: {result.kind}, {result.case}: {result.detail}")
    for name, number in report.stages.items():
        _print(console, f"in stage {name}: {number} of {len(report.results)} cases")
    for text in _embeddings(report):
        _print(console, text)
    for outcome, number in sorted(report.prefills.items()):
        tokens = f", {report.num_transferred} tokens transferred" if outcome == "split" else ""
        _print(console, f"prefill {outcome}: in {number} of {len(report.results)} cases{tokens}")
    for result in report.computed_twice:
        _print(console, f"computed twice: {result.kind}, {result.case}")
    if report.predicted:
        _print(console, f"prompts are known from the size of media: {', '.join(report.predicted)}")
    for note in report.notes:
        _print(console, f"note: {note}")
    console.print(_outcome_of_check(report), highlight=False, soft_wrap=True)


def _row(result: CaseResult) -> tuple[str, ...]:
    colour = _OF_VERDICT[result.verdict]
    stage = f"{result.stage} ({result.transport})" if result.stage else ""
    return (result.kind, escape(result.case), f"[{colour}]{escape(_answer(result))}[/]", stage, result.cache)


def _answer(result: CaseResult) -> str:
    """Describe the verdict in a few words."""
    if result.verdict == "refused":
        return f"refused ({result.status})"
    if result.verdict == "close":
        return f"close ({result.largest_difference:.2g})"
    return result.verdict if result.has_effect else f"{result.verdict}, no effect"


def _embeddings(report: CheckReport) -> Iterator[str]:
    """Say what became of the encoder's outputs."""
    if report.no_embeddings:
        yield f"embeddings are not kept: {report.no_embeddings}"
    for outcome, number in sorted(report.embeddings.items()):
        yield f"embeddings {outcome}: in {number} of {len(report.results)} cases"


def _outcome_of_check(report: CheckReport) -> str:
    counts = [f"{report.count(verdict)} {verdict}" for verdict in _OF_VERDICT if report.count(verdict)]
    text = f"{report.model}: {len(report.results)} cases in {report.seconds:.0f} s: {', '.join(counts)}"
    if not report.num_equal:
        text += "; plain vLLM has answered none of them"
    if report.prefills and "split" not in report.prefills:
        text += "; no prompt was computed by the worker for that"
    if report.computed_twice:
        text += f"; {len(report.computed_twice)} prompts were computed by both workers"
    return f"[{'green' if report.passed else 'red'}]{escape(text)}[/]"


def _print(console: Console, text: str) -> None:
    console.print(text, markup=False, highlight=False, soft_wrap=True)
