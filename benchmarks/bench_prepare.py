"""`medialane bench prepare`: images per second from encoded bytes to features, compared with vLLM's renderer.

Ours, for 1, 2, ... preparers: `PreparerPool.prepare_item`, after copying the bytes into the arena, with enough
concurrency to keep the preparers busy; a preparer decodes, runs vLLM's processor and writes to the arena. `whole
gateway` is `AppBackend.prepare` with all other components, and a store in the same process, over its socket; like
vLLM's renderer it hashes the bytes and expands placeholders, so it is the one that is compared. Theirs: vLLM's own
chain in one process (`ImageMediaIO.load_bytes`, `renderer.render_cmpl`), one request after the other, with one torch
thread and with vLLM's default: the faster one is compared with one preparer. For comparison with more preparers, one
process on all cores: `all threads` of torch, and requests `at once` through `render_cmpl_async`.

All images are distinct within a turn, and dropped after it. Turns alternate, medians count. `CPU ms` is the CPU time
per image of all processes involved; `others` is the share of the cores that the rest of the machine used in the
meantime. Turns in which that exceeds a tenth are not counted if there are enough undisturbed ones; more rounds are run
for that.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import multiprocessing
import os
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import uvloop
from prometheus_client import CollectorRegistry
from vllm.multimodal import MULTIMODAL_REGISTRY
from vllm.multimodal.media.image import ImageMediaIO
from vllm.renderers import renderer_from_config

from harness import Bar, Options, Report, median
from load import cpu_seconds, process_tree
from local_store import host_store, store_link
from medialane.arena import ENTRY_HEADER_BYTES, Arena, ArenaConfig
from medialane.cli.store import PROCESSOR_FACTORY
from medialane.config import process_environ
from medialane.gateway import AppBackend, GatewayConfig, StoreItems, Transports, WorkerPool, open_scope
from medialane.media import MediaConfig
from medialane.observability import Metrics
from medialane.prepare import FactoryConfig, PrepareConfig, PreparerPool
from medialane.routing import Router
from medialane.runtime.tasks import LoopFairness
from medialane.store import StoreLink
from medialane.testing.sample_media import sample_jpeg
from medialane.testing.tiny_model import SPECIAL_TOKENS, TINY_MODEL_FLAGS, build_tiny_model, cache_folder
from medialane.types.feature import MediaPrompt
from medialane.types.media import EncodedMedia, MediaRef
from medialane.vllm_bridge.learned import VllmAssembler
from medialane.vllm_bridge.seams.arguments import create_frontend_config, create_model_config, parse_vllm_args

ABOUT = "images per second of 1, 2, ... preparers, compared with vLLM's renderer in one process"

WIDTH, HEIGHT = 1024, 768
NUM_IMAGES, QUICK_NUM_IMAGES = 40, 8
ROUNDS, QUICK_ROUNDS = 7, 2
#: Up to this many times the requested rounds may be run to get enough undisturbed turns, and this many are enough.
PATIENCE, MIN_UNDISTURBED = 4, 3
MAX_OTHERS = 0.10
MOST_PREPARERS = 8
START_S = 120.0
SAMPLE_PAUSE_S = 0.05
MIB = 1 << 20

FLAGS = (*TINY_MODEL_FLAGS, "--mm-processor-cache-gb=0")
PROMPT = [SPECIAL_TOKENS.index(token) for token in ("<|vision_start|>", "<|image_pad|>", "<|vision_end|>")]

#: Memory of the job's pixels: the decoded image, and the patches that the processor makes of it.
JOB_BYTES = WIDTH * HEIGHT * 3 + 3996 * 1176


class RendererSetup(NamedTuple):
    """How vLLM's renderer is run. `num_threads` of torch, None for vLLM's default; `is_peer` of one preparer."""

    num_threads: int | None
    together: bool
    is_peer: bool


PEERS = {
    "vLLM renderer, 1 thread": RendererSetup(1, together=False, is_peer=True),
    "vLLM renderer, its default": RendererSetup(None, together=False, is_peer=True),
    "vLLM renderer, all threads": RendererSetup(len(os.sched_getaffinity(0)), together=False, is_peer=False),
    "vLLM renderer, at once": RendererSetup(None, together=True, is_peer=False),
}


#: Prepares one image, given its number and its bytes.
Prepare = Callable[[int, bytes], Coroutine[Any, Any, None]]


class Turn(NamedTuple):
    images_per_s: float
    cpu_ms: float
    others: float


class Turns(list[Turn]):
    """All turns of one configuration."""

    @property
    def num_undisturbed(self) -> int:
        return sum(turn.others <= MAX_OTHERS for turn in self)

    @property
    def counted(self) -> list[Turn]:
        """The undisturbed turns, if there are enough of them."""
        return (
            [turn for turn in self if turn.others <= MAX_OTHERS]
            if self.num_undisturbed >= MIN_UNDISTURBED
            else list(self)
        )

    @property
    def images_per_s(self) -> float:
        return median(turn.images_per_s for turn in self.counted)


@dataclass
class Memory:
    """Memory of one preparer in MiB: peak private memory under load, and its proportional set size (PSS) afterwards."""

    private: float = 0.0
    pss: float = 0.0


def run(options: Options) -> Report:
    model = str(build_tiny_model(cache_folder(process_environ())))
    with _renderer(model) as renderer:
        return uvloop.run(_measure(model, *renderer, options))


async def _measure(model: str, renderer: Connection, renderer_pid: int, options: Options) -> Report:
    jpegs = [sample_jpeg(seed, WIDTH, HEIGHT) for seed in range(QUICK_NUM_IMAGES if options.quick else NUM_IMAGES)]
    rounds = options.rounds or (QUICK_ROUNDS if options.quick else ROUNDS)
    speeds: dict[str, Turns] = {}
    memory: dict[str, list[Memory]] = {}
    async with contextlib.AsyncExitStack() as stack:
        arena = Arena.create(ArenaConfig(size_bytes=512 * MIB))
        stack.callback(arena.close)
        arena.prefault(threading.Event())
        processor = MULTIMODAL_REGISTRY.create_processor(create_model_config(parse_vllm_args(model, FLAGS)))
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="medialane-bench-"))
        pools = {count: await stack.enter_async_context(_pool(model, arena, count)) for count in _counts()}
        fairness = LoopFairness()
        stack.callback(fairness.close)
        gateways = {}
        for count, pool in pools.items():
            address = f"unix://{folder}/store-{count}"
            await stack.enter_async_context(host_store(address, arena, pool))
            link = await stack.enter_async_context(store_link(address, writable=True))
            await link.ready()
            gateways[count] = _gateway(link, processor=processor, fairness=fairness)
        ours: dict[str, tuple[int, Prepare]] = {}
        for count, pool in pools.items():
            ours[_name(count)] = (count, partial(_through_pool, arena, pool))
            ours["whole gateway, " + _name(count)] = (count, partial(_through_gateway, gateways[count]))
        for number in range(1 + rounds * (1 if options.quick else PATIENCE)):
            for name, (count, prepare) in ours.items():
                working = [os.getpid(), *process_tree(os.getpid())[1:]]
                async with _timed(speeds.setdefault(name, Turns()), working, renderer_pid, len(jpegs)):
                    await _prepare_all(prepare, jpegs, 2 * count)
                await _drop_all(arena)
            for name, way in PEERS.items():
                async with _timed(speeds.setdefault(name, Turns()), [renderer_pid], None, len(jpegs)):
                    renderer.send((way, jpegs))
                    await asyncio.to_thread(renderer.recv)
            if number == 0:  # warm-up
                speeds.clear()
            elif min(turns.num_undisturbed for turns in speeds.values()) >= rounds:
                break
        for count, pool in pools.items():
            with _watched(arena, pool, memory.setdefault(_name(count), [Memory() for _ in range(count)])):
                await _prepare_all(ours[_name(count)][1], jpegs, 2 * count)
            await _drop_all(arena)
            gateways[count].close()
    return _report(speeds, memory)


def _counts() -> list[int]:
    most = min(MOST_PREPARERS, max(2, len(os.sched_getaffinity(0))))
    return [count for count in (1, 2, 4, 8) if count <= most]


def _name(count: int) -> str:
    return f"{count} preparer{'s' if count > 1 else ''}"


@contextlib.asynccontextmanager
async def _pool(model: str, arena: Arena, count: int) -> AsyncIterator[PreparerPool]:
    config = PrepareConfig(num_preparers=count)
    factory_config = msgspec.json.encode(FactoryConfig(model, list(FLAGS)))
    pool = PreparerPool(
        config,
        factory=PROCESSOR_FACTORY,
        factory_config=factory_config,
        arena=arena,
        media=MediaConfig(),
        environment=os.environ,
    )
    await pool.start()
    try:
        yield pool
    finally:
        await pool.close()


def _gateway(link: StoreLink, *, processor: Any, fairness: LoopFairness) -> AppBackend:
    """The gateway with its own components, except those after preparation."""
    store_items = StoreItems(link, processor_digest="", fairness=fairness, media=MediaConfig())
    return AppBackend(
        config=GatewayConfig(stage="features"),
        transports=Transports([]),
        store_items=store_items,
        assembler=VllmAssembler(processor),
        workers=WorkerPool([]),
        router=Router(),
        metrics=Metrics(CollectorRegistry()),
    )


async def _through_pool(arena: Arena, pool: PreparerPool, number: int, jpeg: bytes) -> None:
    reservation = arena.reserve(len(jpeg), "encoded")
    reservation.buffer[:] = jpeg
    encoded = EncodedMedia("image", "", "image/jpeg", reservation.range, ENTRY_HEADER_BYTES, len(jpeg))
    with arena.publish(reservation, str(number), encoded) as pin:
        (await pool.prepare_item(pin, b"{}", str(number))).release()


async def _through_gateway(gateway: AppBackend, _number: int, jpeg: bytes) -> None:
    with open_scope():
        ref = MediaRef("image", "messages[0].content[0].image_url", data=jpeg)
        await gateway.prepare(MediaPrompt([1, *PROMPT, 2], (ref,)))


async def _prepare_all(prepare: Prepare, jpegs: Sequence[bytes], concurrency: int) -> None:
    todo = iter(enumerate(jpegs))

    async def client() -> None:
        for number, jpeg in todo:
            await prepare(number, jpeg)

    async with asyncio.TaskGroup() as clients:
        for _ in range(concurrency):
            clients.create_task(client())


async def _drop_all(arena: Arena) -> None:
    """Free all entries, once the holds have ended: the gateway releases them by a message to the store."""
    async with asyncio.timeout(START_S):
        while arena.stats().num_leases:  # noqa: ASYNC110 - polled between turns only
            await asyncio.sleep(0.001)
    arena.clear()


@contextlib.asynccontextmanager
async def _timed(turns: Turns, working: list[int], but: int | None, num_images: int) -> AsyncIterator[None]:
    """Measure a turn. `working` are the processes involved, without the process tree of `but`."""
    pids = sorted(set(working) - set(process_tree(but) if but else []))
    cpu, machine = cpu_seconds(pids), _machine_seconds()
    started = time.perf_counter()
    yield
    wall = time.perf_counter() - started
    cpu, machine = cpu_seconds(pids) - cpu, _machine_seconds() - machine
    others = max(0.0, machine - cpu) / (wall * len(os.sched_getaffinity(0)))
    turns.append(Turn(num_images / wall, 1000 * cpu / num_images, others))


def _machine_seconds() -> float:
    """Return the CPU time used by all processes of the machine, and stolen by its host (proc(5), stat)."""
    with open("/proc/stat") as file:
        user, nice, system, _idle, _iowait, irq, softirq, steal = map(int, file.readline().split()[1:9])
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")


@contextlib.contextmanager
def _watched(arena: Arena, pool: PreparerPool, memory: list[Memory]) -> Iterator[None]:
    """Sample the preparers' memory under load, in a separate turn because it slows them."""
    done = threading.Event()
    pids = sorted(pool.preparer_pids)

    def watch() -> None:
        while not done.wait(SAMPLE_PAUSE_S):
            for pid, found in zip(pids, memory, strict=True):
                found.private = max(found.private, _private_bytes(pid, arena.path.name) / MIB)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield
    finally:
        done.set()
        watcher.join()
        for pid, found in zip(pids, memory, strict=True):
            found.pss = _pss_bytes(pid) / MIB


