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
from medialane.cluster.guard import Guard
from medialane.cluster.keeper import POLL_S, Household, Keeper, Observer, first_of
from medialane.cluster.part import Part
from medialane.cluster.part_log import PartLog
from medialane.core.errors import StartupFailed

logger = logging.getLogger(__name__)


class Supervisor:
    """Runs parts: `start` once, then `stop`. For the main thread's event loop only.

    Logs are written to the folder `logs`, a file per part.
    """

    def __init__(self, parts: Sequence[Part], *, config: ClusterConfig, logs: Path, observer: Observer) -> None:
        self._failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._house = Household(config, observer, Guard(), asyncio.Event(), asyncio.Event(), self._fail)
        self._keepers: dict[str, Keeper] = {}
        for part in parts:
            gate = self._keepers[part.after].been_ready if part.after is not None else None
            log = PartLog(logs / f"{part.name.replace(' ', '-')}.log", config.max_log_bytes)
            self._keepers[part.name] = Keeper(part, log, self._house, gate)
        self._runner: asyncio.Task[None] | None = None
        self._unread: set[Keeper] = set()

    @property
    def pids(self) -> dict[str, int]:
        """The parts that run now, and the ids of their process groups."""
        return {name: k.process.pid for name, k in self._keepers.items() if k.process is not None}

    async def start(self) -> None:
        """Start every part and wait until all are ready.

        Raises StartupFailed when one ends, or is not ready in time. What runs then, runs until `stop`.
        """
        self._runner = asyncio.create_task(self._run(), name="supervisor")
        everybody = asyncio.create_task(self._everybody_ready(), name="everybody ready")
        try:
            done, _ = await asyncio.wait((everybody, self._failure, self._runner), return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            everybody.cancel()
            await asyncio.wait((everybody,))
        self._house.all_ready.set()

    async def wait(self) -> None:
        """Wait until supervision ends, which it does after `stop`; earlier only by a fault of ours, which is raised."""
        if self._runner is not None:
            await asyncio.shield(self._runner)

    async def stop(self) -> None:
        """Stop every part, those of higher layers first, each within its time. Cancelled, it kills."""
        self._house.stopping.set()
        try:
            for layer in sorted({k.part.layer for k in self._keepers.values()}, reverse=True):
                await asyncio.gather(*(k.stop() for k in self._keepers.values() if k.part.layer == layer))
            if self._runner is not None:
                await self._runner
        finally:
            self.kill()
            self._house.guard.close()
            if not self._failure.cancel() and not self._failure.cancelled():
                self._failure.exception()  # seen: whoever stops may have learnt of it in another way

    def kill(self) -> None:
        """Kill everything now; `stop` still has to be awaited."""
        self._house.stopping.set()
        for keeper in self._keepers.values():
            if keeper.process is not None:
                keeper.process.kill()

    async def _run(self) -> None:
        reading = asyncio.create_task(self._read_logs(), name="log reader")
        try:
            async with asyncio.TaskGroup() as tasks:
                for name, keeper in self._keepers.items():
                    tasks.create_task(self._keep(keeper), name=f"keeper of {name}")
        finally:
            reading.cancel()
            await asyncio.wait((reading,))

    async def _keep(self, keeper: Keeper) -> None:
        """Let the keeper do its work, whatever it raises: then its part has ended, and begins again."""
        house = self._house
        while not house.stopping.is_set():
            try:
                await keeper.run()
            except Exception as error:  # the supervisor of keepers: the other parts must not end with this one
                logger.exception("%s: its supervision failed", keeper.part.name)
                if not house.all_ready.is_set():
                    house.fail(StartupFailed(f"{keeper.part.name} cannot be supervised: {error!r}"))
                    return
                await first_of(house.stopping.wait(), asyncio.sleep(house.config.restart_max_s))
            else:
                return

    async def _everybody_ready(self) -> None:
        for keeper in self._keepers.values():
            await keeper.been_ready.wait()

    async def _read_logs(self) -> None:
        while True:
            for keeper in self._keepers.values():
                self._read_log(keeper)
            await asyncio.sleep(POLL_S)

    def _read_log(self, keeper: Keeper) -> None:
        """A log that cannot be read or shown ends nothing; it is said once."""
        try:
            keeper.read_log()
        except Exception:  # a supervisor of its own: parts go on without anybody reading their logs
            if keeper not in self._unread:
                logger.exception("%s: its log cannot be read", keeper.part.name)
            self._unread.add(keeper)

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
