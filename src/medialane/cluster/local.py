"""The processes of one machine: a store, workers and gateways, with their unix sockets in a private folder."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import msgspec

from medialane.cluster.child_process import INTERPRETER, HttpAnswers, ProcessSpec, SocketExists, WarmProcess
from medialane.cluster.placement import Engines, Hardware, Placement, place_engines, usable_cores
from medialane.cluster.preflight import check_start
from medialane.cluster.vllm_flags import (
    engine_flags,
    flag_value,
    has_flag,
    processor_flags,
    ranks_per_worker,
    warm_flags,
)
from medialane.config import Config, RoleName, child_environ
from medialane.gateway import AccessKeys
from medialane.runtime.private_files import OwnedFolder
from medialane.types.errors import StartupFailed
from medialane.types.request import ENCODER, SIDE_CHANNEL_PORT, WorkerRole
from medialane.wire.address import consecutive_ports, format_tcp
from medialane.wire.listener import bind_http, check_listen, check_port
from medialane.wire.security import Security, check_address
from medialane.worker.config import WorkerConfig

#: For closing everything else, after the gateway's drain timeout.
_GATEWAY_STOP_S = 20.0
#: It has nothing to finish.
_WARM_STOP_S = 2.0
_RUN_PREFIX = "medialane-run-"
#: Of `command`, before the flags: NAME MODEL after the interpreter.
_NUM_COMMAND_WORDS = len(INTERPRETER) + 2
#: sockaddr_un.sun_path has 108 bytes with its terminating zero (unix(7)), and sockets are in our folder.
_MAX_PARENT_BYTES = 107 - len(f"/{_RUN_PREFIX}12345678/99/gateway-9999.sock")


class HostRun(NamedTuple):
    """One run on this host: the folder of its sockets, the hardware that it may use, and what its processes inherit:
    variables of `environ`, and gateways, or the name router before them, the socket `listener`. Store, workers,
    gateways and name router have the `common_flags`. One of several models on the host has a `label`, with which the
    names of its processes begin; the others have `num_other_engines`."""

    folder: Path
    hardware: Hardware
    environ: Mapping[str, str]
    listener: socket.socket | None = None
    common_flags: Sequence[str] = ()
    label: str = ""
    num_other_engines: int = 0

    @property
    def pass_fds(self) -> tuple[int, ...]:
        """The descriptor of the listener, if there is one."""
        return () if self.listener is None else (self.listener.fileno(),)

    @property
    def flags(self) -> list[str]:
        """Addresses of processes that accept connections."""
        return [*(word for fd in self.pass_fds for word in ("--listen-fd", str(fd))), *self.common_flags]


def check(config: Config, model: str, vllm_args: Sequence[str], environ: Mapping[str, str]) -> None:
    """Detect errors that would otherwise only appear after a minute. Raises StartupFailed with one line for the
    operator."""
    check_addresses(config, vllm_args)
    AccessKeys.load(config.gateway)
    check_encoders(config)
    check_start(model, vllm_args, environ)


def check_addresses(config: Config, vllm_args: Sequence[str]) -> None:
    """Raise StartupFailed if a process of this host could not listen at its address, or not connect to one, for a
    reason that is known before."""
    cluster = config.cluster
    Security.load(config.rpc)
    bind_http(config.server.host, config.server.port).close()
    if config.gateway.join_listen:
        check_join_listen(config, cluster.resolved_num_gateways(usable_cores()))
    elif not (cluster.roles or config.gateway.render_only):
        raise StartupFailed("--workers 0: workers must be able to join: --join-listen HOST:PORT")
    if config.store.peer_listen:
        check_listen(config.store.peer_listen, "--peer-listen", config.rpc)
    check_join(config)
    num_ports = engines_of(config).total * ranks_per_worker(vllm_args)
    check_metrics_ports(config.worker, num_ports)


def check_metrics_ports(config: WorkerConfig, num_ports: int) -> None:
    """Raise StartupFailed if workers of this host could not serve their metrics."""
    for port in range(config.metrics_port, config.metrics_port + num_ports) if config.metrics_port else ():
        check_port(config.metrics_host, port, "--metrics-port")


def check_join_listen(config: Config, num_gateways: int = 1) -> None:
    """Raise StartupFailed if workers cannot join at the configured address, or could without protection."""
    for address in consecutive_ports(config.gateway.join_listen, num_gateways, "--join-listen"):
        check_listen(address, "--join-listen", config.rpc)


def check_join(config: Config) -> None:
    """Raise StartupFailed if workers cannot join the configured gateways without protection."""
    for gateway in config.worker.gateways():
        check_address(format_tcp(*gateway), "--join", config.rpc)


def check_encoders(config: Config) -> None:
    """Raise StartupFailed if encoders could have nothing to do: their embeddings are kept in the arena, and they are
    sent features of it."""
    if not config.cluster.num_encoders:
        return
    if config.worker.encode_cache == "off":
        raise StartupFailed("--encoders needs --encode-cache auto or on: encoders write to that cache")
    if config.gateway.stage not in ("auto", "features"):
        raise StartupFailed(
            f"--encoders needs --stage auto or features: in stage {config.gateway.stage} workers process"
        )
    if config.handover.transport not in ("auto", "shm"):
        raise StartupFailed(f"--encoders needs --transport auto or shm, not {config.handover.transport}")


def with_port(config: Config) -> Config:
    """Return the configuration with port 0 replaced by a free port."""
    if config.server.port:
        return config
    with bind_http(config.server.host, 0) as probe:
        server = msgspec.structs.replace(config.server, port=probe.getsockname()[1])
    return msgspec.structs.replace(config, server=server)


def run_folder(environ: Mapping[str, str]) -> OwnedFolder:
    """Create the folder for the sockets and logs of one supervisor run. Raises StartupFailed."""
    return OwnedFolder.create(parent_directory(environ), _RUN_PREFIX)


def parent_directory(environ: Mapping[str, str]) -> Path:
    """Return its parent: XDG_RUNTIME_DIR or TMPDIR if short enough for socket paths, otherwise /tmp."""
    for candidate in (environ.get("XDG_RUNTIME_DIR", ""), environ.get("TMPDIR", "")):
        fits = candidate.startswith("/") and len(os.fsencode(candidate)) <= _MAX_PARENT_BYTES
        if fits and os.access(candidate, os.W_OK | os.X_OK):
            return Path(candidate)
    return Path("/tmp")  # noqa: S108 - mkdtemp creates a private folder there


def base_url(config: Config, vllm_args: Sequence[str]) -> str:
    """Return the gateway's URL as seen from this host."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(config.server.host, config.server.host)  # noqa: S104 - compared
    scheme = "https" if has_flag(vllm_args, "--ssl-keyfile", "--ssl-certfile") else "http"
    return f"{scheme}://{f'[{host}]' if ':' in host else host}:{config.server.port}"


