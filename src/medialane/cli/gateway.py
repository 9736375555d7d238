"""`medialane gateway`: one gateway process, assembled from its components."""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import signal
import socket
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec
import uvloop
from starlette.middleware import Middleware

from medialane.arena import Arena, reap
from medialane.cli.essential_tasks import EssentialTasks, unless_set
from medialane.cli.tuning import tune_process
from medialane.config import Config
from medialane.core.errors import StartupFailed
from medialane.core.hashing import digest
from medialane.core.stage import RAW_STAGE, STAGES, StageChoice, prepared_stage
from medialane.gateway import (
    Aliases,
    EncodedStore,
    FeatureSource,
    Gateway,
    Handover,
    IntakeMiddleware,
    LoopFairness,
    ScopeMiddleware,
    ScrapeMiddleware,
    WorkerLink,
    WorkerPool,
    WorkerScrape,
    health_of,
)
from medialane.gateway.config import GatewayConfig
from medialane.gateway.http_protocol import http_bounds
from medialane.gateway.http_server import BoundedServer
from medialane.gateway.intake.json_scan import warm_up
from medialane.media import Fetcher
from medialane.observability.metrics import Metrics
from medialane.prepare import NO_PROCESSOR_FACTORY, PreparerPool
from medialane.routing import Router
from medialane.rpc import ArenaOffer, Hello
from medialane.transfer import InlineTransport, ShmTransport
from medialane.vllm_bridge.app import Frontend
from medialane.vllm_bridge.preparation import FactoryConfig

logger = logging.getLogger(__name__)

#: Factory of the processor in the preparers' fork server, except in stage `url`: there preparers only probe items that
#: workers will decode.
PROCESSOR_FACTORY = "medialane.vllm_bridge.preparation:build_processor"

#: Exit status of a gateway that cannot continue: EX_SOFTWARE of sysexits.h. It should be restarted.
EXIT_FAILED = 70


@dataclass(frozen=True)
class _Components:
    """The components of a gateway. `gateway_config` is `config.gateway` with the stage that the model supports."""

    config: Config
    gateway_config: GatewayConfig
    frontend: Frontend
    arena: Arena
    pool: PreparerPool
    fetcher: Fetcher
    links: WorkerPool
    fairness: LoopFairness
    metrics: Metrics


def run(config: Config, model: str, vllm_args: Sequence[str], workers: Sequence[str]) -> int:
    """Serve until SIGINT or SIGTERM (0), or until an essential task has ended (EXIT_FAILED).

    Raises StartupFailed.
    """
    tune_process()
    with bind(config.server.host, config.server.port) as sock:
        return uvloop.run(serve(config, model, vllm_args, workers=workers, sock=sock))


def bind(host: str, port: int) -> socket.socket:
    """Return a bound socket that does not listen yet: connections are refused until the gateway is ready. Raises
    StartupFailed."""
    sock = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((host, port))
    except OSError as error:
        sock.close()
        why = os.strerror(error.errno) if error.errno else str(error)
        raise StartupFailed(f"cannot listen on {host} port {port}: {why} (--host, --port)") from error
    return sock


async def serve(
    config: Config, model: str, vllm_args: Sequence[str], *, workers: Sequence[str], sock: socket.socket
) -> int:
    """Implement `run` on a bound socket, in the main thread's event loop."""
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    tasks = EssentialTasks(stop)
    async with AsyncExitStack() as stack:
        starting = _start(config, model, vllm_args, workers=workers, stack=stack, tasks=tasks)
        started = await unless_set(stop, starting)
        if started is not None:
            frontend, app = started
            bounds = http_bounds(config.gateway, max_headers=frontend.max_headers)
            server_of = partial(BoundedServer, bounds=bounds)
            drain_s = config.gateway.drain_timeout_s
            await frontend.serve(app, sock, stop.wait(), drain_timeout_s=drain_s, server_of=server_of)
            if not stop.is_set():
                tasks.fail("the HTTP server")
    return EXIT_FAILED if tasks.failed else 0


async def _start(
    config: Config,
    model: str,
    vllm_args: Sequence[str],
    *,
    workers: Sequence[str],
    stack: AsyncExitStack,
    tasks: EssentialTasks,
) -> tuple[Frontend, Any]:
    """Create all components, owned by `stack`; return vLLM's front end and the ASGI app that it serves."""
    arena, prefaulted = await stack.enter_async_context(_arena(config))
    pool = _pool(config, model, vllm_args, arena)
    stack.push_async_callback(pool.close)
    frontend = await _load(pool, model, vllm_args)
    if not frontend.takes_media:
        await pool.close()
    gateway_config = _fit(config.gateway, frontend)
    if config.media.jpeg_scaled_decode:
        _warn_of_scaling(gateway_config.stage, frontend)
    await asyncio.to_thread(warm_up)
    fetcher = await stack.enter_async_context(Fetcher(config.media, bodies=EncodedStore(arena, config.media)))
    fairness, metrics = LoopFairness(), Metrics()
    stack.callback(fairness.close)
    links = _links(config, frontend, arena=arena, workers=workers, metrics=metrics)
    components = _Components(config, gateway_config, frontend, arena, pool, fetcher, links, fairness, metrics)
    gateway = _gateway(components)
    stack.callback(gateway.close)
    await stack.enter_async_context(tasks)
    tasks.start(links.run(), "connecting to workers")
    app = await _app(components, gateway)
    await asyncio.shield(prefaulted)  # if a page could not be allocated later, its writer would get SIGBUS
    return frontend, app


