"""Supervises processes of other hosts through an orchestrator, together with this host's.

As on one host, the exit of a process that was never ready fails the start; any other is restarted by the orchestrator,
with the same delays. A worker is ready when a gateway of this host lists it as connected, the processes of another host
when its gateways answer there.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Collection, Sequence

from medialane.cluster.ray.remote import RemoteCluster, RemoteSpec, member_name
from medialane.cluster.supervisor import Observer, Restarts, Supervisor
from medialane.config.settings import ClusterConfig
from medialane.runtime.tasks import first_of, gather_or_cancel
from medialane.types.errors import StartupFailed

logger = logging.getLogger(__name__)

_POLL_S = 1.0

#: Returns the names of the workers that the gateways of this host are connected to; none if they do not answer.
Connected = Callable[[], Awaitable[Collection[str]]]


class RemoteSupervisor:
    """Has the interface of `Supervisor`: `start` once, then `stop`. For the main thread's event loop only."""

    def __init__(
        self,
        local: Supervisor,
        cluster: RemoteCluster,
        specs: Sequence[RemoteSpec],
        *,
        config: ClusterConfig,
        observer: Observer,
        connected: Connected,
        poll_s: float = _POLL_S,
    ) -> None:
        self._local = local
        self._cluster = cluster
        self._specs = specs
        self._config = config
        self._observer = observer
        self._connected = connected
        self._poll_s = poll_s
        self._stopping = asyncio.Event()
        self._spawned = asyncio.Event()
        self._all_ready = asyncio.Event()
        self._started_at: dict[str, float] = {}
        self._ready: set[str] = set()
        self._runner: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Start every process and wait until all are ready. Raises StartupFailed if one exits, or is not ready before
        its timeout."""
        for spec in self._specs:
            self._observer.starting(spec.name)
        self._runner = asyncio.create_task(self._run(), name="supervise remote processes")
        await first_of(self._start_all(), asyncio.shield(self._runner))
        self._all_ready.set()

    async def wait(self) -> None:
        """Wait until supervision ends, which it does after `stop`; earlier only because of a bug, which is raised."""
        runner = [] if self._runner is None else [asyncio.shield(self._runner)]
        await first_of(self._local.wait(), *runner)

    async def stop(self) -> None:
        """Stop the gateways, then the workers and the rest. If cancelled, it kills."""
        self._stopping.set()
        try:
            await self._local.stop()
        finally:
            if self._runner is not None:
                self._runner.cancel()  # it may be restarting a worker
                await asyncio.wait((self._runner,))
            await self._cluster.stop()

    def reload(self) -> None:
        """As `Supervisor.reload`, for the processes of this host."""
        self._local.reload()

    def kill(self) -> None:
        """Kill all processes now; `stop` still has to be awaited."""
        self._stopping.set()
        self._local.kill()
        self._cluster.kill()

    async def _run(self) -> None:
        await gather_or_cancel([self._spawn_and_supervise(), self._end_if_lost()])

    async def _end_if_lost(self) -> None:
        raise StartupFailed(await self._cluster.lost())

    async def _spawn_and_supervise(self) -> None:
        await self._cluster.spawn(self._specs, timeout_s=self._config.start_timeout_s, entered=self._observer.entered)
        self._spawned.set()
        await gather_or_cancel([*map(self._supervise, self._specs), self._watch_ready()])

    async def _supervise(self, spec: RemoteSpec) -> None:
        restarts = Restarts(self._config)
        while not self._stopping.is_set():
            self._started_at[spec.name] = time.monotonic()
            await first_of(self._stopping.wait(), self._cluster.watch(spec.name))
            if self._stopping.is_set():
                return
            end = await self._cluster.watch(spec.name)  # it has ended: returns at once
            was_ready = spec.name in self._ready
            self._ready.discard(spec.name)
            delay_s = restarts.delay_s(was_ready=was_ready, in_start=not self._all_ready.is_set())
            self._observer.ended(spec.name, end.how, delay_s)
            if delay_s is None:
                raise StartupFailed(end.report)
            logger.warning("%s", end.report)
            await first_of(self._stopping.wait(), asyncio.sleep(delay_s))
            if not self._stopping.is_set():
                self._observer.starting(spec.name)
                await self._cluster.restart(spec.name)

    async def _watch_ready(self) -> None:
        while not self._stopping.is_set():
            starting = [spec for spec in self._specs if spec.name not in self._ready]
            if starting:
                connected = await self._connected()
                await asyncio.gather(*(self._check_starting(spec, connected) for spec in starting))
            await first_of(self._stopping.wait(), asyncio.sleep(self._poll_s))

    async def _check_starting(self, spec: RemoteSpec, connected: Collection[str]) -> None:
        """Report the phase of a process, or that it is ready."""
        location = await self._cluster.resolve(spec.name)
        if location is None:
            return
        if location.phase is not None:
            self._observer.entered(spec.name, location.phase)
        if location.is_ready if spec.ready_url else member_name(spec, location.host) in connected:
            self._ready.add(spec.name)
            self._observer.ready(spec.name, time.monotonic() - self._started_at[spec.name])

    async def _start_all(self) -> None:
        await self._spawned.wait()
        await gather_or_cancel([self._local.start(), self._wait_all_ready()])

    async def _wait_all_ready(self) -> None:
        try:
            async with asyncio.timeout(self._config.start_timeout_s):
                while len(self._ready) < len(self._specs):  # noqa: ASYNC110 - polled anyway
                    await asyncio.sleep(self._poll_s)
        except TimeoutError:
            missing = ", ".join(spec.name for spec in self._specs if spec.name not in self._ready)
            raise StartupFailed(
                f"{missing}: not ready after {self._config.start_timeout_s:g} s; can its host reach --join-listen?"
            ) from None
