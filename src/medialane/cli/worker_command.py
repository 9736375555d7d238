"""`medialane worker`: one worker with vLLM's engine, or several simulated ones."""

from __future__ import annotations

import argparse
import asyncio
import gc
import logging
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, nullcontext, suppress
from functools import partial
from types import FrameType
from typing import NoReturn, get_args

import uvloop

from medialane.cli.serving import enter_role
from medialane.cli.settings import PROTECTION, Reloading, add_settings, add_source, reloaded_by_hangup
from medialane.cluster.child_process import INTERPRETER, ChildProcess
from medialane.cluster.local import check_join, check_metrics_ports
from medialane.cluster.vllm_flags import ranks_per_worker
from medialane.config import Config, SectionName, child_environ, process_environ
from medialane.observability.logging import configure
from medialane.runtime.linux import set_title
from medialane.runtime.phase import enter_phase
from medialane.runtime.private_files import try_lock
from medialane.runtime.tasks import Backoff, WatchedTask
from medialane.store import StoreEntries, StoreLink
from medialane.testing.simulated.engine import addresses_of
from medialane.types.errors import StartupFailed
from medialane.types.request import WorkerRole
from medialane.vllm_bridge.seams import probe
from medialane.wire.address import TcpAddress, parse_unix
from medialane.wire.listener import check_listen, has_listener

logger = logging.getLogger(__name__)

SECTIONS: tuple[SectionName, ...] = ("worker", "simulated", "store", "rpc", "environment", "logging", "stop")
_COMMON = (
    "join", "metrics-host", "metrics-port", "worker-name", *PROTECTION, "log-level", "log-format", "arena-directory",
    "simulated-workers", "speedup",
)  # fmt: skip

#: How often it is checked that the host has a store: another worker, which has started it, may have stopped.
_CHECK_S = 1.0
_MAX_BACKOFF_S = 30.0
_STORE_STOP_S = 10.0

#: Gateways of other hosts prepare the media: such a store needs no processor of the model.
_FLAGS = ("--stage", "url", "--preparers", "1")

