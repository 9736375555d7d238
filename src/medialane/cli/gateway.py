"""`medialane gateway`: one gateway process, wired from its parts."""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import signal
import socket
import sys
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import msgspec
import uvloop
from starlette.middleware import Middleware

from medialane.arena import Arena, reap
from medialane.cli.essential_tasks import EssentialTasks, unless_set
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
from medialane.gateway.http_protocol import http_protocol
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

#: What the fork server of the preparers builds its processor with, but in stage `url`: there preparers only open what
#: workers are about to decode.
PROCESSOR_FACTORY = "medialane.vllm_bridge.preparation:build_processor"

#: Exit status of a gateway that cannot go on: EX_SOFTWARE of sysexits.h. Start it again.
EXIT_FAILED = 70

#: How long a thread that runs Python may keep the event loop waiting for the interpreter lock; Python has 5 ms.
SWITCH_INTERVAL_S = 0.0005


@dataclass(frozen=True)
class _Parts:
    """What a gateway is made of. `gateway_config` is `config.gateway` with the stage that the model allows."""

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
    """Serve until SIGINT or SIGTERM (0), or until something has ended without which it cannot serve (EXIT_FAILED).

    Raises StartupFailed.
    """
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    with bind(config.server.host, config.server.port) as sock:
        return uvloop.run(serve(config, model, vllm_args, workers=workers, sock=sock))


def bind(host: str, port: int) -> socket.socket:
    """A bound socket that does not listen yet: clients are refused until the gateway is ready. Raises StartupFailed."""
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
    """What `run` does, on a bound socket, in the main thread's event loop."""
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    tasks = EssentialTasks(stop)
    async with AsyncExitStack() as stack:
        starting = _start(config, model, vllm_args, workers=workers, stack=stack, tasks=tasks)
        started = await unless_set(stop, starting)
        if started is not None:
            frontend, app = started
            http = http_protocol(config.gateway, max_headers=frontend.max_headers)
            await frontend.serve(app, sock, stop.wait(), config.gateway.drain_timeout_s, http=http)
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
    """Make all parts, which end with `stack`; returns vLLM's front end and the ASGI app that it is to serve."""
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
    parts = _Parts(config, gateway_config, frontend, arena, pool, fetcher, links, fairness, metrics)
    gateway = _gateway(parts)
    stack.callback(gateway.close)
    await stack.enter_async_context(tasks)
    tasks.start(links.run(), "connecting to workers")
    app = await _app(parts, gateway)
    await asyncio.shield(prefaulted)  # a page that cannot be had later would kill whoever writes it
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
    """Load vLLM's front end here and the preparers beside, at the same time. Raises StartupFailed."""
    try:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(pool.start())
            # Imports and processors take seconds; the loop goes on to serve the preparers' start meanwhile.
            loading = tasks.create_task(asyncio.to_thread(Frontend, model, vllm_args))
    except* StartupFailed as failed:
        raise next(e for e in failed.exceptions if isinstance(e, StartupFailed)) from None
    return loading.result()


def _fit(config: GatewayConfig, frontend: Frontend) -> GatewayConfig:
    """The settings with the stage that this model allows: where its items cannot be processed one by one, workers do it
    whole. Raises StartupFailed."""
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
    """The arena, removed at the end, and the task that makes its pages meanwhile."""
    config.arena.validate()
    for dead in reap(config.arena.directory):
        logger.info("removed the arena of a dead gateway: %s", dead.path)
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


def _gateway(parts: _Parts) -> Gateway:
    features = FeatureSource(
        arena=parts.arena,
        pool=parts.pool,
        fetcher=parts.fetcher,
        media=parts.config.media,
        processor_digest=digest(parts.frontend.processor_settings),
        fairness=parts.fairness,
        aliases=Aliases(max_aliases=parts.gateway_config.max_uuids, ttl_s=parts.gateway_config.uuid_ttl_s),
    )
    inline = InlineTransport(parts.arena.view.tensor, max_bytes=parts.config.transfer.max_inline_bytes)
    return Gateway(
        config=parts.gateway_config,
        transfer=parts.config.transfer,
        features=features,
        handover=Handover(transports=[ShmTransport(), inline], max_inline_bytes=parts.config.transfer.max_inline_bytes),
        assembler=parts.frontend.assembler(),
        workers=parts.links,
        router=Router(parts.config.routing),
        metrics=parts.metrics,
    )


async def _app(parts: _Parts, gateway: Gateway) -> Any:
    """vLLM's app around the gateway, and the metrics of all parts."""
    metrics, links = parts.metrics, parts.links
    metrics.watch_arena(parts.arena.stats)
    metrics.watch_preparers(parts.pool.stats)
    metrics.watch_workers(links.endpoints)
    metrics.watch_routing(gateway.routes.stats)
    scrape = WorkerScrape(links)
    metrics.watch_engines(scrape.mirrors)
    return await parts.frontend.app(
        gateway,
        outer=Middleware(ScopeMiddleware, metrics=metrics),
        inner=[
            Middleware(ScrapeMiddleware, refresh=scrape.refresh),
            Middleware(
                IntakeMiddleware, media=parts.config.media, config=parts.gateway_config, fairness=parts.fairness
            ),
        ],
        pages={"/medialane/decisions": gateway.routes.decisions},
        health=lambda: health_of(links, [parts.pool.degradation]).response(),
    )
