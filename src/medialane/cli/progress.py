"""The progress display of `medialane serve`: one live line per process on a terminal, plain lines elsewhere."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.live import Live
from rich.markup import escape
from rich.table import Table

#: Without a terminal: interval at which a process that is still starting is reported again.
_REMIND_S = 15.0
_MAX_STATUS = 90
#: vLLM's `(EngineCore pid=7) INFO 11-21 03:54:41 [core.py:133] ` and our `2026-11-21 03:54:54 INFO medialane.worker: `.
_LOG_PREFIX = re.compile(
    r"""(\([\w ]+\ pid=\d+\)\s*)?                                     # process
        [\d:, -]* (DEBUG|INFO|WARNING|ERROR|CRITICAL):?\s+            # time, level
        (\d\d-\d\d\ [\d:]+\ )?                                       # vLLM's time
        (\[[\w./]+:\d+\] | [\w.]+(\ \[[^]]*\])?:)?\s*               # place, request
    """,
    re.VERBOSE,
)


@dataclass
class _State:
    since: float
    phase: str = "waiting for its turn"
    seconds: float | None = None
    last_line: str = ""

    def elapsed(self) -> str:
        return f"{self.seconds if self.seconds is not None else time.monotonic() - self.since:4.0f} s"

    def status(self) -> str:
        if self.phase != "starting" or not self.last_line:
            return self.phase
        return brief(self.last_line)


def brief(line: str) -> str:
    """Return the message of a log line, without its prefix, shortened to fit."""
    text = " ".join(_after_prefix(line).split())
    return text if len(text) <= _MAX_STATUS else text[: _MAX_STATUS - 3] + "..."


def _after_prefix(line: str) -> str:
    found = _LOG_PREFIX.match(line)
    return line if found is None else line[found.end() :]


class Progress:
    """Observes a supervisor. Call `tick` a few times a second while processes start, `finish` when they are ready."""

    def __init__(self, parts: Iterable[str], *, verbose: bool, console: Console | None = None) -> None:
        self._console = console or Console(file=sys.stderr, highlight=False)
        self._verbose = verbose
        now = time.monotonic()
        self._states = {part: _State(now) for part in parts}
        self._reminded = now
        # No refresh thread: this process forks, and the display changes only on its event loop.
        self._live = Live(console=self._console, auto_refresh=False, transient=False)
        self._is_live = self._console.is_terminal
        if self._is_live:
            self._live.start()

    def starting(self, part: str) -> None:
        self._states[part] = _State(time.monotonic(), "starting")
        self._print(f"{part}: starting", unless_live=True)

    def ready(self, part: str, seconds: float) -> None:
        state = self._states[part]
        state.phase, state.seconds = "ready", seconds
        self._print(f"{part}: ready after {seconds:.0f} s", unless_live=True)

    def ended(self, part: str, how: str, restart_in_s: float | None) -> None:
        self._states[part].phase = f"exited ({how})"
        again = "" if restart_in_s is None else f"; restarting {f'in {restart_in_s:g} s' if restart_in_s else 'now'}"
        self._print(f"{part}: exited ({how}){again}")

    def stopping(self, part: str) -> None:
        self._states[part].phase = "stopping"
        self._print(f"{part}: stopping", unless_live=True)

    def printed(self, part: str, lines: Sequence[str]) -> None:
        shown = [line for line in lines if line.strip()]
        if shown:
            self._states[part].last_line = shown[-1]
        if self._verbose:
            for line in lines:
                self._console.print(f"[{part}] {line}", markup=False, soft_wrap=True)

    def tick(self) -> None:
        """Update the elapsed times."""
        if self._is_live:
            self._live.update(self._table(), refresh=True)
        elif time.monotonic() - self._reminded >= _REMIND_S:
            self._reminded = time.monotonic()
            for part, state in self._states.items():
                if state.phase == "starting":
                    self._print(f"{part}: {state.elapsed().strip()}, {state.status()}")

    def finish(self) -> None:
        """Leave the lines as they are; later events are printed one by one. Idempotent."""
        if self._is_live:
            self.tick()
            self._live.stop()
            self._is_live = False

    def _print(self, text: str, *, unless_live: bool = False) -> None:
        if not (unless_live and self._is_live):
            self._console.print(text, markup=False, soft_wrap=True)

    def _table(self) -> Table:
        table = Table.grid(padding=(0, 2))
        for part, state in self._states.items():
            mark = {"ready": "[green]ready[/]", "starting": "[yellow]...[/]"}.get(state.phase, "[dim]-[/]")
            table.add_row(escape(part), mark, state.elapsed(), escape("" if state.phase == "ready" else state.status()))
        return table
