"""How often the processes of this host have ended, counted by their supervisor for the gateways, which expose it: in a
file beside those of their phases (`phase`)."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import msgspec

from medialane.core.private_file import replace_private
from medialane.core.process.phase import VARIABLE as PHASE_FILE

logger = logging.getLogger(__name__)

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
        data = Path(os.environ.get(PHASE_FILE) or os.devnull).with_name(_NAME).read_bytes()
    except FileNotFoundError:
        return {}  # none has ended, or there is no supervisor
    return msgspec.json.decode(data, type=dict[str, ProcessExits])


def hang_problems() -> Iterator[str]:
    """Yield which processes have hung a short while ago."""
    for name, exits in exits_of_host().items():
        if exits.num_hung and time.time() - exits.hung_at < _SHOWN_S:
            yield f"{name} has hung, and was restarted (see the log of serve)"
