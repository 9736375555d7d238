"""Signs of life: how a process that hangs is found by the one that supervises it.

Theory of operation. The kernel reports an exit; a process that is stopped, or whose event loop is blocked, exits never,
and keeps what others wait for. So each process sends a beat every second while it serves: to the supervisor through a
pipe that it inherits, a fork server through its control channel. One that has not sent a beat for `MAX_SILENT_S` hangs
if it has used no CPU time since (its own, not its children's: an engine may compute while nobody can reach it)
and did not wait for a core, and after `MAX_BUSY_S` in any case.

Not counted is time in which the process could not have sent a beat: before the first one and after `pause` (start-up
blocks the event loop, and has a timeout of its own), at a debugger's stop (state t), and whatever the supervisor
itself has slept through: suspension of the host, a frozen container. A process that was stopped by a signal (state T)
hangs also when no beats are expected.
"""

from __future__ import annotations

import asyncio
import os
import stat
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from fcntl import F_DUPFD_CLOEXEC, fcntl
from typing import Final

from medialane.runtime.resources import Activity, activity

#: The descriptor of the pipe, in the environment of the process that is to send beats.
VARIABLE: Final = "MEDIALANE_HEARTBEAT_FD"
BEAT_S: Final = 1.0
MAX_SILENT_S = 10.0
MAX_BUSY_S = 30.0
TICK_S = 1.0
#: Share of a core that is work: idle threads and timers use less.
MIN_CPU_SHARE: Final = 0.02

_BEAT, _PAUSE = b"+", b"-"
_MAX_UNREAD_BYTES = 1 << 16
#: A fork gets the descriptor under the supervisor's number for it, which must be free there.
_MIN_DESCRIPTOR = 200


def beat(sign: bytes = _BEAT) -> None:
    """Send a beat to the supervisor, if there is one. Never waits, and never fails: a supervisor that does not read has
    enough of them, and one that has exited needs none."""
    if (descriptor := _descriptor()) is not None:
        with suppress(BlockingIOError, BrokenPipeError):
            os.write(descriptor, sign)


def pause() -> None:
    """Announce that there will be no beats for some time."""
    beat(_PAUSE)


def forget() -> None:
    """Close the pipe of the process that this one was forked from."""
    if (descriptor := _descriptor()) is not None:
        os.close(descriptor)


@asynccontextmanager
async def beating() -> AsyncIterator[None]:
    """Prove during the block that the event loop runs."""
    beats = asyncio.create_task(_beat(), name="heartbeat")
    try:
        yield
    finally:
        beats.cancel()
        await asyncio.wait([beats])
        pause()


async def _beat() -> None:
    while True:
        beat()
        await asyncio.sleep(BEAT_S)


def _descriptor() -> int | None:
    """Return the heartbeat of the pipe; None for a process that has none, or has inherited the variable without it."""
    number = os.environ.get(VARIABLE, "")
    with suppress(OSError):
        if number.isdecimal() and stat.S_ISFIFO(os.fstat(int(number)).st_mode):
            return int(number)
    return None


class HeartbeatPipe:
    """The supervisor's end of the pipe; the process inherits `writer`, and has `environ`."""

    def __init__(self) -> None:
        self._reader, writer = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self.writer = fcntl(writer, F_DUPFD_CLOEXEC, _MIN_DESCRIPTOR)
        os.close(writer)
        self.environ = {VARIABLE: str(self.writer)}

    @contextmanager
    def passed(self) -> Iterator[None]:
        """Start the process in the block; then it alone has the end that is written. Without one, nobody has either."""
        try:
            yield
        except BaseException:  # KeyboardInterrupt included: the pipe has no other owner
            self.close()
            raise
        finally:
            os.close(self.writer)

    def read(self) -> bytes:
        """Return the signs that have arrived."""
        try:
            return os.read(self._reader, _MAX_UNREAD_BYTES)
        except BlockingIOError:
            return b""

    def close(self) -> None:
        os.close(self._reader)


class HangWatch:
    """Watches one process, by its beats and by what the kernel says of it."""

    def __init__(
        self,
        pid: int,
        pipe: HeartbeatPipe | None = None,
        *,
        tick_s: float | None = None,
        activity: Callable[[int], Activity | None] = activity,
    ) -> None:
        """With another `tick_s` the limits are as many ticks. `activity` returns what the kernel says of a process."""
        self._pid = pid
        self._tick_s = tick_s or TICK_S
        self._max_silent_s, self._max_busy_s = (each / TICK_S * self._tick_s for each in (MAX_SILENT_S, MAX_BUSY_S))
        self._activity = activity
        self._pipe = pipe
        self._is_expected = False
        self._silent_s = 0.0
        self._at_beat: Activity | None = None

    def beat(self) -> None:
        """The process has sent a beat, and will send more."""
        self._is_expected = True
        self._at_beat = None

    async def hung(self) -> str:
        """Wait until the process hangs; return how that was found."""
        while True:
            await asyncio.sleep(self._tick_s)
            if self._pipe is not None and (signs := self._pipe.read()):
                self.beat()
                self._is_expected = signs.endswith(_BEAT)
            if (reason := self._tick(self._activity(self._pid))) is not None:
                return reason

    def _tick(self, now: Activity | None) -> str | None:
        """Count a tick, however long it took: in longer ones the supervisor itself did not run."""
        if now is None:
            return None  # it has exited
        is_stopped = now.state == "T"
        if self._at_beat is None or not (self._is_expected or is_stopped):
            self._silent_s, self._at_beat = 0.0, now
        elif now.state != "t":
            self._silent_s += self._tick_s
        _, cpu_s, waited_s = self._at_beat
        could_run_s = self._silent_s - (now.waited_s - waited_s)
        is_busy = not is_stopped and now.cpu_s - cpu_s >= MIN_CPU_SHARE * could_run_s
        if self._silent_s < self._max_busy_s and (is_busy or could_run_s < self._max_silent_s):
            return None
        return f"hung: {'stopped by a signal' if is_stopped else 'no sign of life'} for {self._silent_s:.0f} s"
