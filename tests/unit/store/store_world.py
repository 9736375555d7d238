"""A store without media: items are patterns of bytes. Its clients are of this process: each has the lock of a slot."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable
from functools import cached_property

import pytest

from cable import Cable
from medialane.arena import ENTRY_HEADER_BYTES, Arena, ArenaConfig, FillWriter, Lineage, Pin, layout
from medialane.store import FindItem, ItemFound, PinnedItem, StoreEntries, StoreLink, StoreServer, StoreStatus
from medialane.store.embeddings import Embeddings
from medialane.transfer import Pulls
from medialane.types.errors import ArenaFull
from medialane.types.feature import Feature, FoundEmbedding, WantedEmbedding
from medialane.types.media import EncodedMedia, MediaRef, MediaSize
from medialane.types.stats import PoolStats, StoreStats
from medialane.types.tensor import ArenaRange, TensorDescriptor, TensorSpec
from medialane.wire import RpcConfig
from poison import poison_freed
from waiting import eventually

RPC = RpcConfig(heartbeat_interval_s=0.05, heartbeat_timeout_s=5.0)
IDLE = PoolStats(0, 0, 0, 0, 0, 0, 0, 0)
ITEM_BYTES = 500_000
#: As many bytes as an item has.
EMBEDDING = TensorSpec("float32", (ITEM_BYTES // 400, 100))
DIRECTORY = "/dev/shm"
LINEAGE = Lineage(owner=b"patterns".ljust(16))


class PatternItems:
    """Replaces `Items`: the item of content `c` is `ITEM_BYTES` bytes of `pattern(c)`."""

    def __init__(self, arena: Arena, **settings: object) -> None:
        self._arena = arena
        self.embeddings = Embeddings(arena, **settings)
        self.gate: asyncio.Event | None = None
        #: Fails every item.
        self.error: Exception | None = None
        #: An item without memory fails when this is set, as a fetch does after it has closed its connection.
        self.closed: asyncio.Event | None = None

    async def find(self, source, form, processing) -> PinnedItem:
        ref = source.ref
        if self.gate is not None:
            await self.gate.wait()
        if self.error is not None:
            raise self.error
        if source.upload is not None:
            with await source.upload(self) as sent:
                data = self._arena.view.entry(sent.range)[ENTRY_HEADER_BYTES : sent.range.nbytes]
                made = self._make(ref.content, bytes(data))
            return PinnedItem(ref.content, made, is_hit=False)
        pin = self._arena.lookup(ref.content)
        try:
            return PinnedItem(ref.content, pin or self._make(ref.content), is_hit=pin is not None)
        except ArenaFull:
            if self.closed is not None:
                await self.closed.wait()
            raise

    def publish(self, reservation, _source, *, content: str, **_fields: object) -> Pin[EncodedMedia]:
        """Keep what a client has sent."""
        range_ = reservation.range
        num_bytes = range_.nbytes - ENTRY_HEADER_BYTES
        encoded = EncodedMedia("image", content, "image/png", range_, ENTRY_HEADER_BYTES, num_bytes)
        return self._arena.publish(reservation, content, encoded)

    def _make(self, content: str, data: bytes = b"") -> Pin[Feature]:
        data = data or pattern(content) * ITEM_BYTES
        reservation = self._arena.reserve(len(data))
        reservation.buffer[:] = data
        return self._arena.publish(reservation, content, feature(content, reservation.range))


def serve_patterns(
    items: PatternItems,
    arena: Arena,
    processor: Callable[[], dict[str, str]] = dict,
    has_started: Callable[[], bool] = lambda: True,
    on_damaged: Callable[[], object] = lambda: None,
) -> StoreServer:
    def status() -> StoreStatus:
        return StoreStatus(StoreStats(arena.stats(), IDLE, embeddings=items.embeddings.stats), None, has_started())

    return StoreServer(
        items,
        arena,
        RPC,
        pulls=Pulls(arena, RPC),
        max_connections=16,
        processor=processor,
        status=status,
        on_damaged=on_damaged,
    )


def pattern(content: str) -> bytes:
    return bytes([ord(content[0])])


def feature(content: str, entry: ArenaRange) -> Feature:
    spec = TensorSpec("uint8", (ITEM_BYTES,))
    (offset,), _ = layout((spec,))
    return Feature("image", content, b"", (TensorDescriptor(spec, entry, offset),), MediaSize())


def described(content: str) -> Feature:
    """The feature of an item without its tensors."""
    return Feature("image", content, b"header", (), MediaSize())


def wanted(content: str, spec: TensorSpec = EMBEDDING) -> WantedEmbedding:
    return WantedEmbedding(content * 64, described(content), spec)


def write(found: FoundEmbedding, content: str, directory: str = DIRECTORY) -> None:
    """What a process of an engine does."""
    with FillWriter.open(found.embedding.tensor.range, directory) as payload:
        payload[:] = pattern(content) * len(payload)


def reference(content: str) -> MediaRef:
    return MediaRef("image", "p", content=content)


class Client:
    """A gateway or worker, connected to the store by `cable`, or else directly. `settings` are those of the `link`."""

    def __init__(
        self, world: World, cable: Cable | None = None, link: type[StoreLink] = StoreLink, **settings: object
    ) -> None:
        self.cable = cable
        self.link = link(
            world.address if cable is None else cable.address,
            rpc=RPC,
            arena_directory=world.directory,
            writable=True,
            **{"wait_timeout_s": world.wait_timeout_s, **settings},
        )
        self.holds: dict[int, tuple[str, ArenaRange]] = {}
        self.running = asyncio.create_task(self.link.run())

    @cached_property
    def entries(self) -> StoreEntries:
        """The worker's view of the arena."""
        return StoreEntries(self.link)

    async def embedding(self, content: str, *, wait_s: float = 0.0) -> FoundEmbedding | None:
        """Find the embedding of `content`, as the worker of an engine."""
        return await self.entries.embedding(wanted(content), wait_s=wait_s)

    async def find(self, content: str) -> int:
        reply = await self.link.call(lambda call_id: FindItem(call_id, reference(content), "processed"))
        assert isinstance(reply, ItemFound)
        self.holds[reply.hold_id] = content, reply.range
        return reply.hold_id

    def release(self, hold_id: int) -> None:
        _, entry = self.holds.pop(hold_id)
        self.link.release(hold_id, entry.arena)

    async def lose_connection(self) -> None:
        """The connection ends, while the process lives; it connects again."""
        num_made = self.cable.num_made
        self.cable.cut()
        await eventually(lambda: self.cable.num_made > num_made and self.link.status is not None)

    async def unplug(self) -> None:
        """The connection ends, while the process lives; it cannot connect again."""
        self.cable.unplug()
        await eventually(lambda: self.link.status is None)

    async def exit(self) -> None:
        """The connection ends, and the kernel drops the lock of its slot."""
        self.running.cancel()
        await asyncio.wait([self.running])
        if self.cable is not None:
            await self.cable.close()


