"""A gateway and its workers without vLLM: real arena, preparers, sockets; fake processor, assembler and engine."""

from __future__ import annotations

import asyncio
import io
import sys
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack, aclosing, suppress
from typing import Self

import msgspec
import numpy as np
from host_store import RPC, HostStore, StoreClientTask, store_address
from PIL import Image as PILImage
from prometheus_client import CollectorRegistry

from fake_engine import FakeEngine, FakeParams
from medialane.arena import Arena
from medialane.gateway import (
    AppBackend,
    Encoders,
    GatewayConfig,
    HandoverConfig,
    InlineTransport,
    MediaEndpoints,
    PullTransport,
    ShmTransport,
    Transport,
    Transports,
    WorkerLink,
    WorkerPool,
)
from medialane.media import MediaConfig
from medialane.media.fetch import Fetcher
from medialane.observability import Metrics
from medialane.prepare import PreparerPool
from medialane.routing import EncodeCosts, Router, RoutingConfig
from medialane.runtime.tasks import LoopFairness
from medialane.store import EncodedStore, HoldPasser, StoreEntries, StoreGrants, StoreLink
from medialane.testing.fake_processor import PLACEHOLDER_TOKEN, FakeAssembler
from medialane.transfer.nixl import NixlMover
from medialane.types.errors import WorkerLost
from medialane.types.feature import MediaPrompt
from medialane.types.hashing import content_hash
from medialane.types.media import MediaRef
from medialane.types.request import EngineRequest, ExpandedPrompt, ModelCard
from medialane.wire import Hello, RpcConfig
from medialane.worker import RpcServer, Worker, WorkerConfig
from waiting import eventually

PROCESSOR = {"model": "fake"}
MEDIA = MediaConfig()


def png(width: int = 60, height: int = 40, seed: int = 0) -> bytes:
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    file = io.BytesIO()
    PILImage.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


def ref(data: bytes, number: int = 0, salt: str = "") -> MediaRef:
    return MediaRef("image", f"messages[0].content[{number}].image_url", data=data, salt=salt)


def prompt(*datas: bytes, options: bytes = b"{}", salt: str = "") -> MediaPrompt:
    """`1`, then each item after a `2`."""
    token_ids = [1] + [token for _ in datas for token in (2, PLACEHOLDER_TOKEN)]
    return MediaPrompt(token_ids, tuple(ref(d, i, salt) for i, d in enumerate(datas)), options)


def request(request_id: str, token_ids: list[int], **params: object) -> EngineRequest:
    return EngineRequest(request_id, ExpandedPrompt(token_ids), msgspec.json.encode(FakeParams(**params)))


class Uncounted:
    """Replaces `ImageBudget`: every image is admitted."""

    def has_counted(self, ref: MediaRef) -> bool:
        return True

    def num_bytes(self, ref: MediaRef, form: str) -> int:
        return 0

    def missing(self) -> None:
        """Let every item be prepared."""

    async def add(self, ref: MediaRef, width: int, height: int) -> None:
        """Count nothing."""


UNCOUNTED = Uncounted()


def media_endpoints(parts: Parts, config: GatewayConfig, fairness: LoopFairness) -> MediaEndpoints:
    gateway = parts.gateway
    return MediaEndpoints(
        parts.store.link,
        config,
        fairness,
        admit=gateway.admit,
        num_tokens=gateway.num_image_tokens,
        read=gateway.read,
        sending=gateway.sending,
    )


class FailingEntries(StoreEntries):
    """A worker's entries of its store: `hold` raises each of `errors` once, `embedding` its error, if it has one."""

    def __init__(self, link: StoreLink) -> None:
        super().__init__(link)
        self.errors: list[Exception] = []
        self.embedding_error: Exception | None = None
        self.has_memory = True

    async def hold(self, *args, **kwargs):
        if self.errors:
            raise self.errors.pop()
        return await super().hold(*args, **kwargs)

    async def embedding(self, *args, **kwargs):
        if self.embedding_error is not None:
            raise self.embedding_error
        return await super().embedding(*args, **kwargs) if self.has_memory else None


