"""How a process stops: the first signal asks it to drain, another one to end at once."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec
from msgspec import field

from medialane.core.process.systemd import show_stopping
from medialane.core.setting import NonNegativeFloat, check_bounds

DRAIN_TIMEOUT_S = 10.0
_NUMBERS = (signal.SIGTERM, signal.SIGINT)


class StopConfig(msgspec.Struct, frozen=True, kw_only=True):
    """How gateways, workers, encoders and stores stop."""

    drain_timeout_s: NonNegativeFloat = field(default=DRAIN_TIMEOUT_S, name="drain-timeout")
    """how long a process that is to stop (SIGTERM, `medialane workers drain`) lets what is running end, taking no new
    work; then answers of a worker go on at another one, if any is ready, and answers of a gateway end with an error"""

    def validate(self) -> None:
        check_bounds(self)


class Stop:
    """`asked` is set when the process is to stop, `at_once` if it is not to wait for what is running."""

    def __init__(self) -> None:
        self.asked = asyncio.Event()
        self.at_once = asyncio.Event()

    def ask(self) -> None:
        """Stop; when called again, at once."""
        if self.asked.is_set():
            self.at_once.set()
        else:
            show_stopping()
        self.asked.set()


@contextmanager
def stopped_by_signals() -> Iterator[Stop]:
    """Yield what SIGTERM and SIGINT set, in the main thread's event loop."""
    stop, loop = Stop(), asyncio.get_running_loop()
    for number in _NUMBERS:
        loop.add_signal_handler(number, stop.ask)
    try:
        yield stop
    finally:
        for number in _NUMBERS:
            loop.remove_signal_handler(number)
