"""Handles gateway requests with the engine (implements `worker.requests.Handler`)."""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import aclosing, contextmanager

import msgspec
from prometheus_client import REGISTRY, CollectorRegistry

from medialane.observability.worker_metrics import MetricReader
from medialane.types.admin import AdminCall, AdminResult, clears_kv_cache
from medialane.types.errors import (
    GenerationFailed,
    WorkerLost,
)
from medialane.types.feature import Hold, MoverName
from medialane.types.kv_blocks import KvChange
from medialane.types.request import (
    EncoderCard,
    EngineRequest,
    ExpandedPrompt,
    KvTransfer,
    ModelCard,
    OutputDelta,
    WorkerLoad,
)
from medialane.types.stats import MetricChanges, ProcessKind, StoreStats
from medialane.types.tensor import ArenaOffer
from medialane.wire.protocol import Hello, Welcome
from medialane.worker.block_table import BlockReports
from medialane.worker.config import WorkerConfig
from medialane.worker.engine import Engine, StallWatch
from medialane.worker.media import HeldEmbeddings, HostArena, NoArena, Receiver, entries_read, hold_entries

logger = logging.getLogger(__name__)

#: Consecutive missed pings of an engine that computes, after which the worker exits. One may be a long step.
MAX_MISSED_PINGS = 2

#: A dying engine fails many requests at once: one ping for all of them.
MIN_PING_INTERVAL_S = 0.1


