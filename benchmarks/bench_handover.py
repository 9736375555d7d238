"""`medialane bench handover`: from 'entry ready' to 'tensor view usable in the EngineCore process'.

Ours, three processes, two hops: the feature lies in the arena and the prompt is prepared; then `Gateway.generate`
(route, hand-over, Submit over the RPC's unix socket), the `Worker` (descriptors checked, views built, item decoded),
vLLM's encoder with our consumer, EngineCore's ipc socket, EngineCore's input thread with our decoder, first and last
element read. Theirs, two processes, one hop: the processed tensors lie in the front end's heap, as vLLM's processor
leaves them; then vLLM's encoder and the same socket and thread, with `direct_rpc` (bytes through the socket) or
`torch_shm` (moved into torch's shared memory). Whatever took the tensors to that heap is left out in their favour.
What is left out in all: tokenising, the feature checks of a worker (`checks`, apart), the scheduler, the model.

The prompt has the same number of tokens at every size, since this is about features: longer ones cost all ways alike.
`answered` adds the way back to whoever sent. `read all` is what EngineCore then takes to read every byte once, its page
tables being as new as for an entry never seen: a mapping's page faults are paid there and not hidden.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

import torch
import uvloop
from prometheus_client import CollectorRegistry

import handover_ends as ends
from harness import Bar, Options, Report, median, percentile
from medialane.arena import Arena, ArenaConfig, Lease, describe, layout
from medialane.core.feature import Feature, MediaPrompt, PlacedFeature, PlaceholderRange, PreparedPrompt
from medialane.core.media import MediaSize
from medialane.core.request import EngineRequest, ExpandedPrompt
from medialane.gateway import Gateway, GatewayConfig, Handover, WorkerLink, WorkerPool, open_scope
from medialane.observability.metrics import Metrics
from medialane.routing import LeastLoaded
from medialane.rpc import ArenaOffer, Hello, RpcConfig
from medialane.transfer import ShmTransport, TransferConfig
from medialane.vllm_bridge.features import encode_item

ABOUT = "from 'feature ready' to 'tensor usable in EngineCore', against vLLM's two ways"

OURS, PEERS = "medialane", ("direct_rpc", "torch_shm")
ROUNDS, QUICK_ROUNDS = 30, 3
#: Our way is measured so often in a round: it is short, and its noise is the machine's.
OURS_PER_ROUND = 4
START_S = 120.0


@dataclass
class Times:
    """One way at one size, milliseconds."""

    usable: list[float] = field(default_factory=list)
    answered: list[float] = field(default_factory=list)
    read: list[float] = field(default_factory=list)


def run(options: Options) -> Report:
    with tempfile.TemporaryDirectory(prefix="medialane-bench-") as folder, _processes(folder) as found:
        times = uvloop.run(_measure(*found, rounds=options.rounds or (QUICK_ROUNDS if options.quick else ROUNDS)))
    return _report(times)


@contextmanager
def _processes(folder: str) -> Iterator[tuple[ends.Addresses, Connection, Connection]]:
    """The front end and EngineCore, started as vLLM starts them for `torch_shm`: spawned, one queue between them."""
    os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
    context = multiprocessing.get_context("spawn")
    addresses = ends.Addresses(
        f"ipc://{folder}/input", f"ipc://{folder}/output", f"unix://{folder}/worker", ArenaConfig().directory
    )
    tensors = torch.multiprocessing.get_context("spawn").Queue()
    seen, seen_there = context.Pipe(duplex=False)
    wishes, wishes_there = context.Pipe()
    started = [
        context.Process(target=ends.run_engine_core, args=(addresses, tensors, seen_there), daemon=True),
        context.Process(target=ends.run_front_end, args=(addresses, tensors, wishes_there), daemon=True),
    ]
    for process in started:
        process.start()
    try:
        if not wishes.poll(START_S):
            raise RuntimeError(f"the processes were not ready after {START_S:g} s")
        wishes.recv()
        yield addresses, wishes, seen
    finally:
        for process in reversed(started):
            process.terminate()
            process.join(10)


async def _measure(
    addresses: ends.Addresses, wishes: Connection, seen: Connection, *, rounds: int
) -> dict[tuple[str, str], Times]:
    arena = Arena.create(ArenaConfig(size_bytes=256 << 20))
    try:
        arena.prefault(threading.Event())
        leases = {size: _publish(arena, size) for size in ends.SIZES}
        sums = {size: ends.checksum(ends.make_item(size)[ends.PIXELS].data) for size in ends.SIZES}
        workers, gateway = _gateway(arena, addresses)
        linked = asyncio.create_task(workers.run())
        async with asyncio.timeout(START_S):
            while not gateway.ready:  # noqa: ASYNC110 - links have no event for it
                await asyncio.sleep(0.01)
        try:
            return await _turns(gateway, leases, sums, wishes, seen, rounds)
        finally:
            linked.cancel()
            await asyncio.wait([linked])
            gateway.close()
            for lease in leases.values():
                lease.release()
    finally:
        arena.close()


def _publish(arena: Arena, size: str) -> Lease[Feature]:
    header, specs, buffers = encode_item(ends.make_item(size))
    reservation = arena.reserve(layout(specs)[1])
    tensors = describe(reservation.range, specs)
    for tensor, buffer in zip(tensors, buffers, strict=True):
        arena_view = reservation.buffer
        start = tensor.offset - 64
        arena_view[start : start + buffer.nbytes] = buffer
    return arena.publish(reservation, size, Feature("image", size, header, tensors, MediaSize(width=1024, height=768)))


def _gateway(arena: Arena, addresses: ends.Addresses) -> tuple[WorkerPool, Gateway]:
    """The gateway's own parts, but those that make features."""
    metrics = Metrics(CollectorRegistry())
    hello = Hello(gateway_id="bench", arena=ArenaOffer(arena.id, arena.nonce), processor=ends.CARD.processor)
    link = WorkerLink(addresses.worker, hello, rpc=RpcConfig(), config=GatewayConfig(), metrics=metrics)
    workers = WorkerPool([link])
    nothing: Any = None
    gateway = Gateway(
        config=GatewayConfig(stage="features"),
        transfer=TransferConfig(transport="shm"),
        features=nothing,
        handover=Handover(transports=[ShmTransport()], features=nothing, max_inline_bytes=0),
        assembler=nothing,
        workers=workers,
        router=LeastLoaded(),
        metrics=metrics,
    )
    return workers, gateway


