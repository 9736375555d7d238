"""Processes on other hosts, placed and restarted by an orchestrator: the interface to it, what runs on the hosts, and
how these processes find each other; and their supervision from this host (`RemoteSupervisor`).

Theory of operation. The orchestrator runs one small supervising process per `RemoteSpec` on a host of its choice
(`ray_cluster`: an actor). That process runs a `RemoteProcess`: the child is an ordinary `medialane worker` in
a process group of its own, so an engine never lives inside the orchestrator's process. When the child exits, its run
ends, and the orchestrator restarts the supervising process, possibly on another host: that is a new incarnation of the
worker.

Only starts, restarts and stops go through the orchestrator. Workers join the gateways over their own connections, whose
heartbeats detect a loss within a second; requests and media never touch the orchestrator.

With `--gateway-nodes head`, gateways and their store run on this host, and the first worker of any other host starts a
store there, which copies from ours. With `each`, every node runs `medialane serve` without workers, and the workers
join the gateways of all nodes. A host's store is shared by its processes: its socket is in a folder whose name all of
them know, and which the last of them removes.

The RPC secret is not passed to other hosts at all: it must be in the environment there, or in a file.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import time
import uuid
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import NamedTuple, Protocol

import msgspec

from medialane.cluster.child_process import INTERPRETER, ChildProcess, HttpAnswers, LogFolder, ProcessLog
from medialane.cluster.local import base_url, own_flags, parent_directory, role_flags
from medialane.cluster.orphan_reaper import OrphanReaper
from medialane.cluster.placement import Engines, find_hardware, installed_version, place_engines, vllm_is_for_cpu
from medialane.cluster.supervisor import Observer, Restarts, Supervisor
from medialane.cluster.vllm_flags import engine_flags, gpus_per_worker
from medialane.config import Config, host_environ, settings_environ, worker_environ
from medialane.config.settings import ClusterConfig
from medialane.runtime.phase import Phase, PhaseFile
from medialane.runtime.private_files import SharedFolder, reap_folders
from medialane.runtime.tasks import first_of, gather_or_cancel
from medialane.types.errors import StartupFailed
from medialane.wire.address import TcpAddress, format_tcp, parse_tcp
from medialane.wire.security import is_loopback

logger = logging.getLogger(__name__)

_LOGS_PREFIX = "medialane-remote-"
#: Of the folders that processes of one host share.
SHARED_PREFIX = "medialane-node-"
#: The log file is bounded by reading it.
_READ_LOG_S = 1.0
_POLL_S = 1.0

#: Returns the names of the workers that the gateways of this host are connected to; none if they do not answer.
Connected = Callable[[], Awaitable[Collection[str]]]


class RemoteSpec(msgspec.Struct, frozen=True, kw_only=True):
    """A process to keep running on some host: `medialane COMMAND... [-- VLLM_ARGS...]`.

    With a `node`, the address of a host, it runs only there: the gateways and the store of that host. Any other is a
    worker, for which `num_gpus` and `num_cpus` are reserved on one host; it joins gateways as `joins_as`, with `{host}`
    replaced by the host's name. Processes with a `ready_url` are ready when that returns 200. Processes of a higher
    `layer` are stopped first.

    `node_flags` are further flags by the host's address, `""` for hosts that are not named. In these and in `command`,
    `{folder}` is replaced by the path of the folder `SHARED_PREFIX + shared_folder` of the host. `environ` are our
    settings, without secrets; other variables are the host's.
    """

    name: str
    command: tuple[str, ...]
    joins_as: str = ""
    ready_url: str = ""
    vllm_args: tuple[str, ...] = ()
    environ: Mapping[str, str] = {}
    node: str = ""
    node_flags: Mapping[str, tuple[str, ...]] = {}
    shared_folder: str = ""
    num_cpus: float = 1.0
    num_gpus: float = 0.0
    layer: int = 0
    stop_timeout_s: float = 10.0
    log_dir: str = ""
    max_log_bytes: int = 16 << 20


class Location(msgspec.Struct, frozen=True):
    """Where a process runs; `node` is the host's address. `incarnation` is different in each run, `is_ready` is for
    processes with a `ready_url`; `phase` is what it does until it is ready."""

    host: str
    node: str
    pid: int
    incarnation: str
    is_ready: bool = False
    phase: Phase | None = None


class RunEnd(msgspec.Struct, frozen=True):
    """How a run ended; `report` has the cause, and the end of the log, for the operator."""

    how: str
    report: str


class RemoteCluster(Protocol):
    """An orchestrator. For one event loop."""

    async def spawn(
        self, specs: Sequence[RemoteSpec], *, timeout_s: float, entered: Callable[[str, Phase], None]
    ) -> None:
        """Reserve the resources of all processes, then start them. `entered` gets the phase of a process that does not
        run yet, by its name. Raises StartupFailed."""
        ...

    async def lost(self) -> str:
        """Return why the orchestrator cannot be used any more, once that has lasted too long; log it at once."""
        ...

    async def resolve(self, name: str) -> Location | None:
        """Return where a process runs now; None while it does not."""
        ...

    async def watch(self, name: str) -> RunEnd:
        """Wait until the current run of a process ends."""
        ...

    async def restart(self, name: str) -> None:
        """Start a new run after one has ended, possibly on another host."""
        ...

    async def stop(self) -> None:
        """Stop all processes, each within its timeout, and release the resources. Idempotent."""
        ...

    def kill(self) -> None:
        """Kill all processes now; `stop` still has to be awaited."""
        ...


def remote_environ(spec: RemoteSpec, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the whole environment of a process on a host whose own environment is `environ`.

    Raises StartupFailed if the reserved GPUs, in CUDA_VISIBLE_DEVICES, do not suffice.
    """
    if spec.node:
        return {**host_environ(environ), **spec.environ}
    inherited = worker_environ(environ, spec.environ)
    if not spec.num_gpus:
        inherited["CUDA_VISIBLE_DEVICES"] = ""  # none is reserved: others may use the host's
    hardware = find_hardware(inherited)
    if spec.num_gpus and not hardware.gpus:
        why = "vLLM's build is for CPUs" if vllm_is_for_cpu() else "CUDA_VISIBLE_DEVICES is empty"
        raise StartupFailed(f"{spec.num_gpus:g} GPU reserved on {socket.gethostname()}, but {why} there")
    (placement,) = place_engines(hardware, spec.vllm_args, Engines(1), single_gpu=False, environ=inherited)
    return {**inherited, **placement.environ, **spec.environ}