def served_name(model: str, vllm_args: Sequence[str]) -> str:
    """Return the model name that requests must use."""
    return flag_value(vllm_args, "--served-model-name") or model


def process_specs(
    config: Config,
    model: str,
    vllm_args: Sequence[str],
    run: HostRun,
    *,
    store_socket: Path | None = None,
) -> list[ProcessSpec]:
    """Return the specifications of the warm process, the store, the workers, the encoders and the gateways. With
    `config.cluster.ray` there are no workers here, and the gateways let them join. Raises StartupFailed."""
    folder, hardware, environ = run.folder, run.hardware, run.environ
    engines, prefix = engines_of(config)._replace(num_others=run.num_other_engines), f"{run.label} ".lstrip()
    placements = (
        place_engines(hardware, vllm_args, engines, single_gpu=config.cluster.single_gpu, environ=environ)
        if engines.total
        else []
    )

    def inherited(role: RoleName) -> dict[str, str]:
        return child_environ(
            config,
            role,
            model,
            vllm_args,
            on_gpu=bool(hardware.gpus),
            num_workers=max(1, engines.num_workers + engines.num_others),
            environ=environ,
        )

    warm_socket = folder / "warm.sock"
    warm = ProcessSpec(
        name=f"{prefix}warm process",
        argv=command("warm", model, ["--listen", str(warm_socket)], warm_flags(vllm_args)),
        environ=inherited("warm"),
        ready=SocketExists(warm_socket),
        layer=-1,
        stop_timeout_s=_WARM_STOP_S,
        not_needed="not needed: processes start from scratch",
    )
    forks = WarmProcess(warm_socket, warm.environ) if config.cluster.warm_start else None
    after = None if forks is None else warm.name
    worker_environ, for_engines = inherited("worker"), engine_flags(vllm_args)
    store_socket = store_socket or store_path(folder)
    store = ProcessSpec(
        name=f"{prefix}store",
        argv=command(
            "store", model, ["--listen", f"unix:{store_socket}", *run.common_flags], processor_flags(vllm_args)
        ),
        environ=inherited("store"),
        ready=SocketExists(store_socket),
        is_ready_later=True,
        stop_timeout_s=config.stop.drain_timeout_s + config.cluster.stop_timeout_s,
        not_needed="not needed: this model takes no media",
        after=after,
        warm=forks,
        reloads=True,
    )
    store_flags = ["--store", f"unix:{store_socket}"]
    roles = [*([] if config.cluster.ray else config.cluster.roles), *[ENCODER] * engines.num_encoders]
    numbers = [roles[:i].count(role) for i, role in enumerate(roles)]
    names = [f"{role} {number}" for role, number in zip(roles, numbers, strict=True)]
    labels = [name.removeprefix("worker ").replace(" ", "-") for name in names]
    sockets = [folder / f"{name.replace(' ', '-')}.sock" for name in names]
    names = [prefix + name for name in names]
    workers = [
        ProcessSpec(
            name=name,
            argv=command(
                "worker",
                model,
                [
                    *("--listen", f"unix:{path}"),
                    *role_flags(roles[i]),
                    *store_flags,
                    *run.common_flags,
                    *own_flags(config, vllm_args, i, labels[i]),
                    *("--number", name.rpartition(" ")[2]),
                ],
                [*for_engines, *placements[i].vllm_args],
            ),
            environ={**worker_environ, **placements[i].environ, **_side_channel(worker_environ, vllm_args, i)},
            ready=SocketExists(path),
            after=_same_gpus(placements, names, i) or after,
            layer=1,
            stop_timeout_s=config.stop.drain_timeout_s + config.cluster.stop_timeout_s,
            warm=forks,
            reloads=True,
        )
        for i, (name, path) in enumerate(zip(names, sockets, strict=True))
    ]
    host = config.worker.name or socket.gethostname()
    addresses = [
        word
        for label, path in zip(labels, sockets, strict=True)
        for word in ("--worker", f"{host}/{label}=unix:{path}")
    ]
    gateway = ProcessSpec(
        name=f"{prefix}gateway",
        argv=command("gateway", model, [*run.flags, *addresses, *store_flags], vllm_args),
        environ=inherited("gateway"),
        ready=HttpAnswers(f"{base_url(config, vllm_args)}/health"),
        layer=2,
        stop_timeout_s=config.stop.drain_timeout_s + _GATEWAY_STOP_S,
        pass_fds=run.pass_fds,
        after=after,
        warm=forks,
        reloads=True,
    )
    first = [] if forks is None else [warm]
    num_gateways = config.cluster.resolved_num_gateways(hardware.num_cores)
    gateways = [gateway] if num_gateways == 1 else _sharing(gateway, folder, num_gateways=num_gateways)
    if run.label:
        paths = http_sockets(config, run)
        gateways = [_behind_router(each, path) for each, path in zip(gateways, paths, strict=True)]
    return [*first, store, *workers, *gateways]


