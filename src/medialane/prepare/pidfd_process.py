"""Handles on processes, and the end of a process that may not end by itself."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from contextlib import suppress

#: How long a killed process may take to exit. It takes a millisecond unless it hangs inside the kernel.
KILL_TIMEOUT_S = 10.0


class PidfdProcess:
    """A child process, or one forked by another process. Owns a pidfd: it becomes readable when the kernel has
    terminated the process, so neither a reused pid nor a hanging or dead parent can be misleading. `on_exit` is called
    then; that of a child reaps it, others are reaped by their parent, or by init."""

    def __init__(self, pid: int, pidfd: int, on_exit: Callable[[], object] = lambda: None) -> None:
        self.pid = pid
        self.exited = asyncio.Event()
        self.on_exit = on_exit
        self._pidfd = pidfd
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(pidfd, self._note_exit)

    async def wait(self) -> None:
        """Wait until the process has exited."""
        await self.exited.wait()

    def kill(self) -> None:
        """Send SIGKILL. Raises ProcessLookupError if the process has exited."""
        self.send_signal(signal.SIGKILL)

    def send_signal(self, number: int) -> None:
        """Send a signal; 0 only checks. Raises ProcessLookupError if the process has exited."""
        if self.exited.is_set():
            raise ProcessLookupError
        signal.pidfd_send_signal(self._pidfd, number)

    def _note_exit(self) -> None:
        self._loop.remove_reader(self._pidfd)
        os.close(self._pidfd)
        self.exited.set()
        self.on_exit()


async def end_process(process: PidfdProcess, grace_s: float) -> bool:
    """Wait up to `grace_s` for the process to exit, then kill it. Returns False if the kernel did not terminate it
    within KILL_TIMEOUT_S."""
    for timeout_s in (grace_s, KILL_TIMEOUT_S):
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await process.wait()
                return True
        with suppress(ProcessLookupError):  # it has exited, and the loop has not noticed yet
            process.kill()
    return False
