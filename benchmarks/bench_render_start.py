"""How long render servers take to start, and what memory they use: `vllm launch render`, and `medialane render` with
one and with two gateways, each alone on the machine, in turns.

A start ends with the first answer about an image. Memory is the proportional set size (PSS), in which a page that n
processes share counts 1/n in each, so that the sum over a server's processes is what it uses; shared memory, of which
the arena is most, apart. It is read after the first answer, and after requests about new images.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp

from harness import Bar, Options, Report, median
from medialane.testing.tiny_model import TINY_MODEL_FLAGS, build_tiny_model, cache_folder
from medialane.tools.check import server_process
from servers import MEDIALANE_RENDER, PLAIN_RENDER, Server, clean_environ, server_of, settle
from start_probe import MB, Client, command, cpu_seconds, seconds_until

NAME = "render_start"
ABOUT = "start and memory of medialane render with 1 and 2 gateways, beside vllm launch render"

NUM_REQUESTS = 200
_CONCURRENCY = 4

PLAIN, ONE, TWO = "vllm launch render", "--gateways 1", "--gateways 2"
#: Each is followed by the model.
_COMMANDS: dict[str, tuple[Sequence[str], list[str]]] = {
    PLAIN: (PLAIN_RENDER, []),
    ONE: (MEDIALANE_RENDER, ["--arena-size", "256MiB", "--"]),
    TWO: (MEDIALANE_RENDER, ["--gateways", "2", "--arena-size", "256MiB", "--"]),
}


@dataclass
class Run:
    model: str
    folder: Path
    starts: dict[str, list[float]] = field(default_factory=dict)
    cpu: dict[str, list[float]] = field(default_factory=dict)
    #: Of the last round: bytes by server and moment.
    memory: dict[tuple[str, str], tuple[int, int]] = field(default_factory=dict)
    processes: list[dict[str, object]] = field(default_factory=list)


def run(options: Options) -> Report:
    with tempfile.TemporaryDirectory() as folder:
        found = Run(str(build_tiny_model(cache_folder(os.environ))), Path(folder))
        asyncio.run(_run(found, options))
        return Report(NAME, _tables(found), _bars(found), [])


async def _run(found: Run, options: Options) -> None:
    num_requests = options.num_requests or (NUM_REQUESTS // 10 if options.quick else NUM_REQUESTS)
    for number in range(options.rounds or (1 if options.quick else 3)):
        for name in _COMMANDS:
            found.processes = [row for row in found.processes if row["server"] != name]
            await _measure(found, name, num_requests if number == 0 else 0)


async def _measure(found: Run, name: str, num_requests: int) -> None:
    words, settings = _COMMANDS[name]
    began = time.perf_counter()
    log = found.folder / f"{name.replace(' ', '-')}.log"
    async with server_process(
        name,
        [*words, found.model],
        [*settings, *TINY_MODEL_FLAGS],
        model=found.model,
        environ=clean_environ(),
        log=log,
        stop_s=60,
    ) as process:
        server = server_of(name, process)
        async with _session() as session:
            body = Client(server.base_url, found.model).image(1)
            found.starts.setdefault(name, []).append(
                await seconds_until(lambda: _rendered(session, server, body), since=began)
            )
            found.cpu.setdefault(name, []).append(cpu_seconds(server.pids()))
            print(f"  {name}: {found.starts[name][-1]:.1f} s, {found.cpu[name][-1]:.1f} s of CPU", flush=True)
            await settle()
            found.memory[name, "at start"] = _total(server.pids())
            found.processes += [{"server": name, **_row(pid)} for pid in server.pids()]
            if num_requests:
                await _load(session, server, found.model, num_requests)
                await settle()
                found.memory[name, "after requests"] = _total(server.pids())


def _session() -> aiohttp.ClientSession:
    return aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=120))


async def _rendered(session: aiohttp.ClientSession, server: Server, body: dict[str, object]) -> bool:
    url = f"{server.base_url}/chat/completions/render"
    async with session.post(url, json=body | {"mm_payload": "none"}) as response:
        answer = await response.json()
        return response.status == 200 and bool(answer["features"]["mm_hashes"]["image"])


async def _load(session: aiohttp.ClientSession, server: Server, model: str, num_requests: int) -> None:
    todo = iter(range(num_requests))

    async def one_by_one() -> None:
        for number in todo:
            if not await _rendered(session, server, Client(server.base_url, model).image(1000 + number)):
                raise RuntimeError(f"{server.name}: a request is not rendered")

    await asyncio.gather(*(one_by_one() for _ in range(_CONCURRENCY)))


def _pss(pid: int) -> tuple[int, int]:
    """Return the process's bytes without and in shared memory; none if it has ended."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]
    except (FileNotFoundError, ProcessLookupError):
        return 0, 0
    sizes = {name: int(size.split()[0]) * 1024 for name, _, size in (line.partition(":") for line in lines)}
    shared = sizes.get("Pss_Shmem", 0)
    return sizes.get("Pss", 0) - shared, shared


def _total(pids: Sequence[int]) -> tuple[int, int]:
    each = [_pss(pid) for pid in pids]
    return sum(own for own, _ in each), sum(shared for _, shared in each)


def _row(pid: int) -> dict[str, object]:
    own, shared = _pss(pid)
    words = [word for word in command(pid).split()[:3] if "/" not in word and not word.startswith("-")]
    return {"process": " ".join(words) or "python", "PSS MB": own / MB, "shared memory MB": shared / MB}


def _tables(found: Run) -> dict[str, list[dict[str, object]]]:
    starts: list[dict[str, object]] = [
        {"server": name, "first answer s": median(each), "CPU s": median(found.cpu[name]), "rounds": len(each)}
        for name, each in found.starts.items()
    ]
    memory: list[dict[str, object]] = [
        {"server": name, "when": when, "PSS MB": own / MB, "shared memory MB": shared / MB}
        for (name, when), (own, shared) in found.memory.items()
    ]
    return {"starts": starts, "memory": memory, "processes at start": found.processes}


def _bars(found: Run) -> list[Bar]:
    def more(when: str) -> float:
        return (found.memory[TWO, when][0] - found.memory[ONE, when][0]) / found.memory[PLAIN, when][0]

    starts = median(found.starts[TWO]) / median(found.starts[ONE])
    return [
        Bar("--gateways 2 / --gateways 1, first answer", starts, 1.2, "at most"),
        Bar("PSS of one gateway more / vllm launch render", more("at start"), 0.5, "at most"),
    ]
