"""The page and its JSON API (docs/reference/state.md); and single workers, to list and drain them (`WorkerControl`).
Which there are is decided elsewhere: by --worker, by themselves when they join, by Ray or Kubernetes.

Theory of operation. A gateway that is asked makes its own part, and gets its siblings' parts over their sockets. All
who watch at a gateway share one document a second: with nobody there, nothing is made. `access` has decided before who
may look.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import time
from collections.abc import Awaitable, Callable, Mapping
from functools import cache
from importlib.resources import files
from pathlib import PurePath
from typing import TYPE_CHECKING, Any, Literal, NamedTuple
from urllib.parse import quote

import msgspec

from medialane.gateway.http.access import FILE_PATH, PAGE_PATH, REQUEST_PATH, REQUESTS_PATH, STATE_PATH
from medialane.gateway.http.metrics import AskOthers, decoded, no_others
from medialane.gateway.http.responses import JSON, NO_STORE, Endpoint, header, query_fields, send_response
from medialane.gateway.operators.state import (
    GatewayPart,
    GatewayView,
    newest_decisions,
    own_part,
    store_view,
    whole_state,
)
from medialane.gateway.records import RecentRequests, RequestFilter, RequestView, request_view
from medialane.gateway.workers.link import WorkerLink
from medialane.gateway.workers.pool import Health, WorkerPool
from medialane.routing import Router
from medialane.store import StoreLink
from medialane.types.errors import InvalidRequest, NotFound, NoWorkerReady
from medialane.types.media import MODALITIES
from medialane.types.request import WorkerRole, WorkerState

if TYPE_CHECKING:  # types only: starlette is installed with vLLM
    from starlette.types import ASGIApp, Receive, Scope, Send

#: What gateways of a port ask each other: the workers that one is connected to.
CONNECTED = "connected-workers"

#: Listed requests.
MAX_LIMIT = 1000
#: Least time between two documents.
INTERVAL_S = 1.0

#: Listed decisions: 2 ms of the event loop.
MAX_DECISIONS = 256
#: How long is waited for new statistics of the store; then the last ones are shown.
_REFRESH_S = 0.5

_MEDIA_TYPES = {
    ".html": b"text/html; charset=utf-8",
    ".js": b"text/javascript",
    ".css": b"text/css",
    ".svg": b"image/svg+xml",
}
_PAGE_HEADERS = [
    (b"content-security-policy", b"default-src 'self'; base-uri 'none'; form-action 'self'; frame-ancestors 'none'"),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cache-control", b"no-cache"),
]


class RequestList(msgspec.Struct):
    """Requests of one gateway, or of all; running ones are first."""

    requests: list[RequestView]
    gateways_missing: list[str] = []


class _PageFile(NamedTuple):
    body: bytes
    media_type: bytes
    etag: bytes


class OperatorEndpoints:
    """The endpoints of one gateway, which is `index` of its port. `store` is None if the model takes no media."""

    def __init__(
        self,
        index: int,
        *,
        model: str,
        recent: RecentRequests,
        workers: WorkerPool,
        router: Router,
        store: StoreLink | None,
        health: Callable[[], Health],
        ask_others: AskOthers = no_others,
        interval_s: float = INTERVAL_S,
    ) -> None:
        self._index = str(index)
        self._model = model
        self._recent = recent
        self._workers = workers
        self._router = router
        self._store = store
        self._health = health
        self._ask_others = ask_others
        self._interval_s = interval_s
        self._started_at = round(time.time(), 3)
        self._document, self._made_at = b"", float("-inf")
        self._making = asyncio.Lock()

    @property
    def routes(self) -> dict[str, ASGIApp]:
        """By method and path; to be the last ones, since FILE_PATH is the path of others, too."""
        return {
            f"GET {STATE_PATH}": Endpoint(self._send_state),
            f"GET {REQUESTS_PATH}": Endpoint(self._send_requests),
            f"GET {REQUEST_PATH}": Endpoint(self._send_request),
            f"GET {PAGE_PATH}": Endpoint(_send_file),
            f"GET {FILE_PATH}": Endpoint(_send_file),
        }

    @property
    def answers(self) -> Mapping[str, Callable[[str], Awaitable[bytes]]]:
        """What other gateways ask by `AskOthers`."""
        return dict.fromkeys(("part", "requests", "request"), self._answer)

    async def decisions(self, query: Mapping[str, str]) -> bytes:
        """Return the last routing decisions with their reasons as JSON, as many as the query wants, with a hash of each
        id: who may ask for decisions need not be the one to see what clients have named their requests. Raises
        InvalidRequest."""
        limit = _number({"limit": "100", **query}, "limit")
        found = newest_decisions(self._recent, self._index, min(limit, MAX_DECISIONS))
        hashed = [{"request_id_sha256": _hashed(decision.pop("request")), **decision} for decision in found]
        return msgspec.json.encode({"decisions": hashed})

    async def _answer(self, path: str) -> bytes:
        """Raises MedialaneError."""
        what, _, query = path.partition("?")
        if what == "part":
            return msgspec.json.encode(await self._part())
        if what == "requests":
            return msgspec.json.encode(RequestList(self._own_requests(*_wanted(query))))
        record = self._recent.find(query_fields(query, ("id",)).get("id", ""))
        return b"null" if record is None else msgspec.json.encode(request_view(record, self._index, is_full=True))

    async def _send_state(self, scope: Scope, _receive: Receive, send: Send) -> None:
        query_fields(scope["query_string"], ())
        await send_response(send, 200, await self._state(), [JSON, NO_STORE])

    async def _send_requests(self, scope: Scope, _receive: Receive, send: Send) -> None:
        query = scope["query_string"].decode("latin-1")
        wanted, limit = _wanted(query)
        listed, missing = self._own_requests(wanted, limit), []
        for index, answer in (await self._ask_others(f"requests?{query}")).items():
            if (theirs := decoded(answer, RequestList)) is None:
                missing.append(index)
            else:
                listed += theirs.requests
        listed.sort(key=lambda view: (view.stage is not None, view.received_at), reverse=True)
        await send_response(send, 200, msgspec.json.encode(RequestList(listed[:limit], missing)), [JSON, NO_STORE])

    async def _send_request(self, scope: Scope, _receive: Receive, send: Send) -> None:
        request_id = scope["path_params"]["id"]
        path = f"request?id={quote(request_id, safe='')}"
        if (found := await self._answer(path)) == b"null":
            others = (await self._ask_others(path)).values()
            found = next((answer for answer in others if answer not in (None, b"null")), None) or b"null"
        if found == b"null":
            raise NotFound("no request with this id is kept", param="id")
        await send_response(send, 200, found, [JSON, NO_STORE])

    def _own_requests(self, wanted: RequestFilter, limit: int) -> list[RequestView]:
        newest = self._recent.newest(wanted)
        return [request_view(record, self._index) for record, _ in zip(newest, range(limit), strict=False)]

    async def _state(self) -> bytes:
        """Return the state, at most `interval_s` old."""
        async with self._making:
            now = asyncio.get_running_loop().time()
            if now - self._made_at < self._interval_s * 0.9:
                return self._document
            others, _ = await asyncio.gather(self._ask_others("part"), self._refresh_store())
            parts: dict[str, GatewayPart | None] = {self._index: await self._part()}
            parts |= {index: decoded(answer, GatewayPart) for index, answer in others.items()}
            await asyncio.sleep(0)
            state = await whole_state(
                {index: parts[index] for index in sorted(parts, key=int)},
                model=self._model,
                endpoints=self._workers.endpoints(),
                encoder_caches=self._router.encoder_cache_use(),
                store=None if self._store is None else store_view(self._store),
            )
            self._document, self._made_at = msgspec.json.encode(state), now
            return self._document

    async def _part(self) -> GatewayPart:
        health = self._health()
        own = GatewayView(
            self._index,
            up=True,
            pid=os.getpid(),
            started_at=self._started_at,
            health=health.status,
            problems=health.problems,
        )
        return await own_part(own, self._recent, self._workers)

    async def _refresh_store(self) -> None:
        if self._store is not None:
            await self._store.refresh(_REFRESH_S)


class WorkerInfo(msgspec.Struct, frozen=True):
    """A worker as its operator sees it. `run` is different each time that it is started, and empty while it is not
    connected; `num_requests` counts all gateways' requests. `origin` is who has named it: --worker, or itself when it
    joined. `unreachable_from` are the gateways of the port that have no connection to it, or do not answer."""

    name: str
    role: WorkerRole
    state: WorkerState
    run: str
    num_requests: int
    address: str = ""
    origin: Literal["configured", "joined"] = "configured"
    unreachable_from: list[str] = []


class WorkerControl:
    """`index` is this gateway's among the gateways of its port; `ask_others` asks the others."""

    def __init__(self, workers: WorkerPool, *, ask_others: AskOthers = no_others, index: str = "0") -> None:
        self._workers = workers
        self._ask_others = ask_others
        self._index = index

    @property
    def answers(self) -> Mapping[str, Callable[[str], Awaitable[bytes]]]:
        """What other gateways of the port may ask."""
        return {CONNECTED: self._answer_connected}

    async def listed(self, _parameters: Mapping[str, str]) -> bytes:
        """Workers and encoders, with their states."""
        others = await self._ask_others(CONNECTED)
        connected = {index: decoded(answer, set[str]) or set() for index, answer in others.items()}
        connected[self._index] = self._connected()
        infos = []
        for link in self._workers.links.values():
            missing = sorted((index for index, names in connected.items() if link.name not in names), key=int)
            infos.append(msgspec.structs.replace(self._info(link), unreachable_from=missing))
        return msgspec.json.encode(infos)

    async def drain(self, parameters: Mapping[str, str]) -> bytes:
        """Have one worker take no new requests, and stop when its requests have ended or moved to others."""
        link = self._link(parameters["name"])
        if not link.drain():
            raise NoWorkerReady(f"worker {link.name} is not connected", retry_after_s=5)
        return msgspec.json.encode(self._info(link))

    async def _answer_connected(self, _path: str) -> bytes:
        return msgspec.json.encode(sorted(self._connected()))

    def _connected(self) -> set[str]:
        return {link.name for link in self._workers.links.values() if link.client is not None}

    def _link(self, name: str) -> WorkerLink:
        if (link := self._workers.links.get(name)) is None:
            known = ", ".join(self._workers.links) or "none"
            raise InvalidRequest(f"there is no worker named {name[:200]}; the workers are: {known}", param="name")
        return link

    def _info(self, link: WorkerLink) -> WorkerInfo:
        endpoints = link.endpoints()
        num_reported = sum(endpoint.load.num_running + endpoint.load.num_waiting for endpoint in endpoints)
        origin: Literal["configured", "joined"] = "configured" if link.address else "joined"
        num_requests = max(num_reported, endpoints[0].num_in_flight)
        return WorkerInfo(link.name, link.role, link.state, link.worker_id, num_requests, link.address, origin)


