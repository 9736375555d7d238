"""Reports of this process to systemd (sd_notify(3)), for units of `Type=notify`.

Each report is one datagram to the socket that systemd names in the environment; without that variable nothing is sent.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Final

from medialane.runtime.heartbeat import beating

logger = logging.getLogger(__name__)

SOCKET: Final = "NOTIFY_SOCKET"
_WATCHDOG_PID: Final = "WATCHDOG_PID"
_WATCHDOG_USEC: Final = "WATCHDOG_USEC"
#: Read while the process runs. They are not for processes that this one starts with an environment of their own.
VARIABLES: Final = frozenset({SOCKET, _WATCHDOG_PID, _WATCHDOG_USEC})

#: How often the status is reported, if it has changed, without a watchdog.
_STATUS_S = 5.0
_USEC = 1_000_000


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
