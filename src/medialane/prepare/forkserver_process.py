"""The gateway's handle on a fork server: start it, have it fork, know when it is gone, end it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
import time
from asyncio.subprocess import DEVNULL, Process
from collections.abc import Callable, Mapping
from typing import Any, Protocol, Self

import msgspec

from medialane.core.errors import StartupFailed
from medialane.prepare.messages import (
    MAX_CONTROL_BYTES,
    SPARE,
    ControlReport,
    Exited,
    Fork,
    Forked,
    ForkFailed,
    ForkSpare,
    PreparerSetup,
    Ready,
    Refused,
    Setup,
    SpareForked,
    decode_control_report,
    encode_control,
)
from medialane.prepare.pidfd_process import PidfdProcess
from medialane.prepare.preparer_process import PreparerLost, PreparerProcess
from medialane.prepare.process_memory import read_into
from medialane.prepare.sandbox import Sandbox

logger = logging.getLogger(__name__)

#: Set before the fork server starts. It must not start a thread (see `forkserver`). Its preparers keep the memory of a
#: job for the next one (glibc, mallopt(3)), up to 64 MiB each: to get it back from the kernel, page by page, took a
#: seventh of the CPU time of a 1024x768 image.
ENVIRONMENT: Mapping[str, str] = {
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "NUMEXPR_NUM_THREADS": "1",
    "RAYON_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "MALLOC_MMAP_THRESHOLD_": str(32 * 1024 * 1024),
    "MALLOC_TRIM_THRESHOLD_": str(64 * 1024 * 1024),
}

#: Allocations of preparers ask for transparent huge pages (glibc 2.35, madvise(2); elsewhere nothing changes): the
#: gateway, which reads tensors out of them page by page, takes 1.35 ms of CPU time a 1024x768 image instead of 1.6.
HUGE_PAGES = "glibc.malloc.hugetlb=1"

#: How long a fork may take until the preparer says Hello: page tables of 1 GB and a mapping, 20 ms on an idle core.
FORK_TIMEOUT_S = 20.0

_KILL_TIMEOUT_S = 10.0


class ForkserverLost(Exception):
    """The fork server is gone, and its preparers with it."""


class _Process(Protocol):
    """A child of ours (`asyncio.subprocess.Process`), or an `PidfdProcess`."""

    @property
    def pid(self) -> int: ...
    def kill(self) -> None: ...
    async def wait(self) -> object: ...


class ForkserverProcess:
    """Owns the fork server's process and control channel, until `close`. Preparers belong to those who forked them.

    Once it is ready, `sandbox` is what confines its preparers, and `reads_memory` whether tensors are read out of them.
    """

    def __init__(self, process: _Process, control: socket.socket, arena: str) -> None:
        self.lost = asyncio.Event()
        self.sandbox = Sandbox()
        self.reads_memory = False
        self._arena = arena
        self._process = process
        self._control = control
        self._loop = asyncio.get_running_loop()
        self._ready: asyncio.Future[float] = self._loop.create_future()
        self._forks: dict[int, tuple[PreparerProcess, asyncio.Future[None]]] = {}
        self._spare: asyncio.Future[PidfdProcess] | None = None
        self._num_forks = 0
        self._refusal: str | None = None
        self._loop.add_reader(control.fileno(), self.poll)

    @property
    def pid(self) -> int:
        return self._process.pid

    @classmethod
    async def start(
        cls,
        *,
        factory: str,
        factory_config: bytes,
        setup: PreparerSetup,
        environment: Mapping[str, str],
        timeout_s: float,
    ) -> Self:
        """Start one and wait until its processor is warm. Raises StartupFailed; then nothing is left running."""
        mine, theirs = _control_channel()
        with theirs:
            try:
                process = await _spawn(factory, theirs.fileno(), environment)
            except BaseException:  # cancelled or failed, the socket has no other owner
                mine.close()
                raise
        self = cls(process, mine, setup.arena)
        try:
            mine.send(encode_control(Setup(factory_config, setup)))
            await self._wait_ready(timeout_s)
        except BaseException:  # cancelled or failed, no process is left
            await self.close(grace_s=0)
            raise
        return self

    async def fork(self, on_exit: Callable[[], None]) -> PreparerProcess:
        """Fork a preparer and wait until it is ready for jobs; the caller owns it. `on_exit` is called when it ends.

        Raises ForkserverLost, or PreparerLost when the preparer could not be forked or died on the way. When this is
        cancelled before the fork, the preparer is killed as soon as it is there.
        """
        self._num_forks += 1
        preparer_id = self._num_forks
        mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        preparer = PreparerProcess(preparer_id, mine, on_exit, writes_arena=not self.reads_memory)
        forked: asyncio.Future[None] = self._loop.create_future()
        try:
            with theirs:
                self._request(Fork(preparer_id, preparer.writes_arena), theirs)
            self._forks[preparer_id] = (preparer, forked)
            async with asyncio.timeout(FORK_TIMEOUT_S):
                await forked
                await preparer.wait_ready()
        except TimeoutError as error:
            if forked.cancelled():  # by the timeout: not even forked, so nothing else will be
                self._lose("it does not fork")
            await preparer.stop(0)
            raise PreparerLost(f"preparer {preparer_id} was not ready in {FORK_TIMEOUT_S:g} s") from error
        except BaseException:
            await preparer.stop(0)
            raise
        return preparer

    async def fork_spare(self) -> ForkserverProcess:
        """Fork another fork server, as warm as this one, and wait until it is ready; the caller owns it.

        It outlives this one. Raises ForkserverLost, of this one or of the spare. One call at a time.
        """
        mine, theirs = _control_channel()
        self._spare = self._loop.create_future()
        try:
            with theirs:
                self._request(ForkSpare(), theirs)
            async with asyncio.timeout(FORK_TIMEOUT_S):
                process = await self._spare
        except BaseException as error:  # cancelled or failed: the end of its channel ends the spare, if there is one
            mine.close()
            if isinstance(error, TimeoutError):
                self._lose("it does not fork")
                raise ForkserverLost from error
            raise
        spare = ForkserverProcess(process, mine, self._arena)
        try:
            async with asyncio.timeout(FORK_TIMEOUT_S):
                await spare._ready
        except BaseException as error:  # as above
            await spare.close(grace_s=0)
            if isinstance(error, TimeoutError):
                raise ForkserverLost from error
            raise
        return spare

    def has_ended(self) -> bool:
        """Whether it is gone. The kernel closes its channel before it kills its preparers, so a preparer whose fork
        server has died is told from one that died alone."""
        self.poll()
        return self.lost.is_set()

    def poll(self) -> None:
        """Take in what the fork server has said so far (the event loop calls this too)."""
        while not self.lost.is_set():
            try:
                packet, fds, _, _ = socket.recv_fds(self._control, MAX_CONTROL_BYTES, 1, socket.MSG_CMSG_CLOEXEC)
            except BlockingIOError:
                return
            except OSError as error:
                self._lose(f"its channel failed: {error.strerror}")
                return
            if not packet:
                self._lose("it ended")
                return
            try:
                self._take(decode_control_report(packet), fds)
            except (msgspec.DecodeError, LookupError) as error:  # LookupError: a fork that nobody asked for
                self._lose(f"it broke the protocol: {error}")

    async def close(self, grace_s: float = 2.0) -> None:
        """End it and all its preparers: closing the channel asks, a kill after `grace_s` makes sure. Idempotent."""
        self._lose("closed")
        if not await self._wait_exit(grace_s):
            with contextlib.suppress(ProcessLookupError):  # it has ended, and the loop is about to tell
                self._process.kill()
            if not await self._wait_exit(_KILL_TIMEOUT_S):
                logger.error("fork server (pid %d) could not be killed", self.pid)

    async def _wait_exit(self, timeout_s: float) -> bool:
        try:
            async with asyncio.timeout(timeout_s):
                await self._process.wait()
        except TimeoutError:
            return False
        return True

    async def _wait_ready(self, timeout_s: float) -> None:
        started = time.monotonic()
        try:
            async with asyncio.timeout(timeout_s):
                warm_s = await self._ready
        except TimeoutError:
            raise StartupFailed(f"the model's processor was not ready in {timeout_s:g} s (start_timeout_s)") from None
        except ForkserverLost as error:
            raise StartupFailed(
                self._refusal or "the media preparation process failed to start; see its log"
            ) from error
        logger.info("processor ready after %.1f s (%.1f s to build)", time.monotonic() - started, warm_s)

    def _request(self, request: Fork | ForkSpare, channel: socket.socket) -> None:
        if self.lost.is_set():
            raise ForkserverLost
        try:
            socket.send_fds(self._control, [encode_control(request)], [channel.fileno()])
        except OSError as error:  # its channel is full although it has nothing else to do, or broken
            self._lose(f"it takes no requests: {error.strerror}")
            raise ForkserverLost from error

    def _take(self, report: ControlReport, fds: list[int]) -> None:
        match report:
            case Ready():
                self._take_ready(report)
            case Refused():
                self._refusal = report.message
            case Forked():
                self._take_forked(report, fds)
            case SpareForked():
                self._take_spare(report, fds)
            case ForkFailed():
                self._take_failure(report)
            case Exited():
                _log_exit(report)

    def _take_ready(self, report: Ready) -> None:
        self.sandbox = report.sandbox
        self.reads_memory = self._may_read(report.probe)
        if not self._ready.done():
            self._ready.set_result(report.warm_s)

    def _may_read(self, probe: int) -> bool:
        """Whether this process may read the fork server's memory, and so that of its preparers."""
        found = bytearray(len(self._arena))
        try:
            read_into(self.pid, probe, memoryview(found))
        except OSError:
            return False
        return found == self._arena.encode()

    def _take_forked(self, report: Forked, fds: list[int]) -> None:
        preparer, forked = self._forks.pop(report.preparer_id)
        preparer.attach(report.pid, fds[0])
        if not forked.done():
            forked.set_result(None)

    def _take_failure(self, report: ForkFailed) -> None:
        if report.preparer_id != SPARE:
            _, forked = self._forks.pop(report.preparer_id)
            if not forked.done():
                forked.set_exception(PreparerLost(report.message))
        elif self._spare is not None:
            _end(self._spare, report.message)

    def _take_spare(self, report: SpareForked, fds: list[int]) -> None:
        if self._spare is None or self._spare.done():  # nobody waits for it any more
            os.close(fds[0])
        else:
            self._spare.set_result(PidfdProcess(report.pid, fds[0]))

    def _lose(self, reason: str) -> None:
        if self.lost.is_set():
            return
        self.lost.set()
        log = logger.info if reason == "closed" else logger.error
        log("fork server (pid %d): %s%s", self.pid, reason, f": {self._refusal}" if self._refusal else "")
        self._loop.remove_reader(self._control.fileno())
        self._control.close()
        _end(self._ready, reason)
        for _, forked in self._forks.values():
            _end(forked, reason)
        self._forks.clear()
        if self._spare is not None:
            _end(self._spare, reason)