class World:
    """The store and its clients."""

    wait_timeout_s = 2.0

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        size_bytes: int = 16 << 20,
        *,
        grows: bool = False,
        directory: str = DIRECTORY,
        **embeddings: object,
    ) -> None:
        poison_freed(monkeypatch)  # before there is an arena
        self.address = f"unix:/tmp/medialane-test-{secrets.token_hex(6)}.sock"
        self.directory = directory
        self._config, self._grows = ArenaConfig(size_bytes=size_bytes, directory=directory), grows
        self.processor: dict[str, str] = {}
        self.has_started = True
        self._embeddings = embeddings
        self._open()
        monkeypatch.setattr("medialane.store.client_use.POLL_INTERVAL_S", 0.005)
        self._clients: list[Client] = []

    async def start(self) -> World:
        await self.server.serve(self.address)
        return self

    async def replace_store(self) -> None:
        """As kill -9 of the store's process, which leaves the arena as it is, and the start of another."""
        self.arena.leave()
        await self.server.close()
        self.arena.close()
        self._open()
        await self.start()

    def _open(self) -> None:
        self.arena = Arena.open(self._config, lineage=LINEAGE, grows=self._grows)
        self.items = PatternItems(self.arena, **self._embeddings)
        self.server = serve_patterns(self.items, self.arena, lambda: self.processor, lambda: self.has_started)

    async def client(self, **settings: object) -> Client:
        client = Client(self, await Cable.lay(self.address), **settings)
        self._clients.append(client)
        await asyncio.wait_for(client.link.ready(), 5)
        return client

    def bytes_of(self, entry: ArenaRange) -> bytes:
        return bytes(self.arena.view.memory[entry.offset + 64 : entry.offset + 64 + ITEM_BYTES])

    async def end(self) -> None:
        """Disconnect all clients and close the store, which then holds nothing for anyone."""
        for client in self._clients:
            await client.exit()
        await self.close()
        assert (self.arena.stats().num_leases, self.arena.stats().num_reservations) == (0, 0)

    async def close(self) -> None:
        await self.server.close()
        self.arena.close()