_EPILOG = """\
examples:
  medialane worker ./model --listen unix:/run/medialane/worker-0.sock
  medialane worker ./model --join gateways.example:7100 --metrics-port 8001       # and --rpc-secret-file FILE
  medialane worker ./model --role encoder --listen unix:/run/medialane/encoder-0.sock --store unix:/run/store.sock
  CUDA_VISIBLE_DEVICES=0,1 medialane worker ./model --listen tcp://0.0.0.0:7000 -- --tensor-parallel-size 2
  medialane worker ./model --engine simulated --simulated-workers 64 --listen unix:/tmp/worker-{}.sock --speedup 4"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = _EPILOG
    parser.add_argument("model", metavar="MODEL", help="a folder, or a name on a model hub")
    parser.add_argument(
        "--listen", metavar="ADDRESS", help="address to listen on for gateways: unix:/path or HOST:PORT"
    )
    parser.add_argument(
        "--store",
        metavar="ADDRESS",
        help="unix socket of this host's media store: unix:/path; without one, media arrive in messages",
    )
    parser.add_argument(
        "--start-store",
        action="store_true",
        help="start the store at --store if none runs there, for workers on a host without a gateway",
    )
    parser.add_argument(
        "--engine",
        choices=("vllm", "simulated"),
        default="vllm",
        help="simulated: no model, meaningless tokens; caches, queues and timing are as in a real worker"
        " (default vllm)",
    )
    parser.add_argument(
        "--role",
        choices=get_args(WorkerRole),
        default="worker",
        help="prefill: only compute prompts, which workers with the role decode read from it and continue; by NIXL, or"
        " vLLM's --kv-transfer-config. encoder: only encode media, without a language model, and keep the embeddings in"
        " this host's store, from which workers load them; for gateways and workers of the same host (default worker:"
        " all of it)",
    )
    parser.add_argument("--number", type=int, help=argparse.SUPPRESS)  # set by `medialane serve`, for the title
    add_source(parser)
    add_settings(parser, (*SECTIONS, "arena"), common=_COMMON)


def run(args: argparse.Namespace) -> int:
    """Serve until stopped. Raises StartupFailed."""
    set_title(args.role if args.number is None else f"{args.role} {args.number}", args.argv)
    # The arena's size is a setting of the store: that section is not validated here.
    reloading = Reloading.of(args, SECTIONS)
    config = reloading.config
    log = configure(config.logging, component=args.role if args.number is None else f"{args.role}-{args.number}")
    if args.store is not None:
        parse_unix(args.store, "--store")
    elif args.start_store:
        raise StartupFailed("--start-store needs --store unix:/path, at which the store is to listen")
    elif config.worker.encode_cache == "on":
        raise StartupFailed("--encode-cache on needs --store unix:/path, in whose arena embeddings are kept")
    if args.listen is None and not config.worker.join:
        raise StartupFailed("a worker needs --join HOST:PORT, the gateways to connect to, or --listen ADDRESS")
    _check_addresses(config, args)
    if args.role == "encoder":
        _check_encoder(config, args)
    if args.engine == "simulated":
        return _run_simulated(reloading, args)
    enter_role(config, "worker", args, log.environ())
    enter_phase("importing vLLM")
    probe.check("worker")
    return _run_vllm(reloading, args)


def _run_vllm(reloading: Reloading, args: argparse.Namespace) -> int:
    """Load the engine, then serve until a signal (0) or until the engine dies."""
    config = reloading.config
    from medialane.vllm_bridge.engine.engine import build_engine  # vllm reads its environment when it is imported
    from medialane.worker.serve import serve_worker

    # Until the worker handles signals itself: unwind the stack, so that vLLM stops the processes that it has started.
    signal.signal(signal.SIGTERM, _leave)
    engine = build_engine(
        args.model,
        args.vllm_args,
        arena_directory=config.arena.directory,
        release_timeout_s=config.worker.release_timeout_s,
        max_sampled_frames=config.media.max_sampled_frames,
        encode_cache=config.worker.encode_cache,
        role=args.role,
        host=_own_address(config.worker.gateways()),
    )
    directory = config.arena.directory

    async def serve() -> int:
        if engine.takes_media:
            enter_phase("measuring the encoder")
        await engine.learn_encoder()
        async with (
            reloaded_by_hangup(reloading.reload),
            _host_arena(config, args if engine.takes_media else None) as host_arena,
        ):
            return await serve_worker(
                config.worker,
                config.rpc,
                engine,
                args.listen,
                arena_directory=directory,
                host_arena=host_arena,
                gateways=config.worker.gateways(),
                drain_timeout_s=config.stop.drain_timeout_s,
            )

    # As vLLM's server does: a collection that visits the modules' objects, too, would stop all streams for 0.1 s.
    gc.collect()
    gc.freeze()
    return uvloop.run(serve())


@asynccontextmanager
async def _host_arena(config: Config, args: argparse.Namespace | None) -> AsyncIterator[StoreEntries | None]:
    """Stay connected to this host's store, if it has one, and keep it running if that is wanted."""
    if args is None or args.store is None:
        yield None
        return
    link = StoreLink(
        args.store,
        rpc=config.rpc,
        arena_directory=config.arena.directory,
        wait_timeout_s=config.store.wait_timeout_s,
        scraped="worker" if config.worker.metrics_port else None,
        names_takers=config.store.debug_holds,
    )
    argv = store_command(args.model, args.store)
    starting = host_store(argv, config, args.model, args.store) if args.start_store else nullcontext()
    async with WatchedTask(link.run, "the connection to the media store"), starting:
        enter_phase("waiting for the media store")
        await _wait_for(link, config.store.wait_timeout_s)
        yield StoreEntries(link, retention_s=config.store.hold_retention_s)


async def _wait_for(link: StoreLink, timeout_s: float) -> None:
    """Wait for the store, if it comes: gateways would send media in messages, or none, to a worker that they reach
    before."""
    try:
        async with asyncio.timeout(timeout_s):
            await link.ready()
    except TimeoutError:
        logger.warning("the store of this host is not ready after %g s: starting without it", timeout_s)
    except StartupFailed:
        pass  # logged by the link, which tries again


def _check_addresses(config: Config, args: argparse.Namespace) -> None:
    """Raise StartupFailed for addresses that are malformed, or cannot be used."""
    check_join(config)
    is_simulated = args.engine == "simulated"
    num_workers = config.simulated.num_workers if is_simulated else 1
    for address in [] if args.listen is None else addresses_of(args.listen, num_workers):
        check_listen(address, "--listen", config.rpc)
    check_metrics_ports(config.worker, num_workers if is_simulated else ranks_per_worker(args.vllm_args))


