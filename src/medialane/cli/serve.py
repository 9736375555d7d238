"""`medialane serve`: starts, supervises and stops a store, workers and gateways on this host."""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import shlex
import signal
import sys
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import get_args

import msgspec

from medialane.arena import reap
from medialane.cli.gateway_command import check_api_key, has_api_key
from medialane.cli.progress import Progress
from medialane.cli.settings import (
    PROTECTION,
    Reloading,
    add_settings,
    given_settings,
    hangup_means_reload,
    reloaded_by_hangup,
)
from medialane.cluster import Observer, Supervisor, local, model_groups
from medialane.cluster.child_process import LogFolder
from medialane.cluster.model_groups import ModelGroup
from medialane.cluster.placement import VISIBLE, find_hardware
from medialane.cluster.ray import (
    Nodes,
    RemoteSpec,
    RemoteSupervisor,
    gateway_specs,
    with_join_addresses,
    worker_specs,
)
from medialane.cluster.vllm_flags import flag_value
from medialane.config import (
    Config,
    ModelTable,
    SectionName,
    load_models,
    log_level_file,
    process_environ,
    replace_environ,
)
from medialane.media import installed_kinds
from medialane.observability.logging import configure
from medialane.runtime.linux import set_title
from medialane.runtime.phase import show_ready, watched
from medialane.runtime.stop import stopped_by_signals
from medialane.runtime.tasks import first_of
from medialane.types.errors import StartupFailed
from medialane.wire.listener import bind_http

logger = logging.getLogger(__name__)

SECTIONS: tuple[SectionName, ...] = tuple(section for section in get_args(SectionName) if section != "simulated")
_COMMON = (
    "workers", "prefill", "decode", "host", "port", "keys", "require-api-key", "admin-key-file",
    "allow-media-network", "allow-media-domain", "allowed-local-media-path", "drain-timeout",
    "gateways", "preparers", "encoders", "arena-size", "log-level", "log-dir", "log-format", "access-log", "record",
    "single-gpu", "encoder-gpu-share", "stage", "transport", "router", "keep-arena", "metrics-port",
    "join-listen", "peer-listen", *PROTECTION, "join", "ray", "address", "gateway-nodes", "gpus-per-worker",
    "cpus-per-worker",
)  # fmt: skip
_TICK_S = 0.125
_EXIT_KILLED = 130

