"""Shows a report on the terminal."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Console
from rich.table import Table

from medialane.compare.agreement import Agreement
from medialane.compare.figures import Verdict, figures, seconds
from medialane.compare.report import CompareReport

_COLOURS: dict[Verdict, str] = {"better": "green", "worse": "red", "same": "default"}
_MAX_PARTINGS = 5


def show(report: CompareReport, console: Console) -> None:
    """Print the figures, then what the answers are, then notes."""
    table = Table("", report.baseline.name, report.other.name, "ratio")
    for column in table.columns[1:]:
        column.justify = "right"
    for each in figures(report):
        coloured = f"[{_COLOURS[each.verdict]}]{each.ratio_text}[/]" if each.ratio_text else ""
        table.add_row(each.name, each.text(each.baseline), each.text(each.other), coloured)
    console.print(table)
    for line in lines(report):
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def lines(report: CompareReport) -> Iterator[str]:
    """Say in words what is not in the table."""
    yield f"SLO: TTFT {seconds(report.slo.ttft_s)}, TPOT {seconds(report.slo.tpot_s)}"
    yield f"answers: {agreed(report.agreement)}"
    for parting in report.agreement.partings[:_MAX_PARTINGS]:
        texts = f": {parting.baseline[:40]!r}, {parting.other[:40]!r}" if parting.verdict == "parts" else ""
        yield f"  {parting.id}: {parting.detail}{texts}"
    for name, itself in report.itself.items():
        yield f"{name} with its own second round: {agreed(itself)}"
    for side in report.sides:
        for reason, count in side.errors.items():
            yield f"{side.name}: {count} x {reason}"
        for names in (side.ways, side.embeddings):
            if names:
                yield f"{side.name}: {', '.join(f'{count} {name}' for name, count in names.items())}"
    for note in report.notes:
        yield f"note: {note}"


def agreed(found: Agreement) -> str:
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
