"""A gateway that only has the page and its API, with made-up requests: `Scene` says how many and what is wrong.

For what no test machine can run: a thousand workers, 500 requests a second. It answers as docs/reference/state.md says.
"""

from __future__ import annotations

import random
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from aiohttp import web

import medialane.gateway

PAGE = Path(medialane.gateway.__file__).parent / "page"
POLICY = "default-src 'self'; frame-ancestors 'none'; base-uri 'none'; form-action 'self'"
TYPES = {".html": "text/html", ".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}
STEP_S, NUM_STEPS = 5, 180


TENANTS = ("search", "chat", "catalogue", "clips")


@dataclass(frozen=True)
class Scene:
    """`stalled` workers do not answer; requests of `slow_origin` take 3 s to fetch; `failing` is a share of them."""

    workers: int = 4
    rate: float = 6.0
    stalled: int = 0
    slow_origin: bool = False
    failing: float = 0.0
    long_names: bool = False
    encoders: int = 0
    key: str = ""
    tenants: tuple[str, ...] = TENANTS


@dataclass
class Request:
    """One whose whole life is known in advance: steps with their durations in s."""

    number: int
    received_at: float
    tenant: str
    worker: str
    items: list[dict[str, Any]]
    steps: list[tuple[str, float]]
    error: dict[str, str] | None
    prompt_tokens: int
    model: str

    @property
    def total_s(self) -> float:
        return sum(seconds for _, seconds in self.steps)

    def view(self, now: float) -> dict[str, Any]:
        passed, stages, stage = now - self.received_at, {}, None
        for name, seconds in self.steps:
            if passed <= 0:
                break
            if passed < seconds:
                name, stage = ("prepare", "prepare") if name in ("decode", "process") else (name, name)
                name, stage = ("prefill", "prefill") if name == "queue" else (name, stage)
            stages[name] = round(1000 * min(seconds, passed), 1)
            passed -= seconds
        is_over = stage is None and passed >= 0
        before_answer = sum(seconds for name, seconds in self.steps if name != "answer")
        routed = any(name in stages for name in ("handover", "queue", "prefill", "answer"))
        answering = stages.get("answer", 0)
        return {
            "id": f"chatcmpl-{self.number:032x}",
            "gateway": "0",
            "received_at": round(self.received_at, 3),
            "path": "/v1/chat/completions",
            "model": self.model,
            "tenant": self.tenant,
            "streams": True,
            "stage": None if is_over else stage,
            "total_ms": round(1000 * min(self.total_s, now - self.received_at), 1),
            "ttft_ms": round(1000 * min(before_answer, now - self.received_at), 1) if routed else None,
            "stages_ms": stages,
            "num_items": len(self.items),
            "items": [self._item(item, stages, stage) for item in self.items],
            "worker": self.worker if routed else None,
            "attempts": [{"worker": self.worker, "stage": "features", "transport": "shm"}] if routed else [],
            "prompt_tokens": self.prompt_tokens if answering else None,
            "cached_tokens": self.prompt_tokens // 3 if answering else None,
            "generated_tokens": int(answering / 30),
            "status": None if not is_over else 503 if self.error else 200,
            "error": self.error if is_over else None,
            "decision": None,
            "prefill": None,
        }

    def _item(self, item: dict[str, Any], stages: dict[str, float], stage: str | None) -> dict[str, Any]:
        own = {name: stages[name] for name in ("fetch", "prepare", "decode", "process") if name in stages}
        is_ready = stage not in {"upload", "fetch", "prepare"}
        return {
            **item,
            "stages_ms": own,
            "stage": None if is_ready else stage,
            "outcome": item["outcome"] if is_ready else None,
        }


RATES = (
    "requests",
    "failed",
    "items",
    "items_cached",
    "prompt_tokens",
    "generated_tokens",
    "ttft_p50_ms",
    "ttft_p95_ms",
)


@dataclass
class SampleGateway:
    scene: Scene
    seed: int = 1
    requests: list[Request] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._chance = random.Random(self.seed)
        self._started = time.time()
        self._next = self._started - (60 if self.scene.rate <= 50 else 4)

    # ---- what exists

    def _advance(self, now: float) -> None:
        if not self.scene.rate:
            return
        while self._next < now:
            self.requests.append(self._request(self._next))
            self._next += self._chance.expovariate(self.scene.rate)
        self.requests = [each for each in self.requests if now - each.received_at < (60 if self.scene.rate < 50 else 6)]

    def _worker(self, number: int) -> str:
        if self.scene.long_names:
            return f"qwen25-vl-72b-instruct-prefill-decode-{number:04d}.gpu-cluster-eu-west-1.svc.cluster.local"
        return f"worker-{number}"

    def _request(self, at: float) -> Request:
        chance, scene = self._chance, self.scene
        kind = chance.choices(range(4), (5, 3, 1, 1))[0]
        tenant = TENANTS[kind]
        worker = chance.randrange(scene.workers) if scene.workers else 0
        if scene.long_names:
            named = f"{tenant}-of-the-department-of-very-long-names-and-numbers"
        else:
            named = scene.tenants[kind]
        items: list[dict[str, Any]] = []
        steps = [("upload", chance.uniform(0.0005, 0.004))]
        if tenant != "chat":
            modality = "video" if tenant == "clips" else "image"
            origin = (
                "media.example.org"
                if tenant == "search"
                else "video.example.net"
                if tenant == "clips"
                else "slow.example.com"
            )
            is_new = tenant != "search" or chance.random() < 0.1
            is_slow = tenant == "catalogue" and scene.slow_origin
            steps.append(("fetch", 3 + chance.random() * 0.1 if is_slow else chance.uniform(0.002, 0.03)))
            if is_new:
                scale = 5 if modality == "video" else 1
                steps += [
                    ("decode", chance.uniform(0.01, 0.05) * scale),
                    ("process", chance.uniform(0.02, 0.1) * scale),
                ]
            num_items = chance.choice((1, 1, 1, 2, 4)) if modality == "image" else 1
            items = [_item(modality, origin, number, is_new, chance) for number in range(num_items)]
        stalled = worker < scene.stalled
        steps += [
            *(("assemble", 0.0004), ("route", 0.0003), ("handover", 0.0006)),
            *(("queue", chance.expovariate(1 / 0.02)), ("prefill", 30.0 if stalled else chance.uniform(0.05, 0.3))),
            ("answer", chance.uniform(0.4, 2.5)),
        ]
        error = None
        if chance.random() < scene.failing:
            code = chance.choice(("media_fetch_timeout", "worker_lost", "worker_lost", "queue_full"))
            error, steps = (
                {"code": code, "reason": f"{code.replace('_', ' ')} at https://media.example.org/..."},
                steps[:-1],
            )
        model = "Qwen/Qwen2.5-VL-72B-Instruct"
        number = chance.getrandbits(128)
        return Request(number, at, named, self._worker(worker), items, steps, error, 200 + 300 * len(items), model)

    def find(self, request_id: str) -> dict[str, Any] | None:
        now = time.time()
        view = next((view for each in self.requests if (view := each.view(now))["id"] == request_id), None)
        if view and view["worker"]:
            view["prefill"] = {"outcome": "split", "worker": self._worker(0), "ms": 81.5, "transferred_tokens": 812}
            others = [self._worker(number) for number in range(min(4, self.scene.workers))]
            view["decision"] = {
                "worker": view["worker"],
                "reason": "longest cached prefix",
                "cached_tokens": 384,
                "cost_ms": {"prefill": 6.4, "running": 0.6, "contention": 12.9},
                "alternatives": [
                    {"worker_id": name, "score": 40.0 + 20 * n, "cached_tokens": 0}
                    for n, name in enumerate(others)
                    if name != view["worker"]
                ],
            }
        return view

    def latest(self, now: float, wanted: Mapping[str, str]) -> list[dict[str, Any]]:
        """As GET /medialane/requests."""
        self._advance(now)
        views = [view for each in reversed(self.requests) if _wants(view := each.view(now), wanted)]
        live, ended = [view for view in views if view["stage"]], [view for view in views if not view["stage"]]
        return ([] if wanted.get("live") == "false" else live + ended)[: int(wanted.get("limit", 100))] or ended[
            : int(wanted["limit"])
        ]

    def state(self, now: float) -> dict[str, Any]:
        """As GET /medialane/state."""
        self._advance(now)
        scene, views = self.scene, [each.view(now) for each in self.requests]
        live = [view for view in views if view["stage"]]
        by_worker: dict[str, list[dict[str, Any]]] = {}
        for view in views:
            by_worker.setdefault(view["worker"] or "", []).append(view)
        workers = [self._worker_state(number, by_worker) for number in range(scene.workers)]
        workers.sort(
            key=lambda row: (row["state"] == "ready", -(row["oldest_ms"] or 0), -row["waiting"], -row["running"])
        )
        items = [item["outcome"] for view in views for item in view["items"] if item["outcome"]]
        problems = [] if scene.workers else ["no worker is ready"]
        gateway = {"index": "0", "up": True, "pid": 4242, "started_at": self._started, "live": len(live)}
        return {
            "time": now,
            "version": "0.0.0",
            "model": "Qwen/Qwen2.5-VL-72B-Instruct",
            "window_s": 60,
            "gateways": [{**gateway, "health": "degraded" if problems else "ok", "problems": problems}],
            "store": self._store(),
            "workers": _group(workers),
            "encoders": _group([]),
            "caches": {
                "items": {outcome: items.count(outcome) for outcome in ("hit", "shared", "new", "sent")},
                "embeddings": {"unneeded": 9 * len(items) // 10, "loaded": 0, "encoded": len(items) // 10, "unkept": 0},
                "prompt_tokens": 700 * len(views),
                "cached_tokens": 410 * len(views),
            },
            "live": {"num": len(live), "stages": _stages(live), "listed": live[:50]},
            "rates": self._rates(now),
            "errors": self._errors(views),
            "tenants": self._tenants(views),
            "origins": self._origins(views),
            "decisions": [self._decision(view) for view in views[-8:] if view["worker"]][::-1],
        }

    def _worker_state(self, number: int, by_worker: Mapping[str, list[dict[str, Any]]]) -> dict[str, Any]:
        name = self._worker(number)
        mine = by_worker.get(name, [])
        live = [view for view in mine if view["stage"]]
        waits = [view["stages_ms"]["prefill"] for view in live if view["stage"] == "prefill"]
        first = sorted(
            view["stages_ms"].get("prefill", 0) + view["stages_ms"].get("queue", 0)
            for view in mine
            if not view["stage"]
        )
        stalled = number < self.scene.stalled
        return {
            "name": name,
            "role": "worker",
            "state": "stalled" if stalled else "ready",
            "running": len(live) - len(waits) // 2,
            "waiting": len(waits) // 2,
            "in_flight": len(live),
            "kv_usage": min(0.99, 0.05 + 0.03 * len(live) + (number * 37 % 100) / 160),
            "encoder_cache": {"used": 8192, "size": 16384},
            "transport": "shm",
            "requests": len(mine),
            "first_token_p50_ms": first[len(first) // 2] if first else None,
            "first_token_p95_ms": first[int(len(first) * 0.95)] if first else None,
            "oldest_ms": max(waits, default=None),
        }

    def _store(self) -> dict[str, Any]:
        size, full, late = 8 << 30, 0.98 if self.scene.failing else 0.6, 12 if self.scene.failing else 0
        kinds = {"encoded": 0.08, "decoded": 0.0, "processed": 0.7, "embedded": 0.2}
        return {
            "state": "ready",
            "problem": None,
            "arena": {
                "size_bytes": size,
                "free_bytes": int(size * (1 - full)),
                "largest_hole_bytes": 1 << 20,
                "writing_bytes": 0,
                "published_bytes": int(size * full),
                "pinned_bytes": int(size * 0.11),
                **{f"{kind}_bytes": int(size * share * full) for kind, share in kinds.items()},
                "num_reservations": 0,
                "num_entries": 812,
                "num_leases": 20,
                "num_hits": 5000,
                "num_misses": 900,
                "num_evictions": 3,
            },
            "preparers": {
                "num_preparers": 7,
                "num_alive": 7,
                "num_busy": 7 if late else 2,
                "num_queued": late,
                "num_restarts": 0,
                "num_forkserver_restarts": 0,
                "num_done": 90210,
                "num_failed": 2,
                "queue_s": late / 5,
            },
            "kept": {"num_leases": 0, "num_bytes": 0, "max_bytes": 1 << 30},
            "copied": {},
            "memory_bytes": {"store": 123 << 20, "preparer": 2 << 30},
        }

    def _rates(self, now: float) -> dict[str, Any]:
        chance, scene = random.Random(5), self.scene
        values: dict[str, list[float | None]] = {name: [] for name in RATES}
        for _ in range(NUM_STEPS):
            requests = int(scene.rate * STEP_S * chance.uniform(0.8, 1.2))
            row = (
                *(requests, int(requests * scene.failing * chance.random() * 2), int(requests * 0.9)),
                *(int(requests * chance.uniform(0.65, 0.8)), requests * 600, requests * 40),
                *((chance.uniform(150, 220), chance.uniform(300, 900)) if requests else (None, None)),
            )
            for name, value in zip(RATES, row, strict=True):
                values[name].append(value)
        return {"started_at": int(now) - NUM_STEPS * STEP_S, "step_s": STEP_S, "values": values}

    def _decision(self, view: dict[str, Any]) -> dict[str, Any]:
        return {
            "request": view["id"],
            "gateway": "0",
            "time": view["received_at"],
            "worker": view["worker"],
            "rank": 0,
            "policy": "cost",
            "reason": "longest cached prefix",
            "num_tokens": 812,
            "cached_tokens": 384,
            "expected_ms": 41.2,
            "cost_ms": {"prefill": 6.4, "running": 0.6, "contention": 12.9},
            "alternatives": [{"worker_id": self._worker(1), "rank": 0, "score": 110.3, "cached_tokens": 0}],
        }

    def _errors(self, views: list[dict[str, Any]]) -> list[dict[str, Any]]:
        found: dict[str, dict[str, Any]] = {}
        for view in views:
            if view["error"]:
                row = {
                    "status": view["status"],
                    "num": 0,
                    **view["error"],
                    "last_request": view["id"],
                }
                row = found.setdefault(view["error"]["code"], row)
                row["num"], row["last_at"] = row["num"] + 1, view["received_at"]
        return sorted(found.values(), key=lambda row: -row["num"])

    def _tenants(self, views: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return [
            _sender(
                name,
                mine,
                [item for view in mine for item in view["items"]],
                [view["ttft_ms"] for view in mine if view["ttft_ms"]],
            )
            for name in sorted({view["tenant"] for view in views})
            if (mine := [view for view in views if view["tenant"] == name])
        ]

    def _origins(self, views: list[dict[str, Any]]) -> list[dict[str, Any]]:
        rows = []
        for name in sorted({item["origin"] for view in views for item in view["items"]}):
            mine = [view for view in views if any(item["origin"] == name for item in view["items"])]
            items = [item for view in mine for item in view["items"]]
            rows.append(
                _sender(
                    name, mine, items, [item["stages_ms"]["fetch"] for item in items if "fetch" in item["stages_ms"]]
                )
            )
        return rows


def _sender(name: str, views: list[dict[str, Any]], items: list[dict[str, Any]], times: list[float]) -> dict[str, Any]:
    times.sort()
    return {
        "name": name,
        "requests": len(views),
        "live": sum(view["stage"] is not None for view in views),
        "items": len(items),
        "new": sum(item["outcome"] == "new" for item in items),
        "p50_ms": times[len(times) // 2] if times else None,
        "oldest_ms": None,
        "prepare_ms": sum(
            each["stages_ms"].get(step, 0)
            for each in items
            if each["outcome"] == "new"
            for step in ("decode", "process")
        ),
    }


def _group(rows: list[dict[str, Any]]) -> dict[str, Any]:
    states = [row["state"] for row in rows]
    return {
        "num": len(rows),
        "states": {state: states.count(state) for state in dict.fromkeys(states)},
        **{name: sum(row[name] for row in rows) for name in ("running", "waiting")},
        "listed": rows[:100],
    }


def _stages(live: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    return {
        stage: {"num": len(here), "oldest_ms": max(view["stages_ms"].get(stage, 0) for view in here)}
        for stage in dict.fromkeys(view["stage"] for view in live)
        if (here := [view for view in live if view["stage"] == stage])
    }


def _wants(view: dict[str, Any], wanted: Mapping[str, str]) -> bool:
    modalities = {item["modality"] for item in view["items"]} or {"text"}
    waited = view["total_ms"] if view["ttft_ms"] is None else view["ttft_ms"]
    return (
        all(wanted.get(name, "") in (view[name] or "") for name in ("model", "tenant", "worker"))
        and wanted.get("modality", "") in {"", *modalities}
        and waited >= float(wanted.get("slow", 0))
        and (view["error"] is not None or "failed" not in wanted)
    )


def _item(modality: str, origin: str, number: int, is_new: bool, chance: random.Random) -> dict[str, Any]:
    return {
        "param": f"messages[0].content[{number}].{modality}_url",
        "modality": modality,
        "source": "url",
        "origin": origin,
        "outcome": "new" if is_new else "hit",
        "embedding": None,
        "bytes": chance.randrange(50_000, 900_000) * (9 if modality == "video" else 1),
        "feature_bytes": 4_700_000,
        "width": 1024,
        "height": 768,
        "frames": 24 if modality == "video" else None,
        "samples": None,
        "tokens": 380,
        "hash": f"{chance.getrandbits(32):08x}",
        "pages": None,
    }


class SampleServer:
    """Serves the page over a `SampleGateway`, or over one for each of `models`, as the name router does; None is one
    that does not serve."""

    def __init__(self, scene: Scene, models: Mapping[str, Scene | None] | None = None) -> None:
        self.gateway = SampleGateway(scene)
        self.models = {name: each and SampleGateway(each) for name, each in (models or {}).items()}
        self.key = scene.key
        self.url = ""

    @asynccontextmanager
    async def served(self, port: int = 0) -> AsyncIterator[SampleServer]:
        app = web.Application()
        app.router.add_get("/medialane/state", self._state)
        app.router.add_get("/medialane/requests", self._requests)
        app.router.add_get("/medialane/requests/{id}", self._request)
        app.router.add_get("/medialane/{name:.*}", self._file)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await runner.setup()
        try:
            await web.TCPSite(runner, "127.0.0.1", port).start()
            self.url = f"http://127.0.0.1:{runner.addresses[0][1]}/medialane/"
            yield self
        finally:
            await runner.cleanup()

    async def _file(self, request: web.Request) -> web.Response:
        path = PAGE / (request.match_info["name"] or "index.html")
        headers = {"content-security-policy": POLICY, "cache-control": "no-cache"}
        return web.Response(body=path.read_bytes(), content_type=TYPES[path.suffix], headers=headers)

    def _refused(self, request: web.Request) -> web.Response | None:
        if self.key and request.headers.get("authorization") != f"Bearer {self.key}":
            return web.json_response({"error": {"code": "unauthorized"}}, status=401)
        return None

    async def _state(self, request: web.Request) -> web.Response:
        return self._refused(request) or web.json_response(self._document())

    def _document(self) -> dict[str, Any]:
        now = time.time()
        if not self.models:
            return self.gateway.state(now)
        views = [
            {"name": name, "names": [name], "state": gateway and gateway.state(now)}
            for name, gateway in self.models.items()
        ]
        return {"models": views}

    async def _request(self, request: web.Request) -> web.Response:
        gateway = self.models.get(request.query.get("model", ""), self.gateway)
        view = gateway and gateway.find(request.match_info["id"])
        return (
            web.json_response(view) if view else web.json_response({"error": {"code": "unknown_request"}}, status=404)
        )

    async def _requests(self, request: web.Request) -> web.Response:
        query = dict(request.query)
        gateway = self.models.get(query.get("model", ""), self.gateway)
        if gateway is not self.gateway:
            del query["model"]
        views = gateway.latest(time.time(), query) if gateway else []
        return self._refused(request) or web.json_response({"requests": views, "gateways_missing": []})