def _private_bytes(pid: int, arena: str) -> int:
    """Return the process's private memory, without the arena, which is shared (proc(5), smaps)."""
    total, counts = 0, False
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        name, _, rest = line.partition(":")
        if " " in name:  # the header of a mapping
            counts = arena not in line
        elif counts and name in ("Private_Clean", "Private_Dirty"):
            total += int(rest.split()[0]) * 1024
    return total


def _pss_bytes(pid: int) -> int:
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))


@contextlib.contextmanager
def _renderer(model: str) -> Iterator[tuple[Connection, int]]:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=run_renderer, args=(model, theirs), daemon=True)
    process.start()
    try:
        if not ours.poll(START_S):
            raise RuntimeError(f"vLLM's renderer was not ready after {START_S:g} s")
        ours.recv()
        assert process.pid is not None
        yield ours, process.pid
    finally:
        process.terminate()
        process.join(10)


def run_renderer(model: str, requests: Connection) -> None:
    """Main function of the renderer process: respond to each list of JPEGs when all are rendered."""
    renderer = renderer_from_config(create_frontend_config(parse_vllm_args(model, FLAGS)))
    threads = concurrent.futures.ThreadPoolExecutor(8)  # VLLM_MEDIA_LOADING_THREAD_COUNT
    requests.send("ready")
    while True:
        way, jpegs = requests.recv()
        os.environ.pop("OMP_NUM_THREADS", None)  # vLLM reads it before each item
        if way.num_threads is not None:
            os.environ["OMP_NUM_THREADS"] = str(way.num_threads)
        if way.together:
            asyncio.run(_render_together(renderer, threads, jpegs))
        else:
            for jpeg in jpegs:
                renderer.render_cmpl([_request(ImageMediaIO().load_bytes(jpeg))])
        requests.send("done")