class FakeWorker:
    """A worker over a fake engine, which can be killed and started again at the same address."""

    def __init__(
        self,
        path: str,
        *,
        card: ModelCard | None = None,
        arena: Arena,
        kind: type = FakeEngine,
        config: WorkerConfig | None = None,
        **engine: object,
    ) -> None:
        """An engine of another `kind` must have an attribute `attaches`."""
        self._kind = kind
        self.address = f"unix:{path}"
        self._arena = arena
        self._config = config or WorkerConfig()
        self._engine_settings = {**engine, **({} if card is None else {"card": card})}
        self.engine = kind(**self._engine_settings)
        self.attaches = self.engine.attaches
        self._server: RpcServer | None = None

    async def start(self) -> None:
        self.engine = self._kind(**self._engine_settings)
        self.registry = CollectorRegistry()  # as a new process has one
        directory = str(self._arena.path.parent)
        self._store = StoreClientTask(store_address(self._arena), directory)
        self.host_arena = FailingEntries(self._store.link)
        self._worker = Worker(
            self.engine,
            self._config,
            arena_directory=directory,
            host_arena=self.host_arena,
            registry=self.registry,
        )
        self._watching = asyncio.create_task(self._watch())
        self._server = RpcServer(self._worker, RPC)
        await self._server.serve(self.address)

    async def _watch(self) -> None:
        with suppress(WorkerLost):
            await self._worker.watch()

    @property
    def num_store_calls(self) -> int:
        """What the worker has asked its store since they are connected."""
        return self._store.link.num_calls

    def drop_connections(self) -> None:
        """Like a network failure: the worker keeps running."""
        self._server.drop_connections(WorkerLost("the network is broken"))

    async def drain(self, timeout_s: float) -> None:
        """Stop as `serve_worker` does."""
        self._worker.drain()
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._server.drain()
        await self.close()

    async def close(self) -> None:
        if self._server is not None:
            server, self._server = self._server, None
            await server.close()
            self._watching.cancel()
            await asyncio.wait([self._watching])
            self._worker.close()
            await self._store.close()


class ScriptedFetcher:
    """Replaces `Fetcher`: URLs with the current content of `contents`; `fresh` hashes are known without a fetch."""

    def __init__(self) -> None:
        self.contents: dict[str, bytes] = {}
        self.fresh: dict[str, str] = {}
        self.num_fetches = 0
        self.bodies: EncodedStore | None = None

    async def fetch(self, ref: MediaRef, *, need_data: bool = False) -> str:
        if not need_data and ref.url in self.fresh:
            return self.fresh[ref.url]
        self.num_fetches += 1
        data = self.contents[ref.url]
        body, found = self.bodies.open(ref.source, ref.salt, len(data)), content_hash(data)
        body.write(data)
        body.finish(found)
        return found


