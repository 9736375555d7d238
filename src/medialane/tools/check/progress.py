"""The progress display of the check: a live line on a terminal, a plain line now and then elsewhere."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from rich.console import Console
from rich.markup import escape

from medialane.runtime.phase import PhaseFile

#: Without a terminal: interval at which long work is reported again.
REMIND_S = 15.0
TICK_S = 1.0


class CheckProgress:
    """Writes to `console`; `close` removes the live line."""

    def __init__(self, console: Console, *, tick_s: float = TICK_S, remind_s: float = REMIND_S) -> None:
        self._tick_s, self._remind_s = tick_s, remind_s
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
    async def starting(self, name: str, phases: PhaseFile | None = None) -> AsyncIterator[None]:
        """Show that a server starts, and its phase if it reports any, until the end of the block."""
        started = time.monotonic()
        self.note(f"{name}: starting")
        ticking = asyncio.create_task(self._tick(name, phases, started), name=f"progress of {name}")
        try:
            yield
        finally:
            ticking.cancel()
        self.note(f"{name}: ready after {time.monotonic() - started:.0f} s")

    def close(self) -> None:
        """Idempotent."""
        if self._status is not None:
            self._status.stop()

    async def _tick(self, name: str, phases: PhaseFile | None, started: float) -> None:
        while True:
            await asyncio.sleep(self._tick_s)
            phase = phases.read() if phases is not None else None
            self._show(f"{name}: {phase or 'starting'}, {time.monotonic() - started:.0f} s")

    def _show(self, text: str) -> None:
        if self._status is not None:
            self._status.update(escape(text))
        elif time.monotonic() - self._reported >= self._remind_s:
            self._reported = time.monotonic()
            self.note(text)