async def _turns(
    gateway: Gateway,
    leases: dict[str, Lease[Feature]],
    sums: dict[str, int],
    wishes: Connection,
    seen: Connection,
    rounds: int,
) -> dict[tuple[str, str], Times]:
    times = {(size, way): Times() for size in ends.SIZES for way in (OURS, *PEERS)}

    def note(size: str, way: str, started: int, answered: int) -> None:
        found: ends.Seen = seen.recv()
        assert found.total == sums[size], f"{way} has changed the bytes of {size}"
        into = times[size, way]
        into.usable.append((found.usable_ns - started) / 1e6)
        into.answered.append((answered - started) / 1e6)
        into.read.append(found.read_ns / 1e6)

    for number in range(rounds + 1):
        for index, (size, lease) in enumerate(leases.items()):
            for turn in range(OURS_PER_ROUND):
                wishes.send(ends.HeapRequest(""))
                wishes.recv()
                note(size, OURS, *await _send_ours(gateway, f"{number}-{size}-{turn}", lease))
            for way in PEERS:
                wishes.send(ends.HeapRequest(way, f"{number}-{size}-{way}", index))
                note(size, way, *wishes.recv())
        if number == 0:  # everything was done for the first time
            for found in times.values():
                found.__init__()  # type: ignore[misc]
    return times


async def _send_ours(gateway: Gateway, request_id: str, lease: Lease[Feature]) -> tuple[int, int]:
    """One request, from its prepared prompt on: (started, answered) in ns."""
    ids = ends.token_ids()
    feature = lease.value
    placed = PlacedFeature(feature, PlaceholderRange(*ends.PLACEHOLDER))
    prepared = PreparedPrompt(ids, (placed,), (feature.mm_hash,), MediaPrompt(ids, ()))
    with open_scope() as scope:
        scope.features[feature.mm_hash] = lease
        started = time.perf_counter_ns()
        async for _ in gateway.generate(EngineRequest(request_id, ExpandedPrompt(ids), b""), prepared):
            pass
        return started, time.perf_counter_ns()


def _report(times: dict[tuple[str, str], Times]) -> Report:
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
    return Report("handover", {"from ready to usable": rows}, bars)
