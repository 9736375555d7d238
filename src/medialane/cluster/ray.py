"""Processes placed by Ray: one actor per process, which only supervises it. The only module that imports ray.

Ray starts an actor again when its process or its node is lost (`max_restarts=-1`), and when a run has ended and
`restart` asks for it. The resources of all actors are reserved together, by a placement group that spreads them over
the nodes; actors and group end with the driver, this process.
"""

from __future__ import annotations

import asyncio
import logging
import os
import uuid
from collections.abc import Sequence
from typing import Any

import ray
from ray.exceptions import ActorDiedError, RayActorError
from ray.util import get_node_ip_address
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from medialane.cluster.remote import Location, RemoteProcess, RemoteSpec, RunEnd
from medialane.core.errors import StartupFailed

logger = logging.getLogger(__name__)

NAMESPACE = "medialane"
#: Time after which missing resources are reported; a cluster that grows on demand may still provide them.
_REPORT_S = 5.0
_POLL_S = 0.2
#: Besides a process's own timeout: for the call to its actor.
_CALL_S = 5.0


class SupervisingActor:
    """Runs one process on the actor's node. Asynchronous: it answers, and can be stopped, while the process runs."""

    def __init__(self, spec: RemoteSpec) -> None:
        self._process = RemoteProcess(spec, node_id=ray.get_runtime_context().get_node_id())
        self._running: asyncio.Task[RunEnd] | None = None
        self._incarnation = uuid.uuid4().hex

    async def incarnation(self) -> str:
        """Return what differs each time that Ray starts this actor."""
        return self._incarnation

    async def run(self) -> RunEnd:
        """Run the process until it ends. If it is running, because the driver lost the connection only, wait for it."""
        if self._running is None:
            self._running = asyncio.create_task(self._process.run())
        return await asyncio.shield(self._running)

    async def location(self) -> Location | None:
        return self._process.location

    async def stop(self) -> None:
        await self._process.stop()