async def _send_file(scope: Scope, _receive: Receive, send: Send) -> None:
    """Send a file of the page. They have no data: anyone may read them, also to log in."""
    file = _page_files().get(scope["path_params"].get("file", "index.html"))
    if file is None:
        raise NotFound("there is no such page")
    headers = [*_PAGE_HEADERS, (b"etag", file.etag)]
    if file.etag in header(scope, b"if-none-match"):
        return await send_response(send, 304, headers=headers)
    return await send_response(send, 200, file.body, [*headers, (b"content-type", file.media_type)])


@cache
def _page_files() -> dict[str, _PageFile]:
    """Return the files by name. Read once: a package does not change while it runs."""
    found = {}
    for file in files("medialane.gateway").joinpath("page").iterdir():
        media_type = _MEDIA_TYPES.get(PurePath(file.name).suffix)
        if media_type is not None:
            body = file.read_bytes()
            found[file.name] = _PageFile(body, media_type, b'"%b"' % hashlib.sha256(body).hexdigest()[:16].encode())
    return found


def _wanted(query: str) -> tuple[RequestFilter, int]:
    """Return which requests are wanted, and how many. Raises InvalidRequest."""
    texts = ("model", "tenant", "modality", "worker")
    fields = query_fields(query, (*texts, "slow", "failed", "live", "limit"))
    found: dict[str, Any] = {name: fields[name] for name in texts if name in fields}
    if fields.get("modality", "") not in ("", *(known := (*MODALITIES, "document", "text"))):
        raise InvalidRequest(f"modality must be one of {', '.join(known)}", param="modality")
    if "slow" in fields:
        found["slow_ms"] = float(_number(fields, "slow", least=0))
    for name in ("failed", "live"):
        if name in fields:
            found[name] = _truth(fields, name)
    limit = _number(fields, "limit") if "limit" in fields else 100
    return RequestFilter(**found), min(limit, MAX_LIMIT)


def _number(fields: Mapping[str, str], name: str, *, least: int = 1) -> int:
    text = fields[name]
    if not (text.isascii() and text.isdecimal() and len(text) <= 9 and int(text) >= least):
        raise InvalidRequest(f"{name} must be a whole number of at least {least}", param=name)
    return int(text)


def _truth(fields: Mapping[str, str], name: str) -> bool:
    if fields[name] not in ("true", "false"):
        raise InvalidRequest(f"{name} must be true or false", param=name)
    return fields[name] == "true"


def _hashed(request_id: object) -> str:
    return hashlib.sha256(str(request_id).encode()).hexdigest()
