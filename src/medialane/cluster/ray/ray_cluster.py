"""Processes placed by Ray: one actor per process, which only supervises it. The only module that imports ray.

Ray starts an actor again when its process or its node is lost (`max_restarts=-1`), and when a run has ended and
`restart` asks for it. The resources of all workers are reserved together, by a placement group that spreads them over
the nodes. A process of a given node is bound to it by the resource `node:ADDRESS` that Ray gives each node, so it comes
back with the node. Actors and group end with the driver, this process.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from types import ModuleType
from typing import Any, NamedTuple, TypeVar

import msgspec
import ray
from ray.exceptions import ActorDiedError, RayError
from ray.job_config import JobConfig
from ray.util import get_node_ip_address
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from medialane import __version__
from medialane.cluster.ray.remote import Location, RemoteProcess, RemoteSpec, RunEnd
from medialane.runtime.phase import Phase
from medialane.types.errors import StartupFailed

logger = logging.getLogger(__name__)

T = TypeVar("T")

NAMESPACE = "medialane"
_POLL_S = 0.2
_ANSWER_S = 2.0
_HEAD, _RAYLET = "Ray's head (GCS)", "Ray's raylet of this host"
#: Besides a process's own timeout: for the call to its actor.
_CALL_S = 5.0
#: Of a node that is started here: its smallest, as no object goes through Ray, and /dev/shm is for the arena.
_OBJECT_STORE_BYTES = 80 << 20
#: Of the resource `node:ADDRESS`: a node has 1 of it.
_NODE_SHARE = 0.001
_HINT = "if it has a token, RAY_AUTH_MODE=token and RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH must be as on its nodes"
_MAX_SHOWN_NODES = 8
_MAX_SHOWN_CHARACTERS = 400


class RayTimes(NamedTuple):
    """How often it is checked that Ray's services listen, and how long they may be away, for a restart of the head:
    longer, and Ray ends this process without a word (gcs_rpc_server_reconnect_timeout_s, 60 s). When missing resources
    are reported, and the interval of further reports; a cluster that grows on demand may still provide them."""

    check_s: float = 2.0
    lost_s: float = 30.0
    report_s: float = 5.0
    report_again_s: float = 30.0
    connect_s: float = 5.0


_TIMES = RayTimes()


class SupervisingActor:
    """Runs one process on the actor's node. Asynchronous: it answers, and can be stopped, while the process runs.

    `spec` is a RemoteSpec as JSON, which is not decoded by another `version` of medialane.
    """

    def __init__(self, version: str, spec: bytes) -> None:
        self._node = str(get_node_ip_address())
        self._refusal = _other_version(version, self._node)
        if self._refusal is None:
            self._process = RemoteProcess(msgspec.json.decode(spec, type=RemoteSpec), node=self._node)
        self._running: asyncio.Task[RunEnd] | None = None
        self._incarnation = uuid.uuid4().hex

    async def incarnation(self) -> str:
        """Return what differs each time that Ray starts this actor."""
        return self._incarnation

    async def run(self) -> RunEnd:
        """Run the process until it ends. If it is running, because the driver lost the connection only, wait for it."""
        if self._refusal is not None:
            return self._refusal
        if self._running is None:
            self._running = asyncio.create_task(self._process.run())
        return await asyncio.shield(self._running)

    async def location(self) -> Location | None:
        return self._process.location if self._refusal is None else None

    async def stop(self) -> None:
        """Stop the process, and return when `run` has removed what was the process's."""
        if self._refusal is None:
            await self._process.stop()
        if self._running is not None:
            await asyncio.wait([self._running])


def _other_version(version: str, node: str) -> RunEnd | None:
    if version == __version__:
        return None
    return RunEnd(
        "cannot be started", f"medialane {__version__} is installed on {node}, {version} here: install the same"
    )