def _pool(config: Config, model: str, vllm_args: Sequence[str], arena: Arena) -> PreparerPool:
    return PreparerPool(
        config.prepare,
        factory=PROCESSOR_FACTORY if prepared_stage(config.gateway.stage).is_decoded else NO_PROCESSOR_FACTORY,
        factory_config=msgspec.json.encode(FactoryConfig(model, list(vllm_args), config.media.max_sampled_frames)),
        arena=arena,
        media=config.media,
    )


async def _load(pool: PreparerPool, model: str, vllm_args: Sequence[str]) -> Frontend:
    """Load vLLM's front end in this process while the preparers load theirs. Raises StartupFailed."""
    try:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(pool.start())
            # Imports and processors take seconds; the event loop must serve the preparers' start in the meantime.
            loading = tasks.create_task(asyncio.to_thread(Frontend, model, vllm_args))
    except* StartupFailed as failed:
        raise next(e for e in failed.exceptions if isinstance(e, StartupFailed)) from None
    return loading.result()


def _fit(config: GatewayConfig, frontend: Frontend) -> GatewayConfig:
    """Return the settings with a stage that this model supports: if its items cannot be processed one by one, workers
    do all processing. Raises StartupFailed."""
    if not frontend.takes_media:
        return msgspec.structs.replace(config, stage=RAW_STAGE)
    stage = prepared_stage(config.stage)
    if stage.is_decoded:
        frontend.check_media_options()
    if frontend.supports_split or not stage.is_processed:
        return config
    if config.stage != "auto" or stage.instead is None:
        others = " or ".join(found.name for found in STAGES.values() if not found.is_processed)
        raise StartupFailed(f"this model's media cannot be processed one by one: use --stage auto, {others}")
    logger.info("this model's media cannot be processed one by one: the workers do it (stage %s)", stage.instead)
    return msgspec.structs.replace(config, stage=stage.instead)


def _warn_of_scaling(stage: StageChoice, frontend: Frontend) -> None:
    if not prepared_stage(stage).is_processed:
        logger.warning("--jpeg-scaled-decode has no effect in stage %s: images are sent to the workers", stage)
    elif not frontend.has_resize_target():
        logger.warning("--jpeg-scaled-decode has no effect: the resize target of this model's processor is unknown")
    else:
        logger.warning("--jpeg-scaled-decode: answers about large JPEGs are not token-identical to vLLM's")


@asynccontextmanager
async def _arena(config: Config) -> AsyncIterator[tuple[Arena, asyncio.Task[int]]]:
    """Create the arena, removed on exit, and the task that prefaults its pages."""
    config.arena.validate()
    for dead in reap(config.arena.directory):
        logger.info("removed the arena of a gateway that has exited: %s", dead.path)
    arena = Arena.create(config.arena)
    stop = threading.Event()
    prefault = asyncio.create_task(asyncio.to_thread(arena.prefault, stop))
    try:
        yield arena, prefault
    finally:
        stop.set()
        await asyncio.wait([prefault])
        arena.close()


def _links(config: Config, frontend: Frontend, *, arena: Arena, workers: Sequence[str], metrics: Metrics) -> WorkerPool:
    hello = Hello(
        gateway_id=secrets.token_hex(16),
        arena=ArenaOffer(arena.id, arena.nonce),
        processor=frontend.processor_settings,
    )
    return WorkerPool([WorkerLink(w, hello, rpc=config.rpc, config=config.gateway, metrics=metrics) for w in workers])


def _gateway(components: _Components) -> Gateway:
    features = FeatureSource(
        arena=components.arena,
        pool=components.pool,
        fetcher=components.fetcher,
        media=components.config.media,
        processor_digest=digest(components.frontend.processor_settings),
        fairness=components.fairness,
        aliases=Aliases(max_aliases=components.gateway_config.max_uuids, ttl_s=components.gateway_config.uuid_ttl_s),
    )
    inline = InlineTransport(components.arena.view.tensor)
    return Gateway(
        config=components.gateway_config,
        transfer=components.config.transfer,
        features=features,
        handover=Handover(
            transports=[ShmTransport(), inline], max_inline_bytes=components.config.transfer.max_inline_bytes
        ),
        assembler=components.frontend.assembler,
        workers=components.links,
        router=Router(components.config.routing),
        metrics=components.metrics,
    )


async def _app(components: _Components, gateway: Gateway) -> Any:
    """Build vLLM's app around the gateway, and register the metrics of all components."""
    metrics, links = components.metrics, components.links
    metrics.watch_arena(components.arena.stats)
    metrics.watch_preparers(components.pool.stats)
    metrics.watch_workers(links.endpoints)
    metrics.watch_routing(gateway.routes.stats)
    scrape = WorkerScrape(links)
    metrics.watch_engines(scrape.mirrors)
    return await components.frontend.app(
        gateway,
        outer=Middleware(ScopeMiddleware, metrics=metrics),
        inner=[
            Middleware(ScrapeMiddleware, refresh=scrape.refresh),
            Middleware(
                IntakeMiddleware,
                media=components.config.media,
                config=components.gateway_config,
                fairness=components.fairness,
            ),
        ],
        pages={"/medialane/decisions": gateway.routes.decisions},
        health=lambda: health_of(links, [components.pool.degradation]).response(),
    )
