"""`medialane bench handover`: time from 'entry ready' to 'tensor view usable in the EngineCore process'.

medialane: three processes, two hops, and the store, a fourth. The feature is in the arena, the gateway holds it, and
the prompt is prepared; then `AppBackend.generate` (route, hand-over, Submit over the RPC's unix socket), the `Worker`
(holds the feature at the store, checks descriptors, builds views, decodes the item), vLLM's encoder with our consumer,
EngineCore's IPC socket, EngineCore's input thread with our decoder; finally the first and last element are read. vLLM:
two processes, one hop. The processed tensors are in the front end's heap, where vLLM's processor leaves them; then
vLLM's encoder and the same socket and thread, with `direct_rpc` (bytes through the socket) or `torch_shm` (moved into
torch's shared memory). The time to bring the tensors to that heap is not counted, in vLLM's favour. `no feature` is the
same hop for a text request: a lower bound for all hand-over paths. Not included in any: tokenising, a worker's feature
checks (`checks`, measured separately), the scheduler, the model.

The prompt has the same number of tokens at every size: longer prompts cost the same with every hand-over path.
`answered` includes the response to the sender. `read all` is the time that EngineCore then takes to read every byte
once, with page tables as for an entry that it has not seen before: the page faults of a mapping are counted here.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import tempfile
import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

import torch
import uvloop
from prometheus_client import CollectorRegistry
from vllm.multimodal import MULTIMODAL_REGISTRY

import handover_ends as ends
from harness import Bar, Options, Report, median, percentile
from local_store import store_link
from medialane.arena import ArenaConfig
from medialane.config import process_environ
from medialane.gateway import AppBackend, GatewayConfig, ShmTransport, Transports, WorkerLink, WorkerPool, open_scope
from medialane.observability import Metrics
from medialane.routing import Router
from medialane.store import HoldPasser, StoreEntries, StoreLink
from medialane.testing.fake_processor import FakeAssembler
from medialane.testing.sample_media import sample_pixels
from medialane.testing.tiny_model import SPECIAL_TOKENS, TINY_MODEL_FLAGS, build_tiny_model, cache_folder
from medialane.types.feature import (
    Feature,
    Hold,
    MediaPayload,
    MediaPrompt,
    PlacedFeature,
    PlaceholderRange,
    PreparedPrompt,
    StagedItem,
)
from medialane.types.media import Image, MediaRef, StageName
from medialane.types.request import EngineRequest, ExpandedPrompt
from medialane.vllm_bridge.items import VllmProcessor, decode_item
from medialane.vllm_bridge.learned import ModelProfile, VllmAssembler
from medialane.vllm_bridge.seams.arguments import create_model_config, parse_vllm_args
from medialane.wire import Hello, RpcConfig

ABOUT = "from 'feature ready' to 'tensor usable in EngineCore', compared with vLLM's two hand-over paths"

OURS, PEERS = "medialane", ("direct_rpc", "torch_shm")
#: The unexpanded placeholder of one image in the tiny model's vocabulary.
_IMAGE = [SPECIAL_TOKENS.index(token) for token in ("<|vision_start|>", "<|image_pad|>", "<|vision_end|>")]

#: Requests per turn: one path and size, one request after the other.
ROUNDS, QUICK_ROUNDS = 20, 2
OURS_A_TURN, PEERS_A_TURN = 12, 3
#: Rounds in which EngineCore reads every byte.
WHOLE_ROUNDS = 5
START_S = 120.0
ANSWER_S = 30.0


@dataclass
class Times:
    """One hand-over path at one size, in milliseconds."""

    usable: list[float] = field(default_factory=list)
    answered: list[float] = field(default_factory=list)
    read: list[float] = field(default_factory=list)


def run(options: Options) -> Report:
    with tempfile.TemporaryDirectory(prefix="medialane-bench-") as folder, _processes(folder) as found:
        hop = uvloop.run(_measure(*found, rounds=options.rounds or (QUICK_ROUNDS if options.quick else ROUNDS)))
    return _report(hop.times, hop.bare, _check_times(200 if options.quick else 2000))


@contextmanager
def _processes(folder: str) -> Iterator[tuple[ends.Addresses, dict[str, Feature], Connection, Connection]]:
    """Run the store, and the front end and EngineCore as vLLM starts them for `torch_shm`: spawned, with one queue
    between them. Yields also the features in the store, by size."""
    os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
    context = multiprocessing.get_context("spawn")
    addresses = ends.Addresses(
        f"ipc://{folder}/input",
        f"ipc://{folder}/output",
        f"unix://{folder}/worker",
        f"unix://{folder}/store",
        ArenaConfig().directory,
    )
    tensors = torch.multiprocessing.get_context("spawn").Queue()
    seen, seen_there = context.Pipe(duplex=False)
    requests, wishes_there = context.Pipe()
    published, published_there = context.Pipe(duplex=False)
    started = [
        context.Process(target=ends.run_store, args=(addresses, published_there), daemon=True),
        context.Process(target=ends.run_engine_core, args=(addresses, tensors, seen_there), daemon=True),
        context.Process(target=ends.run_front_end, args=(addresses, tensors, wishes_there), daemon=True),
    ]
    for process in started:
        process.start()
    try:
        for theirs in (published_there, seen_there, wishes_there):
            theirs.close()  # so that EOF is read from the pipe when the process exits
        features = _receive(published, START_S)
        _receive(requests, START_S)
        yield addresses, features, requests, seen
    finally:
        for process in reversed(started):
            process.terminate()
            process.join(10)


async def _measure(
    addresses: ends.Addresses, features: dict[str, Feature], requests: Connection, seen: Connection, *, rounds: int
) -> Hop:
    async with store_link(addresses.store) as link:
        await link.ready()
        entries = StoreEntries(link)
        held = {size: (found, await entries.hold([found.tensors[0].range])) for size, found in features.items()}
        workers, gateway = _gateway(link, addresses)
        linked = asyncio.create_task(workers.run())
        async with asyncio.timeout(START_S):
            while not any(worker.same_host for worker in workers.endpoints()):  # noqa: ASYNC110 - there is no event
                await asyncio.sleep(0.01)
        try:
            hop = Hop(gateway, held, requests, seen)
            await hop.run(rounds)
            await hop.run_whole(min(rounds, WHOLE_ROUNDS))
            return hop
        finally:
            linked.cancel()
            await asyncio.wait([linked])
            gateway.close()


def _gateway(store: StoreLink, addresses: ends.Addresses) -> tuple[WorkerPool, AppBackend]:
    """The gateway with its own components, except what creates features."""
    metrics = Metrics(CollectorRegistry())
    link = WorkerLink(
        addresses.worker,
        Hello(gateway_id="bench", processor=ends.CARD.processor),
        rpc=RpcConfig(),
        config=GatewayConfig(),
        metrics=metrics,
        own_arena=lambda: store.arena,
    )
    workers = WorkerPool([link])
    nothing: Any = None
    gateway = AppBackend(
        config=GatewayConfig(stage="features"),
        transports=Transports([ShmTransport(HoldPasser(store, retention_s=0))]),
        store_items=nothing,
        assembler=FakeAssembler(),
        workers=workers,
        router=Router(),
        metrics=metrics,
    )
    return workers, gateway


class Hop:
    """Sends one feature at a time over each hand-over path, and records the times."""

    def __init__(
        self, gateway: AppBackend, held: Mapping[str, tuple[Feature, Hold]], requests: Connection, seen: Connection
    ) -> None:
        self.times = {(size, way): Times() for size in ends.SIZES for way in (OURS, *PEERS)}
        self.bare = Times()
        self._gateway = gateway
        self._held = held
        self._wishes = requests
        self._seen = seen
        self._sums = {size: ends.checksum(ends.make_item(size)[ends.PIXELS].data) for size in ends.SIZES}
        self._num_sent = 0

    async def run(self, rounds: int) -> None:
        """Alternate the paths for `rounds` rounds, after a warm-up round."""
        await self._round()
        self.times = {key: Times() for key in self.times}
        self.bare = Times()
        for _ in range(rounds):
            await self._round()

    async def run_whole(self, rounds: int) -> None:
        """Like `run`, with one request per turn and every byte read; the time is spent in page faults and reading."""
        for _ in range(rounds):
            for size, way in self.times:
                self._wishes.send(ends.HeapRequest(""))
                _receive(self._wishes)
                found, _, _ = await self._send(size, way, ends.READ_WHOLE)
                assert found.total == self._sums[size], f"{way} has changed the bytes of {size}"
                self.times[size, way].read.append(found.read_ns / 1e6)

    async def _round(self) -> None:
        for (size, way), times in self.times.items():
            for _ in range(OURS_A_TURN if way == OURS else PEERS_A_TURN):
                found, started, answered = await self._send(size, way)
                times.usable.append((found.usable_ns - started) / 1e6)
                times.answered.append((answered - started) / 1e6)
        for _ in range(PEERS_A_TURN):
            found, started, answered = await self._send(next(iter(ends.SIZES)), ends.NO_FEATURE)
            self.bare.usable.append((found.usable_ns - started) / 1e6)
            self.bare.answered.append((answered - started) / 1e6)

    async def _send(self, size: str, way: str, prefix: str = "") -> tuple[ends.Seen, int, int]:
        self._num_sent += 1
        request_id = f"{prefix}-{self._num_sent}"
        if way == OURS:
            started, answered = await _send_ours(self._gateway, request_id, *self._held[size])
        else:
            self._wishes.send(ends.HeapRequest(way, request_id, list(ends.SIZES).index(size)))
            started, answered = _receive(self._wishes)
        return _receive(self._seen), started, answered


class FoundMedia:
    """Media that are already prepared."""

    def __init__(self, items: tuple[StagedItem, ...]) -> None:
        self._items = items

    async def in_stage(self, stage: StageName) -> tuple[StagedItem, ...]:
        return self._items

    async def without_embeddings(self) -> int:
        return 0

    async def with_embeddings(self, mm_hashes: Collection[str]) -> tuple[Feature, ...]:
        return tuple(item.feature for item in self._items)

    def note_embedded(self, mm_hashes: Collection[str]) -> None:
        """Its items are not looked up."""

    @property
    def is_lost(self) -> bool:
        return False


async def _send_ours(gateway: AppBackend, request_id: str, feature: Feature, hold: Hold) -> tuple[int, int]:
    """Send one request from its prepared prompt on; return (started, answered) in ns."""
    ids = ends.token_ids()
    placed = PlacedFeature(feature, PlaceholderRange(*ends.PLACEHOLDER))
    ref = MediaRef("image", "image", data=b"")
    media = FoundMedia((StagedItem(ref, feature, hold),))
    prepared = PreparedPrompt(ids, (placed,), (feature.mm_hash,), MediaPrompt(ids, ()), media)
    with open_scope():
        async with asyncio.timeout(ANSWER_S):
            started = time.perf_counter_ns()
            async for _ in gateway.generate(EngineRequest(request_id, ExpandedPrompt(ids), b""), prepared):
                pass
            return started, time.perf_counter_ns()


def _receive(pipe: Connection, timeout_s: float = ANSWER_S) -> Any:
    """Return the next message of a process. Raises EOFError if it has exited."""
    if not pipe.poll(timeout_s):
        raise TimeoutError(f"a process of the benchmark has sent nothing for {timeout_s:g} s")
    return pipe.recv()


def _check_times(num_checks: int) -> list[float]:
    """Return the times of a worker's checks of one 1024x768 image's feature before it reaches the engine, in ms."""
    model = str(build_tiny_model(cache_folder(process_environ())))
    processor = MULTIMODAL_REGISTRY.create_processor(create_model_config(parse_vllm_args(model, TINY_MODEL_FLAGS)))
    checker = ModelProfile(processor).checker
    made = VllmProcessor(processor).process(Image(sample_pixels(0, 1024, 768)), b"{}")
    feature = Feature("image", "0" * 64, made.header, (), made.size)
    assembled = VllmAssembler(processor).assemble([1, *_IMAGE, 2], (feature,), b"{}")
    handed = MediaPayload("image", feature.mm_hash, made.header, (), made.size, assembled.placeholders[0])
    prompt = ExpandedPrompt(assembled.token_ids, (handed,))
    items = [decode_item(made.header, made.buffers)]
    times = []
    for _ in range(num_checks):
        started = time.perf_counter_ns()
        checker.check(prompt, items)
        times.append((time.perf_counter_ns() - started) / 1e6)
    return times


def _report(times: dict[tuple[str, str], Times], bare: Times, checks: list[float]) -> Report:
    rows = [
        {
            "size": size,
            "way": way,
            "n": len(found.usable),
            "usable p50 ms": median(found.usable),
            "usable p90 ms": percentile(found.usable, 0.9),
            "answered p50 ms": median(found.answered),
            "read all p50 ms": median(found.read),
        }
        for (size, way), found in times.items()
    ]
    rows.append(
        {
            "size": "none",
            "way": ends.NO_FEATURE,
            "n": len(bare.usable),
            "usable p50 ms": median(bare.usable),
            "usable p90 ms": percentile(bare.usable, 0.9),
            "answered p50 ms": median(bare.answered),
            "read all p50 ms": 0.0,
        }
    )
    p50 = {key: median(found.usable) for key, found in times.items()}
    smallest, *_, largest = ends.SIZES
    better = min(p50["18.8 MB", way] for way in PEERS)
    bars = [
        *(Bar(f"handover: usable p50 at {size}, ms", p50[size, OURS], 0.5, "at most") for size in ends.SIZES),
        Bar(
            f"handover: p50 at {largest} over p50 at {smallest}",
            p50[largest, OURS] / p50[smallest, OURS],
            1.5,
            "at most",
        ),
        Bar("handover: times faster than vLLM's better way at 18.8 MB", better / p50["18.8 MB", OURS], 10, "at least"),
    ]
    check: dict[str, object] = {"n": len(checks), "p50 ms": median(checks), "p90 ms": percentile(checks, 0.9)}
    return Report("handover", {"from ready to usable": rows, "checks of a 4.7 MB feature": [check]}, bars)
