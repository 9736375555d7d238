"""The state of a server as operators see it (docs/reference/state.md), added up from the parts of its gateways."""

from __future__ import annotations

import asyncio
import re
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal, NamedTuple

import msgspec

from medialane.gateway.operators.part import WINDOW_S, ErrorSample, Group, LiveStageCount, Part, let_others_run
from medialane.gateway.requests import RequestView
from medialane.gateway.requests.rates import Series, series
from medialane.types.request import Endpoint, WorkerRole, WorkerState
from medialane.types.stats import StoreStats

#: In the order in which requests are in them.
STAGES = (
    "upload", "intake", "admission", "fetch", "prepare", "decode", "process", "assemble", "encode", "route", "handover",
    "queue", "prefill", "answer",
)  # fmt: skip
#: Listed tenants, and origins.
MAX_GROUPS = 20

#: Names of workers: HOST/NUMBER, HOST/encoder-NUMBER, HOST:PORT and HOST:PID, or the address that they listen at.
_HOST = re.compile(r"(?:tcp://)?\[?(?P<host>.+?)\]?(?::\d+)?(?:/(?:encoder-)?\d+)?", re.ASCII)
_STORES = {"shm": "gateway's", "pull": "own", "inline": "none"}

Transport = Literal["shm", "pull", "inline"]


class GatewayView(msgspec.Struct, frozen=True):
    index: str
    asked: bool
    up: bool
    pid: int | None = None
    started_at: float | None = None
    live: int | None = None
    health: str | None = None
    problems: tuple[str, ...] = ()


class HostView(msgspec.Struct, frozen=True):
    name: str
    own: bool
    workers: int
    ready: int
    encoders: int
    store: str


class ArenaView(msgspec.Struct, frozen=True):
    size_bytes: int
    free_bytes: int
    held_bytes: int
    writing_bytes: int
    entries: int
    evictions: int
    kinds: dict[str, int]


class PreparersView(msgspec.Struct, frozen=True):
    num: int
    alive: int
    busy: int
    queued: int
    queue_s: float
    restarts: int
    done: int
    failed: int


class KeptView(msgspec.Struct, frozen=True):
    leases: int
    bytes: int
    max_bytes: int


class StoreView(msgspec.Struct, frozen=True):
    state: Literal["ready", "starting", "lost"]
    problem: str | None
    arena: ArenaView | None = None
    preparers: PreparersView | None = None
    kept: KeptView | None = None
    copied: Mapping[str, int] = {}
    memory_bytes: Mapping[str, int] = {}


class EncoderCacheView(msgspec.Struct, frozen=True):
    used: int
    size: int


class WorkerView(msgspec.Struct, frozen=True):
    name: str
    host: str
    role: WorkerRole
    state: WorkerState
    reached_by: tuple[str, ...]
    ranks: int
    running: int
    waiting: int
    in_flight: int
    max_running: int | None
    kv_usage: float
    kv_blocks: int | None
    encoder_cache: EncoderCacheView | None
    transport: Transport | None
    requests: int
    failed: int
    first_token_p50_ms: float | None
    first_token_p95_ms: float | None
    oldest_ms: float | None


class WorkersView(msgspec.Struct, frozen=True):
    num: int
    states: dict[str, int]
    running: int
    waiting: int
    in_flight: int
    kv_usage: float | None
    listed: list[WorkerView]


class CachesView(msgspec.Struct, frozen=True):
    items: dict[str, int]
    embeddings: dict[str, int]
    prompt_tokens: int
    cached_tokens: int


class StageView(msgspec.Struct, frozen=True):
    stage: str
    num: int
    oldest_ms: float


class LiveView(msgspec.Struct, frozen=True):
    num: int
    stages: list[StageView]
    listed: list[RequestView]


class ErrorGroup(msgspec.Struct, frozen=True):
    code: str
    num: int
    status: int | None = None
    last_at: float | None = None
    reason: str = ""
    tenants: tuple[str, ...] = ()
    last_request: str | None = None


class GroupView(msgspec.Struct, frozen=True):
    name: str
    requests: int
    failed: int
    live: int
    items: int
    new: int
    p50_ms: float | None
    p95_ms: float | None
    oldest_ms: float | None
    prepare_ms: float
    tenants: tuple[str, ...]


class State(msgspec.Struct, frozen=True):
    time: float
    version: str
    model: str
    window_s: float
    gateways: list[GatewayView]
    hosts: list[HostView]
    store: StoreView | None
    workers: WorkersView
    encoders: WorkersView
    caches: CachesView
    live: LiveView
    rates: Series
    errors: list[ErrorGroup]
    tenants: list[GroupView]
    origins: list[GroupView]
    decisions: list[dict[str, object]]


