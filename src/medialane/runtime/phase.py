"""What a process does until it is ready, reported as data to whoever started it; and how often processes have ended.

Who starts a process names a file in its environment (`VARIABLE`). The process and its descendants, vLLM's engine
processes among them, replace the file with each phase that they enter; the latest one counts. systemd, if it has
started the process, gets them as the status of the service. Without either phases are only logged.

Exits are counted by the supervisor for the gateways, which expose them: in a file beside those of the phases.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

import msgspec

from medialane.runtime.private_file import replace_private
from medialane.runtime.systemd import show_ready, show_status

logger = logging.getLogger(__name__)

VARIABLE: Final = "MEDIALANE_PHASE_FILE"

#: The last phase of a process whose supervisor does not notice otherwise that it is ready.
READY: Final = "ready"

#: A longer file is not ours.
_MAX_BYTES = 4096


class Phase(msgspec.Struct, frozen=True):
    """`num_done` of `num_total` steps, if they can be counted. `remedy` is what an operator can do if it takes long."""

    name: str
    num_done: int = 0
    num_total: int = 0
    remedy: str = ""

    def __str__(self) -> str:
        return f"{self.name} {self.num_done}/{self.num_total}" if self.num_total else self.name


def enter_phase(name: str) -> None:
    """Log and report that this process enters a phase."""
    show_phase(Phase(name))


def show_phase(phase: Phase) -> None:
    """Log and report the phase of this process, or how far it has come in it."""
    logger.info("%s", phase)
    report_phase(phase)


def report_phase(phase: Phase) -> None:
    """Report the phase of this process, or how far it has come in it."""
    show = show_ready if phase.name == READY else show_status
    show(str(phase))
    path = os.environ.get(VARIABLE)
    if path:
        PhaseFile(Path(path)).write(phase)


class PhaseFile:
    """The latest phase of a process. One process reads it, and removes it in the end."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def environ(self) -> dict[str, str]:
        """Return the variable of the process that is to report its phases here."""
        return {VARIABLE: str(self._path)}

    def write(self, phase: Phase) -> None:
        """Replace the phase. A failure is logged: it is no reason for a process not to start."""
        try:
            replace_private(self._path, msgspec.json.encode(phase))
        except OSError as error:
            logger.info("the phase %s cannot be reported: %s", phase.name, error.strerror)

    def read(self) -> Phase | None:
        """Return the phase; None if the process has reported none."""
        try:
            with self._path.open("rb") as file:
                return msgspec.json.decode(file.read(_MAX_BYTES), type=Phase)
        except (FileNotFoundError, msgspec.DecodeError):
            return None

    def remove(self) -> None:
        """Forget the phase. Idempotent."""
        self._path.unlink(missing_ok=True)


_NAME = "exits.json"
#: How long a process that has hung is a problem of the host's health.
_SHOWN_S = 60.0


class ProcessExits(msgspec.Struct):
    """Ends of a process that is then restarted. `num_hung` of `num` are those of one that was killed because it
    hung, at `hung_at` (seconds since the epoch) for the last time."""

    num: int = 0
    num_hung: int = 0
    hung_at: float = 0.0


class ExitCounts:
    """The supervisor's. `folder` is that of the phase files."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / _NAME
        self._exits: dict[str, ProcessExits] = {}

    def add(self, name: str, *, hung: bool) -> None:
        """Count an end. A file that cannot be written is logged: it is no reason for a process not to be restarted."""
        exits = self._exits.setdefault(name, ProcessExits())
        exits.num += 1
        if hung:
            exits.num_hung, exits.hung_at = exits.num_hung + 1, time.time()
        try:
            replace_private(self._path, msgspec.json.encode(self._exits))
        except OSError as error:
            logger.warning("the exits of processes cannot be reported: %s", error.strerror)

    def remove(self) -> None:
        self._path.unlink(missing_ok=True)


def exits_of_host() -> Mapping[str, ProcessExits]:
    """Return the ends of this host's processes by name, as counted by the supervisor of this process."""
    try:
        data = Path(os.environ.get(VARIABLE) or os.devnull).with_name(_NAME).read_bytes()
    except FileNotFoundError:
        return {}  # none has ended, or there is no supervisor
    return msgspec.json.decode(data, type=dict[str, ProcessExits])


def hang_problems() -> Iterator[str]:
    """Yield which processes have hung a short while ago."""
    for name, exits in exits_of_host().items():
        if exits.num_hung and time.time() - exits.hung_at < _SHOWN_S:
            yield f"{name} has hung, and was restarted (see the log of serve)"
