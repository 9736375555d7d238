"""What a process reports to whoever started it: what it does until it is ready, that its event loop runs, and how often
processes of its host have ended.

Who starts a process names a file in its environment (`VARIABLE`). The process and its descendants, vLLM's engine
processes among them, replace the file with each phase that they enter; the latest one counts. Without it they are only
logged. Exits are counted by the supervisor for the gateways, which expose them: in a file beside the phases' files.

systemd gets the same of a unit of `Type=notify` (sd_notify(3)), each report as a datagram to the socket that it names
in the environment; without that variable nothing is sent.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Final

import msgspec

from medialane.runtime.heartbeat import beating
from medialane.runtime.private_files import replace_private

logger = logging.getLogger(__name__)

VARIABLE: Final = "MEDIALANE_PHASE_FILE"

#: The last phase of a process whose supervisor does not notice otherwise that it is ready.
READY: Final = "ready"

#: A longer file is not ours.
_MAX_BYTES = 4096

SOCKET: Final = "NOTIFY_SOCKET"
_WATCHDOG_PID: Final = "WATCHDOG_PID"
_WATCHDOG_USEC: Final = "WATCHDOG_USEC"
#: Read while the process runs. They are not for processes that this one starts with an environment of their own.
SYSTEMD_VARIABLES: Final = frozenset({SOCKET, _WATCHDOG_PID, _WATCHDOG_USEC})

#: How often the status is reported, if it has changed, without a watchdog.
_STATUS_S = 5.0
_USEC = 1_000_000


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
    """Ends of a process that is then restarted. `num_hung` of `num` ended because the process was killed when it
    hung, at `hung_at` (seconds since the epoch) for the last time."""

    num: int = 0
    num_hung: int = 0
    hung_at: float = 0.0


class ExitCounts:
    """The supervisor's. `folder` has the phase files."""

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


def show_ready(status: str) -> None:
    """Report that the start, or a reload, is complete."""
    _send("READY=1", f"STATUS={_line(status)}")


def show_status(status: str) -> None:
    """Report what this process does, in one line for `systemctl status`."""
    _send(f"STATUS={_line(status)}")


def show_stopping() -> None:
    """Report that this process has begun to stop."""
    _send("STOPPING=1", "STATUS=stopping")


@contextmanager
def shown_reload() -> Iterator[None]:
    """Report that this process reads its settings again, and at the end that it has, with success or without."""
    _send("RELOADING=1", f"MONOTONIC_USEC={time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000}")
    try:
        yield
    finally:
        _send("READY=1")


@asynccontextmanager
async def watched(status: Callable[[], str] | None = None) -> AsyncIterator[None]:
    """Prove during the block that the event loop runs, to the supervisor, and to systemd if it wants to know
    (WatchdogSec=), and report changes of the status to systemd."""
    async with beating():
        if SOCKET not in os.environ:
            yield
            return
        reports = asyncio.create_task(_beat(status), name="reports to systemd")
        try:
            yield
        finally:
            reports.cancel()
            await asyncio.wait([reports])


async def _beat(status: Callable[[], str] | None) -> None:
    shown, interval_s = "", _watchdog_s()
    while True:
        lines = [] if interval_s is None else ["WATCHDOG=1"]
        if status is not None and (text := status()) != shown:
            shown = text
            lines.append(f"STATUS={_line(text)}")
        if lines:
            _send(*lines)
        await asyncio.sleep(_STATUS_S if interval_s is None else min(_STATUS_S, interval_s / 2))


def _watchdog_s() -> float | None:
    """Return the time within which systemd expects the next sign of life; None if it expects none."""
    usec, pid = os.environ.get(_WATCHDOG_USEC, ""), os.environ.get(_WATCHDOG_PID, "")
    if not usec.isdecimal() or not int(usec) or (pid and pid != str(os.getpid())):
        return None
    return int(usec) / _USEC


def _line(text: str) -> str:
    return " ".join(text.split())


def _send(*lines: str) -> None:
    """Never waits, and never fails: whoever does not read loses reports."""
    address = os.environ.get(SOCKET, "")
    if not address.startswith(("/", "@")):
        return
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sock:
            sock.setblocking(False)
            sock.connect(f"\0{address[1:]}" if address.startswith("@") else address)
            sock.send("\n".join(lines).encode())
    except OSError as error:
        logger.debug("systemd cannot be told %s: %s", lines[0], error.strerror)