def _check_encoder(config: Config, args: argparse.Namespace) -> None:
    """Raise StartupFailed if an encoder could not keep what it encodes."""
    if args.store is None:
        raise StartupFailed("--role encoder needs --store unix:/path: embeddings are kept in the arena of that store")
    if config.worker.encode_cache == "off":
        raise StartupFailed("--role encoder needs --encode-cache auto or on: encoders write to that cache")
    if args.engine == "simulated":
        raise StartupFailed("--role encoder is for --engine vllm")


def _own_address(gateways: Sequence[TcpAddress]) -> str:
    """Return this host's address on the way to the gateways that are joined; empty if that is not known, or there are
    none. No packet is sent."""
    for gateway in gateways:
        with suppress(OSError):
            kind, *_, address = socket.getaddrinfo(gateway.host, gateway.port, type=socket.SOCK_DGRAM)[0]
            with socket.socket(kind, socket.SOCK_DGRAM) as probing:
                probing.connect(address)
                return str(probing.getsockname()[0])
    return ""


def _leave(number: int, _frame: FrameType | None) -> NoReturn:
    raise SystemExit(128 + number)


def _run_simulated(reloading: Reloading, args: argparse.Namespace) -> int:
    """Serve until a signal (0) or until a worker fails."""
    config = reloading.config
    if args.vllm_args:
        raise StartupFailed("a simulated worker takes no flags of vLLM: its settings begin with --simulated")
    from medialane.testing.simulated.engine import serve_simulated

    async def serve() -> int:
        async with reloaded_by_hangup(reloading.reload), _host_arena(config, args) as host_arena:
            return await serve_simulated(
                config.simulated,
                config.worker,
                config.rpc,
                model=args.model,
                listen=args.listen,
                role=args.role,
                arena_directory=config.arena.directory,
                host_arena=host_arena,
                gateways=config.worker.gateways(),
                drain_timeout_s=config.stop.drain_timeout_s,
            )

    return uvloop.run(serve())


@asynccontextmanager
async def host_store(
    argv: Sequence[str], config: Config, model: str, address: str, *, check_s: float = _CHECK_S
) -> AsyncIterator[None]:
    """Keep a store, `argv`, running at `address`, a unix socket, during the block. If workers of one host use the same
    address, the first of them starts the store, and another one when that has stopped."""
    work = partial(_keep_running, argv, config, model, address, check_s=check_s)
    async with WatchedTask(work, "what keeps the host's store running"):
        yield


async def _keep_running(argv: Sequence[str], config: Config, model: str, address: str, *, check_s: float) -> None:
    backoff = Backoff(initial_s=check_s, max_s=_MAX_BACKOFF_S)
    loop = asyncio.get_running_loop()
    while True:
        started, was_missing = loop.time(), True
        try:
            with _turn(address) as is_ours:
                was_missing = is_ours and not has_listener(parse_unix(address).path)
                if was_missing:
                    await _run_once(argv, config, model)
        except OSError as error:
            logger.error("the store of this host cannot be started: %s", error.strerror)
        if not was_missing or loop.time() - started > _MAX_BACKOFF_S:
            backoff.reset()
        await asyncio.sleep(backoff.next() if was_missing else check_s)


@contextmanager
def _turn(address: str) -> Iterator[bool]:
    """Yield whether this worker may start the store: one of several that try at once. Raises OSError."""
    descriptor = os.open(f"{address.removeprefix('unix:')}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        yield try_lock(descriptor)
    finally:
        os.close(descriptor)


async def _run_once(argv: Sequence[str], config: Config, model: str) -> None:
    """Run a store until it ends. Raises OSError if it cannot be started."""
    environ = child_environ(config, "store", model, (), on_gpu=False, environ=process_environ())
    process = ChildProcess.spawn(argv, environ, sys.stderr.fileno())
    logger.info("started the store of this host, pid %d", process.pid)
    try:
        await process.wait()
    except asyncio.CancelledError:
        await process.stop(_STORE_STOP_S)
        raise
    logger.warning("the store of this host has ended: %s", process.describe_exit())


def store_command(model: str, address: str) -> list[str]:
    """Return the command line of the store that a worker starts."""
    return [*INTERPRETER, "store", model, "--listen", address, *_FLAGS]