class Worker:
    """Registers gateways, generates, reports KV blocks, and watches the engine.

    Created on the event loop; the owner closes it, after the server and the engine.
    """

    def __init__(
        self,
        engine: Engine,
        config: WorkerConfig,
        *,
        arena_directory: str,
        host_arena: HostArena | None = None,
        registry: CollectorRegistry = REGISTRY,  # used by vLLM for its engine's metrics
        memory: Callable[[], Mapping[ProcessKind, int]] = dict,  # of the worker's processes; called in threads
    ) -> None:
        self.worker_id = secrets.token_hex(8)
        self._engine = engine
        self._config = config
        self.registry = registry
        self.memory = memory
        self._receiver = Receiver(arena_directory)
        self._blocks = BlockReports(engine.card)
        engine.watch_blocks(self._blocks.apply)
        #: Set when this worker is to stop: it takes no new requests.
        self.draining = asyncio.Event()
        self._ping_requested = asyncio.Event()
        self._num_missed_pings = 0
        self._stalls = StallWatch(engine, timeout_s=config.stall_timeout_s)
        self._host_arena = host_arena or NoArena()
        self._offer: ArenaOffer | None = None
        self._mapped: str | None = None  # here and in the engine
        self._in_engine: set[str] = set()
        self._readers: Counter[str] = Counter()  # requests in the engine, by the arena that they read
        self._unmappable: set[str] = set()
        self._arena_listeners: dict[Callable[[str | None], None], None] = {}
        self._host_arena.watch(self._arena_changed)

    @property
    def card(self) -> ModelCard:
        return self._engine.card

    @property
    def encoder(self) -> EncoderCard | None:
        return self._engine.card.encoder

    @property
    def is_stalled(self) -> bool:
        """Whether the engine hangs, or has missed the last ping."""
        return self._stalls.is_stalled or bool(self._num_missed_pings)

    @property
    def is_draining(self) -> bool:
        return self.draining.is_set()

    def drain(self) -> None:
        if not self.is_draining:
            logger.info("draining: this worker takes no new requests, and stops")
        self.draining.set()

    @property
    def has_unknown_blocks(self) -> bool:
        """Whether the engine's KV blocks cannot be compared with prompts."""
        return self._blocks.has_unknown_blocks

    @property
    def has_arena(self) -> bool:
        """Whether the arena of this host's store is mapped."""
        return self._mapped is not None

    async def exposed_store(self) -> StoreStats | None:
        """See `HostArena.exposed_stats`."""
        return await self._host_arena.exposed_stats()

    async def register(self, hello: Hello) -> Welcome:
        self._compare(hello)
        return Welcome(self.worker_id, os.getpid(), self._engine.card, self._host_arena.client_id)

    async def run(self, request: EngineRequest) -> AsyncGenerator[OutputDelta, None]:
        """Run one request. Raises HandoverFailed if its tensors cannot be read, otherwise like `Engine.generate`."""
        embeddings = HeldEmbeddings(self._engine.card.encoder, self._host_arena)
        embeddings.check(request.prompt.media)
        hold: Hold | None = None
        movers: tuple[MoverName, ...] = ()
        is_at_engine = False
        try:
            if request.has_passed_holds:  # with the embeddings, as a rule
                request, hold, movers = await hold_entries(request, (), self._host_arena)
                request = await embeddings.find(request, self._mapped)
            else:
                request = await embeddings.find(request, self._mapped)  # what is found need not be held or copied
                request, hold, movers = await hold_entries(request, embeddings.ranges, self._host_arena)
            embeddings.use_sent(request.prompt.media, self._mapped, self._engine.card.encoder)
            media = request.prompt.media
            tensors = [[self._receiver.fetch(tensor) for tensor in item.tensors] for item in media]
            with self._reading({entry.arena for entry in (*entries_read(request.prompt), *embeddings.ranges)}):
                is_at_engine = True
                async with aclosing(self._engine.generate(request, tensors, embeddings.uses(media))) as deltas:
                    is_first = True
                    async for delta in deltas:
                        if is_first:
                            first = embeddings.on_first_output(delta, self._receiver.is_completed)
                            delta = msgspec.structs.replace(first, movers=movers) if movers else first
                        yield delta
                        if is_first:  # the message to the store comes after that to the gateway
                            embeddings.end_writing()
                        is_first = False
        except (GenerationFailed, WorkerLost):
            self._ping_requested.set()
            raise
        except asyncio.CancelledError:
            if not is_at_engine:
                await self._leave_blocks(request)
            raise
        finally:  # the engine no longer reads or writes: `generate` ends only then
            embeddings.release()
            if hold is not None:
                hold.release()

    async def _leave_blocks(self, request: EngineRequest) -> None:
        """Release the KV blocks that an aborted request was to read, which the engine has not got."""
        if request.kv_transfer is not None and request.kv_transfer.params:
            release = KvTransfer("release", request.kv_transfer.params)
            leaving = EngineRequest(request.request_id, ExpandedPrompt([]), b"", kv_transfer=release)
            async with aclosing(self._engine.generate(leaving, ())) as deltas:
                async for _ in deltas:
                    pass

    def watch_arena(self, listener: Callable[[str | None], None]) -> Callable[[], None]:
        """Call `listener` with the arena that this worker and its engine have mapped, now and after every change."""
        self._arena_listeners[listener] = None
        listener(self._mapped)
        return lambda: self._arena_listeners.pop(listener, None)

    def loads(self) -> Sequence[WorkerLoad]:
        return self._engine.loads()

    def watch_blocks(self, listener: Callable[[KvChange], None]) -> Callable[[], None]:
        return self._blocks.watch(listener)

    def held_blocks(self) -> Mapping[int, Sequence[int]]:
        return self._blocks.held()

    async def administer(self, call: AdminCall) -> AdminResult:
        """Raises like `Engine.administer`.

        vLLM reports cleared caches with its next step, which an idle engine does not run, so it is reported here.
        """
        before = self._blocks.num_clears()
        result = await self._engine.administer(call)
        if clears_kv_cache(call) and result is not False:
            self._blocks.clear(unless_since=before)
        return result

    def metrics(self) -> Callable[[], list[MetricChanges]]:
        return MetricReader(self.registry, self.memory).read

    async def watch(self) -> None:
        """Ping the engine, and have it unmap unused arenas. Never returns; raises WorkerLost when the engine is lost.

        A request failed by the engine triggers an immediate ping.
        """
        while True:
            self._ping_requested.clear()
            try:
                await self._stalls.watch(self._engine.ping(self._config.ping_timeout_s))
                self._num_missed_pings = 0
            except GenerationFailed as error:
                self._num_missed_pings += 1
                logger.error("%s (%d of %d)", error.message, self._num_missed_pings, MAX_MISSED_PINGS)
                if self._stalls.is_stalled or self._num_missed_pings >= MAX_MISSED_PINGS:
                    raise WorkerLost("the engine does not respond") from error
            await self._stalls.watch(self.map_arena())
            await self._wait_for_next_ping()

    async def map_arena(self) -> None:
        """Map the current arena in this process and in the engine's, which may have a different /dev/shm, and unmap
        others that no request reads any more: vLLM frees an item that it read only when `detach_arena` follows.

        Until it is mapped, gateways send media in messages. Raises WorkerLost."""
        offer = self._offer
        for arena in self._in_engine - {offer.id if offer is not None else None} - self._readers.keys():
            self._in_engine.discard(arena)
            await self._engine.detach_arena(arena)
        if offer is None or offer.id == self._mapped or offer.id in self._unmappable:
            return
        self._in_engine.add(offer.id)
        if not await self._engine.attach_arena(offer.id, offer.nonce) or not self._receiver.attach(
            offer.id, offer.nonce
        ):
            logger.warning("the store's arena is not in this worker's shared memory: media arrive in messages")
            self._unmappable = {offer.id}
        elif offer == self._offer:
            self._announce(offer.id)
        else:  # the store was lost meanwhile
            self._receiver.detach(offer.id)

    def close(self) -> None:
        """Unmap all arenas. Idempotent."""
        self._blocks.close()
        self._receiver.close()

    def _compare(self, hello: Hello) -> None:
        """Log processor settings that differ from the gateway's, which sends no features in this case."""
        ours, theirs = self._engine.card.processor, hello.processor
        for name in sorted(ours.keys() | theirs.keys()):
            if ours.get(name) != theirs.get(name):
                there, here = theirs.get(name), ours.get(name)
                logger.warning(
                    "gateway %s: processor setting %s is %s there and %s here", hello.gateway_id, name, there, here
                )

    def _arena_changed(self, offer: ArenaOffer | None) -> None:
        """Map the arena of the host's store soon, and unmap an earlier one: there may be no space for a new arena
        while any process has mapped the old one. What running requests read stays mapped until they end."""
        self._offer = offer
        if self._mapped is not None and (offer is None or offer.id != self._mapped):
            self._receiver.detach(self._mapped)
            self._announce(None)
        self._ping_requested.set()  # wakes `watch`, which has the engine map it

    def _announce(self, arena: str | None) -> None:
        self._mapped = arena
        for listener in list(self._arena_listeners):
            listener(arena)

    @contextmanager
    def _reading(self, arenas: AbstractSet[str]) -> Iterator[None]:
        """Count a request that reads `arenas` in the engine. The last reader of an earlier arena has it unmapped."""
        self._readers.update(arenas)
        try:
            yield
        finally:
            self._readers.subtract(arenas)
            self._readers += Counter()  # without zero counts
            if arenas - self._readers.keys() - {self._mapped}:
                self._ping_requested.set()

    async def _wait_for_next_ping(self) -> None:
        try:
            async with asyncio.timeout(self._config.ping_interval_s):
                await self._ping_requested.wait()
        except TimeoutError:
            return
        await asyncio.sleep(MIN_PING_INTERVAL_S)
