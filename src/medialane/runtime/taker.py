"""Who takes a hold, and where: for the record that `--debug-holds` keeps."""

from __future__ import annotations

import sys
from contextvars import ContextVar
from pathlib import PurePath
from types import FrameType

#: The request, or the client of the store and its call, for which this task runs; empty unless holds are recorded.
TAKER: ContextVar[str] = ContextVar("medialane_taker", default="")

_NUM_FRAMES = 5
_PACKAGE = __name__.partition(".")[0]


def call_site(depth: int) -> str:
    """Return the innermost calls of medialane, without the `depth` innermost ones."""
    frame: FrameType | None = sys._getframe(depth + 1)  # noqa: SLF001 - CPython's; inspect's way reads source files
    calls: list[str] = []
    while frame is not None and len(calls) < _NUM_FRAMES:
        if frame.f_globals.get("__name__", "").partition(".")[0] == _PACKAGE:
            calls.append(f"{PurePath(frame.f_code.co_filename).name}:{frame.f_lineno} {frame.f_code.co_name}")
        frame = frame.f_back
    return " < ".join(calls)
