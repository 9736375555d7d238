"""Processes on other hosts, placed and restarted by an orchestrator: the interface to it, and what runs on the hosts.

Theory of operation. The orchestrator runs one small supervising process per `RemoteSpec` on a host of its choice
(`medialane.cluster.ray`: an actor). That process runs a `RemoteProcess`: the child is an ordinary `medialane worker` in
a process group of its own, so an engine never lives inside the orchestrator's process. When the child exits, its run
ends, and the orchestrator restarts the supervising process, possibly on another host: that is a new incarnation of the
worker.

Only starts, restarts and stops go through the orchestrator. Workers join the gateways over their own connections, whose
heartbeats detect a loss within a second; requests and media never touch the orchestrator.

The RPC secret is not passed to other hosts at all: it must be in the environment there, or in a file.
"""

from __future__ import annotations

import asyncio
import os
import socket
import sys
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Protocol

import msgspec

from medialane.cluster.child_process import ChildProcess, describe_exit
from medialane.cluster.local import parent_directory
from medialane.cluster.orphan_reaper import OrphanReaper
from medialane.cluster.placement import find_hardware, place_workers
from medialane.cluster.process_log import ProcessLog
from medialane.cluster.process_supervisor import failure_report
from medialane.config import host_environ
from medialane.core.errors import StartupFailed
from medialane.core.owner_lock import OwnedFolder

_FOLDER_PREFIX = "medialane-remote-"
#: The log file is bounded by reading it.
_READ_LOG_S = 1.0


class RemoteSpec(msgspec.Struct, frozen=True, kw_only=True):
    """A process to keep running on some host: `python -m medialane COMMAND... [-- VLLM_ARGS...]`.

    `environ` are our settings, without secrets; other variables are those of the host. On the hosts that `node_flags`
    names by their node's id, the command gets these flags as well. `joins_as` is the name under which a worker joins
    gateways; `{host}` in it is replaced by the host's name. `num_gpus` and `num_cpus` are reserved.
    """

    name: str
    command: tuple[str, ...]
    joins_as: str
    vllm_args: tuple[str, ...] = ()
    environ: Mapping[str, str] = {}
    node_flags: Mapping[str, tuple[str, ...]] = {}
    num_cpus: float = 1.0
    num_gpus: float = 0.0
    stop_timeout_s: float = 10.0
    max_log_bytes: int = 16 << 20


class Location(msgspec.Struct, frozen=True):
    """Where a process runs. `incarnation` is different in each run."""

    host: str
    node_id: str
    pid: int
    incarnation: str


class RunEnd(msgspec.Struct, frozen=True):
    """How a run ended; `report` has the cause, and the end of the log, for the operator."""

    how: str
    report: str


class RemoteCluster(Protocol):
    """An orchestrator. For one event loop."""

    async def spawn(self, specs: Sequence[RemoteSpec], *, timeout_s: float) -> None:
        """Reserve the resources of all processes, then start them. Raises StartupFailed."""
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

    Raises StartupFailed if the reserved GPUs, which are those of CUDA_VISIBLE_DEVICES, do not suffice.
    """
    inherited = host_environ(environ)
    if not spec.num_gpus:
        inherited["CUDA_VISIBLE_DEVICES"] = ""  # none is reserved: others may use those of the host
    hardware = find_hardware(inherited)
    (placement,) = place_workers(hardware, spec.vllm_args, num_workers=1, single_gpu=False, environ=inherited)
    return {**inherited, **placement.environ, **spec.environ}


def member_name(spec: RemoteSpec, host: str) -> str:
    """Return the name under which the worker joins gateways from a host."""
    return spec.joins_as.replace("{host}", host)


def remote_argv(spec: RemoteSpec, node_id: str) -> list[str]:
    """Return the command line on this host, which is the given node."""
    name = member_name(spec, socket.gethostname())
    words = [*spec.command, "--worker-name", name, *spec.node_flags.get(node_id, ())]
    return [sys.executable, "-m", "medialane", *words, *(["--", *spec.vllm_args] if spec.vllm_args else [])]


class RemoteProcess:
    """Runs the process of a spec on this host; for one event loop, whose thread must live as long as this process."""

    def __init__(self, spec: RemoteSpec, *, node_id: str) -> None:
        self._spec = spec
        self._node_id = node_id
        self._child: ChildProcess | None = None
        self._incarnation = ""
        self._stopping = False

    @property
    def location(self) -> Location | None:
        if self._child is None or self._child.ended:
            return None
        return Location(socket.gethostname(), self._node_id, self._child.pid, self._incarnation)

    async def run(self) -> RunEnd:
        """Run the process once, until it has exited and its group is killed. If this process is killed, so is the
        group."""
        spec = self._spec
        try:
            folder = OwnedFolder.create(parent_directory(os.environ), _FOLDER_PREFIX)
        except StartupFailed as error:
            return RunEnd("cannot be started", f"{spec.name}: {error.message}")
        try:
            log = ProcessLog(folder.path / f"{spec.name.replace(' ', '-')}.log", spec.max_log_bytes)
            return await self._run(log)
        finally:
            folder.close(keep=not self._stopping)

    async def _run(self, log: ProcessLog) -> RunEnd:
        name = self._spec.name
        reaper = OrphanReaper()
        try:
            child = self._child = self._spawn(log)
            self._incarnation = uuid.uuid4().hex[:12]
            reaper.watch(child.pid)
            reading = asyncio.create_task(_read(log), name="log reader")
            try:
                how = describe_exit(await child.wait())
            finally:
                reading.cancel()
                child.kill()
        except StartupFailed as error:
            return RunEnd("cannot be started", f"{name}: {error.message}")
        except OSError as error:
            return RunEnd("cannot be started", f"{name} cannot be started: {error.strerror}")
        finally:
            reaper.close()
        log.read()
        return RunEnd(how, failure_report(f"{name} on {socket.gethostname()}", how, log))

    def _spawn(self, log: ProcessLog) -> ChildProcess:
        environ = remote_environ(self._spec, os.environ)
        output = log.open()
        try:
            return ChildProcess.spawn(remote_argv(self._spec, self._node_id), environ, output)
        finally:
            os.close(output)

    async def stop(self) -> None:
        """Stop the process, within its timeout. Idempotent."""
        self._stopping = True
        if self._child is not None:
            with suppress(ProcessLookupError):
                await self._child.stop(self._spec.stop_timeout_s)


async def _read(log: ProcessLog) -> None:
    while True:
        log.read()
        await asyncio.sleep(_READ_LOG_S)