class Parts:
    """A gateway wired from its parts. `async with` starts the links; everything that tests inspect is an attribute."""

    def __init__(
        self,
        arena: Arena | None,
        preparers: PreparerPool | None,
        workers: list[FakeWorker],
        *,
        rpc: RpcConfig = RPC,
        config: GatewayConfig | None = None,
        handover: HandoverConfig | None = None,
        fetcher: Fetcher | None = None,
        max_tokens: int = sys.maxsize,
        beside: Parts | None = None,
        routing: RoutingConfig | None = None,
        mover: NixlMover | None = None,
        transports: Sequence[Transport] = (),
        assembler: FakeAssembler | None = None,
        link: type[WorkerLink] = WorkerLink,
        shm: type[ShmTransport] = ShmTransport,
        grants: type[StoreGrants] = StoreGrants,
    ) -> None:
        """With `beside`, another gateway of that one's host, with the same store; `transports` are tried first. `link`,
        `shm` and `grants` may be fakes that fail."""
        self.arena = arena
        self._rpc = rpc
        self._beside = beside
        self.registry = CollectorRegistry()
        self.metrics = Metrics(self.registry)
        self.fetcher = fetcher or ScriptedFetcher()
        config = config or GatewayConfig(reconnect_initial_s=0.01, reconnect_max_s=0.05)
        handover = handover or HandoverConfig()
        if isinstance(self.fetcher, ScriptedFetcher):
            self.fetcher.bodies = EncodedStore(arena, MEDIA)
        self.store = beside.store if beside else HostStore(arena, preparers, self.fetcher, media=MEDIA, mover=mover)
        self.workers = workers
        self._routing = routing
        self._transports = transports
        self._assembler = assembler or FakeAssembler(max_tokens)
        self._new_link, self._new_shm, self._new_grants = link, shm, grants
        self._config, self._handover = config, handover

    async def _assemble(self) -> None:
        hello = Hello(gateway_id=f"gateway-{id(self)}", processor=PROCESSOR)
        link, config, handover = self.store.link, self._config, self._handover
        self.links = WorkerPool(
            [
                self._new_link(
                    w.address,
                    hello,
                    rpc=self._rpc,
                    config=config,
                    metrics=self.metrics,
                    own_arena=lambda: link.arena,
                    can_grant=lambda: link.can_grant,
                )
                for w in self.workers
            ]
        )
        link.watch(lambda _: self.links.arena_changed())
        self.store_items = self.store.store_items
        shm = self._new_shm(HoldPasser(link, retention_s=0.0))
        pull = PullTransport(self._new_grants(link), handover.mover)
        inline = InlineTransport(link.tensor, handover.max_inline_bytes)
        router = self.router = Router(self._routing)
        self.gateway = AppBackend(
            config=config,
            transports=Transports([*self._transports, shm, pull, inline], handover.transport),
            store_items=self.store_items,
            assembler=self._assembler,
            workers=self.links,
            router=router,
            metrics=self.metrics,
            encoders=Encoders(
                self.links,
                shm,
                params=msgspec.json.encode(FakeParams(max_tokens=1)),
                costs=EncodeCosts.of(router.config),
                mean_sequences=lambda: router.mean_sequences,
                config=config,
                metrics=self.metrics,
            ),
        )

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as stack:
            stack.callback(self.metrics.close)
            if self._beside is None:
                await stack.enter_async_context(self.store)
            await self._assemble()
            stack.callback(self.gateway.close)
            running = asyncio.create_task(self.links.run())
            stack.push_async_callback(_cancelled, running)
            await eventually(lambda: all(found.client is not None for found in self.links.links.values()))
            mapping = {w.address for w in self.workers if w.attaches}
            await eventually(lambda: all(self._has_mapped(address) for address in mapping))
            self._stack = stack.pop_all()
        return self

    def _has_mapped(self, address: str) -> bool:
        link = self.links.links[address]
        return link.same_host or link.can_pull

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    @property
    def num_held(self) -> int:
        """Number of pins on entries of the arena."""
        return self.arena.stats().num_leases

    def count(self, name: str, **labels: str) -> float:
        """Add the samples of this name that have these labels, whatever others they have."""
        samples = [sample for metric in self.registry.collect() for sample in metric.samples if sample.name == name]
        return sum(sample.value for sample in samples if labels.items() <= sample.labels.items())

    async def answer(self, media: MediaPrompt, request_id: str = "r", **params: object) -> list[int]:
        """Prepare and generate inside the current scope; return the output token ids."""
        prepared = await self.gateway.prepare(media)
        return await self.generate(request(request_id, prepared.token_ids, **params), prepared)

    async def generate(self, wanted: EngineRequest, prepared: object) -> list[int]:
        async with asyncio.timeout(10), aclosing(self.gateway.generate(wanted, prepared)) as deltas:
            return [token async for delta in deltas for token in delta.completions[0].token_ids]


async def _cancelled(task: asyncio.Task[None]) -> None:
    task.cancel()
    started = time.monotonic()
    await asyncio.wait([task])
    assert time.monotonic() - started < 5
