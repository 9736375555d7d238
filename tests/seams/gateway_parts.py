"""A gateway and its workers without vLLM: real arena, preparers, sockets; fake processor, assembler and engine."""

from __future__ import annotations

import asyncio
import io
import sys
import time
from contextlib import AsyncExitStack, aclosing
from typing import Self

import msgspec
import numpy as np
from PIL import Image as PILImage
from prometheus_client import CollectorRegistry

from medialane.arena import Arena
from medialane.core.errors import WorkerLost
from medialane.core.feature import MediaPrompt
from medialane.core.media import MediaRef
from medialane.core.request import EngineRequest, ExpandedPrompt, ModelCard
from medialane.gateway import (
    Aliases,
    FeatureSource,
    Gateway,
    GatewayConfig,
    Handover,
    LoopFairness,
    WorkerLink,
    WorkerPool,
)
from medialane.media import Fetched, Fetcher, MediaConfig
from medialane.observability.metrics import Metrics
from medialane.prepare import PreparerPool
from medialane.prepare.fake import PLACEHOLDER_TOKEN, FakeAssembler
from medialane.routing import Router
from medialane.rpc import ArenaOffer, Hello, RpcConfig, RpcServer
from medialane.transfer import InlineTransport, ShmTransport, TransferConfig
from medialane.worker import FakeEngine, FakeParams, Worker, WorkerConfig
from waiting import eventually

PROCESSOR = {"model": "fake"}
RPC = RpcConfig(heartbeat_interval_s=0.05, heartbeat_timeout_s=1.0)
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
    """Replaces `ImageBudget`: no image's cost is predicted."""

    def has_counted(self, ref: MediaRef) -> bool:
        return True

    def processed_bytes(self, ref: MediaRef) -> int:
        return 0

    decoded_bytes = processed_bytes


UNCOUNTED = Uncounted()


class FakeWorker:
    """A worker over a fake engine, which can be killed and started again at the same address."""

    def __init__(self, path: str, *, card: ModelCard | None = None, directory: str, **engine: object) -> None:
        self.address = f"unix:{path}"
        self._directory = directory
        self._engine_settings = {**engine, **({} if card is None else {"card": card})}
        self.engine = FakeEngine(**self._engine_settings)
        self._server: RpcServer | None = None

    async def start(self) -> None:
        self.engine = FakeEngine(**self._engine_settings)
        self.registry = CollectorRegistry()  # as a new process has one
        self._worker = Worker(self.engine, WorkerConfig(), arena_directory=self._directory, registry=self.registry)
        self._server = RpcServer(self._worker, RPC)
        await self._server.serve(self.address)

    def drop_connections(self) -> None:
        """Like a network failure: the worker keeps running."""
        for session in list(self._server._sessions):
            session.end(WorkerLost("the network is broken"))

    async def close(self) -> None:
        if self._server is not None:
            server, self._server = self._server, None
            await server.close()
            self._worker.close()


class ScriptedFetcher:
    """Replaces `Fetcher`: URLs with the current content of `contents`; `fresh` hashes are known without a fetch."""

    def __init__(self) -> None:
        self.contents: dict[str, bytes] = {}
        self.fresh: dict[str, str] = {}
        self.num_fetches = 0
        self._real = Fetcher(MEDIA)

    async def fetch(self, ref: MediaRef, *, need_data: bool = False) -> Fetched:
        if ref.url is None:
            return await self._real.fetch(ref)
        if not need_data and ref.url in self.fresh:
            return Fetched(self.fresh[ref.url], None)
        self.num_fetches += 1
        return await self._real.fetch(msgspec.structs.replace(ref, url=None, data=self.contents[ref.url]))


class Parts:
    """A gateway wired from its parts. `async with` starts the links; everything that tests inspect is an attribute."""

    def __init__(
        self,
        arena: Arena,
        preparers: PreparerPool,
        workers: list[FakeWorker],
        *,
        config: GatewayConfig | None = None,
        transfer: TransferConfig | None = None,
        fetcher: Fetcher | None = None,
        max_tokens: int = sys.maxsize,
    ) -> None:
        self.arena = arena
        self.registry = CollectorRegistry()
        self.metrics = Metrics(self.registry)
        self.fetcher = fetcher or ScriptedFetcher()
        config = config or GatewayConfig(reconnect_initial_s=0.01, reconnect_max_s=0.05)
        transfer = transfer or TransferConfig()
        hello = Hello(gateway_id="gateway", arena=ArenaOffer(arena.id, arena.nonce), processor=PROCESSOR)
        self.links = WorkerPool(
            [WorkerLink(w.address, hello, rpc=RPC, config=config, metrics=self.metrics) for w in workers]
        )
        self.fairness = LoopFairness()
        self.features = FeatureSource(
            arena=arena,
            pool=preparers,
            fetcher=self.fetcher,
            media=MEDIA,
            processor_digest="digest",
            fairness=self.fairness,
            aliases=Aliases(max_aliases=8, ttl_s=60),
        )
        inline = InlineTransport(arena.view.tensor)
        self.gateway = Gateway(
            config=config,
            transfer=transfer,
            features=self.features,
            handover=Handover(
                transports=[ShmTransport(), inline],
                max_inline_bytes=transfer.max_inline_bytes,
            ),
            assembler=FakeAssembler(max_tokens),
            workers=self.links,
            router=Router(),
            metrics=self.metrics,
        )

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as stack:
            stack.callback(self.metrics.close)
            stack.callback(self.fairness.close)
            stack.callback(self.gateway.close)
            running = asyncio.create_task(self.links.run())
            stack.push_async_callback(_cancelled, running)
            await eventually(lambda: self.links.num_ready == len(self.links.links))
            self._stack = stack.pop_all()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    @property
    def num_held(self) -> int:
        return sum(len(link._leases) for link in self.links.links.values())

    def count(self, name: str, **labels: str) -> float:
        return self.registry.get_sample_value(name, labels) or 0.0

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
