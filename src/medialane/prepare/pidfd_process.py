"""A process that another one forked, handled as `asyncio.subprocess.Process` handles our own children."""

from __future__ import annotations

import asyncio
import os
import signal


class PidfdProcess:
    """Owns a pidfd. Whoever forked the process reaps it, or init does."""

    def __init__(self, pid: int, pidfd: int) -> None:
        self.pid = pid
        self._pidfd = pidfd
        self._ended = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(pidfd, self._note_end)

    async def wait(self) -> None:
        """Wait until the kernel has ended it."""
        await self._ended.wait()

    def kill(self) -> None:
        """Raises ProcessLookupError when it has ended."""
        if self._ended.is_set():
            raise ProcessLookupError
        signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)

    def _note_end(self) -> None:
        self._loop.remove_reader(self._pidfd)
        os.close(self._pidfd)
        self._ended.set()