class Limits(NamedTuple):
    """Most workers, running requests and decisions that are listed."""

    workers: int = 100
    live: int = 50
    decisions: int = 20


class OwnView(NamedTuple):
    """What the gateway that is asked sees of the server itself: its workers, how many embeddings are in their encoder
    caches and how many fit, and the store of its host."""

    version: str
    model: str
    endpoints: Sequence[Endpoint]
    encoder_caches: Mapping[str, tuple[int, int]]
    store: StoreView | None


async def whole_state(
    own: OwnView, parts: Mapping[str, Part | None], asked: str, limits: Limits, *, now: float | None = None
) -> State:
    """Return the state of the server. `parts` are those of all gateways of the port, None of those that are down."""
    now = time.time() if now is None else now
    known = [part for part in parts.values() if part is not None]
    by_worker = _sum_groups(part.by_worker for part in known)
    await asyncio.sleep(0)
    views = []
    for number, endpoint in enumerate(own.endpoints, 1):
        views.append(_worker(endpoint, own, known, by_worker.get(endpoint.worker_id, Group())))
        await let_others_run(number)
    await asyncio.sleep(0)
    return State(
        time=round(now, 3),
        version=own.version,
        model=own.model,
        window_s=WINDOW_S,
        gateways=[_gateway(index, part, asked) for index, part in parts.items()],
        hosts=_hosts(views),
        store=own.store,
        workers=_workers([view for view in views if view.role == "worker"], limits.workers),
        encoders=_workers([view for view in views if view.role == "encoder"], limits.workers),
        caches=CachesView(
            {"hit": 0, "shared": 0, "new": 0, "sent": 0} | _sum(part.items for part in known),
            {"unneeded": 0, "loaded": 0, "encoded": 0, "unkept": 0} | _sum(part.embeddings for part in known),
            sum(part.prompt_tokens for part in known),
            sum(part.cached_tokens for part in known),
        ),
        live=_live(known, limits.live),
        rates=series((step for part in known for step in part.steps), now),
        errors=_errors(known),
        tenants=_groups(part.by_tenant for part in known),
        origins=_groups(part.by_origin for part in known),
        decisions=sorted((each for part in known for each in part.decisions), key=_time, reverse=True)[
            : limits.decisions
        ],
    )


def store_view(stats: StoreStats | None, problem: str | None, *, has_started: bool) -> StoreView:
    """Return the store as its last statistics have it; None if it is not connected."""
    if stats is None:
        return StoreView("lost", problem)
    arena, pool, leases = stats.arena, stats.preparers, stats.leases
    kinds = {
        "encoded": arena.encoded_bytes,
        "decoded": arena.decoded_bytes,
        "features": arena.processed_bytes,
        "embeddings": arena.embedded_bytes,
    }
    return StoreView(
        "ready" if has_started else "starting",
        problem,
        ArenaView(
            arena.size_bytes,
            arena.free_bytes,
            arena.pinned_bytes,
            arena.writing_bytes,
            arena.num_entries,
            arena.num_evictions,
            kinds,
        ),
        PreparersView(
            pool.num_preparers,
            pool.num_alive,
            pool.num_busy,
            pool.num_queued,
            round(pool.queue_s, 3),
            pool.num_restarts,
            pool.num_done,
            pool.num_failed,
        ),
        KeptView(leases.num_leases, leases.num_bytes, leases.max_bytes),
        stats.pulls.num_bytes,
        {str(kind): size for kind, size in stats.memory.items()},
    )


def worker_host(name: str) -> str:
    """Return the host of a worker, as far as its name has it; empty for a worker of the gateway's host."""
    if name.startswith("unix:"):
        return ""
    match = _HOST.fullmatch(name)
    return match["host"] if match else name


def _gateway(index: str, part: Part | None, asked: str) -> GatewayView:
    if part is None:
        return GatewayView(index, index == asked, up=False)
    return GatewayView(
        index,
        index == asked,
        up=True,
        pid=part.pid,
        started_at=round(part.started_at, 3),
        live=part.num_live,
        health=part.health,
        problems=part.problems,
    )


def _worker(endpoint: Endpoint, own: OwnView, parts: Sequence[Part], group: Group) -> WorkerView:
    name, card, ranks = endpoint.worker_id, endpoint.card, endpoint.num_ranks
    at = {part.index: part.workers[name] for part in parts if name in part.workers}
    cache = own.encoder_caches.get(name)
    transport: Transport = "shm" if endpoint.same_host else "pull" if endpoint.can_pull else "inline"
    return WorkerView(
        name=name,
        host=worker_host(name),
        role=endpoint.role,
        state=endpoint.state,
        reached_by=tuple(index for index, each in at.items() if each.state != "lost"),
        ranks=ranks,
        running=endpoint.load.num_running,
        waiting=endpoint.load.num_waiting,
        in_flight=sum(each.in_flight for each in at.values()),
        max_running=card.max_num_seqs * ranks or None if card is not None else None,
        kv_usage=round(endpoint.load.kv_usage, 4),
        kv_blocks=card.num_kv_blocks * ranks or None if card is not None else None,
        encoder_cache=EncoderCacheView(*cache) if cache is not None and cache[1] else None,
        transport=transport if endpoint.ready else None,
        requests=group.requests,
        failed=group.failed,
        first_token_p50_ms=group.waits.percentile_ms(0.5),
        first_token_p95_ms=group.waits.percentile_ms(0.95),
        oldest_ms=round(group.oldest_ms, 1) or None,
    )