class RayCluster:
    """The cluster at `address`: a node's `HOST:PORT`, or `ray://...` is refused. Without one, the cluster of
    RAY_ADDRESS or of this host, otherwise a new one of this host alone. `api` is Ray, or its fake. Raises
    StartupFailed."""

    def __init__(self, address: str = "", *, api: ModuleType = ray, times: RayTimes = _TIMES) -> None:
        if address.startswith("ray://"):
            raise StartupFailed("--address ray://...: gateways need a node of the cluster here: HOST:PORT, or auto")
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        self._ray, self._times = api, times
        self._is_own = not api.is_initialized()  # otherwise of the embedding program
        if self._is_own:
            _connect(address, api, times.connect_s)
        self._actors: dict[str, Any] = {}
        self._runs: dict[str, asyncio.Future[RunEnd]] = {}
        self._specs: dict[str, RemoteSpec] = {}
        self._group: PlacementGroup | None = None

    @cached_property
    def _services(self) -> dict[str, tuple[str, int]]:
        """Where Ray's services listen that this process depends on."""
        context = self._ray.get_runtime_context()
        host, _, port = context.gcs_address.rpartition(":")
        own = next(node for node in self._ray.nodes() if node["NodeID"] == context.get_node_id())
        return {_HEAD: (host.strip("[]"), int(port)), _RAYLET: (own["NodeManagerAddress"], own["NodeManagerPort"])}

    @property
    def node(self) -> str:
        """Address of the node of this process."""
        return str(get_node_ip_address())

    @property
    def nodes(self) -> list[str]:
        """Addresses of all nodes that are alive, this process's first."""
        alive = {str(node["NodeManagerAddress"]) for node in self._ray.nodes() if node["Alive"]}
        return [self.node, *sorted(alive - {self.node})]

    @property
    def has_gpus(self) -> bool:
        return bool(self._ray.cluster_resources().get("GPU"))

    async def spawn(
        self, specs: Sequence[RemoteSpec], *, timeout_s: float, entered: Callable[[str, Phase], None] = lambda *_: None
    ) -> None:
        self._specs = {spec.name: spec for spec in specs}
        workers = self._workers
        if workers:
            phase = Phase("waiting for Ray's resources", remedy=await self._shortage(workers))
            for spec in workers:
                entered(spec.name, phase)
            self._group = self._ray.util.placement_group([_resources(spec) for spec in workers], strategy="SPREAD")
            await self._reserved(self._group, timeout_s)
        for name in self._specs:
            entered(name, Phase("waiting for Ray to start its actor"))
            self._start(name)

    async def lost(self) -> str:
        missing_since = None
        while True:
            missing = await self._missing()
            now = time.monotonic()
            if missing and missing_since is None:
                missing_since = now
                logger.error("%s: waiting %g s for it to come back", _gone(missing), self._times.lost_s)
            elif missing and missing_since is not None and now - missing_since >= self._times.lost_s:
                # Calls about them would block, and then end this process. Actors end with their driver or raylet.
                self._actors, self._group = {}, None
                return f"{_gone(missing)}: restart Ray on this host (`ray status`), then medialane"
            elif not missing and missing_since is not None:
                missing_since = None
                logger.warning("Ray answers again")
            await asyncio.sleep(self._times.check_s)

    async def resolve(self, name: str) -> Location | None:
        if name not in self._actors:
            return None  # Ray has given it up, and a new one is about to be started
        try:
            location: Location | None = await asyncio.wait_for(self._actors[name].location.remote(), _CALL_S)
        except (RayError, TimeoutError):
            return None
        return location

    async def watch(self, name: str) -> RunEnd:
        try:
            return await asyncio.shield(self._runs[name])
        except RayError as error:
            how = "Ray's actor or node is lost"
            return RunEnd(how, f"{name}: {how}: {_brief(error)}")

    async def _missing(self) -> list[str]:
        """Return Ray's services that do not listen."""
        return [name for name, address in self._services.items() if not await _listens(address)]

    async def restart(self, name: str) -> None:
        restarted = asyncio.ensure_future(self._restarted(name))
        try:
            await self._reported(restarted, f"{name}: waiting for Ray to start its actor again", [self._specs[name]])
        finally:
            restarted.cancel()
        self._start(name)

    async def stop(self) -> None:
        try:
            for layer in sorted({spec.layer for spec in self._specs.values()}, reverse=True):
                of_layer = [name for name in self._actors if self._specs[name].layer == layer]
                await asyncio.gather(*(self._stop(name, self._actors[name]) for name in of_layer))
        finally:
            self.kill()
            if self._group is not None:
                self._ray.util.remove_placement_group(self._group)
            for run in self._runs.values():
                run.cancel()
            await asyncio.gather(*self._runs.values(), return_exceptions=True)
            self._actors, self._runs, self._group = {}, {}, None

    def kill(self) -> None:
        for actor in self._actors.values():
            self._ray.kill(actor)

    def close(self) -> None:
        """Leave the cluster, and end it if it was started here. Idempotent."""
        if self._is_own:
            self._ray.shutdown()

    async def _stop(self, name: str, actor: Any) -> None:
        try:
            await asyncio.wait_for(actor.stop.remote(), self._specs[name].stop_timeout_s + _CALL_S)
        except (RayError, TimeoutError) as error:
            logger.warning("%s: Ray's actor does not stop it, and is killed: %r", name, error)

    async def _restarted(self, name: str) -> None:
        """Have Ray start an actor again, unless it does that anyway. Returns when it has, or will not."""
        previous = None
        if self._runs[name].exception() is None:  # the process has ended, its actor has not
            previous = await self._incarnation(name)
            if name in self._actors:
                self._ray.kill(self._actors[name], no_restart=False)
        while name in self._actors and await self._incarnation(name) in {None, previous}:  # noqa: ASYNC110 - Ray's
            await asyncio.sleep(_POLL_S)

    async def _incarnation(self, name: str) -> str | None:
        """Return the incarnation of an actor; None while Ray starts it. One that Ray does not start is forgotten."""
        try:
            return str(await self._actors[name].incarnation.remote())
        except ActorDiedError:
            del self._actors[name]
        except RayError:
            pass  # asked again
        return None

    @property
    def _workers(self) -> list[RemoteSpec]:
        return [spec for spec in self._specs.values() if not spec.node]

    def _start(self, name: str) -> None:
        if name not in self._actors:
            options = {"max_restarts": -1, "max_task_retries": 0, **self._placement(self._specs[name])}
            encoded = msgspec.json.encode(self._specs[name])
            self._actors[name] = self._ray.remote(**options)(SupervisingActor).remote(__version__, encoded)
        self._runs[name] = asyncio.ensure_future(_result(self._actors[name].run.remote()))

    def _placement(self, spec: RemoteSpec) -> dict[str, object]:
        if spec.node:
            return {"num_cpus": 0, "resources": {f"node:{spec.node}": _NODE_SHARE}}
        bundle = self._workers.index(spec)
        strategy = PlacementGroupSchedulingStrategy(self._group, bundle)
        return {"num_cpus": spec.num_cpus, "num_gpus": spec.num_gpus, "scheduling_strategy": strategy}

    async def _shortage(self, specs: Sequence[RemoteSpec]) -> str:
        """Describe what processes need, and the nodes. Without Ray's head, which is asked, Ray would not return."""
        if specs[0].node:
            return f"it needs node {specs[0].node}"
        if not await _listens(self._services[_HEAD]):
            return _gone([_HEAD])
        return shortage(specs, self._ray.nodes(), self._ray.available_resources())

    async def _reserved(self, group: PlacementGroup, timeout_s: float) -> None:
        waiting = asyncio.ensure_future(_result(group.ready()))
        try:
            async with asyncio.timeout(timeout_s):
                await self._reported(waiting, "waiting for Ray's resources", self._workers)
        except TimeoutError:
            what = await self._shortage(self._workers)
            raise StartupFailed(f"Ray has not reserved the resources within {timeout_s:g} s: {what}") from None
        except RayError as error:  # it takes this node or this process for dead
            gone = await self._missing()
            raise StartupFailed(
                f"Ray has given up the reservation: {_gone(gone) if gone else _brief(error)}"
            ) from error
        finally:
            waiting.cancel()

    async def _reported(self, waiting: asyncio.Future[T], what: str, specs: Sequence[RemoteSpec]) -> T:
        """Wait, and log `what` is waited for, and what `specs` need, if that takes long, again and again."""
        delay_s = self._times.report_s
        while not (await asyncio.wait([waiting], timeout=delay_s))[0]:
            logger.warning("%s: %s", what, await self._shortage(specs))
            delay_s = self._times.report_again_s
        return waiting.result()


