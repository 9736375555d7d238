"""Shows a report on the terminal."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from medialane.tools.check.results import CaseResult, CheckReport, Verdict

_COLOURS: dict[Verdict, str] = {
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
    if report.predicted:
        _print(console, f"prompts are known from the size of media: {', '.join(report.predicted)}")
    for note in report.notes:
        _print(console, f"note: {note}")
    console.print(_outcome(report), highlight=False, soft_wrap=True)


def _row(result: CaseResult) -> tuple[str, ...]:
    colour = _COLOURS[result.verdict]
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


def _outcome(report: CheckReport) -> str:
    counts = [f"{report.count(verdict)} {verdict}" for verdict in _COLOURS if report.count(verdict)]
    text = f"{report.model}: {len(report.results)} cases in {report.seconds:.0f} s: {', '.join(counts)}"
    if not report.num_equal:
        text += "; plain vLLM has answered none of them"
    return f"[{'green' if report.passed else 'red'}]{escape(text)}[/]"


def _print(console: Console, text: str) -> None:
    console.print(text, markup=False, highlight=False, soft_wrap=True)