class RayCluster:
    """The cluster at `address`: a node's `HOST:PORT`, or `ray://...` is refused. Without one, that of RAY_ADDRESS or of
    this host, else a new one of this host alone. Raises StartupFailed."""

    def __init__(self, address: str = "", **init: Any) -> None:
        if address.startswith("ray://"):
            raise StartupFailed("--address ray://...: gateways need a node of the cluster here: HOST:PORT, or auto")
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        self._is_own = not ray.is_initialized()  # otherwise of the embedding program
        try:
            if self._is_own:
                ray.init(address or None, namespace=NAMESPACE, log_to_driver=False, include_dashboard=False, **init)
        except (ConnectionError, RuntimeError, ValueError, OSError) as error:
            first_line = str(error).strip().partition("\n")[0]
            raise StartupFailed(f"cannot connect to Ray{f' at {address}' if address else ''}: {first_line}") from error
        self._actors: dict[str, Any] = {}
        self._runs: dict[str, asyncio.Future[RunEnd]] = {}
        self._specs: dict[str, RemoteSpec] = {}
        self._group: PlacementGroup | None = None

    @property
    def node_id(self) -> str:
        """The node of this process."""
        return str(ray.get_runtime_context().get_node_id())

    @property
    def node_address(self) -> str:
        """IP address of this node."""
        return str(get_node_ip_address())

    @property
    def num_nodes(self) -> int:
        return sum(bool(node["Alive"]) for node in ray.nodes())

    @property
    def has_gpus(self) -> bool:
        return bool(ray.cluster_resources().get("GPU"))

    async def spawn(self, specs: Sequence[RemoteSpec], *, timeout_s: float) -> None:
        self._specs = {spec.name: spec for spec in specs}
        self._group = placement_group([_resources(spec) for spec in specs], strategy="SPREAD")
        await self._reserved(self._group, specs, timeout_s)
        for name in self._specs:
            self._start(name)

    async def resolve(self, name: str) -> Location | None:
        try:
            found: Location | None = await asyncio.wait_for(self._actors[name].location.remote(), _CALL_S)
        except (RayActorError, TimeoutError):
            return None
        return found

    async def watch(self, name: str) -> RunEnd:
        try:
            return await asyncio.shield(self._runs[name])
        except RayActorError as error:
            how = "Ray's actor or node is lost"
            return RunEnd(how, f"{name}: {how}: {str(error).strip().partition(chr(10))[0]}")

    async def restart(self, name: str) -> None:
        ended, actor = self._runs[name], self._actors[name]
        previous = None
        if ended.exception() is None:  # the process has ended: Ray starts its actor again
            previous = await self._incarnation(name)
            ray.kill(actor, no_restart=False)
        while name in self._actors and await self._incarnation(name) in {None, previous}:  # noqa: ASYNC110 - Ray's
            await asyncio.sleep(_POLL_S)
        self._start(name)

    async def stop(self) -> None:
        try:
            await asyncio.gather(*(self._stop(name, actor) for name, actor in self._actors.items()))
        finally:
            self.kill()
            if self._group is not None:
                remove_placement_group(self._group)
            for run in self._runs.values():
                run.cancel()
            await asyncio.gather(*self._runs.values(), return_exceptions=True)
            self._actors, self._runs, self._group = {}, {}, None

    def kill(self) -> None:
        for actor in self._actors.values():
            ray.kill(actor)

    def close(self) -> None:
        """Leave the cluster, and end it if it was started here. Idempotent."""
        if self._is_own:
            ray.shutdown()

    async def _stop(self, name: str, actor: Any) -> None:
        try:
            await asyncio.wait_for(actor.stop.remote(), self._specs[name].stop_timeout_s + _CALL_S)
        except (RayActorError, TimeoutError) as error:
            logger.warning("%s: Ray's actor does not stop it, and is killed: %r", name, error)

    async def _incarnation(self, name: str) -> str | None:
        """Return the incarnation of an actor; None while Ray starts it. One that Ray does not start is forgotten."""
        try:
            return str(await self._actors[name].incarnation.remote())
        except ActorDiedError:
            del self._actors[name]
        except RayActorError:
            pass  # asked again
        return None

    def _start(self, name: str) -> None:
        spec = self._specs[name]
        if name not in self._actors:
            bundle = list(self._specs).index(name)
            options = {
                "max_restarts": -1,
                "max_task_retries": 0,
                "num_cpus": spec.num_cpus,
                "num_gpus": spec.num_gpus,
                "scheduling_strategy": PlacementGroupSchedulingStrategy(self._group, bundle),
            }
            self._actors[name] = ray.remote(**options)(SupervisingActor).remote(spec)
        self._runs[name] = asyncio.ensure_future(_result(self._actors[name].run.remote()))

    async def _reserved(self, group: PlacementGroup, specs: Sequence[RemoteSpec], timeout_s: float) -> None:
        waiting = asyncio.ensure_future(_result(group.ready()))
        try:
            await asyncio.wait([waiting], timeout=min(_REPORT_S, timeout_s))
            if not waiting.done():
                logger.warning("waiting for Ray's resources: %s", _shortage(specs))
                await asyncio.wait([waiting], timeout=timeout_s)
            if not waiting.done():
                raise StartupFailed(f"Ray has not reserved the resources within {timeout_s:g} s: {_shortage(specs)}")
            waiting.result()
        finally:
            waiting.cancel()


async def _result(reference: Any) -> Any:
    return await reference


def _resources(spec: RemoteSpec) -> dict[str, float]:
    return {kind: amount for kind, amount in (("CPU", spec.num_cpus), ("GPU", spec.num_gpus)) if amount}


def _shortage(specs: Sequence[RemoteSpec]) -> str:
    needs, free = _resources(specs[0]), ray.available_resources()
    each = ", ".join(f"{amount:g} {kind}" for kind, amount in needs.items())
    there = ", ".join(f"{free.get(kind, 0):g} {kind}" for kind in needs)
    return f"{len(specs)} workers of {each} each, free in the cluster: {there}"
