"""Supervises one process across restarts."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from medialane.cluster.child_process import ChildProcess
from medialane.cluster.orphan_reaper import OrphanReaper
from medialane.cluster.process_log import ProcessLog, is_secondary
from medialane.cluster.process_spec import INTERPRETER, NOT_NEEDED, ProcessSpec
from medialane.cluster.restart_delay import RestartDelay
from medialane.cluster.warm import NotForked, WarmProcess, WarmProcessGone
from medialane.config.cluster import ClusterConfig
from medialane.runtime.phase import READY, ExitCounts, Phase, PhaseFile
from medialane.runtime.resources import LACK_OF_MEMORY
from medialane.runtime.tasks import first_of
from medialane.types.errors import StartupFailed

POLL_S = 0.2
#: Exits of a process that had become ready, while others are still starting, after which the start fails.
MAX_EXITS_IN_START = 5
_SHOWN_LINES = 15
#: How long a process may wait for the warm process to fork it, which takes milliseconds: one that does not answer is
#: not waited for until it is found to hang. The first time, that reads the model before.
FORK_TIMEOUT_S = 5.0
FIRST_FORK_TIMEOUT_S = 120.0
#: How long a process waits for the next warm process to import everything.
WARM_TIMEOUT_S = 60.0

logger = logging.getLogger(__name__)


class Observer(Protocol):
    """Receives the events of processes, on the event loop; must return at once."""

    def starting(self, name: str) -> None: ...

    def ready(self, name: str, seconds: float) -> None: ...

    def ended(self, name: str, how: str, restart_in_s: float | None) -> None:
        """A process exited unexpectedly. `restart_in_s` is None if it is not restarted."""
        ...

    def stopping(self, name: str) -> None: ...

    def entered(self, name: str, phase: Phase) -> None:
        """A process that is not ready yet is in another phase, or has come further in it."""
        ...

    def printed(self, name: str, lines: Sequence[str]) -> None:
        """The process wrote these lines to its log, some tenths of a second ago."""
        ...


@dataclass(frozen=True)
class SupervisorContext:
    """State shared by the process supervisors of one supervisor. `fail` is called with the reason why the start
    failed."""

    config: ClusterConfig
    observer: Observer
    orphan_reaper: OrphanReaper
    exits: ExitCounts
    stopping: asyncio.Event
    all_ready: asyncio.Event
    fail: Callable[[StartupFailed], None]


class ProcessSupervisor:
    """Runs one process. The first start waits for `gate`.

    `is_ready` is set while the process is ready, or not needed; `is_forking` is whether a child may exist that is not
    `process` yet.
    """

    def __init__(
        self,
        spec: ProcessSpec,
        log: ProcessLog,
        context: SupervisorContext,
        *,
        gate: asyncio.Event | None = None,
    ) -> None:
        self.spec = spec
        self.process: ChildProcess | None = None
        self.is_ready = asyncio.Event()
        self.is_forking = False
        self._has_been_ready = False
        #: Whether the warm process has forked it before: then it will again, once there is one.
        self._was_forked = False
        self._num_exits = 0
        self._log = log
        self._phases = PhaseFile(log.path.with_suffix(".phase"))
        self._shown = Phase("")
        self._context = context
        self._gate = gate
        self._status: int | None = None
        self._delay = RestartDelay(context.config)

    async def run(self) -> None:
        """Run until the supervisor stops, or the start has failed by this process."""
        stopping = self._context.stopping
        if self._gate is not None:
            await first_of(stopping.wait(), self._gate.wait())
        while not stopping.is_set():
            how = await self._run_once()
            if stopping.is_set():
                return
            if self._status == NOT_NEEDED:
                self._context.observer.ended(self.spec.name, self.spec.not_needed, None)
                self.is_ready.set()  # for those that wait for it
                return
            self._num_exits += 1
            if self._fails_start():
                self._fail(how)
                return
            delay_s = self._delay.next(had_become_ready=self._has_been_ready)
            self.is_ready.clear()
            self._context.observer.ended(self.spec.name, how, delay_s)
            await first_of(stopping.wait(), asyncio.sleep(delay_s))

    async def stop(self) -> None:
        """Stop the process. The event `stopping` must be set, so that `run` returns."""
        if self.process is not None:
            self._context.observer.stopping(self.spec.name)
            await self.process.stop(self.spec.stop_timeout_s)

    def reload(self) -> None:
        """Have the process read its settings again, if it does, and is ready: before, it would end."""
        if self.process is not None and self.spec.reloads and self.is_ready.is_set():
            self.process.hang_up()

    def read_log(self) -> None:
        if lines := self._log.read():
            self._context.observer.printed(self.spec.name, lines)

    def read_phase(self) -> None:
        """Report the phase of a process that starts, if it has changed."""
        if self.process is None or self._shown.name == READY:
            return
        phase = self._phases.read() or self._shown
        if phase == self._shown:
            return
        self._shown = phase
        if phase.name == READY:
            self._context.observer.ready(self.spec.name, self.process.lifetime_s)
        else:
            self._context.observer.entered(self.spec.name, phase)

    def _fails_start(self) -> bool:
        """Return whether an exit fails the start: what exits before it was ever ready will do so again."""
        is_hopeless = not self._has_been_ready or self._num_exits >= MAX_EXITS_IN_START
        return is_hopeless and not self._context.all_ready.is_set()

    async def _run_once(self) -> str:
        """Run the process once, from start to exit. Returns how it ended; `is_ready` is whether it had become ready."""
        self._context.observer.starting(self.spec.name)
        try:
            process = await self._start()
        except OSError as error:
            return f"cannot be started: {error.strerror}"
        if process is None:
            return "stopped"
        self.process = process
        self._context.orphan_reaper.watch(process.pid)
        if self._context.stopping.is_set():
            process.kill()  # `stop` may have been called before it was there
        try:
            monitor = asyncio.create_task(self._monitor(process))
            monitor.add_done_callback(lambda task: self._kill_unmonitored(process, task))
            self._status = await process.wait()
            killed = await _result_or_cancel(monitor)
            if not self._context.stopping.is_set() and self._status != NOT_NEEDED:
                self._context.exits.add(self.spec.name, hung=process.hang is not None)
        finally:
            process.kill()
            self._context.orphan_reaper.forget(process.pid)
            self._phases.remove()
            self.process = None
        return killed or process.describe_exit()

    async def _start(self) -> ChildProcess | None:
        """Fork the process, or start it from scratch if that is not possible now; return None if the supervisor stops
        meanwhile. Raises OSError."""
        self.spec.ready.reset()
        self._shown = Phase("")
        environ = {**self.spec.environ, **self._phases.environ()}
        output = self._log.open()
        try:
            if self.spec.warm is not None:
                try:
                    return await self._fork_once_warm(self.spec.warm, environ, output)
                except NotForked as error:
                    logger.warning("%s is started from scratch: %s", self.spec.name, error)
            return ChildProcess.spawn(self.spec.argv, environ, output, pass_fds=self.spec.pass_fds)
        finally:
            os.close(output)

    async def _fork_once_warm(self, warm: WarmProcess, environ: Mapping[str, str], output: int) -> ChildProcess | None:
        """As `_fork`. If the warm process has exited, too, wait for the next one: it imports vLLM and reads the model
        once for all that do. Raises NotForked."""
        timeout_s, give_up_at = FORK_TIMEOUT_S, time.monotonic() + WARM_TIMEOUT_S
        while not self._context.stopping.is_set():
            try:
                child = await self._fork(warm, environ, output, timeout_s if self._was_forked else FIRST_FORK_TIMEOUT_S)
            except WarmProcessGone:
                if not self._was_forked or time.monotonic() > give_up_at:
                    raise
                timeout_s = FIRST_FORK_TIMEOUT_S  # the next one reads the model first
                await first_of(self._context.stopping.wait(), asyncio.sleep(POLL_S))
            else:
                self._was_forked = True
                return child
        return None

    async def _fork(
        self, warm: WarmProcess, environ: Mapping[str, str], output: int, timeout_s: float
    ) -> ChildProcess | None:
        """Return None if the supervisor stops meanwhile. Raises NotForked."""
        argv, passed = self.spec.argv[len(INTERPRETER) :], self.spec.pass_fds
        forking = asyncio.create_task(
            ChildProcess.fork(warm, argv, environ, output, pass_fds=passed, timeout_s=timeout_s)
        )
        self.is_forking = True
        try:
            await first_of(self._context.stopping.wait(), asyncio.wait([forking]))
            return forking.result() if forking.done() else None
        finally:
            forking.cancel()  # a fork that nobody waits for ends
            self.is_forking = False

    async def _monitor(self, process: ChildProcess) -> str | None:
        """Kill the process if it does not become ready in time; return the reason."""
        reason = await self._wait_until_ready(process)
        if reason is not None:
            process.kill()
        return reason

    async def _wait_until_ready(self, process: ChildProcess) -> str | None:
        """Wait for the process to become ready. Returns None, or that it took too long."""
        limit_s = self._context.config.start_timeout_s
        try:
            async with asyncio.timeout(limit_s):
                while not await self.spec.ready.passes():  # noqa: ASYNC110 - polls another process
                    await asyncio.sleep(POLL_S)
        except TimeoutError:
            return f"not ready after {limit_s:g} s"
        if not process.ended:
            self.is_ready.set()
            self._has_been_ready = True
            if not self.spec.is_ready_later:
                self._shown = Phase(READY)
                self._context.observer.ready(self.spec.name, process.lifetime_s)
        return None

    def _kill_unmonitored(self, process: ChildProcess, watching: asyncio.Task[str | None]) -> None:
        """Kill a process if its readiness check failed with an exception: it would never become ready."""
        if not watching.cancelled() and watching.exception() is not None and not self.is_ready.is_set():
            process.kill()

    def _fail(self, how: str) -> None:
        self.read_log()
        self._context.observer.ended(self.spec.name, how, None)
        report = failure_report(self.spec.name, how, self._log, was_ready=self._has_been_ready)
        self._context.fail(StartupFailed(report))


def failure_report(name: str, how: str, log: ProcessLog, *, was_ready: bool = False) -> str:
    """Return one line with the cause; unless the process reported it itself, the end of its log follows."""
    why = f" ({how})" if LACK_OF_MEMORY in how else ""  # the log does not have it
    cause = log.first_exception()
    if (ours := log.reported_error()) is not None:
        if cause is not None and is_secondary(ours):  # of its engine, which has said more
            ours = f"vLLM failed to start: {cause}"
        return f"{name}: {ours}{why}"
    head = f"{name} {'exited again and again' if was_ready else 'did not start'}: {cause + why if cause else how}"
    lines = log.tail(_SHOWN_LINES)
    if not lines:
        return head
    return "\n".join([head, f"  the end of {log.path} ({how}):", *(f"  | {line}" for line in lines)])


async def _result_or_cancel(task: asyncio.Task[str | None]) -> str | None:
    if task.done():
        return task.result()
    task.cancel()
    await asyncio.wait((task,))
    return None
