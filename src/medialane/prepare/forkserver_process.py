"""The store's handles on a fork server and on its preparers: start it, fork preparers, detect their death, terminate
them; the spare that takes over when it dies; and the fork server that was forked before, with a processor that was
built before.

*Prebuilt*: a warm process calls `prebuild_processor` once. Each store is a fork of it, and calls `fork_forkserver`
while it has one thread, and before it has read a secret: the fork server, which waits with the built processor, then
has none in its memory. When the store knows its settings, `ForkserverProcess.start` takes that fork server over, if its
processor was built for these; otherwise, and after it and its spare have died, the store execs one.

The spare is a fork of the active one. When that dies, the spare replaces it and forks its own spare; a processor is
rebuilt only if both die at the same time. Measured with the tiny Qwen2.5-VL on two cores: importing, building and
warming a processor takes 19 s, in which all media are refused; the spare forks its first preparer after 0.03 s. It is
forked in 0.02 s and has 3 MB of memory of its own, the rest of its 580 MB is shared with the active one.

The exit of a preparer is detected by its pidfd, which the fork server passes to the store: only then is it certain that
it does not write into the arena any more.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Self

import msgspec

from medialane.prepare.forkserver_environment import differences, exec_environ, require_one_thread, required
from medialane.prepare.messages import (
    MAX_CONTROL_BYTES,
    MAX_FRAME_BYTES,
    READ_BYTES,
    SPARE,
    Alive,
    ControlReport,
    Exited,
    Fork,
    Forked,
    ForkFailed,
    JobReport,
    JobRequest,
    PreparerReady,
    PreparerSetup,
    Ready,
    Setup,
    SetupFailed,
    decode_control_report,
    decode_job_report,
    encode_frame,
)
from medialane.prepare.processor import Processor
from medialane.prepare.sandbox import Sandbox, available, read_into
from medialane.runtime.heartbeat import HangWatch
from medialane.runtime.resources import OomKills
from medialane.runtime.stop import PidfdProcess, end_process
from medialane.runtime.tasks import Backoff, first_of
from medialane.types.errors import ProtocolViolation, StartupFailed
from medialane.wire.child_channel import ChannelToChild, child_channel, spawn
from medialane.wire.connection import FrameReader

logger = logging.getLogger(__name__)

#: Timeout of a fork, and then of PreparerReady or Ready: copying the page tables of 1 GB takes 20 ms on an idle core.
FORK_TIMEOUT_S = 20.0

#: Bounds of the exponential backoff before a dead spare is replaced.
INITIAL_BACKOFF_S = 1.0
MAX_BACKOFF_S = 60.0

_CLOSED = "closed"

_MODULE = "medialane.prepare.forkserver"


class ForkserverLost(Exception):
    """The fork server has exited, and its preparers with it."""


@dataclass(frozen=True, slots=True)
class ProcessorSource:
    """What a processor is built from: the factory `module:function`, what it gets, and the environment."""

    factory: str
    factory_config: bytes
    environment: Mapping[str, str]

    def changes(self, other: ProcessorSource) -> list[str]:
        """Return the names of what differs and may make another processor."""
        changes = differences(self.environment, other.environment)
        if (self.factory, self.factory_config) != (other.factory, other.factory_config):
            changes.append("the model's flags")
        return changes


class ForkserverProcess:
    """Owns the fork server's process and control channel until `close`. The callers of `fork` own the preparers.

    Valid once it is ready: `sandbox` is the sandbox of its preparers, `reads_memory` whether the store may read
    tensors from their memory.
    """

    def __init__(self, process: PidfdProcess, control: socket.socket, arena: str) -> None:
        self.lost = asyncio.Event()
        self.sandbox = Sandbox()
        self.settings: dict[str, str] = {}
        self.reads_memory = False
        self._arena = arena
        self._process = process
        self._loop = asyncio.get_running_loop()
        self._ready: asyncio.Future[float] = self._loop.create_future()
        self._forks: dict[int, asyncio.Future[PidfdProcess]] = {}
        self._num_forks = 0
        self._refusal: str | None = None
        self._oom_kills = OomKills(process.pid)
        self._watch = HangWatch(process.pid)
        self._watching = asyncio.create_task(self._lose_if_it_hangs(), name=f"heartbeat of {process.pid}")
        self._channel = ChannelToChild(
            control, decode_control_report, self._handle, self._lose, max_bytes=MAX_CONTROL_BYTES
        )

    @property
    def pid(self) -> int:
        return self._process.pid

    @classmethod
    async def start(cls, source: ProcessorSource, setup: PreparerSetup, *, timeout_s: float) -> Self:
        """Start a fork server, with what it requires itself besides the environment of the source, and wait until its
        processor is warm: the one that was forked with a prebuilt processor, or a new one.

        Raises StartupFailed; then no process is left running.
        """
        waiting = _take_prebuilt(source)
        process, control = waiting or spawn(_MODULE, source.factory, environ=exec_environ(source.environment))
        given = dict(source.environment) if waiting else {}
        self = cls(process, control, setup.arena)
        try:
            self._channel.send(Setup(source.factory_config, setup, given))
            await self._wait_ready(timeout_s)
        except BaseException:  # cancelled or failed: leave no process running
            await self.close(grace_s=0)
            raise
        return self

    async def fork(self, on_exit: Callable[[], None]) -> PreparerProcess:
        """Fork a preparer and wait until it is ready for jobs; the caller owns it. `on_exit` is called when it exits.

        Raises ForkserverLost, or PreparerLost if the preparer could not be forked or died before it was ready. If
        cancelled before the fork, the preparer is killed as soon as it has been forked.
        """
        self._num_forks += 1
        number, writes_arena = self._num_forks, not self.reads_memory
        mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            process = await self._fork(Fork(number, writes_arena), theirs)
        except BaseException:  # cancelled or failed: the socket has no other owner
            mine.close()
            raise
        preparer = PreparerProcess(number, mine, process, on_exit, writes_arena=writes_arena)
        try:
            async with asyncio.timeout(FORK_TIMEOUT_S):
                await preparer.wait_ready()
        except BaseException as error:  # cancelled or failed
            await preparer.stop(0)
            if isinstance(error, TimeoutError):
                raise PreparerLost(f"preparer {number} was not ready within {FORK_TIMEOUT_S:g} s") from error
            raise
        return preparer

    async def fork_spare(self) -> ForkserverProcess:
        """Fork another, equally warm fork server and wait until it is ready; the caller owns it.

        It outlives this one. Raises ForkserverLost if this one or the spare dies. One call at a time.
        """
        mine, theirs = child_channel()
        try:
            process = await self._fork(Fork(SPARE), theirs)
        except BaseException as error:  # cancelled or failed: closing its channel terminates the spare, if any
            mine.close()
            if isinstance(error, PreparerLost):
                raise ForkserverLost(str(error)) from error
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
        """Return whether the fork server has exited.

        The kernel closes its channel before killing its preparers, so a preparer that died with its fork server can be
        distinguished from one that died alone.
        """
        self._channel.poll()
        return self.lost.is_set()

    async def close(self, grace_s: float = 2.0) -> None:
        """Terminate it and all its preparers: close its channel, kill it after `grace_s`. Idempotent."""
        self._lose(_CLOSED)
        self._watching.cancel()
        await asyncio.wait((self._watching,))
        if not await end_process(self._process, grace_s):
            logger.error("fork server (pid %d) could not be killed", self.pid)

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

    async def _fork(self, request: Fork, channel: socket.socket) -> PidfdProcess:
        """Request a fork of a process that gets `channel`, which is closed here, and wait for it.

        Raises ForkserverLost, or PreparerLost if there is no such process. If cancelled, it is killed.
        """
        forked: asyncio.Future[PidfdProcess] = self._loop.create_future()
        with channel:
            if not self._channel.send(request, [channel.fileno()]):
                raise ForkserverLost
        self._forks[request.preparer_id] = forked
        try:
            async with asyncio.timeout(FORK_TIMEOUT_S):
                return await forked
        except TimeoutError as error:
            self._lose("it does not fork")
            raise PreparerLost(f"a process was not forked within {FORK_TIMEOUT_S:g} s") from error
        except asyncio.CancelledError:
            if not forked.cancelled() and forked.exception() is None:
                forked.result().kill()
            raise

    def _handle(self, report: ControlReport, fds: list[int]) -> None:
        match report:
            case Alive():
                self._watch.beat()
            case Ready():
                self._handle_ready(report)
            case SetupFailed():
                self._refusal = report.message
            case Forked():
                self._handle_forked(report, fds)
            case ForkFailed():
                forked = self._forks.pop(report.preparer_id)
                if not forked.done():
                    forked.set_exception(PreparerLost(report.message))
            case Exited():
                self._log_exit(report)

    def _handle_ready(self, report: Ready) -> None:
        self.sandbox = report.sandbox
        self.settings = report.settings
        self.reads_memory = self._may_read(report.probe)
        if not self._ready.done():
            self._ready.set_result(report.warm_s)

    def _log_exit(self, report: Exited) -> None:
        if report.status:
            name = "the spare fork server" if report.preparer_id == SPARE else f"preparer {report.preparer_id}"
            logger.warning("%s exited: %s", name, self._oom_kills.describe_exit(report.status))

    def _may_read(self, probe: int) -> bool:
        """Return whether this process may read the memory of the fork server, and so of its preparers."""
        data = bytearray(len(self._arena))
        try:
            read_into(self.pid, probe, memoryview(data))
        except OSError:
            return False
        return data == self._arena.encode()

    def _handle_forked(self, report: Forked, fds: list[int]) -> None:
        process, forked = PidfdProcess(report.pid, fds[0]), self._forks.pop(report.preparer_id)
        if forked.done():  # cancelled
            process.kill()
        else:
            forked.set_result(process)

    async def _lose_if_it_hangs(self) -> None:
        self._lose(await self._watch.hung())

    def _lose(self, reason: str) -> None:
        """Called when it has exited, or is to: its preparers, which run jobs, would not end before it does."""
        if self.lost.is_set():
            return
        reason = reason or "it exited"
        if reason != _CLOSED:
            self._process.kill()
        self.lost.set()
        self._oom_kills.close()
        log = logger.info if reason == _CLOSED else logger.error
        log("fork server (pid %d): %s%s", self.pid, reason, f": {self._refusal}" if self._refusal else "")
        self._channel.close()
        _end(self._ready, reason)
        for forked in self._forks.values():
            _end(forked, reason)
        self._forks.clear()


class SpareForkserver:
    """Owns the spare of a pool."""

    def __init__(self) -> None:
        self._spare: ForkserverProcess | None = None

    @property
    def pid(self) -> int | None:
        """Its process id; None while there is none, or it is lost."""
        return None if self._spare is None or self._spare.lost.is_set() else self._spare.pid

    async def take(self) -> ForkserverProcess | None:
        """Return the spare, which the caller owns; None if there is none, or it is lost."""
        if (spare := self._spare) is not None and self.pid is not None:
            self._spare = None
            logger.info("spare fork server (pid %d) takes over", spare.pid)
            return spare
        await self.close()
        return None

    async def keep(self, used: ForkserverProcess) -> None:
        """Keep a spare of `used` running until `used` is lost."""
        backoff = Backoff(initial_s=INITIAL_BACKOFF_S, max_s=MAX_BACKOFF_S)
        while not used.lost.is_set():
            try:
                self._spare = await used.fork_spare()
            except ForkserverLost as error:
                logger.warning("no spare fork server: %s", error)
            else:
                await first_of(self._spare.lost.wait(), used.lost.wait())
            if used.lost.is_set():
                return
            await self.close()
            await first_of(used.lost.wait(), asyncio.sleep(backoff.next()))

    async def close(self) -> None:
        """Terminate the spare. Idempotent."""
        spare, self._spare = self._spare, None
        if spare is not None:
            await spare.close(grace_s=1.0)


def _end(future: asyncio.Future[Any], reason: str) -> None:
    if not future.done():
        future.set_exception(ForkserverLost(reason))
        future.exception()  # marks it as retrieved: there may be no waiter


# Prebuilt

#: What `prebuild_processor` has built, from what; and the sandbox that this machine supports.
_built: tuple[ProcessorSource, Processor, Sandbox] | None = None
#: What the fork server has been built from, its process id and pidfd (a child of this process), and our end of its
#: control channel.
_waiting: tuple[ProcessorSource, int, int, socket.socket] | None = None


def prebuild_processor(source: ProcessorSource) -> None:
    """Build the processor that fork servers of stores with this source use. The process has one thread afterwards.
    Raises StartupFailed, or what the factory raises."""
    global _built
    from medialane.prepare.forkserver import build_processor  # imported lazily: only warm processes decode

    with required():
        _built = source, build_processor(source.factory, source.factory_config), available()


def fork_forkserver() -> None:
    """Fork the fork server of this process, a store, if a processor has been built. Call it from the main thread, which
    must be the only one. Raises StartupFailed if it is not."""
    global _waiting
    if _built is None:
        return
    from medialane.prepare import forkserver

    source, processor, sandbox = _built
    require_one_thread()
    ours, theirs = child_channel()
    store_pid = os.getpid()
    pid = os.fork()
    if pid == 0:
        forkserver.run_forked(theirs, store_pid, processor, sandbox)
    theirs.close()
    _waiting = source, pid, os.pidfd_open(pid), ours


def is_prebuilt(source: ProcessorSource) -> bool:
    """Return whether there is a fork server to take, with the processor that this source would give."""
    return _waiting is not None and not source.changes(_waiting[0])


def _take_prebuilt(source: ProcessorSource) -> tuple[PidfdProcess, socket.socket] | None:
    """Return the waiting fork server and our end of its control channel; the caller owns both. For a running loop.

    None if it was not forked, has been taken, or has another processor than this source would give: then it is
    terminated.
    """
    global _waiting
    waiting, _waiting = _waiting, None
    if waiting is None:
        return None
    built_from, pid, pidfd, control = waiting
    process = PidfdProcess(pid, pidfd, on_exit=partial(os.waitpid, pid, 0))
    if not (changes := source.changes(built_from)):
        return process, control
    logger.warning("the prebuilt processor is not used: it was built with other values of %s", ", ".join(changes))
    control.close()
    process.kill()
    return None


# Preparers


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
