"""The progress display of `medialane serve`: one live line per process on a terminal; elsewhere a plain line for each
phase, or with `--log-format json` a line of a log. What it shows was reported by the processes as phases
(`core.phase`), never by lines of their logs."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from rich.console import Console
from rich.live import Live
from rich.markup import escape
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from medialane.cluster.child_process import CLEAN_EXIT
from medialane.observability.logging import is_access_line, is_json, write_line
from medialane.runtime.phase import Phase, report_phase

logger = logging.getLogger(__name__)

#: After this time in one phase its remedy is shown.
_LONG_S = 20.0
_WAITING = Phase("waiting for its turn")
_STARTING = Phase("starting")


@dataclass
class _State:
    """A process: since when it has been starting, what it does now and since when; `seconds` until it was ready."""

    phase: Phase = _WAITING
    since: float = field(default_factory=time.monotonic)
    phase_since: float = field(default_factory=time.monotonic)
    seconds: float | None = None
    is_starting: bool = False

    def enter(self, phase: Phase) -> None:
        if phase.name != self.phase.name:
            self.phase_since = time.monotonic()
        self.phase = phase

    def elapsed(self) -> str:
        return f"{self.seconds if self.seconds is not None else time.monotonic() - self.since:4.0f} s"

    def is_long(self) -> bool:
        return self.is_starting and time.monotonic() - self.phase_since >= _LONG_S


class Progress:
    """Observes a supervisor. Call `tick` a few times a second while processes start, `finish` when they are ready."""

    def __init__(
        self, names: Iterable[str], *, verbose: bool, console: Console | None = None, as_log: bool = False
    ) -> None:
        self._console = console or Console(file=sys.stderr, highlight=False)
        self._verbose = verbose
        self._as_log = as_log
        self._states = {name: _State() for name in names}
        self._spinner = Spinner("line")
        self._advised: set[str] = set()
        #: Whether a process has exited unexpectedly.
        self.has_failed = False
        # No refresh thread: this process forks, and the display changes only on its event loop.
        self._live = Live(console=self._console, auto_refresh=False, transient=False)
        self._is_live = self._console.is_terminal and not as_log
        if self._is_live:
            self._live.start()

    def starting(self, name: str) -> None:
        self._states[name] = _State(_STARTING, is_starting=True)
        self._print(f"{name}: starting", unless_live=True)

    def entered(self, name: str, phase: Phase) -> None:
        state = self._states[name]
        if phase.name != state.phase.name:
            self._print(f"{name}: {phase}", unless_live=True)
            report_phase(Phase(f"{name}: {phase}"))
        state.enter(phase)

    def ready(self, name: str, seconds: float) -> None:
        self._states[name] = _State(Phase("ready"), seconds=seconds)
        self._print(f"{name}: ready after {seconds:.0f} s", unless_live=True)

    def ended(self, name: str, how: str, restart_in_s: float | None) -> None:
        self._states[name] = _State(Phase(f"exited ({how})"))
        again = "" if restart_in_s is None else f"; restarting {f'in {restart_in_s:g} s' if restart_in_s else 'now'}"
        self.has_failed |= restart_in_s is not None and how != CLEAN_EXIT
        self._print(f"{name}: exited ({how}){again}")

    def stopping(self, name: str) -> None:
        self._states[name] = _State(Phase("stopping"))
        self._print(f"{name}: stopping", unless_live=True)

    def printed(self, name: str, lines: Sequence[str]) -> None:
        for line in lines:
            if not self._verbose and not is_access_line(line):
                continue
            if not self._as_log:
                self._console.print(f"[{name}] {line}", markup=False, soft_wrap=True)
            elif is_json(line):
                write_line(line)
            elif line:  # of a library that is not written in Python
                logging.getLogger("stderr").info("%s", line, extra={"fields": {"component": name.replace(" ", "-")}})

    def tick(self) -> None:
        """Update the elapsed times, and say once what can be done about a phase that takes long."""
        for name, state in self._states.items():
            remedy = state.phase.remedy
            if remedy and remedy not in self._advised and state.is_long():
                self._advised.add(remedy)
                self._print(f"{name}: {state.phase.name} takes long: {remedy}")
        if self._is_live:
            self._live.update(self._table(), refresh=True)

    def finish(self) -> None:
        """Leave the lines as they are; later events are printed one by one. Idempotent."""
        if self._is_live:
            self.tick()
            self._live.stop()
            self._is_live = False

    def _print(self, text: str, *, unless_live: bool = False) -> None:
        if self._as_log:
            logger.info("%s", text)
        elif not (unless_live and self._is_live):
            self._console.print(text, markup=False, soft_wrap=True)

    def _table(self) -> Table:
        table = Table.grid(padding=(0, 2))
        for name, state in self._states.items():
            if state.seconds is not None:
                table.add_row(escape(name), Text("ready", "green"), state.elapsed(), "")
            else:
                mark = self._spinner if state.is_starting else Text("-", "dim")
                table.add_row(escape(name), mark, state.elapsed(), escape(str(state.phase)))
        return table
