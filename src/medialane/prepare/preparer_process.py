"""The gateway's handle on one preparer: its job channel and its process.

The exit of a preparer is detected by its pidfd, which the fork server passes to the gateway. It becomes readable when
the kernel has terminated the process, so neither a reused pid nor a hanging or dead fork server can mislead the gateway
about which processes may still write into the arena.
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

#: How long a killed process may take to exit. It takes a millisecond unless it hangs inside the kernel.
KILL_TIMEOUT_S = 10.0


class PreparerLost(Exception):
    """The preparer has exited or violated the protocol: it gets no further job."""


class PreparerProcess:
    """Owns the gateway's end of the job channel and the preparer's pidfd; `stop` closes both and ends the process.

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
        """Set pid and pidfd once the fork server has forked the preparer. Takes ownership of the pidfd."""
        self.pid = pid
        self._pidfd = pidfd
        self._loop.add_reader(pidfd, self._note_exit)
        if self._jobs.fileno() < 0:  # stopped while the fork was in progress
            self._kill()

    @property
    def gone(self) -> bool:
        return self.exited.is_set()

    async def wait_ready(self) -> None:
        """Wait for its Hello. Raises PreparerLost."""
        report = await self.receive()
        if not isinstance(report, Hello):
            raise PreparerLost(f"preparer {self.preparer_id} sent {type(report).__name__} instead of Hello")

    async def send(self, request: JobRequest) -> None:
        """Send one message. Raises PreparerLost."""
        try:
            await self._loop.sock_sendall(self._jobs, encode_frame(request))
        except OSError as error:
            raise PreparerLost(f"preparer {self.preparer_id}: {error.strerror}") from error

    async def receive(self) -> JobReport:
        """Return the next message. Raises PreparerLost if the channel is closed or the protocol is violated."""
        try:
            length = frame_length(await self._read(LENGTH.size))
            return decode_job_report(await self._read(length))
        except (OSError, EOFError) as error:
            raise PreparerLost(f"preparer {self.preparer_id} has closed its channel") from error
        except (ValueError, msgspec.DecodeError) as error:
            raise PreparerLost(f"preparer {self.preparer_id} violated the protocol: {error}") from error

    def read(self, addresses: Sequence[int], into: Sequence[memoryview]) -> None:
        """Fill each buffer from the preparer's memory at the corresponding address. Blocks for 0.2 ms per MB.

        Callable from any thread. Raises PreparerLost.
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
        """Raise ProcessLookupError if it has exited: then its pid may have been reused by another process."""
        if self._pidfd is None:
            raise ProcessLookupError(errno.ESRCH, "it has exited")
        signal.pidfd_send_signal(self._pidfd, 0)

    async def stop(self, grace_s: float) -> bool:
        """Close the channel, which makes it exit; kill it after `grace_s`. Idempotent.

        Returns True if the process has exited. False if the kernel did not terminate it within KILL_TIMEOUT_S, or its
        fork was never confirmed: then it may still use its memory range and pin.
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
            with contextlib.suppress(ProcessLookupError):  # it has exited, and the loop has not noticed yet
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