def _workers(views: Sequence[WorkerView], limit: int) -> WorkersView:
    with_cache = [view.kv_usage for view in views if view.state != "lost"]
    return WorkersView(
        num=len(views),
        states=dict(Counter(view.state for view in views)),
        running=sum(view.running for view in views),
        waiting=sum(view.waiting for view in views),
        in_flight=sum(view.in_flight for view in views),
        kv_usage=round(sum(with_cache) / len(with_cache), 4) if with_cache else None,
        listed=sorted(views, key=_attention)[:limit],
    )


def _attention(view: WorkerView) -> tuple[bool, float, int, int]:
    """Those that need attention are first; otherwise the order stays that of the configuration."""
    return view.state == "ready", -(view.oldest_ms or 0.0), -view.waiting, -view.running


def _hosts(views: Sequence[WorkerView]) -> list[HostView]:
    by_host: dict[str, list[WorkerView]] = {}
    for view in views:
        by_host.setdefault(view.host, []).append(view)
    hosts = [_host(name, of_host) for name, of_host in by_host.items()]
    return hosts if any(host.own for host in hosts) else [HostView("", True, 0, 0, 0, ""), *hosts]


def _host(name: str, views: Sequence[WorkerView]) -> HostView:
    workers = [view for view in views if view.role == "worker"]
    stores = {_STORES[view.transport] for view in workers if view.transport is not None}
    is_own = not name or "shm" in {view.transport for view in views}
    num_ready = sum(view.state == "ready" for view in workers)
    return HostView(name, is_own, len(workers), num_ready, len(views) - len(workers), " or ".join(sorted(stores)))


def _live(parts: Sequence[Part], limit: int) -> LiveView:
    stages: dict[str, LiveStageCount] = {}
    for part in parts:
        for name, count in part.stages.items():
            stage = stages.setdefault(name, LiveStageCount())
            stage.num += count.num
            stage.oldest_ms = max(stage.oldest_ms, count.oldest_ms)
    listed = sorted((view for part in parts for view in part.live), key=lambda view: view.received_at)
    in_order = [StageView(name, stages[name].num, stages[name].oldest_ms) for name in STAGES if name in stages]
    return LiveView(sum(part.num_live for part in parts), in_order, listed[:limit])


def _errors(parts: Sequence[Part]) -> list[ErrorGroup]:
    numbers = _sum(step.codes for part in parts for step in part.steps)
    samples: dict[str, ErrorSample] = {}
    for part in parts:
        for code, sample in part.errors.items():
            if code not in samples or samples[code].last_at < sample.last_at:
                samples[code] = sample
    groups = []
    for code, number in sorted(numbers.items(), key=lambda each: -each[1]):
        known = samples.get(code)
        groups.append(
            ErrorGroup(code, number)
            if known is None
            else ErrorGroup(code, number, known.status, known.last_at, known.reason, known.tenants, known.last_request)
        )
    return groups


def _groups(of_parts: Iterable[Mapping[str, Group]]) -> list[GroupView]:
    summed = _sum_groups(of_parts)
    first = sorted(summed.items(), key=lambda each: (-(each[1].requests + each[1].new), -each[1].live, each[0]))
    return [
        GroupView(
            name,
            group.requests,
            group.failed,
            group.live,
            group.items,
            group.new,
            group.waits.percentile_ms(0.5),
            group.waits.percentile_ms(0.95),
            round(group.oldest_ms, 1) or None,
            round(1000 * group.prepare_s, 1),
            tuple(sorted(group.tenants)),
        )
        for name, group in first[:MAX_GROUPS]
    ]


def _sum_groups(of_parts: Iterable[Mapping[str, Group]]) -> dict[str, Group]:
    summed: dict[str, Group] = {}
    for groups in of_parts:
        for name, group in groups.items():
            summed.setdefault(name, Group()).add(group)
    return summed


def _sum(counts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    summed: Counter[str] = Counter()
    for each in counts:
        summed.update(each)
    return dict(summed)


def _time(decision: Mapping[str, object]) -> float:
    time_s = decision["time"]
    return time_s if isinstance(time_s, float) else 0.0
