"""How a process stops: the first signal asks it to drain, another one to end at once; and how another one is ended."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

import msgspec
from msgspec import field

from medialane.runtime.phase import show_stopping
from medialane.runtime.tasks import first_of
from medialane.types.setting import NonNegativeFloat, check_bounds

if TYPE_CHECKING:  # stores and workers have no HTTP server
    import uvicorn

DRAIN_TIMEOUT_S = 10.0
#: For the error responses of requests that have not ended when the drain's time is over.
GIVE_UP_S = 2.0


class StopConfig(msgspec.Struct, frozen=True, kw_only=True):
    """How gateways, workers, encoders and stores stop."""

    drain_timeout_s: NonNegativeFloat = field(default=DRAIN_TIMEOUT_S, name="drain-timeout")
    """how long a stopping process (SIGTERM, `medialane workers drain`) lets requests end; then a worker's continue at
    another one, a gateway's end with an error"""

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
def stopped_by_signals(*others: signal.Signals) -> Iterator[Stop]:
    """Yield what SIGTERM, SIGINT and others set, in the main thread's event loop."""
    stop, loop, numbers = Stop(), asyncio.get_running_loop(), (signal.SIGTERM, signal.SIGINT, *others)
    for number in numbers:
        loop.add_signal_handler(number, stop.ask)
    try:
        yield stop
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)


async def serve_until_stopped(
    server: uvicorn.Server, sock: socket.socket, stop: Stop, *, drain_timeout_s: float, give_up: Callable[[], None]
) -> None:
    """Serve on `sock` until `stop`; requests in flight get `drain_timeout_s` to finish, then `give_up` is called, which
    ends them with an error. The server must install no signal handlers."""
    serving = asyncio.ensure_future(server.serve(sockets=[sock]))
    await first_of(asyncio.shield(serving), stop.asked.wait())
    server.should_exit = True
    await first_of(asyncio.shield(serving), stop.at_once.wait(), asyncio.sleep(drain_timeout_s))
    if not serving.done():
        give_up()
    if stop.at_once.is_set():
        await asyncio.wait((serving,), timeout=GIVE_UP_S)
        server.force_exit = True
    await serving


#: How long a killed process may take to exit. It takes a millisecond unless it hangs inside the kernel.
KILL_TIMEOUT_S = 10.0


class PidfdProcess:
    """A child process, or one forked by another process. Owns a pidfd: it becomes readable when the kernel has
    terminated the process, so neither a reused pid nor a hanging or dead parent can be misleading. `on_exit` is called
    then, and reaps a child; others are reaped by their parent, or by init."""

    def __init__(self, pid: int, pidfd: int, on_exit: Callable[[], object] = lambda: None) -> None:
        self.pid = pid
        self.exited = asyncio.Event()
        self.on_exit = on_exit
        self._pidfd = pidfd
        asyncio.get_running_loop().add_reader(pidfd, self._note_exit)

    def kill(self) -> None:
        """Send SIGKILL, unless the process has exited."""
        with suppress(ProcessLookupError):
            self.send_signal(signal.SIGKILL)

    def send_signal(self, number: int) -> None:
        """Send a signal; 0 only checks. Raises ProcessLookupError if the process has exited."""
        if self.exited.is_set():
            raise ProcessLookupError
        signal.pidfd_send_signal(self._pidfd, number)

    def _note_exit(self) -> None:
        asyncio.get_running_loop().remove_reader(self._pidfd)
        os.close(self._pidfd)
        self.exited.set()
        self.on_exit()


async def end_process(process: PidfdProcess, grace_s: float) -> bool:
    """Wait up to `grace_s` for the process to exit, then kill it. Returns False if the kernel did not terminate it
    within KILL_TIMEOUT_S."""
    for timeout_s in (grace_s, KILL_TIMEOUT_S):
        await first_of(process.exited.wait(), asyncio.sleep(timeout_s))
        if process.exited.is_set():
            return True
        process.kill()
    return False
