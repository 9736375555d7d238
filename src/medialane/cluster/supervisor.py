"""Supervises the processes of one host.

Until all processes are ready, the exit of one that has never been fails the start: the operator must see and fix the
cause. A process that had been ready is restarted (`Restarts`), and the others continue; during the start this is
bounded. From then on, every process that exits is restarted.

Each process has a `ProcessSupervisor`, one task that starts it, waits until it is ready, waits until it exits, and
backs off. `stop` sets one event and stops the processes layer by layer; every task ends after its process. `kill` is
for callers that cannot wait.

A process supervisor that itself fails (an observer, a descriptor, a bug) is logged and restarted; the others continue.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from medialane.cluster.child_process import (
    INTERPRETER,
    NOT_NEEDED,
    ChildProcess,
    NotForked,
    ProcessLog,
    ProcessSpec,
    WarmProcess,
    WarmProcessGone,
)
from medialane.cluster.orphan_reaper import OrphanReaper
from medialane.config.settings import ClusterConfig
from medialane.runtime.linux import reap_orphans, set_subreaper
from medialane.runtime.phase import READY, ExitCounts, Phase, PhaseFile
from medialane.runtime.tasks import Backoff, first_of
from medialane.types.errors import StartupFailed

logger = logging.getLogger(__name__)

POLL_S = 0.2
#: Exits of a process that had become ready, while others are still starting, after which the start fails.
MAX_EXITS_IN_START = 5
#: How long a process may wait for the warm process to fork it, which takes milliseconds: one that does not answer is
#: not waited for until it is found to hang. The first time, that reads the model before.
FORK_TIMEOUT_S = 5.0
FIRST_FORK_TIMEOUT_S = 120.0
#: How long a process waits for the next warm process to import everything.
WARM_TIMEOUT_S = 60.0
#: Longest delay for a process that had become ready: what it needs is there, and its users wait for it.
MAX_READY_S = 4.0


class Restarts:
    """The restarts of one process, of this host or another. One that has ever become ready is restarted at once, but
    for its second and further exits within `restart_reset_s`. One that has not is the more likely to fail again: it
    waits longer, and fails the start."""

    def __init__(self, config: ClusterConfig, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.had_become_ready = False
        self._config = config
        self._clock = clock
        self._backoff = Backoff(initial_s=config.restart_initial_s, max_s=config.restart_max_s)
        self._exited_at = float("-inf")
        self._num_exits = 0

    def delay_s(self, *, was_ready: bool, in_start: bool = False) -> float | None:
        """Return the delay after an exit of a process that `was_ready`; None if the exit fails the start."""
        self.had_become_ready |= was_ready
        self._num_exits += 1
        if in_start and (not self.had_become_ready or self._num_exits >= MAX_EXITS_IN_START):
            return None
        now = self._clock()
        is_first = now - self._exited_at >= self._config.restart_reset_s
        self._exited_at = now
        if is_first:
            self._backoff.reset()
        if not self.had_become_ready:
            return self._backoff.next()
        return 0.0 if is_first else min(self._backoff.next(), MAX_READY_S)


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
    """State shared by the process supervisors of one supervisor."""

    config: ClusterConfig
    observer: Observer
    orphan_reaper: OrphanReaper
    exits: ExitCounts
    stopping: asyncio.Event
    all_ready: asyncio.Event


class Supervisor:
    """Runs processes: `start` once, then `stop`. For the main thread's event loop only.

    Logs are written to the folder `logs`, one file per process.
    """

    def __init__(self, specs: Sequence[ProcessSpec], *, config: ClusterConfig, logs: Path, observer: Observer) -> None:
        self._failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._context = SupervisorContext(
            config, observer, OrphanReaper(), ExitCounts(logs), asyncio.Event(), asyncio.Event()
        )
        self._supervisors: dict[str, ProcessSupervisor] = {}
        for spec in specs:
            gate = self._supervisors[spec.after].is_ready if spec.after is not None else None
            log = ProcessLog(logs / f"{spec.name.replace(' ', '-')}.log", config.max_log_bytes)
            self._supervisors[spec.name] = ProcessSupervisor(spec, log, self._context, gate=gate)
        self._runner: asyncio.Task[None] | None = None
        self._unreadable_logs: set[ProcessSupervisor] = set()

    @property
    def pids(self) -> dict[str, int]:
        """The running processes, and the ids of their process groups."""
        return {name: each.process.pid for name, each in self._supervisors.items() if each.process is not None}

    async def start(self) -> None:
        """Start every process and wait until all are ready.

        Raises StartupFailed if one exits, or is not ready before its timeout. The others keep running until `stop`.
        """
        if self._has_forks:
            set_subreaper(on=True)
        self._runner = asyncio.create_task(self._run(), name="supervisor")
        await first_of(self._wait_all_ready(), asyncio.shield(self._failure), asyncio.shield(self._runner))
        self._context.all_ready.set()

    async def wait(self) -> None:
        """Wait until supervision ends, which it does after `stop`; earlier only because of a bug, which is raised."""
        if self._runner is not None:
            await asyncio.shield(self._runner)

    async def stop(self) -> None:
        """Stop every process, higher layers first, each within its timeout. If cancelled, it kills."""
        self._context.stopping.set()
        try:
            supervisors = self._supervisors.values()
            for layer in sorted({supervisor.spec.layer for supervisor in supervisors}, reverse=True):
                await asyncio.gather(*(each.stop() for each in supervisors if each.spec.layer == layer))
            if self._runner is not None:
                await self._runner
        finally:
            self.kill()
            if self._has_forks:
                set_subreaper(on=False)
            self._context.orphan_reaper.close()
            self._context.exits.remove()
            if not self._failure.cancel() and not self._failure.cancelled():
                self._failure.exception()  # retrieved: the caller of `stop` need not have awaited it

    def reload(self) -> None:
        """Have the processes that are ready read their settings again, if they do."""
        for supervisor in self._supervisors.values():
            supervisor.reload()

    def kill(self) -> None:
        """Kill all processes now; `stop` still has to be awaited."""
        self._context.stopping.set()
        for supervisor in self._supervisors.values():
            if supervisor.process is not None:
                supervisor.process.kill()

    async def _run(self) -> None:
        reading = asyncio.create_task(self._read_logs(), name="log reader")
        try:
            async with asyncio.TaskGroup() as tasks:
                for name, supervisor in self._supervisors.items():
                    tasks.create_task(self._supervise(supervisor), name=f"supervise {name}")
        finally:
            reading.cancel()
            await asyncio.wait((reading,))

    async def _supervise(self, supervisor: ProcessSupervisor) -> None:
        """Run a process supervisor; if it raises, its process has ended, and both are restarted, unless that fails the
        start."""
        context = self._context
        while not context.stopping.is_set():
            try:
                await supervisor.run()
                return
            except StartupFailed as error:
                self._fail(error)
                return
            except Exception as error:  # top-level handler: the other processes must not end with this one
                logger.exception("%s: supervision failed", supervisor.spec.name)
                if not context.all_ready.is_set():
                    self._fail(StartupFailed(f"{supervisor.spec.name} cannot be supervised: {error!r}"))
                    return
                await first_of(context.stopping.wait(), asyncio.sleep(context.config.restart_max_s))

    async def _wait_all_ready(self) -> None:
        supervisors = self._supervisors.values()
        while waiting := [each for each in supervisors if not each.is_ready.is_set()]:
            await waiting[0].is_ready.wait()

    async def _read_logs(self) -> None:
        while True:
            for supervisor in self._supervisors.values():
                self._read_output(supervisor)
            self._reap_orphans()
            await asyncio.sleep(POLL_S)

    @property
    def _has_forks(self) -> bool:
        return any(each.spec.warm is not None for each in self._supervisors.values())

    def _reap_orphans(self) -> None:
        """As a subreaper we inherit the orphans of our processes. A fork that is about to be ours is not one."""
        if self._has_forks and not any(each.is_forking for each in self._supervisors.values()):
            reap_orphans({*self.pids.values(), *filter(None, [self._context.orphan_reaper.pid])})

    def _read_output(self, supervisor: ProcessSupervisor) -> None:
        """Read one log, and the phase; a log that cannot be read or shown is reported once and affects nothing else."""
        try:
            supervisor.read_log()
            supervisor.read_phase()
        except Exception:  # top-level handler: processes run on without their logs being read
            if supervisor not in self._unreadable_logs:
                logger.exception("%s: its log cannot be read", supervisor.spec.name)
            self._unreadable_logs.add(supervisor)

    def _fail(self, error: StartupFailed) -> None:
        """Fail the start; only the first reason counts."""
        if not self._failure.done():
            self._failure.set_exception(error)


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
        #: Whether the warm process has forked it before: then it will again, once there is one.
        self._was_forked = False
        self._log = log
        self._phases = PhaseFile(log.path.with_suffix(".phase"))
        self._shown = Phase("")
        self._context = context
        self._gate = gate
        self._status: int | None = None
        self._restarts = Restarts(context.config)

    async def run(self) -> None:
        """Run until the supervisor stops. Raises StartupFailed if the start fails by this process."""
        stopping = self._context.stopping
        if self._gate is not None:
            await first_of(stopping.wait(), self._gate.wait())
        while not stopping.is_set():
            how = await self._run_once()
            if stopping.is_set():
                return
            if self._status == NOT_NEEDED:
                self._context.observer.ended(self.spec.name, self.spec.not_needed, None)
                self.is_ready.set()  # for the waiting callers
                return
            in_start = not self._context.all_ready.is_set()
            delay_s = self._restarts.delay_s(was_ready=self.is_ready.is_set(), in_start=in_start)
            if delay_s is None:
                self.read_log()
                self._context.observer.ended(self.spec.name, how, None)
                was_ready = self._restarts.had_become_ready
                raise StartupFailed(self._log.failure_report(self.spec.name, how, was_ready=was_ready))
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
            waiting = asyncio.create_task(self._wait_until_ready(process))
            self._status = await process.wait()
            waiting.cancel()
            await asyncio.wait((waiting,))
            killed = None if waiting.cancelled() else waiting.result()
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
            spec = self.spec
            return ChildProcess.spawn(spec.argv, environ, output, pass_fds=spec.pass_fds, tick_s=spec.tick_s)
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
        argv, passed, tick_s = self.spec.argv[len(INTERPRETER) :], self.spec.pass_fds, self.spec.tick_s
        forking = asyncio.create_task(
            ChildProcess.fork(warm, argv, environ, output, pass_fds=passed, timeout_s=timeout_s, tick_s=tick_s)
        )
        self.is_forking = True
        try:
            await first_of(self._context.stopping.wait(), asyncio.wait([forking]))
            return forking.result() if forking.done() else None
        finally:
            forking.cancel()  # a fork that nobody waits for ends
            self.is_forking = False

    async def _wait_until_ready(self, process: ChildProcess) -> str | None:
        """Wait for the process to become ready. Returns None, or that it took too long: then it is killed."""
        limit_s = self._context.config.start_timeout_s
        try:
            async with asyncio.timeout(limit_s):
                while not await self.spec.ready.passes():  # noqa: ASYNC110 - polls another process
                    await asyncio.sleep(POLL_S)
        except TimeoutError:
            process.kill()
            return f"not ready after {limit_s:g} s"
        except BaseException:  # of the check: the process would never become ready
            process.kill()
            raise
        if not process.ended:
            self.is_ready.set()
            if not self.spec.is_ready_later:
                self._shown = Phase(READY)
                self._context.observer.ready(self.spec.name, process.lifetime_s)
        return None
