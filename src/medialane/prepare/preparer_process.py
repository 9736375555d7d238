"""The gateway's handle on one preparer: its job channel, its life and its end.

The end of a preparer is known by its pidfd, which the fork server sends along: it becomes readable when the kernel has
ended the process, so neither a reused pid nor a fork server that hangs or died can deceive us about who still writes
into the arena.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import signal
import socket
from collections.abc import Callable, Sequence

import msgspec

from medialane.prepare.messages import (
    LENGTH,
    MAX_FRAME_BYTES,
    Hello,
    JobReport,
    JobRequest,
    decode_job_report,
    encode_frame,
    frame_length,
)
from medialane.prepare.process_memory import read_into

logger = logging.getLogger(__name__)

#: How long a killed process may take to end. It takes a millisecond unless it hangs inside the kernel.
KILL_TIMEOUT_S = 10.0


class PreparerLost(Exception):
    """The preparer is gone, or said what it must not: it takes no further job."""


class PreparerProcess:
    """Owns the gateway's end of the job channel and the preparer's pidfd; `stop` ends both and the process.

    One task at a time may call `send`, `receive` and `stop`. A cancelled `send` or `receive` leaves the channel in an
    unknown state: only `stop` may follow.
    """

    def __init__(
        self, preparer_id: int, jobs: socket.socket, on_exit: Callable[[], None], *, writes_arena: bool = False
    ) -> None:
        self.preparer_id = preparer_id
        self.writes_arena = writes_arena
        self.pid: int | None = None
        self.exited = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._jobs = jobs
        self._jobs.setblocking(False)
        self._pidfd: int | None = None
        self._on_exit = on_exit

    def attach(self, pid: int, pidfd: int) -> None:
        """The fork server has forked it. Takes the pidfd over."""
        self.pid = pid
        self._pidfd = pidfd
        self._loop.add_reader(pidfd, self._note_exit)
        if self._jobs.fileno() < 0:  # stopped while the fork was under way
            self._kill()

    @property
    def gone(self) -> bool:
        return self.exited.is_set()

    async def wait_ready(self) -> None:
        """Wait for its first word. Raises PreparerLost."""
        report = await self.receive()
        if not isinstance(report, Hello):
            raise PreparerLost(f"preparer {self.preparer_id} began with {type(report).__name__}")

    async def send(self, request: JobRequest) -> None:
        """Raises PreparerLost."""
        try:
            await self._loop.sock_sendall(self._jobs, encode_frame(request))
        except OSError as error:
            raise PreparerLost(f"preparer {self.preparer_id}: {error.strerror}") from error

    async def receive(self) -> JobReport:
        """Raises PreparerLost for the channel's end and for what the protocol does not allow."""
        try:
            length = frame_length(await self._read(LENGTH.size))
            return decode_job_report(await self._read(length))
        except (OSError, EOFError) as error:
            raise PreparerLost(f"preparer {self.preparer_id} has closed its channel") from error
        except (ValueError, msgspec.DecodeError) as error:
            raise PreparerLost(f"preparer {self.preparer_id} broke the protocol: {error}") from error

    def read(self, addresses: Sequence[int], into: Sequence[memoryview]) -> None:
        """Copy its memory from each of these addresses on. Blocks for a fifth of a millisecond a MB; for any thread.

        Raises PreparerLost.
        """
        if self.pid is None or len(addresses) != len(into):
            raise PreparerLost(f"preparer {self.preparer_id} has {len(addresses)} tensors, not {len(into)}")
        try:
            for address, data in zip(addresses, into, strict=True):
                read_into(self.pid, address, data)
            self._check_alive()
        except OSError as error:
            raise PreparerLost(f"preparer {self.preparer_id}: its tensors cannot be read: {error.strerror}") from error

    def _check_alive(self) -> None:
        """Raise ProcessLookupError if it has ended: then what was read by its pid may have been another's."""
        if self._pidfd is None:
            raise ProcessLookupError(errno.ESRCH, "it has ended")
        signal.pidfd_send_signal(self._pidfd, 0)

    async def stop(self, grace_s: float) -> bool:
        """Close the channel, which asks it to end; kill it after `grace_s`. Idempotent.

        True when the process is gone. False when the kernel did not end it within KILL_TIMEOUT_S, or when it was never
        known to be forked: then it may still use what it was given.
        """
        self._jobs.close()
        if self._pidfd is None:
            return self.gone
        if not await self._wait_exit(grace_s):
            self._kill()
            if not await self._wait_exit(KILL_TIMEOUT_S):
                logger.error(
                    "preparer %d (pid %d) could not be killed; its memory stays reserved", self.preparer_id, self.pid
                )
        return self.gone

    async def _wait_exit(self, timeout_s: float) -> bool:
        if timeout_s > 0 and not self.gone:
            try:
                async with asyncio.timeout(timeout_s):
                    await self.exited.wait()
            except TimeoutError:
                return False
        return self.gone

    def _kill(self) -> None:
        if self._pidfd is not None:
            with contextlib.suppress(ProcessLookupError):  # it has ended, and the loop is about to tell
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)

    def _note_exit(self) -> None:
        if self._pidfd is not None:
            self._loop.remove_reader(self._pidfd)
            os.close(self._pidfd)
            self._pidfd = None
        self.exited.set()
        self._on_exit()

    async def _read(self, nbytes: int) -> bytes:
        parts = bytearray()
        while len(parts) < nbytes:
            part = await self._loop.sock_recv(self._jobs, min(nbytes - len(parts), MAX_FRAME_BYTES))
            if not part:
                raise EOFError
            parts += part
        return bytes(parts)
