"""`medialane store`: one host's media store, assembled from its components."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager

import msgspec
import uvloop

from medialane.arena import Arena, reap
from medialane.cli.essential_tasks import unless_set
from medialane.cli.tuning import tune_process
from medialane.config import Config
from medialane.core.stage import prepared_stage
from medialane.core.stats import StoreStats
from medialane.media import Fetcher
from medialane.prepare import NO_PROCESSOR_FACTORY, FactoryConfig, PreparerPool
from medialane.store import Aliases, EncodedStore, Items, Pulls, StoreServer
from medialane.store.messages import StoreStatus
from medialane.transfer.nixl import NixlMover
from medialane.worker.serve import stopped_by_signals

logger = logging.getLogger(__name__)

#: Factory of the processor in the preparers' fork server, except in stage `url`: there preparers only probe items that
#: workers will decode.
PROCESSOR_FACTORY = "medialane.vllm_bridge.preparation:build_processor"


def run(config: Config, model: str, vllm_args: Sequence[str], address: str) -> int:
    """Serve until SIGINT or SIGTERM. Raises StartupFailed."""
    tune_process()
    return uvloop.run(_serve(config, model, vllm_args, address))


async def _serve(config: Config, model: str, vllm_args: Sequence[str], address: str) -> int:
    with stopped_by_signals() as stop:
        async with AsyncExitStack() as stack:
            started = await unless_set(stop, _start(config, model, vllm_args, address=address, stack=stack))
            if started is not None:
                logger.info("the media store listens at %s", address)
                await stop.wait()
    return 0


async def _start(
    config: Config, model: str, vllm_args: Sequence[str], *, address: str, stack: AsyncExitStack
) -> StoreServer:
    """Create all components, owned by `stack`, and listen."""
    arena, prefaulted = await stack.enter_async_context(_arena(config))
    pool = _pool(config, model, vllm_args, arena)
    stack.push_async_callback(pool.close)
    await pool.start()
    prepares = prepared_stage(config.gateway.stage).is_decoded
    if prepares and not pool.processor_settings:
        logger.info("this model takes no media")
        await pool.close()
    fetcher = await stack.enter_async_context(Fetcher(config.media, bodies=EncodedStore(arena, config.media)))
    aliases = Aliases(max_aliases=config.store.max_uuids, ttl_s=config.store.uuid_ttl_s)
    items = Items(arena=arena, pool=pool, fetcher=fetcher, media=config.media, aliases=aliases)
    pulls = Pulls(arena, [NixlMover(arena.id, config.arena.directory, max_given_up_bytes=arena.size_bytes // 8)])
    stack.push_async_callback(pulls.close)
    server = StoreServer(
        items,
        arena,
        config.rpc,
        pulls=pulls,
        max_connections=config.store.max_connections,
        processor=lambda: pool.processor_settings,
        status=lambda: StoreStatus(StoreStats(arena.stats(), pool.stats(), pulls.stats), pool.degradation),
    )
    stack.push_async_callback(server.close)
    await asyncio.shield(prefaulted)  # if a page could not be allocated later, its writer would get SIGBUS
    if config.store.peer_listen:
        logger.info("other hosts' stores connect to %s", await pulls.serve(config.store.peer_listen))
    await server.serve(address)
    return server


def _pool(config: Config, model: str, vllm_args: Sequence[str], arena: Arena) -> PreparerPool:
    return PreparerPool(
        config.prepare,
        factory=PROCESSOR_FACTORY if prepared_stage(config.gateway.stage).is_decoded else NO_PROCESSOR_FACTORY,
        factory_config=msgspec.json.encode(FactoryConfig(model, list(vllm_args), config.media.max_sampled_frames)),
        arena=arena,
        media=config.media,
    )


@asynccontextmanager
async def _arena(config: Config) -> AsyncIterator[tuple[Arena, asyncio.Task[int]]]:
    """Create the arena, removed on exit, and the task that prefaults its pages."""
    config.arena.validate()
    for dead in reap(config.arena.directory):
        logger.info("removed the arena of a store that has exited: %s", dead.path)
    arena = Arena.create(config.arena)
    stop = threading.Event()
    prefault = asyncio.create_task(asyncio.to_thread(arena.prefault, stop))
    try:
        yield arena, prefault
    finally:
        stop.set()
        await asyncio.wait([prefault])
        arena.close()
