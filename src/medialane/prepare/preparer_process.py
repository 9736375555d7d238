"""The store's handle on a preparer and its job channel.

The exit of a preparer is detected by its pidfd, which the fork server passes to the store: only then is it certain that
it does not write into the arena any more.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable, Sequence

import msgspec

from medialane.prepare.messages import (
    MAX_FRAME_BYTES,
    READ_BYTES,
    JobReport,
    JobRequest,
    PreparerReady,
    decode_job_report,
    encode_frame,
)
from medialane.prepare.sandbox import read_into
from medialane.runtime.stop import PidfdProcess, end_process
from medialane.types.errors import ProtocolViolation
from medialane.wire.connection import FrameReader

logger = logging.getLogger(__name__)


class PreparerLost(Exception):
    """The preparer has exited or violated the protocol: it gets no further job."""


class PreparerProcess:
    """Owns the store's end of the job channel and the process; `stop` ends both.

    One task at a time may call `send`, `receive` and `stop`. A cancelled `send` or `receive` leaves the channel in an
    unknown state: only `stop` may follow.
    """

    def __init__(
        self,
        preparer_id: int,
        jobs: socket.socket,
        process: PidfdProcess,
        on_exit: Callable[[], None],
        *,
        writes_arena: bool = False,
    ) -> None:
        self.preparer_id = preparer_id
        self.writes_arena = writes_arena
        self.pid = process.pid
        self._loop = asyncio.get_running_loop()
        self._jobs = jobs
        self._jobs.setblocking(False)
        self._frames = FrameReader(MAX_FRAME_BYTES)
        self._process = process
        self._process.on_exit = on_exit

    @property
    def gone(self) -> bool:
        return self._process.exited.is_set()

    async def wait_ready(self) -> None:
        """Wait for its PreparerReady. Raises PreparerLost."""
        report = await self.receive()
        if not isinstance(report, PreparerReady):
            raise PreparerLost(f"preparer {self.preparer_id} sent {type(report).__name__} instead of PreparerReady")

    async def send(self, request: JobRequest) -> None:
        """Send one message. Raises PreparerLost."""
        try:
            await self._loop.sock_sendall(self._jobs, encode_frame(request))
        except OSError as error:
            raise PreparerLost(f"preparer {self.preparer_id}: {error.strerror}") from error

    async def receive(self) -> JobReport:
        """Return the next message. Raises PreparerLost if the channel is closed or the protocol is violated."""
        try:
            while (frame := self._frames.next_frame()) is None:
                if not (data := await self._loop.sock_recv(self._jobs, READ_BYTES)):
                    raise EOFError
                self._frames.receive(data)
            return decode_job_report(frame)
        except (OSError, EOFError) as error:
            raise PreparerLost(f"preparer {self.preparer_id} has closed its channel") from error
        except (ProtocolViolation, ValueError, msgspec.DecodeError) as error:
            raise PreparerLost(f"preparer {self.preparer_id} violated the protocol: {error}") from error

    def read(self, addresses: Sequence[int], into: Sequence[memoryview]) -> None:
        """Fill each buffer from the preparer's memory at the corresponding address. Blocks for 0.2 ms per MB.

        Callable from any thread. Raises PreparerLost.
        """
        if len(addresses) != len(into):
            raise PreparerLost(f"preparer {self.preparer_id} has {len(addresses)} tensors, not {len(into)}")
        try:
            for address, data in zip(addresses, into, strict=True):
                read_into(self.pid, address, data)
            self._process.send_signal(0)  # if it has exited, its pid may have been reused by another process
        except OSError as error:
            raise PreparerLost(f"preparer {self.preparer_id}: its tensors cannot be read: {error.strerror}") from error

    async def stop(self, grace_s: float) -> bool:
        """Close the channel, which makes it exit; kill it after `grace_s`. Idempotent.

        Returns False if the kernel did not terminate the process: then it may still use its memory range and pin.
        """
        self._jobs.close()
        has_exited = await end_process(self._process, grace_s)
        if not has_exited:
            logger.error(
                "preparer %d (pid %d) could not be killed; its memory stays reserved", self.preparer_id, self.pid
            )
        return has_exited
