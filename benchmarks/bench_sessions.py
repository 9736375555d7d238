"""Sessions with images over two real vLLM workers: medialane; plain vLLM behind round-robin; SGLang's gateway (smg) in
front of the same two plain servers; and, as the memory does not suffice for all at once, after these and beside
medialane alone, two vLLM with the Rust front end behind round-robin.

Ten users talk at once, each four times; each question brings two new images, and each request the whole conversation,
images included, as chat clients send it. Round-robin is done by the client: it costs nothing.

Everything has its defaults (`servers`), which differ: a plain server chooses its cores as if it were alone, so that two
of them have the same ones. So the same is measured with one thread for each engine, on any core (`equal threads`).

medialane and a peer get the same conversations, in turns, and must give the same answers; the next peer gets others,
because the peers' servers would know them. A figure is the median over the turns. Memory is the proportional set size
of all of a server's processes, read at the end: pages that several have mapped are counted once.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from pathlib import Path

from conversations import Held, Question, Shape, hold, questions, share_of_same
from harness import Bar, Options, Report, median
from medialane.testing.tiny_model import TINY_MODEL_FLAGS, build_tiny_model, cache_folder
from peers import peer_environment, rust_front_end, rust_server, smg_gateway, smg_version
from servers import OURS, Server, medialane_server, plain_server, settle
from start_probe import MB, proportional_bytes

ABOUT = "conversations with images over two workers: medialane, vLLM behind round-robin, SGLang's gateway"

ROUND_ROBIN, SMG, RUST_ROUND_ROBIN = "round-robin", "smg", "round-robin, Rust"
PEERS = (ROUND_ROBIN, SMG, RUST_ROUND_ROBIN)
ONE_THREAD = {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
THREADS: Mapping[str, Mapping[str, str]] = {"defaults": {}, "equal threads": ONE_THREAD}
NUM_TOKENS = 16
#: Of each question.
TRAFFIC = {
    "two images of 1024x768": Shape(num_users=10, num_turns=4, num_images=2, size=(1024, 768)),
    "two images of 512x384": Shape(num_users=10, num_turns=4, num_images=2, size=(512, 384)),
    "text only": Shape(num_users=10, num_turns=4, num_images=0),
}
#: Eight images of the larger size are 8,000 tokens; of repeated flags the last one counts. In bfloat16 an answer may
#: depend on what else is in its batches, in any server, and answers could not be compared.
FLAGS = (*TINY_MODEL_FLAGS, "--max-model-len=16384", "--dtype=float32")

#: Of conversations: none is held twice in a run.
_SEEDS = count(1)


@dataclass(frozen=True)
class System:
    """What is compared: its base URLs, which take turns by request, and all processes that answer."""

    name: str
    base_urls: tuple[str, ...]
    pids: Callable[[], list[int]]


@dataclass
class Found:
    """Of one kind of traffic, by turn: what each system has done, and the share of answers in which medialane and a
    peer agree."""

    held: dict[str, list[Held]] = field(default_factory=dict)
    same: dict[str, list[float]] = field(default_factory=dict)


def run(options: Options) -> Report:
    environment = peer_environment()
    report = Report("sessions", notes=[f"SGLang's gateway: smg {smg_version()}."])
    return asyncio.run(_run(options, report, environment, rust_front_end(report)))


async def _run(options: Options, report: Report, environment: Path, rust: Path | None) -> Report:
    model = str(build_tiny_model(cache_folder(os.environ)))
    for threads, own in THREADS.items():
        found = {traffic: Found() for traffic in TRAFFIC}
        memory: dict[str, dict[str, object]] = {}
        for front in (None,) if rust is None else (None, rust):
            async with _systems(model, environment, own, rust=front) as systems:
                for traffic, shape in TRAFFIC.items():
                    await _measure(found[traffic], shape, systems, model=model, options=options)
                memory |= {name: _memory(system) for name, system in systems.items() if name not in memory}
        for traffic, shape in TRAFFIC.items():
            report.tables[f"{traffic}, {threads}"] = _rows(found[traffic])
            report.bars += _bars(f"{traffic}, {threads}", found[traffic], shape)
        report.tables[f"memory, {threads}"] = list(memory.values())
    return report


async def _measure(found: Found, shape: Shape, systems: Mapping[str, System], *, model: str, options: Options) -> None:
    """Add what each system does in each turn."""
    await _hold_with_each(systems.values(), model, questions(shape, next(_SEEDS))[:2])  # not counted
    peers = [name for name in systems if name != OURS]
    for turn in range(options.rounds or (1 if options.quick else 5)):
        for peer in peers if turn % 2 == 0 else peers[::-1]:
            both = [systems[name] for name in ((OURS, peer) if turn % 2 == 0 else (peer, OURS))]
            held = await _hold_with_each(both, model, questions(shape, next(_SEEDS)))
            for name, each in held.items():
                found.held.setdefault(name, []).append(each)
            found.same.setdefault(peer, []).append(share_of_same(held[OURS], held[peer]))


async def _hold_with_each(systems: Iterable[System], model: str, asked: list[list[Question]]) -> dict[str, Held]:
    """Hold these conversations with idle systems, one system after the other."""
    held = {}
    for system in systems:
        await settle()
        held[system.name] = await hold(system.base_urls, model, asked, num_tokens=NUM_TOKENS, pids=system.pids)
    return held


def _rows(found: Found) -> list[dict[str, object]]:
    return [
        {
            "server": name,
            "req/s": _requests_per_s(held),
            "first_ttft_p50_ms": 1000 * _ttft_s(held, later=False),
            "later_ttft_p50_ms": 1000 * _ttft_s(held, later=True),
            "cpu_ms/req": median(1000 * each.cpu_s / each.num_requests for each in held),
            "same_answers": min(found.same.get(name, [1.0])),
        }
        for name, held in ((name, found.held[name]) for name in (OURS, *_peers(found)))
    ]


def _peers(found: Found) -> list[str]:
    return [name for name in PEERS if name in found.held]


def _requests_per_s(held: list[Held]) -> float:
    return median(each.num_requests / each.wall_s for each in held)


def _ttft_s(held: list[Held], *, later: bool) -> float:
    """Of first turns, or of all later ones: the median over rounds of each round's median."""
    return median(median(each.ttft_s(lambda turn: (turn > 0) == later)) for each in held)


