"""Supervises the processes of one host.

Until all processes are ready, the exit of one that has never been fails the start: the operator must see and fix the
cause. A process that had been ready is restarted (`RestartDelay`), and the others continue; during the start this is
bounded. From then on, every process that exits is restarted.

Each process has a `ProcessSupervisor`, one task that starts it, waits until it is ready, waits until it exits, and
backs off. `stop` sets one event and stops the processes layer by layer; every task ends after its process. `kill` is
for callers that cannot wait.

A process supervisor that itself fails (an observer, a descriptor, a bug) is logged and restarted; the others continue.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from medialane.cluster.orphan_reaper import OrphanReaper
from medialane.cluster.process_log import ProcessLog
from medialane.cluster.process_spec import ProcessSpec
from medialane.cluster.process_supervisor import POLL_S, Observer, ProcessSupervisor, SupervisorContext
from medialane.config.cluster import ClusterConfig
from medialane.runtime.linux import reap_orphans, set_subreaper
from medialane.runtime.phase import ExitCounts
from medialane.runtime.tasks import first_of
from medialane.types.errors import StartupFailed

logger = logging.getLogger(__name__)


class Supervisor:
    """Runs processes: `start` once, then `stop`. For the main thread's event loop only.

    Logs are written to the folder `logs`, one file per process.
    """

    def __init__(self, specs: Sequence[ProcessSpec], *, config: ClusterConfig, logs: Path, observer: Observer) -> None:
        self._failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._context = SupervisorContext(
            config,
            observer,
            OrphanReaper(),
            ExitCounts(logs),
            asyncio.Event(),
            asyncio.Event(),
            self._fail,
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
        """Stop every process, those of higher layers first, each within its timeout. If cancelled, it kills."""
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
        """Run a process supervisor; if it raises, its process has ended, and both are restarted."""
        context = self._context
        while not context.stopping.is_set():
            try:
                await supervisor.run()
            except Exception as error:  # top-level handler: the other processes must not end with this one
                logger.exception("%s: supervision failed", supervisor.spec.name)
                if not context.all_ready.is_set():
                    context.fail(StartupFailed(f"{supervisor.spec.name} cannot be supervised: {error!r}"))
                    return
                await first_of(context.stopping.wait(), asyncio.sleep(context.config.restart_max_s))
            else:
                return

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


@asynccontextmanager
async def running(supervisor: Supervisor) -> AsyncIterator[Supervisor]:
    """Run the supervisor's processes: ready inside the block, stopped after it. Raises StartupFailed."""
    try:
        await supervisor.start()
        yield supervisor
    finally:
        await supervisor.stop()
