"""`medialane check MODEL --tensors`: runs the process that makes and compares tensors (`tensor_program`); its report,
each item's fields compared; and how that is shown: a row for each field, with the items that it concerns."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

import msgspec
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from medialane.runtime.phase import PhaseFile
from medialane.runtime.private_files import write_private
from medialane.tools.check.media import ADVICE
from medialane.tools.check.servers import CheckProgress, CheckSetup, log_tail, logged_process, wait_ended
from medialane.types.errors import StartupFailed
from medialane.types.media import Modality
from medialane.types.tensor import Comparison, FieldComparison, PixelNormalisation, Relation

#: Whose tensors: plain vLLM's, medialane's, and of Hugging Face's `AutoProcessor`.
Source = Literal["plain", "ours", "hugging_face"]


class TensorTask(msgspec.Struct, frozen=True):
    """What is compared: a model with vLLM's flags; the items whose names contain one of the words `only`, or all."""

    model: str
    vllm_args: tuple[str, ...]
    only: tuple[str, ...] = ()


class ItemTensors(msgspec.Struct, frozen=True, omit_defaults=True):
    """One item. `stage` is the one in which medialane serves such items. `errors` are of the programs that refuse it;
    if plain vLLM or medialane does, there are no fields."""

    item: str
    modality: Modality
    stage: str
    fields: tuple[FieldComparison, ...] = ()
    errors: dict[Source, str] = {}

    @property
    def is_equal(self) -> bool:
        """Whether medialane gives an engine the very tensors of plain vLLM, or both refuse the item."""
        if self.errors.keys() & {"plain", "ours"}:
            return "plain" in self.errors
        return all(field.of_ours.relation == "equal" for field in self.fields)


class TensorReport(msgspec.Struct, frozen=True, kw_only=True):
    """`hugging_face` is the class of its processor; empty if the model has none, for the reason `no_hugging_face`.
    `normalisation` is what the engine does to raw pixels; None if it gets normalised ones."""

    model: str
    medialane: str
    vllm: str
    transformers: str
    vllm_flags: tuple[str, ...]
    dtype: str
    hugging_face: str
    no_hugging_face: str = ""
    normalisation: PixelNormalisation | None
    items: tuple[ItemTensors, ...]
    seconds: float

    @property
    def passed(self) -> bool:
        """Whether all items are equal, and plain vLLM has accepted one at all."""
        return all(item.is_equal for item in self.items) and any(item.fields for item in self.items)


TENSOR_LOG = "tensors.log"
_PROGRAM = "medialane.tools.check.tensor_program"


async def compare_tensors(setup: CheckSetup, progress: CheckProgress) -> TensorReport:
    """Compare the tensors of a model's items. Raises StartupFailed with the end of its log if that takes longer than
    `setup.start_s`, or fails. Cancelled, it leaves no process behind."""
    log, report = setup.logs / TENSOR_LOG, setup.logs / "tensors.json"
    task, phases = setup.logs / "tensors.task", PhaseFile(setup.logs / "tensors.phase")
    write_private(task, msgspec.json.encode(TensorTask(setup.model, tuple(setup.vllm_args), tuple(setup.only))))
    argv = [sys.executable, "-P", "-m", _PROGRAM, str(task), str(report)]
    # As plain vLLM without plugins; ours changes nothing in this process anyway.
    environ = {**setup.environ, "VLLM_PLUGINS": "", **phases.environ()}
    async with progress.starting("tensors", phases):
        await _run(argv, environ, log, setup.start_s)
    return msgspec.json.decode(report.read_bytes(), type=TensorReport)


async def _run(argv: list[str], environ: dict[str, str], log: Path, timeout_s: float) -> None:
    async with logged_process(argv, environ, log) as process:
        try:
            async with asyncio.timeout(timeout_s):
                await wait_ended(process)
        except TimeoutError as error:
            raise StartupFailed(f"tensors were not compared within {timeout_s:g} s{log_tail(log)}") from error
    if process.wait():
        raise StartupFailed(f"tensors cannot be compared{log_tail(log)}")


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