_EPILOG = """\
A setting has one name: --arena-size, MEDIALANE_ARENA_SIZE in the environment, arena-size = "2GiB" in the file.
Flags win over the environment, the environment over the file.

examples:
  medialane serve Qwen/Qwen2.5-VL-3B-Instruct --workers 2
  medialane serve ./model --port 9000 -- --max-model-len 8192 --limit-mm-per-prompt '{"image": 8}'
  medialane serve /models/m --ray --address 10.0.0.1:6379 --workers 8 --rpc-secret-file /etc/medialane/rpc-secret
  medialane serve ./model --workers 3 --encoders 1       # 4 GPUs; new media do not hold up the tokens of others
  medialane serve ./model --prefill 1 --decode 2         # 3 GPUs; long prompts do not hold up the tokens of others
  VLLM_API_KEY=$(cat key) medialane serve ./model --workers 2 --single-gpu -- --served-model-name vision
  medialane serve --config models.toml       # several models behind one port: a table [models.NAME] for each

With --ray, run it on a node of the Ray cluster: gateways and a media store run there (--gateway-nodes each: on every
node), Ray places the workers on nodes with enough free GPUs and CPUs, and restarts them. Every node needs the same
medialane and Ray, the model under the same name or absolute path, and the secret in a file or in MEDIALANE_RPC_SECRET.

Ctrl-C shuts down gracefully, a second one immediately."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = _EPILOG
    parser.add_argument(
        "model",
        metavar="MODEL",
        nargs="?",
        help="a folder, or a name on a model hub; default: the models of the --config file",
    )
    parser.add_argument("--verbose", "-v", action="store_true", help="show the logs of all processes")
    # Set by `medialane serve --ray --gateway-nodes each`: workers of the host know it.
    parser.add_argument("--unannounced", action="store_true", help=argparse.SUPPRESS)  # `medialane demo` says the rest
    parser.add_argument("--store-socket", type=Path, metavar="PATH", help=argparse.SUPPRESS)
    add_settings(parser, SECTIONS, common=_COMMON)


def run(args: argparse.Namespace) -> int:
    """Serve until SIGINT or SIGTERM, with a terminal SIGHUP; 0 after a clean stop. Raises StartupFailed."""
    set_title("serve", args.argv)
    reloading, groups = _loaded(args)
    config = local.with_port(reloading.config)
    configure(config.logging, component="serve")
    if config.cluster.ray:
        config = for_ray(config, args.secret_flags, process_environ())
    with closing(RayServe(config, args.model)) if config.cluster.ray else nullcontext() as ray:
        return run_here(config if ray is None else ray.config, reloading, args, ray, groups=groups)


def _loaded(args: argparse.Namespace) -> tuple[Reloading, list[ModelGroup]]:
    """Load the settings; return the models, if they are several. One model of a file becomes the command line's.
    Raises StartupFailed."""
    flags, environ = given_settings(args), process_environ()
    config, tables = load_models(flags, file=args.config, environ=environ, sections=SECTIONS, rules=model_groups.TABLES)
    groups = _groups(args, tables)
    if len(groups) > 1 and config.cluster.ray:
        raise StartupFailed("--ray is for one model, and the file has several")
    if len(groups) == 1:  # needs no name router
        (group,), groups = groups, []
        config, args.model, args.vllm_args = group.config, group.model, list(group.vllm_args)
        if group.gpus:
            replace_environ({**environ, VISIBLE: ",".join(group.gpus)})
    return Reloading(config, log_level_file(flags, args.config, environ)), groups


def _groups(args: argparse.Namespace, tables: Sequence[ModelTable]) -> list[ModelGroup]:
    """Return the models of the file, none if the command line has one. Raises StartupFailed."""
    if args.model is not None and tables:
        raise StartupFailed(f"MODEL {args.model} and the tables of --config ([models.NAME]) are both given: use one")
    if args.model is None and not tables:
        raise StartupFailed("give a MODEL, or several with --config FILE, which has a table [models.NAME] for each")
    return [model_groups.group_of(table, args.vllm_args) for table in tables]


def run_here(
    config: Config,
    reloading: Reloading,
    args: argparse.Namespace,
    ray: RayServe | None = None,
    *,
    groups: Sequence[ModelGroup] = (),
) -> int:
    """Serve with the processes of this configuration, until stopped; `groups` are the models, if they are several.
    Raises StartupFailed."""
    environ = process_environ()
    check_api_key(config, environ)
    if groups:
        model_groups.check_groups(groups, args.vllm_args, environ)
    else:
        local.check(config, args.model, args.vllm_args, environ)
    _say(config, installed_kinds().line())
    directories = {each.arena.directory for each in (config, *(group.config for group in groups))}
    with (
        _reaped(directories),
        closing(local.run_folder(environ)) as folder,
        # Inherited by gateways. Connections are refused until the first of them listens; from then on they wait while
        # gateways restart: the queue of accepted connections ends with the last descriptor of the socket.
        bind_http(config.server.host, config.server.port) as listener,
    ):
        here = local.HostRun(folder.path, find_hardware(environ), environ, listener, reloading.flags)
        if groups:
            specs = model_groups.process_specs(groups, config, args.vllm_args, here)
        else:
            specs = local.process_specs(config, args.model, args.vllm_args, here, store_socket=args.store_socket)
        remote = [] if ray is None else ray.specs(args.model, args.vllm_args, folder.path)
        announcement = _announcement(config, args, groups, needs_key=has_api_key(config, environ))
        announce_start = (lambda: None) if args.unannounced else partial(_say, config, announcement)

        with _logs(config) as logs:
            names = [*(spec.name for spec in specs), *(spec.name for spec in remote)]
            progress = Progress(names, verbose=args.verbose, as_log=config.logging.format == "json")

            def make_supervisor() -> Supervisor | RemoteSupervisor:
                own = Supervisor(specs, config=config.cluster, logs=logs.path, observer=progress)
                if ray is None:
                    return own
                return ray.supervisor(own, remote, progress, vllm_args=args.vllm_args)

            status = asyncio.run(_serve(make_supervisor, reloading, progress, announce_start))
            logs.keep = progress.has_failed
            return status


@contextmanager
def _reaped(directories: Iterable[str]) -> Iterator[None]:
    """Remove the arenas of stores that have exited, before and after: the last store leaves its to the next one."""
    try:
        for directory in directories:
            reap(directory)
        yield
    finally:
        for directory in directories:
            reap(directory)


def for_ray(config: Config, secret_flags: Sequence[str], environ: Mapping[str, str]) -> Config:
    """Return the configuration for a Ray cluster, through which no secret is passed: gateways of other nodes need an
    API key of their own if this one has any. Raises StartupFailed for secrets in the command line, which Ray stores
    with the job."""
    if secret_flags:
        raise StartupFailed(
            f"{secret_flags[0]} is not accepted with --ray, which stores command lines: set VLLM_API_KEY (several: "
            "MEDIALANE_API_KEYS) and HF_TOKEN in the environment, on other nodes in that of `ray start`"
        )
    if config.cluster.gateway_nodes == "each" and (config.gateway.admin_key or config.gateway.metrics_key):
        raise StartupFailed(
            "MEDIALANE_ADMIN_KEY and MEDIALANE_METRICS_KEY are not passed to gateways of other nodes, which would be "
            "open: use --admin-key-file and --metrics-key-file, with the files on every node"
        )
    gateway = msgspec.structs.replace(
        config.gateway, require_api_key=config.gateway.require_api_key or has_api_key(config, environ)
    )
    return msgspec.structs.replace(config, gateway=gateway)


def _announcement(config: Config, args: argparse.Namespace, groups: Sequence[ModelGroup], *, needs_key: bool) -> str:
    if not groups:
        return announce(config, args.model, args.vllm_args, needs_key=needs_key)
    url = local.base_url(config, args.vllm_args)
    names = "".join(f"\n  {', '.join(group.served_names)}: {_counted_workers(group.config)}" for group in groups)
    page = f"\n\nWhat they do: {url}/medialane/" if config.gateway.page else ""
    served = f"medialane serves {len(groups)} models at {_address(url)}"
    return f"\n{served}\n{names}{page}\n\nCtrl-C stops it."


def _say(config: Config, text: str) -> None:
    """Tell the operator, on the terminal or as a line of the log."""
    if config.logging.format == "json":
        logger.info("%s", text.strip())
    else:
        print(text, flush=True)


@contextmanager
def _logs(config: Config) -> Iterator[LogFolder]:
    """Yield the folder of the logs, which is shown; errors name it again."""
    logs = LogFolder.create(config.cluster.log_dir)
    _say(config, f"logs: {logs.path}")
    try:
        yield logs
        if logs.keep:
            print(f"processes have failed: the logs are kept in {logs.path}", file=sys.stderr, flush=True)
    except StartupFailed as error:
        raise StartupFailed(f"{error.message}\nthe logs are in {logs.path}") from error
    finally:
        logs.close()


class RayServe:
    """What `medialane serve` does differently with Ray. Raises StartupFailed if the cluster cannot be connected to."""

    def __init__(self, config: Config, model: str) -> None:
        if Path(model).is_dir() and not Path(model).is_absolute():
            absolute = Path(model).resolve()
            raise StartupFailed(f"--ray needs the model's absolute path, the same on all nodes: {absolute}")
        try:
            from medialane.cluster.ray.ray_cluster import RayCluster  # imports ray
        except ModuleNotFoundError as error:
            if error.name != "ray":
                raise
            raise StartupFailed("--ray needs Ray: install medialane with the extra ray") from error
        self._cluster = RayCluster(config.cluster.ray_address)
        own, *self._others = self._cluster.nodes
        try:
            self.config = with_join_addresses(config, own, self._others)
        except StartupFailed:
            self.close()
            raise

    def specs(self, model: str, vllm_args: Sequence[str], folder: Path) -> list[RemoteSpec]:
        """Return the specifications of the processes that Ray places. Workers on this host use the store whose socket
        is in `folder`. Raises StartupFailed."""
        nodes = Nodes(self._cluster.node, self._others, f"unix:{local.store_path(folder)}")
        shared = uuid.uuid4().hex[:12]
        return [
            *gateway_specs(self.config, model, vllm_args, nodes, folder=shared),
            *worker_specs(self.config, model, vllm_args, nodes, has_gpus=self._cluster.has_gpus, folder=shared),
        ]

    def supervisor(
        self, own: Supervisor, specs: Sequence[RemoteSpec], observer: Observer, *, vllm_args: Sequence[str]
    ) -> RemoteSupervisor:
        """Return a supervisor of `own`, the processes of this host, and of the processes that Ray places."""
        from medialane.cli.status import read_state
        from medialane.gateway import metrics_key

        config = self.config
        url, key = local.base_url(config, vllm_args), metrics_key(config.gateway)

        async def connected() -> set[str]:
            try:
                return (await read_state(url, key=key, verify=False)).connected_workers()
            except StartupFailed:
                return set()

        return RemoteSupervisor(
            own, self._cluster, specs, config=config.cluster, observer=observer, connected=connected
        )

    def close(self) -> None:
        """Leave the cluster. Idempotent."""
        self._cluster.close()


async def _serve(
    make_supervisor: Callable[[], Supervisor | RemoteSupervisor],
    reloading: Reloading,
    progress: Progress,
    announce_start: Callable[[], None],
) -> int:
    supervisor = make_supervisor()
    # SIGHUP stops as well if it means that the terminal is gone.
    with stopped_by_signals(*(() if hangup_means_reload() else (signal.SIGHUP,))) as stop:
        starting = asyncio.create_task(supervisor.start(), name="start")
        stopped = asyncio.create_task(stop.asked.wait(), name="stop")
        supervised = asyncio.create_task(_supervised(supervisor, starting), name="supervision")
        try:
            while not starting.done() and not stopped.done():
                progress.tick()
                await asyncio.wait((starting, stopped), timeout=_TICK_S, return_when=asyncio.FIRST_COMPLETED)
            progress.finish()
            if starting.done():
                starting.result()
                announce_start()
                show_ready("serving")

                async def reload() -> None:
                    await reloading.reload()  # with an error, no process does
                    supervisor.reload()

                async with watched(), reloaded_by_hangup(reload):
                    await asyncio.wait((stopped, supervised), return_when=asyncio.FIRST_COMPLETED)
                if supervised.done():
                    supervised.result()
        finally:
            if stop.asked.is_set():
                print("\nstopping (interrupt again to kill)", file=sys.stderr, flush=True)
            starting.cancel()
            stopped.cancel()
            supervised.cancel()
            progress.finish()
            stopping = asyncio.create_task(supervisor.stop(), name="stopping")
            await first_of(asyncio.shield(stopping), stop.at_once.wait())
            if stop.at_once.is_set():
                supervisor.kill()
            await stopping
    return _EXIT_KILLED if stop.at_once.is_set() else 0


async def _supervised(supervisor: Supervisor | RemoteSupervisor, starting: asyncio.Task[None]) -> None:
    """End when supervision ends, after the start: without it, processes would run unsupervised."""
    await asyncio.wait((starting,))
    await supervisor.wait()
    raise StartupFailed("supervision of the processes ended unexpectedly")


def announce(config: Config, model: str, vllm_args: Sequence[str], *, needs_key: bool = False) -> str:
    """Return the message that announces the address, with an example command. `needs_key`: clients must send one."""
    url = local.base_url(config, vllm_args)
    if config.gateway.render_only:
        name = local.served_name(model, vllm_args)
        return f"\nmedialane renders requests for {name} at {url}/v1/chat/completions/render\n\nCtrl-C stops it."
    picture = "https://upload.wikimedia.org/wikipedia/commons/3/3a/Cat03.jpg"
    content = [
        {"type": "text", "text": "What is in this picture?"},
        {"type": "image_url", "image_url": {"url": picture}},
    ]
    body = {"model": local.served_name(model, vllm_args), "messages": [{"role": "user", "content": content}]}
    path = "/pooling" if flag_value(vllm_args, "--runner") == "pooling" else "/v1/chat/completions"
    words = ["curl", *(["-k"] if url.startswith("https") else []), f"{url}{path}"]
    words += ["-H", "Content-Type: application/json"]
    if needs_key:
        words += ["-H", "Authorization: Bearer <your API key>"]
    command = shlex.join([*words, "-d", json.dumps(body)])
    workers = _counted_workers(config)
    if config.cluster.num_encoders:
        workers += f" and {_counted(config.cluster.num_encoders, 'encoder')}"
    page = f"\n\nWhat it does: {url}/medialane/" if config.gateway.page else ""
    served = f"medialane serves {body['model']} with {workers} at {_address(url)}"
    return f"\n{served}\n\n  {command}{page}\n\nCtrl-C stops it."


def _address(url: str) -> str:
    return f"{url} (base_url of OpenAI clients: {url}/v1)"


def _counted_workers(config: Config) -> str:
    cluster = config.cluster
    if cluster.num_decode:
        return f"{cluster.num_prefill} prefill and {_counted(cluster.num_decode, 'decode worker')}"
    return _counted(cluster.num_workers, "worker")


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