def _connect(address: str, api: ModuleType, timeout_s: float) -> None:
    address = address or os.environ.get("RAY_ADDRESS", "")
    _check_reachable(address, timeout_s)
    settings: dict[str, Any] = {"namespace": NAMESPACE, "log_to_driver": False, "include_dashboard": False}
    # Of a client's job; for others Ray's workers import from the driver's working directory first.
    settings["job_config"] = JobConfig(_client_job=True)
    try:
        try:
            api.init(address or "auto", **settings)
        except ConnectionError:
            if address:
                raise
            api.init("local", object_store_memory=_OBJECT_STORE_BYTES, **settings)
    except (ConnectionError, RuntimeError, ValueError, OSError) as error:
        hint = f"; {_HINT}" if isinstance(error, ConnectionError) or "AuthToken" in str(error) else ""
        where = f" at {address}" if address else ""
        raise StartupFailed(f"cannot connect to Ray{where}: {_brief(error)}{hint}") from error


def _check_reachable(address: str, timeout_s: float) -> None:
    """Raise StartupFailed if no process listens at HOST:PORT: Ray would try for a minute, and then abort."""
    host, colon, port = address.rpartition(":")
    if not colon or not port.isdigit():
        return  # auto, local: Ray's own words
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout_s).close()
    except (OSError, OverflowError) as error:
        why = "no answer" if isinstance(error, TimeoutError) else getattr(error, "strerror", None) or str(error)
        raise StartupFailed(
            f"cannot connect to Ray at {address}: {why}; --address is the head node's (ray start --head --port)"
        ) from error


