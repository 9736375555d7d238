"""The report as a page: one file with its style and its drawings, which loads nothing."""

from __future__ import annotations

from collections.abc import Sequence

from medialane.compare.journal import Turn
from medialane.compare.report import CompareReport


def page_of(report: CompareReport, turns: Sequence[Sequence[Turn]]) -> str:
    return f"<!doctype html><title>{report.model}</title>{len(turns)}"
