"""A media store for parts of a gateway or worker that a benchmark runs by themselves, and links to one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from medialane.arena import Arena, ArenaConfig
from medialane.media import MediaConfig
from medialane.media.fetch import Fetcher
from medialane.prepare import PreparerPool
from medialane.store import Aliases, EncodedStore, Items, MediaLeases, StoreConfig, StoreLink, StoreServer, StoreStatus
from medialane.transfer import Pulls
from medialane.types.stats import PoolStats, StoreStats
from medialane.wire import RpcConfig

WAIT_S = 30.0
_NO_PREPARERS = PoolStats(0, 0, 0, 0, 0, 0, 0, 0)


@asynccontextmanager
async def host_store(address: str, arena: Arena, pool: PreparerPool | None = None) -> AsyncIterator[None]:
    """Serve the store of `arena` at `address`. Without a `pool` only what is in the arena already can be used."""
    media = MediaConfig()
    preparers: Any = pool
    async with Fetcher(media, open_body=EncodedStore(arena, media).open) as fetcher:
        aliases = Aliases(max_aliases=1, ttl_s=60)
        leases = MediaLeases(arena, StoreConfig(), media, aliases=aliases, pool=preparers)
        items = Items(arena=arena, pool=preparers, fetcher=fetcher, media=media, aliases=aliases, leases=leases)

        def status() -> StoreStatus:
            return StoreStatus(StoreStats(arena.stats(), _NO_PREPARERS if pool is None else pool.stats()))

        server = StoreServer(
            items, arena, RpcConfig(), pulls=Pulls(arena, RpcConfig()), max_connections=8, processor=dict, status=status
        )
        try:
            await server.serve(address)
            yield
        finally:
            await server.close()
            leases.close()


@asynccontextmanager
async def store_link(
    address: str, *, directory: str = ArenaConfig().directory, writable: bool = False
) -> AsyncIterator[StoreLink]:
    """Stay connected to the store at `address`, which need not exist yet."""
    link = StoreLink(address, rpc=RpcConfig(), arena_directory=directory, wait_timeout_s=WAIT_S, writable=writable)
    running = asyncio.create_task(link.run())
    try:
        yield link
    finally:
        running.cancel()
        await asyncio.wait([running])
