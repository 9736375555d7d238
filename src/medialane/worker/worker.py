"""Handles gateway requests with the engine (implements `rpc.Handler`)."""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing

from prometheus_client import REGISTRY, CollectorRegistry

from medialane.core.admin import AdminCall, AdminResult, clears_kv_cache
from medialane.core.errors import GenerationFailed, WorkerLost
from medialane.core.kv_events import KvChange
from medialane.core.metrics import MetricChanges
from medialane.core.request import EngineRequest, OutputDelta, Prompt, WorkerLoad
from medialane.core.tensor import InlineTensor, TensorDescriptor
from medialane.observability.worker_metrics import MetricReader
from medialane.rpc import ArenaOffer, Hello, Welcome
from medialane.transfer import InlineReceiver, Receiver, ShmReceiver
from medialane.worker.block_reports import BlockReports
from medialane.worker.config import WorkerConfig
from medialane.worker.engine import Engine

logger = logging.getLogger(__name__)

#: Consecutive missed pings of the engine after which the worker exits. One may be a stall of the machine.
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
        registry: CollectorRegistry = REGISTRY,  # used by vLLM for its engine's metrics
    ) -> None:
        self.worker_id = secrets.token_hex(8)
        self._engine = engine
        self._config = config
        self._registry = registry
        self._shm = ShmReceiver(arena_directory)
        self._inline = InlineReceiver()
        self._blocks = BlockReports(engine.card)
        engine.watch_blocks(self._blocks.apply)
        self._ping_requested = asyncio.Event()
        self._attached: dict[str, str] = {}  # arena -> gateway
        self._unused: set[str] = set()  # arenas that the engine still has to unmap

    async def register(self, hello: Hello) -> Welcome:
        """Register a gateway, and map its arena if it is on this host."""
        self._compare(hello)
        shm = hello.arena is not None and await self._attach(hello.gateway_id, hello.arena)
        return Welcome(self.worker_id, os.getpid(), self._engine.card, shm)

    def left(self, hello: Hello) -> None:
        """Unmap a gateway's arena, here now and in the engine's processes soon: a killed gateway restarts, and there
        may be no space for its new arena while any process has mapped the old one."""
        if hello.arena is None or self._attached.get(hello.arena.id) != hello.gateway_id:
            return
        del self._attached[hello.arena.id]
        self._shm.detach(hello.arena.id)
        self._unused.add(hello.arena.id)
        self._ping_requested.set()  # wakes `watch`, which unmaps it

    async def run(self, request: EngineRequest) -> AsyncGenerator[OutputDelta, None]:
        """Run one request. Raises HandoverFailed if its tensors cannot be read, otherwise like `Engine.generate`."""
        try:
            async with aclosing(self._engine.generate(request, self._tensors(request.prompt))) as deltas:
                async for delta in deltas:
                    yield delta
        except (GenerationFailed, WorkerLost):
            self._ping_requested.set()
            raise

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
        return MetricReader(self._registry).read

    async def watch(self) -> None:
        """Ping the engine, and have it unmap unused arenas. Never returns; raises WorkerLost when the engine is lost.

        A request failed by the engine triggers an immediate ping.
        """
        num_missed_pings = 0
        while True:
            self._ping_requested.clear()
            try:
                await self._engine.ping(self._config.ping_timeout_s)
                num_missed_pings = 0
            except GenerationFailed as error:
                num_missed_pings += 1
                logger.error("%s (%d of %d)", error.message, num_missed_pings, MAX_MISSED_PINGS)
                if num_missed_pings >= MAX_MISSED_PINGS:
                    raise WorkerLost("the engine does not respond") from error
            while self._unused:
                await self._engine.detach_arena(self._unused.pop())
            await self._wait_for_next_ping()

    def close(self) -> None:
        """Unmap all arenas. Idempotent."""
        self._blocks.close()
        self._shm.close()

    def _compare(self, hello: Hello) -> None:
        """Log processor settings that differ from the gateway's, which sends no features in this case."""
        ours, theirs = self._engine.card.processor, hello.processor
        for name in sorted(ours.keys() | theirs.keys()):
            if ours.get(name) != theirs.get(name):
                there, here = theirs.get(name), ours.get(name)
                logger.warning(
                    "gateway %s: processor setting %s is %s there and %s here", hello.gateway_id, name, there, here
                )

    async def _attach(self, gateway_id: str, offer: ArenaOffer) -> bool:
        """Attach the arena in this process and in the engine's, which may have a different /dev/shm. Return True if
        both have mapped it."""
        if not self._shm.attach(offer.id, offer.nonce):
            return False
        self._attached[offer.id] = gateway_id
        self._unused.discard(offer.id)
        return await self._engine.attach_arena(offer.id, offer.nonce)

    def _tensors(self, prompt: Prompt) -> list[list[memoryview]]:
        return [[self._fetch(tensor) for tensor in item.tensors] for item in prompt.media]

    def _fetch(self, tensor: TensorDescriptor | InlineTensor) -> memoryview:
        receiver: Receiver = self._inline if isinstance(tensor, InlineTensor) else self._shm
        return receiver.fetch(tensor)

    async def _wait_for_next_ping(self) -> None:
        try:
            async with asyncio.timeout(self._config.ping_interval_s):
                await self._ping_requested.wait()
        except TimeoutError:
            return
        await asyncio.sleep(MIN_PING_INTERVAL_S)