def _bars(name: str, found: Found, shape: Shape) -> list[Bar]:
    """Against whichever peer is better. Text has no bar but right answers. Those of the Rust front end differ: it ends
    an answer with the incomplete character that others leave out, which is then part of the next request."""
    same = min(share for peer in (ROUND_ROBIN, SMG) for share in found.same[peer])
    bars = [Bar(f"{name}: share of answers that equal the peers'", same, 1.0, "at least")]
    if shape.num_images:
        best = max(_requests_per_s(found.held[peer]) for peer in _peers(found))
        soonest = min(_ttft_s(found.held[peer], later=True) for peer in _peers(found))
        ours = found.held[OURS]
        bars += [
            Bar(f"{name}: req/s / better peer", _requests_per_s(ours) / best, 2.0, "at least"),
            Bar(f"{name}: later turns' TTFT p50 / better peer", _ttft_s(ours, later=True) / soonest, 0.3, "at most"),
        ]
    return bars


def _memory(system: System) -> dict[str, object]:
    proportional, shared = proportional_bytes(system.pids())
    return {"server": system.name, "memory_MB": proportional / MB, "of_it_shared_MB": shared / MB}


@asynccontextmanager
async def _systems(
    model: str, environment: Path, own: Mapping[str, str], *, rust: Path | None
) -> AsyncIterator[dict[str, System]]:
    """Run medialane with two workers, two plain servers and SGLang's gateway in front of them; with `rust`, two servers
    with this front end instead of these three."""
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ml-bench-")))
        logs = [folder / f"plain-{n}.log" for n in range(2)]
        start = plain_server if rust is None else partial(rust_server, rust)
        pair = [await stack.enter_async_context(start(model, log, flags=FLAGS, own=own)) for log in logs]
        name = ROUND_ROBIN if rust is None else RUST_ROUND_ROBIN
        peers = [System(name, tuple(server.base_url for server in pair), lambda: _pids(*pair))]
        if rust is None:
            smg = await stack.enter_async_context(smg_gateway(environment, pair, folder / "smg.log"))
            peers.append(System(SMG, (smg.base_url,), lambda: _pids(smg, *pair)))
        ours = await stack.enter_async_context(
            medialane_server(model, folder / "medialane.log", settings=("--workers", "2"), flags=FLAGS, own=own)
        )
        yield {system.name: system for system in (System(OURS, (ours.base_url,), ours.pids), *peers)}


def _pids(*servers: Server) -> list[int]:
    return [pid for server in servers for pid in server.pids()]