def member_name(spec: RemoteSpec, host: str) -> str:
    """Return the name under which the worker joins gateways from a host."""
    return spec.joins_as.replace("{host}", host)


def shared_path(spec: RemoteSpec) -> Path:
    """Return the path on this host of the folder that a spec shares with others."""
    return parent_directory(os.environ) / (SHARED_PREFIX + spec.shared_folder)


def remote_argv(spec: RemoteSpec, node: str) -> list[str]:
    """Return the command line on this host, whose address is `node`."""
    words = [*spec.command, *spec.node_flags.get(node, spec.node_flags.get("", ()))]
    if spec.joins_as:
        words += ["--worker-name", member_name(spec, socket.gethostname())]
    if spec.shared_folder:
        folder = str(shared_path(spec))
        words = [word.replace("{folder}", folder) for word in words]
    return [*INTERPRETER, *words, *(["--", *spec.vllm_args] if spec.vllm_args else [])]


class RemoteProcess:
    """Runs the process of a spec on this host, whose address is `node`; for one event loop, whose thread must live as
    long as this process."""

    def __init__(self, spec: RemoteSpec, *, node: str) -> None:
        self._spec = spec
        self._node = node
        self._child: ChildProcess | None = None
        self._phases: PhaseFile | None = None
        self._incarnation = ""
        self._is_ready = False
        self._stopping = False

    @property
    def location(self) -> Location | None:
        if self._child is None or self._child.ended:
            return None
        phase = self._phases.read() if self._phases is not None else None
        return Location(socket.gethostname(), self._node, self._child.pid, self._incarnation, self._is_ready, phase)

    async def run(self) -> RunEnd:
        """Run the process once, until it has exited and its group is killed. If this process is killed, so is the
        group."""
        spec = self._spec
        with ExitStack() as stack:
            try:
                if spec.shared_folder:
                    reap_folders(parent_directory(os.environ), SHARED_PREFIX)
                    stack.callback(SharedFolder.join(shared_path(spec)).close)
                logs = LogFolder.create(spec.log_dir, _LOGS_PREFIX, shared=True)
            except StartupFailed as error:
                return RunEnd("cannot be started", f"{spec.name}: {error.message}")
            stack.callback(logs.close)
            end = await self._run(ProcessLog(logs.path / f"{spec.name.replace(' ', '-')}.log", spec.max_log_bytes))
            logs.keep = not self._stopping
            return end

    async def _run(self, log: ProcessLog) -> RunEnd:
        name = self._spec.name
        reaper = OrphanReaper()
        try:
            child = self._child = self._spawn(log)
            self._incarnation = uuid.uuid4().hex[:12]
            reaper.watch(child.pid)
            following = asyncio.create_task(self._follow(log), name="log reader")
            try:
                await child.wait()
            finally:
                following.cancel()
                child.kill()
        except StartupFailed as error:
            return RunEnd("cannot be started", f"{name}: {error.message}")
        except OSError as error:
            return RunEnd("cannot be started", f"{name} cannot be started: {error.strerror}")
        finally:
            reaper.close()
        log.read()
        how = child.describe_exit()
        return RunEnd(how, log.failure_report(f"{name} on {socket.gethostname()}", how))

    def _spawn(self, log: ProcessLog) -> ChildProcess:
        self._phases = PhaseFile(log.path.with_suffix(".phase"))
        environ = {**remote_environ(self._spec, os.environ), **self._phases.environ()}
        output = log.open()
        try:
            return ChildProcess.spawn(remote_argv(self._spec, self._node), environ, output)
        finally:
            os.close(output)

    async def stop(self) -> None:
        """Stop the process, within its timeout. Idempotent."""
        self._stopping = True
        if self._child is not None:
            with suppress(ProcessLookupError):
                await self._child.stop(self._spec.stop_timeout_s)

    async def _follow(self, log: ProcessLog) -> None:
        check = HttpAnswers(self._spec.ready_url) if self._spec.ready_url else None
        while True:
            log.read()
            self._is_ready = self._is_ready or (check is not None and await check.passes())
            await asyncio.sleep(_READ_LOG_S)


