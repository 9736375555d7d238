"""The media store of a host in this process, over a real socket."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Self

from medialane.arena import Arena
from medialane.gateway import StoreItems
from medialane.media import MediaConfig
from medialane.media.fetch import Fetcher
from medialane.prepare import PreparerPool
from medialane.runtime.tasks import LoopFairness
from medialane.store import (
    Aliases,
    EncodedStore,
    Items,
    MediaLeases,
    PublishedImages,
    StoreConfig,
    StoreLink,
    StoreServer,
    StoreStatus,
)
from medialane.transfer import Pulls
from medialane.transfer.nixl import NixlMover
from medialane.types.hashing import digest
from medialane.types.stats import PoolStats, StoreStats
from medialane.wire import RpcConfig

PROCESSOR = {"model": "fake"}
RPC = RpcConfig(heartbeat_interval_s=0.05, heartbeat_timeout_s=1.0)
WAIT_S = 2.0
NO_PREPARERS = PoolStats(0, 0, 0, 0, 0, 0, 0, 0)


def store_address(arena: Arena) -> str:
    """Every client of a test finds the store of its arena."""
    return f"unix:/tmp/medialane-test-{arena.id[:16]}.sock"


class StoreClientTask:
    """A link that stays connected until `close`."""

    def __init__(self, address: str, directory: str, *, link: type[StoreLink] = StoreLink, **settings: object) -> None:
        settings = {"rpc": RPC, "wait_timeout_s": WAIT_S, **settings}
        self.link = link(address, arena_directory=directory, **settings)
        self._running = asyncio.create_task(self.link.run())

    async def close(self) -> None:
        self._running.cancel()
        await asyncio.wait([self._running])


@asynccontextmanager
async def fetching(arena: Arena, media: MediaConfig) -> AsyncIterator[Fetcher]:
    """What a store fetches by, into `arena`."""
    async with Fetcher(media, open_body=EncodedStore(arena, media).open) as fetcher:
        yield fetcher


class HostStore:
    """The store of `arena`, which its caller owns, like the other parts. `store_items` is how a gateway uses it."""

    def __init__(
        self,
        arena: Arena,
        preparers: PreparerPool | None,
        fetcher: Fetcher,
        *,
        media: MediaConfig | None = None,
        address: str | None = None,
        mover: NixlMover | None = None,
    ) -> None:
        self.media = media = media or MediaConfig()
        self.arena = arena
        self.address = address or store_address(arena)
        self._preparers = preparers
        self._fetcher = fetcher
        self.mover = mover
        self.aliases = Aliases(max_aliases=8, ttl_s=60)
        self.leases = MediaLeases(arena, StoreConfig(), media, aliases=self.aliases, pool=preparers)
        self.items = self._make_items()
        self.fairness = LoopFairness()
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Self:
        self._stack.callback(self.fairness.close)
        self._stack.callback(self.leases.close)
        self.pulls = Pulls(self.arena, RPC, self.mover)
        self._stack.push_async_callback(self.pulls.close)
        if self.mover is not None:
            published = PublishedImages(self.arena, self.pulls, self.mover, self.media)
            self._stack.push_async_callback(published.close)
            self.items = self._make_items(published)
        await self.pulls.serve("tcp://127.0.0.1:0")
        self.server = StoreServer(
            self.items, self.arena, RPC, pulls=self.pulls, max_connections=64, processor=dict, status=self._status
        )
        self._stack.push_async_callback(self.server.close)
        await self.server.serve(self.address)
        client = StoreClientTask(self.address, str(self.arena.path.parent), writable=True, processor=PROCESSOR)
        self._stack.push_async_callback(client.close)
        self.link = client.link
        async with asyncio.timeout(5):
            await self.link.ready()
        self.store_items = StoreItems(
            self.link, processor_digest=digest(PROCESSOR), fairness=self.fairness, media=self.media
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    def _make_items(self, published: PublishedImages | None = None) -> Items:
        return Items(
            arena=self.arena,
            pool=self._preparers,
            fetcher=self._fetcher,
            media=self.media,
            aliases=self.aliases,
            leases=self.leases,
            published=published,
        )

    def _status(self) -> StoreStatus:
        preparers = self._preparers.stats() if self._preparers is not None else NO_PREPARERS
        return StoreStatus(StoreStats(self.arena.stats(), preparers, embeddings=self.items.embeddings.stats))
