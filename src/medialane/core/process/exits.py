"""How often the processes of this host have ended, counted by their supervisor for the gateways, which expose it.

As for phases, the supervisor names a file in the environment of its processes."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

import msgspec

from medialane.core.private_file import write_private

logger = logging.getLogger(__name__)

VARIABLE: Final = "MEDIALANE_EXITS_FILE"
#: How long a process that has hung is a problem of the host's health.
_SHOWN_S = 60.0


class ProcessExits(msgspec.Struct):
    """Ends of a process that is then restarted. `num_hung` of `num` are those of one that was killed because it
    hung, at `hung_at` (seconds since the epoch) for the last time."""

    num: int = 0
    num_hung: int = 0
    hung_at: float = 0.0


class ExitCounts:
    """The supervisor's."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._exits: dict[str, ProcessExits] = {}
        self.environ = {VARIABLE: str(path)}

    def add(self, name: str, *, hung: bool) -> None:
        """Count an end. A file that cannot be written is logged: it is no reason for a process not to be restarted."""
        exits = self._exits.setdefault(name, ProcessExits())
        exits.num += 1
        if hung:
            exits.num_hung, exits.hung_at = exits.num_hung + 1, time.time()
        unfinished = self._path.with_suffix(".unfinished")
        try:
            write_private(unfinished, msgspec.json.encode(self._exits))
            unfinished.replace(self._path)
        except OSError as error:
            logger.warning("the exits of processes cannot be reported: %s", error.strerror)

    def remove(self) -> None:
        self._path.unlink(missing_ok=True)


def exits_of_host() -> Mapping[str, ProcessExits]:
    """Return the ends of this host's processes by name, as counted by the supervisor of this process."""
    try:
        with open(os.environ.get(VARIABLE) or os.devnull, "rb") as file:
            return msgspec.json.decode(file.read() or b"{}", type=dict[str, ProcessExits])
    except FileNotFoundError:
        return {}  # none has ended


def hang_problems() -> Iterator[str]:
    """Yield which processes have hung a short while ago."""
    for name, exits in exits_of_host().items():
        if exits.num_hung and time.time() - exits.hung_at < _SHOWN_S:
            yield f"{name} has hung, and was restarted (see the log of serve)"