#: Where gateways let workers join unless `--join-listen` is given. Stores listen for others on the port before it.
JOIN_PORT = 7100
_ALL_INTERFACES = {"0.0.0.0", "::"}  # noqa: S104 - compared
#: Of the store that processes of a host share, as flags.
_SHARED_STORE = "unix:{folder}/store.sock"


class Nodes(NamedTuple):
    """Addresses: this host, the other nodes of the cluster; and the store of this host."""

    own: str
    others: Sequence[str]
    store: str


def with_join_addresses(config: Config, node: str, others: Sequence[str]) -> Config:
    """Return the configuration with the addresses at which gateways of this host, `node`, let workers join, at which
    its store lets other stores copy, and which workers connect to.

    A cluster of one node uses loopback, which needs no secret. Raises StartupFailed.
    """
    default = format_tcp(node if others else "127.0.0.1", JOIN_PORT)
    listen = config.gateway.join_listen or default
    target = parse_tcp(listen, "--join-listen", to_connect=True)
    if others and is_loopback(target.host):
        raise StartupFailed(f"--join-listen {listen}: workers on other nodes cannot connect to loopback")
    if config.cluster.gateway_nodes == "each" and others:
        _check_each(config, target, node)
        joined = [node, *others]
    else:
        joined = [node if target.host in _ALL_INTERFACES else target.host]
    num_gateways = 1 if config.cluster.num_gateways == "auto" else config.cluster.num_gateways
    ports = range(target.port, target.port + num_gateways)  # any may be down when a worker joins
    addresses = [format_tcp(host, port).removeprefix("tcp://") for host in joined for port in ports]
    peers = config.store.peer_listen or (format_tcp(node, target.port - 1) if others else "")
    return msgspec.structs.replace(
        config,
        gateway=msgspec.structs.replace(config.gateway, join_listen=listen),
        store=msgspec.structs.replace(config.store, peer_listen=peers),
        worker=msgspec.structs.replace(config.worker, join=",".join(filter(None, [*addresses, config.worker.join]))),
    )


def _check_each(config: Config, join: TcpAddress, node: str) -> None:
    """Raise StartupFailed for addresses that only one node has."""
    if join.host not in {*_ALL_INTERFACES, node}:
        raise StartupFailed(f"--gateway-nodes each: --join-listen tcp://0.0.0.0:{join.port}, as all nodes use it")
    if config.store.peer_listen:
        raise StartupFailed(
            "--gateway-nodes each: each store listens on the port before --join-listen: no --peer-listen"
        )
    host = config.server.host
    if host not in _ALL_INTERFACES and not is_loopback(host):
        raise StartupFailed(f"--gateway-nodes each: --host {host} is of one node; use 0.0.0.0, or loopback")


