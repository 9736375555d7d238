"""A process forked by another process, with the interface of `asyncio.subprocess.Process`."""

from __future__ import annotations

import asyncio
import os
import signal


class PidfdProcess:
    """Owns a pidfd. The process is reaped by its parent, or by init."""

    def __init__(self, pid: int, pidfd: int) -> None:
        self.pid = pid
        self._pidfd = pidfd
        self._exited = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(pidfd, self._note_exit)

    async def wait(self) -> None:
        """Wait until the process has exited."""
        await self._exited.wait()

    def kill(self) -> None:
        """Send SIGKILL. Raises ProcessLookupError if the process has exited."""
        if self._exited.is_set():
            raise ProcessLookupError
        signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)

    def _note_exit(self) -> None:
        self._loop.remove_reader(self._pidfd)
        os.close(self._pidfd)
        self._exited.set()
