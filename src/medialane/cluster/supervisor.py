"""Keeps the parts of one machine running.

Until all parts have been ready once, the end of any of them is the failure of the start: something that the operator
must see and change. From then on a part that ends is started again after a pause, and the others go on.

Each part has a keeper, one task that starts it, waits until it is ready, waits until it ends, and pauses. `stop` sets
one event and ends the parts layer by layer; every keeper ends after its part. `kill` is for whoever cannot wait.

A keeper that fails itself (an observer, a descriptor, a bug) is logged and started again like a part; the others go on.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from medialane.cluster.config import ClusterConfig
from medialane.cluster.orphan_reaper import OrphanReaper
from medialane.cluster.process_log import ProcessLog
from medialane.cluster.process_spec import ProcessSpec
from medialane.cluster.process_supervisor import POLL_S, Observer, ProcessSupervisor, SupervisorContext, first_of
from medialane.core.errors import StartupFailed

logger = logging.getLogger(__name__)


class Supervisor:
    """Runs parts: `start` once, then `stop`. For the main thread's event loop only.

    Logs are written to the folder `logs`, a file per part.
    """

    def __init__(self, parts: Sequence[ProcessSpec], *, config: ClusterConfig, logs: Path, observer: Observer) -> None:
        self._failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._context = SupervisorContext(
            config, observer, OrphanReaper(), asyncio.Event(), asyncio.Event(), self._fail
        )
        self._process_supervisors: dict[str, ProcessSupervisor] = {}
        for part in parts:
            gate = self._process_supervisors[part.after].was_ready if part.after is not None else None
            log = ProcessLog(logs / f"{part.name.replace(' ', '-')}.log", config.max_log_bytes)
            self._process_supervisors[part.name] = ProcessSupervisor(part, log, self._context, gate)
        self._runner: asyncio.Task[None] | None = None
        self._unreadable_logs: set[ProcessSupervisor] = set()

    @property
    def pids(self) -> dict[str, int]:
        """The parts that run now, and the ids of their process groups."""
        return {name: k.process.pid for name, k in self._process_supervisors.items() if k.process is not None}

    async def start(self) -> None:
        """Start every part and wait until all are ready.

        Raises StartupFailed when one ends, or is not ready in time. What runs then, runs until `stop`.
        """
        self._runner = asyncio.create_task(self._run(), name="supervisor")
        waiting = asyncio.create_task(self._wait_all_ready(), name="everybody ready")
        try:
            done, _ = await asyncio.wait((waiting, self._failure, self._runner), return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            waiting.cancel()
            await asyncio.wait((waiting,))
        self._context.all_ready.set()

    async def wait(self) -> None:
        """Wait until supervision ends, which it does after `stop`; earlier only by a fault of ours, which is raised."""
        if self._runner is not None:
            await asyncio.shield(self._runner)

    async def stop(self) -> None:
        """Stop every part, those of higher layers first, each within its time. Cancelled, it kills."""
        self._context.stopping.set()
        try:
            for layer in sorted({k.part.layer for k in self._process_supervisors.values()}, reverse=True):
                await asyncio.gather(*(k.stop() for k in self._process_supervisors.values() if k.part.layer == layer))
            if self._runner is not None:
                await self._runner
        finally:
            self.kill()
            self._context.orphan_reaper.close()
            if not self._failure.cancel() and not self._failure.cancelled():
                self._failure.exception()  # seen: whoever stops may have learnt of it in another way

    def kill(self) -> None:
        """Kill everything now; `stop` still has to be awaited."""
        self._context.stopping.set()
        for process_supervisor in self._process_supervisors.values():
            if process_supervisor.process is not None:
                process_supervisor.process.kill()

    async def _run(self) -> None:
        reading = asyncio.create_task(self._read_logs(), name="log reader")
        try:
            async with asyncio.TaskGroup() as tasks:
                for name, process_supervisor in self._process_supervisors.items():
                    tasks.create_task(self._supervise(process_supervisor), name=f"keeper of {name}")
        finally:
            reading.cancel()
            await asyncio.wait((reading,))

    async def _supervise(self, process_supervisor: ProcessSupervisor) -> None:
        """Let the keeper do its work, whatever it raises: then its part has ended, and begins again."""
        house = self._context
        while not house.stopping.is_set():
            try:
                await process_supervisor.run()
            except Exception as error:  # the supervisor of keepers: the other parts must not end with this one
                logger.exception("%s: supervision failed", process_supervisor.part.name)
                if not house.all_ready.is_set():
                    house.fail(StartupFailed(f"{process_supervisor.part.name} cannot be supervised: {error!r}"))
                    return
                await first_of(house.stopping.wait(), asyncio.sleep(house.config.restart_max_s))
            else:
                return

    async def _wait_all_ready(self) -> None:
        for process_supervisor in self._process_supervisors.values():
            await process_supervisor.was_ready.wait()

    async def _read_logs(self) -> None:
        while True:
            for process_supervisor in self._process_supervisors.values():
                self._read_log(process_supervisor)
            await asyncio.sleep(POLL_S)

    def _read_log(self, process_supervisor: ProcessSupervisor) -> None:
        """A log that cannot be read or shown ends nothing; it is said once."""
        try:
            process_supervisor.read_log()
        except Exception:  # a supervisor of its own: parts go on without anybody reading their logs
            if process_supervisor not in self._unreadable_logs:
                logger.exception("%s: its log cannot be read", process_supervisor.part.name)
            self._unreadable_logs.add(process_supervisor)

    def _fail(self, error: StartupFailed) -> None:
        """The first reason is the one that counts."""
        if not self._failure.done():
            self._failure.set_exception(error)


@asynccontextmanager
async def running(supervisor: Supervisor) -> AsyncIterator[Supervisor]:
    """The supervisor's parts, ready inside the block and gone after it. Raises StartupFailed."""
    try:
        await supervisor.start()
        yield supervisor
    finally:
        await supervisor.stop()