def gateway_specs(
    config: Config, model: str, vllm_args: Sequence[str], nodes: Nodes, *, folder: str
) -> list[RemoteSpec]:
    """Return the specifications of stores and gateways of the other nodes, with the configuration of
    `with_join_addresses`."""
    if config.cluster.gateway_nodes == "head":
        return []
    return [
        RemoteSpec(
            name=f"gateways of {node}",
            command=("serve", model, "--store-socket", "{folder}/store.sock"),
            ready_url=f"{base_url(config, vllm_args)}/health",
            vllm_args=tuple(vllm_args),
            environ=settings_environ(_of_node(config, node)),
            node=node,
            shared_folder=folder,
            layer=1,
            stop_timeout_s=config.stop.drain_timeout_s + config.cluster.stop_timeout_s,
            log_dir=config.cluster.log_dir,
            max_log_bytes=config.cluster.max_log_bytes,
        )
        for node in nodes.others
    ]


def _of_node(config: Config, node: str) -> Config:
    """Return the settings of gateways and store of another node: this node's, with the other's addresses."""
    joined = parse_tcp(config.gateway.join_listen, "--join-listen")
    none = dict.fromkeys(("num_workers", "num_prefill", "num_decode"), 0)
    cluster = msgspec.structs.replace(config.cluster, **none, ray=False, ray_address="", gateway_nodes="head")
    return msgspec.structs.replace(
        config,
        cluster=cluster,
        gateway=msgspec.structs.replace(config.gateway, join_listen=format_tcp(node, joined.port)),
        store=msgspec.structs.replace(config.store, peer_listen=format_tcp(node, joined.port - 1)),
        worker=msgspec.structs.replace(config.worker, join="", name="", metrics_port=0),
    )


def worker_specs(
    config: Config, model: str, vllm_args: Sequence[str], nodes: Nodes, *, has_gpus: bool, folder: str
) -> list[RemoteSpec]:
    """Return the specifications of all workers, with the configuration of `with_join_addresses`; `has_gpus` is whether
    the cluster has any, `folder` the name of what processes of a host share. Raises StartupFailed."""
    num_gpus = _num_gpus(config, vllm_args, has_gpus=has_gpus)
    prefix = config.worker.name or "{host}"
    own = msgspec.structs.replace(
        config,
        worker=msgspec.structs.replace(config.worker, name=""),
        store=msgspec.structs.replace(config.store, peer_listen=""),  # of this host
    )
    with_gateways = nodes.others if config.cluster.gateway_nodes == "each" else ()
    node_flags = {
        nodes.own: ("--store", nodes.store),
        **dict.fromkeys(with_gateways, ("--store", _SHARED_STORE)),
        "": ("--store", _SHARED_STORE, "--start-store"),
    }
    return [
        RemoteSpec(
            name=f"{role} {i}",
            command=("worker", model, *role_flags(role), *own_flags(own, vllm_args, i)),
            joins_as=f"{prefix}/{i}",
            vllm_args=tuple(engine_flags(vllm_args)),
            environ=settings_environ(own),
            node_flags=node_flags,
            shared_folder=folder,
            num_cpus=config.cluster.cpus_per_worker,
            num_gpus=num_gpus,
            stop_timeout_s=config.stop.drain_timeout_s + config.cluster.stop_timeout_s,
            log_dir=config.cluster.log_dir,
            max_log_bytes=config.cluster.max_log_bytes,
        )
        for i, role in enumerate(config.cluster.roles)
    ]


def _num_gpus(config: Config, vllm_args: Sequence[str], *, has_gpus: bool) -> int:
    """Return the GPUs of each worker. Raises StartupFailed if vLLM could not use them, or needs others."""
    given, needed = config.cluster.gpus_per_worker, gpus_per_worker(vllm_args)
    if vllm_is_for_cpu():
        if given not in ("auto", 0):
            raise StartupFailed(
                f"--gpus-per-worker {given}: the installed vLLM is a build for CPUs; install the extra vllm, or use 0"
            )
        return 0
    if given != "auto" and 0 < given < needed:
        raise StartupFailed(f"--gpus-per-worker {given}: the vLLM flags after `--` need {needed}")
    num_gpus = (needed if has_gpus else 0) if given == "auto" else given
    if not num_gpus and installed_version("vllm") is not None:
        where = "no node of the Ray cluster has a GPU" if given == "auto" else "--gpus-per-worker 0"
        raise StartupFailed(f"{where}, but the installed vLLM needs one; the extra cpu is for CPUs")
    return num_gpus


class RemoteSupervisor:
    """Supervises processes of other hosts through an orchestrator, together with this host's. Has the interface of
    `Supervisor`: `start` once, then `stop`. For the main thread's event loop only.

    As on one host, the exit of a process that was never ready fails the start; any other is restarted by the
    orchestrator, with the same delays. A worker is ready when a gateway of this host lists it as connected, the
    processes of another host when its gateways answer there.
    """

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
