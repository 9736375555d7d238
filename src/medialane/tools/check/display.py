"""Shows on the terminal what the check found: a row for each case; and where tensors differ: a row for each field, with
the items that it concerns."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from medialane.tools.check.media import ADVICE
from medialane.tools.check.results import CaseResult, CheckReport, Verdict
from medialane.tools.check.tensors import ItemTensors, TensorReport
from medialane.types.tensor import Comparison, FieldComparison, Relation

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
    return f"[{'green' if report.passed else 'red'}]{escape(text)}[/]"


def _print(console: Console, text: str) -> None:
    console.print(text, markup=False, highlight=False, soft_wrap=True)


_OF_RELATION: dict[Relation, str] = {
    "equal": "green",
    "cast": "green",
    "normalised": "green",
    "differs": "red",
    "shape": "red",
    "missing": "yellow",
}
_WORDS: dict[Relation, str] = {
    "equal": "equal",
    "cast": "equal in vLLM's dtype",
    "normalised": "equal after normalisation",
    "differs": "differs",
    "shape": "another shape",
    "missing": "missing",
}
_SHOWN_ITEMS = 4


class _Row(NamedTuple):
    """Fields of one modality that compare alike; `largest` are the largest differences of ours and Hugging Face's."""

    modality: str
    name: str
    ours: Relation
    hugging_face: Relation | None


def show_tensors(report: TensorReport, console: Console) -> None:
    """Print one row per field and outcome, what refused an item, what a trainer has to do, and the outcome."""
    table = Table("field", "items", "plain vLLM", "medialane", "Hugging Face")
    for row, members in _rows(report.items).items():
        table.add_row(*_cells(row, members, report.items))
    console.print(table)
    for text in _remarks(report):
        console.print(text, markup=False, highlight=False, soft_wrap=True)
    colour = "green" if report.passed else "red"
    console.print(f"[{colour}]{escape(_outcome_of_tensors(report))}[/]", highlight=False, soft_wrap=True)


_Member = tuple[ItemTensors, FieldComparison]


def _rows(items: Sequence[ItemTensors]) -> dict[_Row, list[_Member]]:
    rows: dict[_Row, list[_Member]] = {}
    for item in items:
        for field in item.fields:
            theirs = None if field.of_hugging_face is None else field.of_hugging_face.relation
            rows.setdefault(_Row(item.modality, field.name, field.of_ours.relation, theirs), []).append((item, field))
    return dict(sorted(rows.items(), key=lambda row: (row[0].modality, row[0].name)))


def _cells(row: _Row, members: Sequence[_Member], items: Sequence[ItemTensors]) -> tuple[str, ...]:
    first = members[0][1]
    num_all = sum(item.modality == row.modality and bool(item.fields) for item in items)
    names = [item.item.removeprefix(row.modality).strip() for item, _ in members]
    shown = ", ".join(names[:_SHOWN_ITEMS]) + (", ..." if len(names) > _SHOWN_ITEMS else "")
    which = f"all {num_all} of {row.modality}" if len(members) == num_all else f"{row.modality}: {shown}"
    theirs = [field.of_hugging_face for _, field in members if field.of_hugging_face is not None]
    return (
        escape(row.name),
        escape(which),
        escape(first.plain) or "-",
        _compared(first.ours, [field.of_ours for _, field in members]),
        _compared(first.hugging_face, theirs) if theirs else "[dim]refused[/]",
    )


def _compared(form: str, comparisons: Sequence[Comparison]) -> str:
    """Describe fields that compare alike to plain vLLM's, with the form of the first one if they are not equal."""
    relation, largest = comparisons[0].relation, max(one.largest for one in comparisons)
    text = f"[{_OF_RELATION[relation]}]{_WORDS[relation]}[/]"
    if largest:
        text += f" (up to {largest:.2g})"
    return text if relation in ("equal", "missing") or not form else f"{text}: {escape(form)}"


def _remarks(report: TensorReport) -> Iterator[str]:
    if report.no_hugging_face:
        yield f"no Hugging Face processor: {report.no_hugging_face}"
    for item in report.items:
        for source, error in item.errors.items():
            if source != "hugging_face" or report.hugging_face:
                yield f"{item.item}: {_SOURCES[source]} refuses it: {error}"
    for item in report.items:
        if item.item in ADVICE and any(_differs(field) for field in item.fields):
            yield f"{item.item}: {ADVICE[item.item]}"
    stages = {item.modality: item.stage for item in report.items if item.stage != "features"}
    for modality, stage in stages.items():
        yield f"{modality}: workers run the processor (stage {stage}), so these tensors are not in the arena"
    if (done := report.normalisation) is not None:
        yield (
            "uint8 pixels are raw: vLLM's engine computes (pixel * rescale_factor - mean) / std on its device; "
            f"rescale_factor {done.rescale_factor:.6g}, mean {_numbers(done.mean)}, std {_numbers(done.std)}. "
            "A trainer does the same, or passes --no-mm-device-do-normalize to all"
        )


_SOURCES = {"plain": "plain vLLM", "ours": "medialane", "hugging_face": "Hugging Face's processor"}


def _numbers(values: Sequence[float]) -> str:
    return "[" + ", ".join(f"{value:.4g}" for value in values) + "]"


def _outcome_of_tensors(report: TensorReport) -> str:
    equal = sum(item.is_equal for item in report.items)
    text = f"{report.model}: {equal} of {len(report.items)} items have plain vLLM's tensors in medialane"
    given = [item for item in report.items if item.fields and "hugging_face" not in item.errors]
    same = sum(all(_is_same(field) for field in item.fields) for item in given)
    if not any(item.fields for item in report.items):
        text += "; but plain vLLM accepts none of them"
    theirs = f"; {report.hugging_face} of transformers agrees for {same} of {len(given)}" if given else ""
    return f"{text}{theirs} ({report.seconds:.0f} s)"


def _differs(field: FieldComparison) -> bool:
    return field.of_hugging_face is not None and field.of_hugging_face.relation in ("differs", "shape")


def _is_same(field: FieldComparison) -> bool:
    """Whether Hugging Face's processor gives the same numbers, or does not have the field, which is vLLM's own."""
    theirs = field.of_hugging_face
    return theirs is not None and (theirs.relation in ("equal", "cast", "normalised") or not field.hugging_face)
