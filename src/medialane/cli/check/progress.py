"""The progress display of the check: a live line on a terminal, a plain line now and then elsewhere."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from rich.console import Console
from rich.markup import escape

from medialane.cli.progress import brief

#: Without a terminal: interval at which long work is reported again.
_REMIND_S = 15.0
_TICK_S = 1.0
#: The end of a log is read up to this size.
_TAIL_BYTES = 4096


class CheckProgress:
    """Writes to `console`; `close` removes the live line."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._status = console.status("starting") if console.is_terminal else None
        self._reported = time.monotonic()
        if self._status is not None:
            self._status.start()

    def note(self, text: str) -> None:
        self._console.print(escape(text), soft_wrap=True)

    def case(self, number: int, total: int, name: str) -> None:
        self._show(f"{number}/{total} {name}")

    @asynccontextmanager
    async def starting(self, name: str, log: Path) -> AsyncIterator[None]:
        """Show that a server starts, with the last line of its log, until the end of the block."""
        started = time.monotonic()
        self.note(f"{name}: starting")
        ticking = asyncio.create_task(self._tick(name, log, started), name=f"progress of {name}")
        try:
            yield
        finally:
            ticking.cancel()
        self.note(f"{name}: ready after {time.monotonic() - started:.0f} s")

    def close(self) -> None:
        """Idempotent."""
        if self._status is not None:
            self._status.stop()

    async def _tick(self, name: str, log: Path, started: float) -> None:
        while True:
            await asyncio.sleep(_TICK_S)
            self._show(f"{name}: starting, {time.monotonic() - started:.0f} s {_last_line(log)}".rstrip())

    def _show(self, text: str) -> None:
        if self._status is not None:
            self._status.update(escape(text))
        elif time.monotonic() - self._reported >= _REMIND_S:
            self._reported = time.monotonic()
            self.note(text)


def _last_line(log: Path) -> str:
    """Return the last line of a log, without its prefix."""
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - _TAIL_BYTES))
        lines = [line for line in file.read().decode(errors="replace").splitlines() if line.strip()]
    return brief(lines[-1]) if lines else ""