def http_sockets(config: Config, run: HostRun) -> list[Path]:
    """Return where the gateways of one of several models listen for the name router."""
    return [run.folder / f"http-{i}.sock" for i in range(config.cluster.resolved_num_gateways(run.hardware.num_cores))]


def _behind_router(gateway: ProcessSpec, path: Path) -> ProcessSpec:
    argv = _with_flags(gateway.argv, ("--http-socket", str(path)))
    return replace(gateway, argv=argv, ready=HttpAnswers("http://gateway/health", path))


def store_path(folder: Path) -> Path:
    """Return the path of the store's socket."""
    return folder / "store.sock"


def role_flags(role: WorkerRole) -> tuple[str, ...]:
    return () if role == "worker" else ("--role", role)


def own_flags(config: Config, vllm_args: Sequence[str], number: int, label: str = "") -> list[str]:
    """Return the flags that give a worker of this host a name, with `label` or its number, and metrics ports of its
    own."""
    name, port = config.worker.name, config.worker.metrics_port
    flags = ["--worker-name", f"{name}/{label or number}"] if name else []
    return [*flags, "--metrics-port", str(port + number * ranks_per_worker(vllm_args))] if port else flags


def _with_flags(argv: Sequence[str], flags: Sequence[str]) -> tuple[str, ...]:
    return (*argv[:_NUM_COMMAND_WORDS], *flags, *argv[_NUM_COMMAND_WORDS:])


def _sharing(gateway: ProcessSpec, folder: Path, *, num_gateways: int) -> list[ProcessSpec]:
    """Return specifications of several gateways on one listening socket, each with a socket of its own, too: any of
    them would answer on the shared port."""
    paths = [folder / f"gateway-{i}.sock" for i in range(num_gateways)]
    flags = [word for path in paths for word in ("--gateway-socket", str(path))]
    return [
        replace(
            gateway,
            name=f"{gateway.name} {i}",
            argv=_with_flags(gateway.argv, [*flags, "--gateway-index", str(i)]),
            ready=HttpAnswers("http://gateway/health", path),
        )
        for i, path in enumerate(paths)
    ]


def engines_of(config: Config) -> Engines:
    """Return the engines of this host."""
    cluster = config.cluster
    num_workers = 0 if cluster.ray else len(cluster.roles)
    return Engines(num_workers, cluster.num_encoders, cluster.encoder_gpu_share)


def _side_channel(environ: Mapping[str, str], vllm_args: Sequence[str], number: int) -> dict[str, str]:
    """Return the ports of NIXL connectors of this engine, if the user has chosen the first."""
    first = environ.get(SIDE_CHANNEL_PORT, "")
    if not first.isdecimal():
        return {}
    return {SIDE_CHANNEL_PORT: str(int(first) + number * ranks_per_worker(vllm_args))}


def _same_gpus(placements: Sequence[Placement], names: Sequence[str], number: int) -> str | None:
    """Return the engine after which another one starts: the last one before it on the same GPUs, since vLLM measures
    their free memory during start-up."""
    own = placements[number].gpus
    return next((names[i] for i in reversed(range(number)) if own and placements[i].gpus == own), None)


def command(name: str, model: str, flags: Sequence[str], vllm_args: Sequence[str]) -> tuple[str, ...]:
    """Build a command line. Settings are passed in the environment."""
    return (*INTERPRETER, name, model, *flags, *(["--", *vllm_args] if vllm_args else []))