async def _render_together(renderer: Any, threads: concurrent.futures.Executor, jpegs: Sequence[bytes]) -> None:
    todo = iter(jpegs)
    loop = asyncio.get_running_loop()

    async def client() -> None:
        for jpeg in todo:
            media = await loop.run_in_executor(threads, ImageMediaIO().load_bytes, jpeg)
            await renderer.render_cmpl_async([_request(media)])

    await asyncio.gather(*(client() for _ in range(4)))


def _request(media: Any) -> dict[str, Any]:
    return {"prompt_token_ids": [1, *PROMPT, 2], "multi_modal_data": {"image": [media]}}


def _report(speeds: dict[str, Turns], memory: dict[str, list[Memory]]) -> Report:
    rows = [
        {
            "way": name,
            "turns": f"{len(turns.counted)} of {len(turns)}",
            "images/s": turns.images_per_s,
            "best": max(turn.images_per_s for turn in turns),
            "CPU ms": median(turn.cpu_ms for turn in turns.counted),
            "others": f"{median(turn.others for turn in turns.counted):.0%}",
        }
        for name, turns in speeds.items()
    ]
    sizes = [
        {"way": name, "preparer": number, "private at most, MiB": found.private, "PSS, MiB": found.pss}
        for name, each in memory.items()
        for number, found in enumerate(each)
    ]
    one, two = (speeds[_name(count)].images_per_s for count in (1, 2))
    whole = speeds["whole gateway, " + _name(1)].images_per_s
    peer = max(speeds[name].images_per_s for name, way in PEERS.items() if way.is_peer)
    most = max(found.private for each in memory.values() for found in each) - JOB_BYTES / MIB
    bars = [
        Bar("prepare: 1 preparer over vLLM's renderer", whole / peer, 1.0, "at least"),
        Bar("prepare: 2 preparers over 1", two / one, 1.8, "at least"),
        Bar("prepare: private memory of a preparer beyond its job's pixels, MB", most * MIB / 1e6, 80, "at most"),
    ]
    disturbed = [name for name, turns in speeds.items() if turns.num_undisturbed < MIN_UNDISTURBED]
    notes = [f"Other processes used the machine; disturbed figures, vLLM's included: {', '.join(disturbed)}."]
    return Report(
        "prepare", {f"{WIDTH}x{HEIGHT} JPEGs": rows, "memory of preparers": sizes}, bars, notes if disturbed else []
    )