def _end(future: asyncio.Future[Any], reason: str) -> None:
    if not future.done():
        future.set_exception(ForkserverLost(reason))
        future.exception()  # nobody may be waiting for it


def _control_channel() -> tuple[socket.socket, socket.socket]:
    """Our end, which does not block, and the fork server's."""
    mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    mine.setblocking(False)
    return mine, theirs


async def _spawn(factory: str, control_fd: int, environment: Mapping[str, str]) -> Process:
    arguments = ["-P", "-m", "medialane.prepare.forkserver", factory, str(control_fd), str(os.getpid())]
    return await asyncio.create_subprocess_exec(
        sys.executable,
        *arguments,
        stdin=DEVNULL,
        pass_fds=[control_fd],
        env=_environment(environment),
        # A Ctrl-C in the terminal is for the gateway, which then ends this process.
        start_new_session=True,
    )


def _environment(more: Mapping[str, str]) -> dict[str, str]:
    """This process's own, handed on, not read (settings are config.py's business), `more`, and what is ours."""
    wanted = {**os.environ, **more, **ENVIRONMENT}
    tunables = [HUGE_PAGES, *filter(None, [wanted.get("GLIBC_TUNABLES")])]  # of one named twice, the last one counts
    return {**wanted, "GLIBC_TUNABLES": ":".join(tunables)}


def _log_exit(report: Exited) -> None:
    who = "the spare fork server" if report.preparer_id == SPARE else f"preparer {report.preparer_id}"
    if report.status < 0:
        logger.warning("%s was ended by %s", who, signal.Signals(-report.status).name)
    elif report.status:
        logger.warning("%s ended with status %d", who, report.status)
