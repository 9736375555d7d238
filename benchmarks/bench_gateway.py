"""What HTTP, routing and RPC cost, without a model: one and two gateways, and vLLM's own API server.

The gateways are `medialane gateway` processes over `medialane worker --engine simulated`; clients are spread over them.
vLLM's API server runs over the same simulated engine in its own process (`simulated_api_server`): its CPU time includes
the engine's, and lacks what vLLM's front end spends on detokenising and on EngineCore's sockets; `engine alone` is the
CPU time of the engine, measured in a process without a server, and the ratio without it. The bar counts all CPU time.

`requests`: text requests for one token, in a closed loop. `tokens`: 64 streams of 256 tokens, a token in each event.
The engine takes 9 ms for a step of 64 sequences, so that no server is saturated by tokens and none merges them:
CPU times compare like with like; `tokens/event` shows it. The servers alternate, A B C, C B A, ...; figures are medians
over the turns, ratios those of turns in the same round. CPU is user and system time of each process, per request or
per token.

A traced gateway exports the spans of a tenth of its requests by OTLP; an observed one does, too, has its page open, and
logs its requests (`observers`).

A gateway with roles has a worker that prefills and one that decodes, and splits none of these prompts, which are short.

Two gateways need cores for themselves, the worker and the client: with three or fewer cores, throughput is not judged.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path

import msgspec
import uvloop

from event_client import EventClient
from harness import Bar, Options, Report, median
from load import cpu_seconds
from medialane.cluster import spawn_leader
from medialane.testing.simulated import SimulatedConfig, SimulatedEngine, SimulatedParams
from medialane.testing.tiny_model import TINY_MODEL_ENVIRON, build_tiny_model, cache_folder
from medialane.tools.check import server_process
from medialane.types.request import EngineRequest, ExpandedPrompt, WorkerRole
from observers import SAMPLED, start_observers

ABOUT = "requests/s and tokens/s of 1 and 2 gateways and of vLLM's API server over simulated engines, CPU of each"

FLAGS = ("--max-model-len=8192", "--language-model-only")
#: Prompts of fewer tokens are computed where they are continued.
WHOLE = ("--routing-split-tokens", "1000")
ROUNDS, NUM_REQUESTS = 5, 600
QUICK_ROUNDS, QUICK_NUM_REQUESTS = 1, 64
NUM_STREAMS, NUM_TOKENS = 64, 256
TURN_S = 120.0
#: With fewer cores, two gateways share them with the worker and the client.
MIN_CORES = 4

VLLM, ONE, TWO = "vLLM's API server", "1 gateway", "2 gateways"
TRACED, OBSERVED, ROLES = "1 traced gateway", "1 observed gateway", "1 gateway with roles"
REQUESTS, TOKENS = "requests", "tokens"


@dataclass(frozen=True)
class Setup:
    """A server under test. `front` are the processes that serve HTTP."""

    name: str
    base_urls: tuple[str, ...]
    front: tuple[int, ...]
    workers: tuple[int, ...] = ()


@dataclass(frozen=True)
class Turn:
    """CPU times are per request or per token, in us."""

    per_s: float
    front_us: tuple[float, ...]
    worker_us: float
    tokens_per_event: float

    @property
    def per_core_s(self) -> float:
        """Requests or tokens per second of CPU time of the processes that serve HTTP."""
        return 1e6 / sum(self.front_us)


Turns = dict[tuple[str, str], list[Turn]]


def run(options: Options) -> Report:
    return uvloop.run(_run(options))


async def _run(options: Options) -> Report:
    model = str(build_tiny_model(cache_folder(os.environ)))
    rounds = options.rounds or (QUICK_ROUNDS if options.quick else ROUNDS)
    num_requests = QUICK_NUM_REQUESTS if options.quick else NUM_REQUESTS
    turns: Turns = {}
    async with _setups(model) as setups:
        for setup in setups:
            await _turn(setup, REQUESTS, model, QUICK_NUM_REQUESTS)  # warm-up
        for number in range(rounds):
            for case, num in ((REQUESTS, num_requests), (TOKENS, NUM_STREAMS)):
                for setup in setups if number % 2 == 0 else setups[::-1]:
                    turns.setdefault((case, setup.name), []).append(await _turn(setup, case, model, num))
    return _report(turns, await _engine_alone_us(2 if options.quick else 5))


async def _turn(setup: Setup, case: str, model: str, num_requests: int) -> Turn:
    """Send all requests, one at a time on each of `NUM_STREAMS` connections. Raises RuntimeError for a wrong answer."""
    num_tokens = NUM_TOKENS if case == TOKENS else 1
    bodies = iter([_body(model, num_tokens) for _ in range(num_requests)])
    urls = setup.base_urls
    clients = [await EventClient.connect(urls[number % len(urls)]) for number in range(NUM_STREAMS)]
    num_events = 0

    async def send(client: EventClient) -> None:
        nonlocal num_events
        for body in bodies:
            found, end = await client.ask(body)
            if b'"completion_tokens":%d' % num_tokens not in end or b"[DONE]" not in end:
                raise RuntimeError(f"{setup.name}, {case}: {end!r}")
            num_events += found - NUM_OTHER_EVENTS

    pids = [*setup.front, *setup.workers]
    before, started = [cpu_seconds([pid]) for pid in pids], time.perf_counter()
    async with asyncio.timeout(TURN_S), asyncio.TaskGroup() as tasks:
        for client in clients:
            tasks.create_task(send(client))
    wall_s = time.perf_counter() - started
    num = num_requests * num_tokens
    used_us = [1e6 * (cpu_seconds([pid]) - then) / num for pid, then in zip(pids, before, strict=True)]
    for client in clients:
        client.close()
    num_front = len(setup.front)
    return Turn(num / wall_s, tuple(used_us[:num_front]), sum(used_us[num_front:]), num / num_events)


#: Events of a stream without tokens: the role, the usage and [DONE].
NUM_OTHER_EVENTS = 3
_NUMBERS = count(1)


def _body(model: str, num_tokens: int) -> bytes:
    text = f"Count all objects and name their colours. This is question {next(_NUMBERS)}."
    body = {
        "model": model,
        "messages": [{"role": "user", "content": text}],
        "max_tokens": num_tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    return json.dumps(body).encode()


@asynccontextmanager
async def _setups(model: str) -> AsyncIterator[list[Setup]]:
    """Start all servers: each gateway, or pair of gateways, has workers of its own, so that others stay idle."""
    with tempfile.TemporaryDirectory(prefix="medialane-bench-") as name:
        async with AsyncExitStack() as stack:
            folder = Path(name)
            server = [str(Path(__file__).with_name("simulated_api_server.py")), model]
            starting = {VLLM: [_server(stack, folder / "api-server.log", command=server, flags=FLAGS)]}
            workers = {}
            observers = stack.enter_context(start_observers(is_on=True))
            gateways: tuple[tuple[str, int, Sequence[str], Sequence[str], Sequence[WorkerRole]], ...] = (
                (ONE, 1, (), (), ("worker",)),
                (TWO, 2, (), (), ("worker",)),
                (TRACED, 1, (), observers.flags, ("worker",)),
                (OBSERVED, 1, observers.settings, observers.flags, ("worker",)),
                (ROLES, 1, WHOLE, (), ("prefill", "decode")),
            )
            for place, (name, number, settings, own, roles) in enumerate(gateways):
                paths = [folder / f"{role}-{place}" for role in roles]
                workers[name] = tuple(
                    stack.enter_context(_worker(model, role, path)) for role, path in zip(roles, paths, strict=True)
                )
                addresses = [word for path in paths for word in ("--worker", f"unix:{path}")]
                command, flags = (
                    ["-m", "medialane", "gateway", model],
                    [*addresses, "--store", "none", *settings, "--", *FLAGS, *own],
                )
                starting[name] = [
                    _server(stack, folder / f"gateway-{place}-{n}.log", command=command, flags=flags)
                    for n in range(number)
                ]
            async with asyncio.TaskGroup() as tasks:
                started = {name: [tasks.create_task(one) for one in each] for name, each in starting.items()}
            stack.enter_context(observers.watching(started[OBSERVED][0].result()[0]))
            yield [
                Setup(
                    name,
                    tuple(task.result()[0] for task in each),
                    tuple(task.result()[1] for task in each),
                    workers.get(name, ()),
                )
                for name, each in started.items()
            ]


async def _server(stack: AsyncExitStack, log: Path, *, command: Sequence[str], flags: Sequence[str]) -> tuple[str, int]:
    """Start a server, which `stack` stops; return its base URL and its process."""
    found = await stack.enter_async_context(
        server_process(log.stem, command, flags, model=command[-1], environ=_environ(), log=log)
    )
    return found.base_url, found.process_id


@contextmanager
def _worker(model: str, role: WorkerRole, path: Path) -> Iterator[int]:
    command = ["-m", "medialane", "worker", model, "--engine", "simulated"]
    argv = [sys.executable, *command, "--role", role, "--listen", f"unix:{path}"]
    with path.with_suffix(".log").open("wb") as output:
        process: subprocess.Popen[bytes] = spawn_leader(argv, _environ(), output.fileno())
    try:
        yield process.pid
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(30)


def _environ() -> dict[str, str]:
    return {**os.environ, **TINY_MODEL_ENVIRON, **SAMPLED}


async def _engine_alone_us(num_turns: int) -> float:
    """Return the CPU time of a simulated engine for a token of 64 streams, in us."""
    params = msgspec.msgpack.encode(SimulatedParams(max_tokens=NUM_TOKENS, output_kind=1))
    engine = SimulatedEngine(SimulatedConfig(), model="none")

    async def stream(number: int) -> None:
        request = EngineRequest(f"alone-{number}", ExpandedPrompt([number] * 32), params)
        async for _ in engine.generate(request, ()):
            pass

    used = []
    for _ in range(num_turns):
        before = time.process_time()
        await asyncio.gather(*(stream(number) for number in range(NUM_STREAMS)))
        used.append(1e6 * (time.process_time() - before) / (NUM_STREAMS * NUM_TOKENS))
    await engine.close()
    return median(used)


def _report(turns: Turns, engine_us: float) -> Report:
    report = Report("gateway", {REQUESTS: [], TOKENS: []})
    for (case, name), found in turns.items():
        each = [median(values) for values in zip(*(turn.front_us for turn in found), strict=True)]
        row: dict[str, object] = {
            "server": name,
            f"{case}/s": median(turn.per_s for turn in found),
            "front us": " + ".join(f"{us:.1f}" for us in each),
            "worker us": median(turn.worker_us for turn in found),
            f"{case}/s per front core": median(turn.per_core_s for turn in found),
            "tokens/event": median(turn.tokens_per_event for turn in found),
        }
        report.tables[case].append(row)
    without_engine = [sum(turn.front_us) - engine_us for turn in turns[TOKENS, VLLM]]
    ours = [sum(turn.front_us) for turn in turns[TOKENS, ONE]]
    stricter = median(theirs / mine for theirs, mine in zip(without_engine, ours, strict=True))
    report.tables["engine alone"] = [
        {"us per token": engine_us, "tokens/s per gateway core / vLLM's without the engine": stricter}
    ]

    def ratio(case: str, ours: str, theirs: str, figure: str) -> float:
        pairs = zip(turns[case, ours], turns[case, theirs], strict=True)
        return median(getattr(a, figure) / getattr(b, figure) for a, b in pairs)

    cost = 1 / ratio(TOKENS, TWO, ONE, "per_core_s")
    report.bars = [
        Bar(
            "tokens/s per gateway core / vLLM's API server core",
            ratio(TOKENS, ONE, VLLM, "per_core_s"),
            0.9,
            "at least",
        ),
        Bar(
            "observed: tokens/s per gateway core / vLLM's API server core",
            ratio(TOKENS, OBSERVED, VLLM, "per_core_s"),
            0.9,
            "at least",
        ),
        Bar("2 gateways: CPU of the gateways per token / 1 gateway", cost, 1.05, "at most"),
        Bar("traces: CPU per request / 1 gateway", 1 / ratio(REQUESTS, TRACED, ONE, "per_core_s"), 1.03, "at most"),
        Bar("traces: CPU per token / 1 gateway", 1 / ratio(TOKENS, TRACED, ONE, "per_core_s"), 1.03, "at most"),
        Bar("roles: CPU per request / 1 gateway", 1 / ratio(REQUESTS, ROLES, ONE, "per_core_s"), 1.02, "at most"),
        Bar("roles: CPU per token / 1 gateway", 1 / ratio(TOKENS, ROLES, ONE, "per_core_s"), 1.02, "at most"),
    ]
    num_cores = len(os.sched_getaffinity(0))
    if num_cores >= MIN_CORES:
        scale = ratio(REQUESTS, TWO, ONE, "per_s")
        report.bars.append(Bar("2 gateways: requests/s / 1 gateway", scale, 1.8, "at least"))
    else:
        report.notes.append(
            f"2 gateways: throughput is not judged on {num_cores} cores, which worker and client need, too"
        )
    return report
