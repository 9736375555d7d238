"""The state of a server as operators see it (docs/reference/state.md), added up from the parts of its gateways."""

from __future__ import annotations

import asyncio
import re
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from operator import attrgetter
from typing import Literal

import msgspec
from msgspec import field

import medialane
from medialane.gateway.operators.part import (
    WINDOW_S,
    ErrorGroup,
    GatewayPart,
    GatewayView,
    Limits,
    RequestGroup,
    RequestSums,
    let_others_run,
)
from medialane.gateway.records import RequestView, Series, series
from medialane.store import StoreLink
from medialane.types.request import Endpoint, WorkerRole, WorkerState

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


class HostView(msgspec.Struct, frozen=True):
    name: str
    own: bool
    workers: int
    ready: int
    encoders: int
    store: str


class StoreArenaView(msgspec.Struct, frozen=True):
    """Of `ArenaStats`, but for `kinds`, its bytes by kind of entry."""

    size_bytes: int
    free_bytes: int
    pinned_bytes: int = field(name="held_bytes")
    writing_bytes: int
    num_entries: int = field(name="entries")
    num_evictions: int = field(name="evictions")
    kinds: dict[str, int] = {}


class PreparersView(msgspec.Struct, frozen=True):
    """Of `PoolStats`."""

    num_preparers: int = field(name="num")
    num_alive: int = field(name="alive")
    num_busy: int = field(name="busy")
    num_queued: int = field(name="queued")
    queue_s: float
    num_restarts: int = field(name="restarts")
    num_done: int = field(name="done")
    num_failed: int = field(name="failed")


class KeptView(msgspec.Struct, frozen=True):
    """Of `MediaLeaseStats`."""

    num_leases: int = field(name="leases")
    num_bytes: int = field(name="bytes")
    max_bytes: int


class StoreView(msgspec.Struct, frozen=True):
    state: Literal["ready", "starting", "lost"]
    problem: str | None
    arena: StoreArenaView | None = None
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
    """Requests that run, by what they wait for."""

    stage: str
    num: int
    oldest_ms: float


class LiveView(msgspec.Struct, frozen=True):
    num: int
    stages: list[StageView]
    listed: list[RequestView]


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


class ServerState(msgspec.Struct, frozen=True):
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


async def whole_state(
    parts: Mapping[str, GatewayPart | None],
    limits: Limits,
    *,
    model: str,
    endpoints: Sequence[Endpoint],
    encoder_caches: Mapping[str, tuple[int, int]],
    store: StoreView | None,
    now: float | None = None,
) -> ServerState:
    """Return the state of the server. `parts` are of all gateways of the port, None for one that is down. The
    gateway that is asked sees the rest itself: `endpoints` are its workers, `encoder_caches` how many embeddings each
    has and how many fit, `store` is the one of its host."""
    now = time.time() if now is None else now
    known = [part for part in parts.values() if part is not None]
    sums = RequestSums()
    for part in known:
        sums += part.sums
        await asyncio.sleep(0)
    views = []
    for number, endpoint in enumerate(endpoints, 1):
        views.append(_worker(endpoint, encoder_caches, known, sums.by_worker.get(endpoint.worker_id, RequestGroup())))
        await let_others_run(number)
    await asyncio.sleep(0)
    return ServerState(
        time=round(now, 3),
        version=medialane.__version__,
        model=model,
        window_s=WINDOW_S,
        gateways=[
            GatewayView(index, asked=False, up=False) if part is None else part.gateway for index, part in parts.items()
        ],
        hosts=_hosts(views),
        store=store,
        workers=_workers([view for view in views if view.role == "worker"], limits.workers),
        encoders=_workers([view for view in views if view.role == "encoder"], limits.workers),
        caches=CachesView(
            {"hit": 0, "shared": 0, "new": 0, "sent": 0} | sums.items,
            {"unneeded": 0, "loaded": 0, "encoded": 0, "unkept": 0} | sums.embeddings,
            sums.prompt_tokens,
            sums.cached_tokens,
        ),
        live=LiveView(
            sum(part.gateway.live or 0 for part in known),
            [StageView(name, at.num, at.oldest_ms) for name in STAGES if (at := sums.stages.get(name)) is not None],
            sorted((view for part in known for view in part.live), key=attrgetter("received_at"))[: limits.live],
        ),
        rates=series(sums.steps, now),
        errors=_errors(known),
        tenants=_groups(sums.by_tenant),
        origins=_groups(sums.by_origin),
        decisions=sorted((each for part in known for each in part.decisions), key=_time, reverse=True)[
            : limits.decisions
        ],
    )


def store_view(store: StoreLink) -> StoreView:
    """Return the store as its last statistics have it."""
    status = store.status
    if status is None:
        return StoreView("lost", store.problem)
    stats = status.stats
    arena = stats.arena
    kinds = {
        "encoded": arena.encoded_bytes,
        "decoded": arena.decoded_bytes,
        "features": arena.processed_bytes,
        "embeddings": arena.embedded_bytes,
    }
    return StoreView(
        "ready" if status.has_started else "starting",
        status.problem,
        msgspec.structs.replace(msgspec.convert(arena, StoreArenaView, from_attributes=True), kinds=kinds),
        msgspec.convert(stats.preparers, PreparersView, from_attributes=True),
        msgspec.convert(stats.leases, KeptView, from_attributes=True),
        stats.pulls.num_bytes,
        {str(kind): size for kind, size in stats.memory.items()},
    )


def worker_host(name: str) -> str:
    """Return the host of a worker, as far as its name has it; empty for a worker of the gateway's host."""
    if name.startswith("unix:"):
        return ""
    match = _HOST.fullmatch(name)
    return match["host"] if match else name


def _worker(
    endpoint: Endpoint, encoder_caches: Mapping[str, tuple[int, int]], parts: Sequence[GatewayPart], group: RequestGroup
) -> WorkerView:
    name, card, ranks = endpoint.worker_id, endpoint.card, endpoint.num_ranks
    at = {part.gateway.index: part.workers[name] for part in parts if name in part.workers}
    cache = encoder_caches.get(name)
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
    """Workers that need attention are first; otherwise the order of the configuration stays."""
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


def _errors(parts: Sequence[GatewayPart]) -> list[ErrorGroup]:
    """Return the errors by code, the most frequent first, each with its last request."""
    groups: dict[str, ErrorGroup] = {}
    for part in parts:
        for code, group in part.errors.items():
            known = groups.get(code, group)
            last = known if (known.last_at or 0.0) >= (group.last_at or 0.0) else group
            num = group.num if known is group else known.num + group.num
            groups[code] = msgspec.structs.replace(last, num=num)
    return sorted(groups.values(), key=lambda group: -group.num)


def _groups(groups: Mapping[str, RequestGroup]) -> list[GroupView]:
    first = sorted(groups.items(), key=lambda each: (-(each[1].requests + each[1].new), -each[1].live, each[0]))
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


def _time(decision: Mapping[str, object]) -> float:
    time_s = decision["time"]
    return time_s if isinstance(time_s, float) else 0.0