async def _listens(address: tuple[str, int]) -> bool:
    try:
        async with asyncio.timeout(_ANSWER_S):
            _, writer = await asyncio.open_connection(*address)
    except (OSError, TimeoutError):
        return False
    writer.close()
    return True


def _gone(missing: Sequence[str]) -> str:
    return f"{' and '.join(missing)} {'does' if len(missing) == 1 else 'do'} not answer"


async def _result(reference: Any) -> Any:
    return await reference


def _resources(spec: RemoteSpec) -> dict[str, float]:
    return {kind: amount for kind, amount in (("CPU", spec.num_cpus), ("GPU", spec.num_gpus)) if amount}


def shortage(specs: Sequence[RemoteSpec], nodes: Sequence[Mapping[str, Any]], free: Mapping[str, float]) -> str:
    """Describe what workers need, what is `free` in the cluster, and what its `nodes` (`ray.nodes()`) have at all."""
    needs = _resources(specs[0])
    alive = [node for node in nodes if node["Alive"]]
    fitting = sum(_num_fitting(needs, node["Resources"]) for node in alive)
    shown = [f"{node['NodeManagerAddress']} has {_amounts(needs, node['Resources'])}" for node in alive]
    more = [f"and {len(shown) - _MAX_SHOWN_NODES} more nodes"] if len(shown) > _MAX_SHOWN_NODES else []
    return (
        f"{len(specs)} workers of {_amounts(needs, needs)} each, free in the cluster: {_amounts(needs, free)}; "
        f"its nodes can hold {fitting} of them if nothing else runs ({', '.join(shown[:_MAX_SHOWN_NODES] + more)})"
    )


def _num_fitting(needs: Mapping[str, float], resources: Mapping[str, float]) -> int:
    return min(int(resources.get(kind, 0) / amount) for kind, amount in needs.items())


def _amounts(kinds: Iterable[str], resources: Mapping[str, float]) -> str:
    return ", ".join(f"{resources.get(kind, 0):g} {kind}" for kind in kinds)


def _brief(error: BaseException) -> str:
    """Return an error of Ray in one line: its first, and its last, where an exception in an actor has its reason."""
    lines = [line.strip() for line in str(error).strip().splitlines() if line.strip()]
    if any("ersion mismatch" in line for line in lines):
        return " ".join(lines)[:_MAX_SHOWN_CHARACTERS]
    return "; ".join(dict.fromkeys([*lines[:1], *lines[-1:]]))[:_MAX_SHOWN_CHARACTERS]
