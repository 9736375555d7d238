"""What operators see: state and requests over real sockets, siblings, and who may look."""

import asyncio
import contextlib
import hashlib
import json
import re
import socket
import tempfile
import time
from contextlib import AsyncExitStack
from pathlib import Path

import aiohttp
import msgspec
import pytest
import uvicorn
from prometheus_client import CollectorRegistry
from starlette.routing import Route, Router

from medialane.gateway import (
    AccessKeys,
    AccessMiddleware,
    BoundedServer,
    GatewayConfig,
    GatewayMetrics,
    Health,
    OperatorEndpoints,
    RecentRequests,
    ScopeMiddleware,
    WorkerPool,
    http_bounds,
    no_others,
)
from medialane.gateway.http import error_form, is_from_this_machine, send_error
from medialane.gateway.operators import GatewayView, RequestList, ServerState, own_part, whole_state
from medialane.gateway.records import RequestRecord, RequestView
from medialane.observability import Metrics
from medialane.routing import Router as KvRouter
from medialane.types.errors import InvalidImage, InvalidRequest, MedialaneError, to_report
from medialane.types.media import MediaRef
from medialane.types.request import Endpoint, OutputDelta, RoutingDecision, WorkerLoad
from waiting import eventually

BEARER = {"authorization": "Bearer admin"}
#: Faster than the second of real servers.
INTERVAL_S = 0.05


def record(name, *refs, tenant=None, worker=None, error=None):
    made = RequestRecord()
    made.id = name
    made.received(refs, model="m", streams=True)
    made.tenant, made.status = tenant, 200
    if worker is not None:
        made.sending(RoutingDecision(worker, "idle", num_tokens=9))
        made.prompt_sent()
    if error is not None:
        made.failed(to_report(error), quotes_client=False)
    return made


class Member:
    """One gateway, without workers: its endpoints, and what it has of requests."""

    def __init__(self, index=0, ask_others=no_others, keys=None):
        self.recent, self.num_parts = RecentRequests(), 0
        self.keys = keys or AccessKeys.load(GatewayConfig(), is_local=True)
        self.endpoints = OperatorEndpoints(
            index,
            model="m",
            recent=self.recent,
            workers=WorkerPool([]),
            router=KvRouter(),
            store=None,
            health=self._health,
            ask_others=ask_others,
            interval_s=INTERVAL_S,
        )

    def _health(self):
        """Asked for once for each part."""
        self.num_parts += 1
        return Health("ok")

    def live(self, made):
        self.recent.begin(made)
        return made

    def ended(self, made):
        self.recent.begin(made)
        made.ended(is_disconnected=False)
        self.recent.end(made)
        return made

    @contextlib.asynccontextmanager
    async def serving(self):
        """A client of its HTTP server."""
        pairs = [(*key.partition(" ")[::2], endpoint) for key, endpoint in self.endpoints.routes.items()]
        router = Router([Route(path, endpoint, methods=[method]) for method, path, endpoint in pairs])

        def route_of(scope):
            found = (route for route in router.routes if route.matches(scope)[0].value == 2)
            return next((route.path for route in found), None)

        app = ScopeMiddleware(AccessMiddleware(answering_errors(router), self.keys, route_of), metrics())
        settings = uvicorn.Config(app, lifespan="off", log_config=None)
        server = BoundedServer(settings, bounds=http_bounds(GatewayConfig()))
        with socket.create_server(("127.0.0.1", 0)) as sock:
            task = asyncio.create_task(server.serve(sockets=[sock]))
            base = f"http://127.0.0.1:{sock.getsockname()[1]}"
            try:
                async with aiohttp.ClientSession(base) as session:
                    yield session
            finally:
                server.should_exit = True
                async with asyncio.timeout(10):
                    await task


def metrics():
    return Metrics(CollectorRegistry())


def answering_errors(app):
    async def answering(scope, receive, send):
        try:
            await app(scope, receive, send)
        except MedialaneError as error:
            await send_error(send, error, error_form(scope))

    return answering


async def get(session, path, status=200, **headers):
    async with session.get(path, headers=headers) as response:
        assert response.status == status, await response.text()
        return await response.json()


async def test_state_adds_up_what_requests_do():
    member = Member()
    origin = MediaRef("image", "a", url="http://slow.example/x.png?secret=1")
    waiting = member.live(record("live", origin, tenant="acme"))
    member.ended(record("done", tenant="acme", worker="w0"))
    member.ended(record("broken", error=InvalidImage("not an image")))
    async with member.serving() as session:
        with waiting.finding(origin):
            state = await get(session, "/medialane/state")
    assert state["live"]["num"] == 1
    assert list(state["live"]["stages"]) == ["fetch"]
    assert [each["id"] for each in state["live"]["listed"]] == ["live"]
    (error,) = state["errors"]
    assert (error["code"], error["num"], error["status"], error["last_request"]) == ("invalid_image", 1, 200, "broken")
    (tenant,) = state["tenants"]
    assert (tenant["name"], tenant["requests"], tenant["live"]) == ("acme", 1, 1)
    (found,) = state["origins"]
    assert (found["name"], found["live"]) == ("slow.example", 1)
    assert state["rates"]["values"]["requests"][-1] + state["rates"]["values"]["requests"][-2] == 2
    assert [decision["request"] for decision in state["decisions"]] == ["done"]
    assert "secret" not in json.dumps(state)


async def test_decisions_are_listed_for_each_attempt_with_a_hash_of_the_requests_id():
    """Whoever has an id may fetch its response from vLLM's response store."""
    member, tried = Member(), record("resp_secret", worker="w0")
    tried.attempt_failed("w0", 0, None, "worker_lost")
    decision = RoutingDecision("w1", "longest cached prefix", num_tokens=9)
    tried.sending(decision, is_sent=False)
    member.live(tried)
    page = await member.endpoints.decisions({"limit": "2"})
    assert b"resp_secret" not in page
    about, failed = json.loads(page)["decisions"]
    assert about["request_id_sha256"] == failed["request_id_sha256"] == hashlib.sha256(b"resp_secret").hexdigest()
    assert (about["worker"], about["reason"], about["sent"]) == ("w1", "longest cached prefix", False)
    assert (failed["worker"], failed["error"], failed["sent"]) == ("w0", "worker_lost", True)
    assert about["first_token_ms"] is failed["first_token_ms"] is None
    tried.sending(decision)
    tried.prompt_sent()
    now = time.perf_counter()
    tried.answered(OutputDelta("r", [], num_cached_tokens=8), decision, 9, {}, times=(now - 0.25, now))
    (answered,) = json.loads(await member.endpoints.decisions({"limit": "1"}))["decisions"]
    assert (answered["sent"], answered["engine_cached_tokens"]) == (True, 8)
    assert answered["first_token_ms"] == 250


@pytest.mark.parametrize("limit", ["0", "-1", "1.5", "many", "\u0661"])
async def test_non_numeric_decision_limit_is_rejected_by_name(limit):
    with pytest.raises(InvalidRequest) as raised:
        await Member().endpoints.decisions({"limit": limit})
    assert raised.value.param == "limit"


async def test_request_is_found_with_its_decision():
    member = Member()
    member.ended(record("one", worker="w0"))
    async with member.serving() as session:
        found = await get(session, "/medialane/requests/one")
        assert (found["id"], found["decision"]["reason"]) == ("one", "idle")
        assert (await get(session, "/medialane/requests/two", 404))["error"]["code"] == "not_found"


async def test_requests_are_filtered_and_limited():
    member = Member()
    for number in range(5):
        member.ended(record(f"r{number}", tenant="a" if number % 2 else "b"))
    member.live(record("live"))
    async with member.serving() as session:

        async def ids(query=""):
            return [each["id"] for each in (await get(session, f"/medialane/requests{query}"))["requests"]]

        assert await ids("?limit=3") == ["live", "r4", "r3"]
        assert await ids("?tenant=a") == ["r3", "r1"]
        assert await ids("?live=true") == ["live"]
        assert await ids("?failed=true") == []


@pytest.mark.parametrize(
    ("path", "param"),
    [
        ("requests?colour=red", "colour"),
        ("requests?limit=0", "limit"),
        ("requests?limit=-1", "limit"),
        ("requests?failed=yes", "failed"),
        ("requests?modality=smell", "modality"),
        ("state?x", "x"),
    ],
)
async def test_wrong_parameter_is_named(path, param):
    async with Member().serving() as session:
        error = (await get(session, f"/medialane/{path}", 400))["error"]
    assert error["param"] == param


async def test_all_who_watch_share_one_document_and_nothing_is_made_while_nobody_looks():
    member = Member()
    async with member.serving() as session:
        started = time.perf_counter()
        for _ in range(8):
            await asyncio.gather(*(get(session, "/medialane/state") for _ in range(8)))
        num_intervals = (time.perf_counter() - started) / INTERVAL_S
        # One for each question would be 64. A document may be made a little early.
        assert member.num_parts <= 2 * num_intervals + 1
        number = member.num_parts
        await asyncio.sleep(6 * INTERVAL_S)  # time: nothing happens meanwhile
        assert member.num_parts == number


@contextlib.asynccontextmanager
async def siblings():
    """Two gateways of a port, and the server of the first."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        sockets = [str(Path(folder, f"{index}.sock")) for index in range(2)]

        async def nothing():
            pass

        async with AsyncExitStack() as stack:
            groups = [
                GatewayMetrics(
                    sockets,
                    index,
                    metrics=Metrics(CollectorRegistry(), host=CollectorRegistry()),
                    health=lambda: (200, b""),
                    refresh_own=nothing,
                )
                for index in range(2)
            ]
            members = [Member(index, group.ask_others) for index, group in enumerate(groups)]
            endpoints = []
            for group, member in zip(groups, members, strict=True):
                group.answers.update(member.endpoints.answers)
                endpoints.append(await stack.enter_async_context(AsyncExitStack()))
                await endpoints[-1].enter_async_context(group.endpoint())
            session = await stack.enter_async_context(members[0].serving())
            yield members, session, endpoints[1]


async def test_any_gateway_answers_for_all():
    async with siblings() as (members, session, other):
        members[0].ended(record("mine"))
        members[1].ended(record("theirs", error=InvalidImage("x")))
        members[1].live(record("running"))
        state = await get(session, "/medialane/state")
        assert [(each["index"], each["up"], each["live"]) for each in state["gateways"]] == [
            ("0", True, 0),
            ("1", True, 1),
        ]
        assert state["live"]["listed"][0]["gateway"] == "1"
        assert state["errors"][0]["code"] == "invalid_image"
        listed = await get(session, "/medialane/requests")
        assert {each["id"] for each in listed["requests"]} == {"mine", "theirs", "running"}
        assert listed["requests"][0]["id"] == "running"
        assert (await get(session, "/medialane/requests/theirs"))["gateway"] == "1"
        await other.aclose()

        async def is_missing():
            state = await get(session, "/medialane/state")
            return [each["up"] for each in state["gateways"]] == [True, False]

        await eventually(is_missing, "the last document is outdated within an interval")
        listed = await get(session, "/medialane/requests")
        assert ([each["id"] for each in listed["requests"]], listed["gateways_missing"]) == (["mine"], ["1"])


def admin_keys(**more):
    return AccessKeys.load(GatewayConfig(admin_key="admin", **more), ["client"], is_local=True)


@pytest.mark.parametrize("path", ["state", "requests", "requests/one"])
async def test_state_needs_the_admin_key_where_there_is_one(path):
    async with Member(keys=admin_keys()).serving() as session:
        for headers, status in (
            ({}, 401),
            ({"authorization": "Bearer wrong"}, 401),
            ({"authorization": "Bearer client"}, 403),
        ):
            async with session.get(f"/medialane/{path}", headers=headers) as response:
                assert response.status == status
        async with session.get(f"/medialane/{path}", headers=BEARER) as response:
            assert response.status == (404 if path == "requests/one" else 200)


async def test_no_key_suffices_on_a_network_without_an_admin_key():
    keys = AccessKeys.load(GatewayConfig(), ["client"], is_local=False)
    async with Member(keys=keys).serving() as session:
        for headers in ({}, {"authorization": "Bearer client"}):
            error = await get(session, "/medialane/state", 403, **headers)
            assert "MEDIALANE_ADMIN_KEY" in error["error"]["message"]


async def test_client_key_does_not_matter_on_loopback():
    keys = AccessKeys.load(GatewayConfig(), ["client"], is_local=True)
    async with Member(keys=keys).serving() as session:
        await get(session, "/medialane/state")


@pytest.mark.parametrize(
    ("headers", "is_local"),
    [
        ({"host": "127.0.0.1:8000"}, True),
        ({"host": "localhost"}, True),
        ({"host": "[::1]:8000"}, True),
        ({"host": "127.0.0.1:8000", "origin": "http://127.0.0.1:8000", "sec-fetch-site": "same-origin"}, True),
        ({"host": "medialane.example"}, False),
        ({"host": "127.0.0.1.evil.example:8000"}, False),
        ({}, False),
        ({"host": "127.0.0.1:8000", "origin": "http://evil.example"}, False),
        ({"host": "127.0.0.1:8000", "origin": "null"}, False),
        ({"host": "127.0.0.1:8000", "sec-fetch-site": "cross-site"}, False),
        ({"host": "127.0.0.1:8000", "x-forwarded-for": "10.0.0.1"}, False),
        ({"host": "127.0.0.1:8000", "forwarded": "for=10.0.0.1"}, False),
        ({"host": "127.0.0.1:8000", "via": "1.1 proxy"}, False),
    ],
)
def test_only_programs_and_pages_of_this_machine_are_local(headers, is_local):
    scope = {"headers": [(name.encode(), value.encode()) for name, value in headers.items()]}
    assert is_from_this_machine(scope) is is_local
    assert is_from_this_machine({**scope, "client": ("127.0.0.1", 1), "http_version": "1.1"}) is is_local
    assert not is_from_this_machine({**scope, "client": ("10.0.0.1", 1)}), "Host is the client's choice"
    assert not is_from_this_machine({**scope, "http_version": "1.0"}), "as nginx asks"


async def test_page_is_served_without_a_key_and_only_its_files():
    async with Member(keys=admin_keys()).serving() as session:
        async with session.get("/medialane/") as response:
            assert response.status == 200
            assert response.content_type == "text/html"
            assert response.headers["content-security-policy"].startswith("default-src 'self';")
            assert response.headers["cache-control"] == "no-cache"
            etag = response.headers["etag"]
        async with session.get("/medialane/index.html", headers={"if-none-match": etag}) as response:
            assert (response.status, await response.read()) == (304, b"")
        for path in ("nothing.js", "__init__.py", "..%2faccess.py", "%2e%2e%2faccess.py"):
            async with session.get(f"/medialane/{path}") as response:
                assert response.status in (401, 404)


def worker(name, *, ready=True, **load):
    return Endpoint(name, name, ready=ready, load=WorkerLoad(**load), num_in_flight=0, same_host=True)


async def test_a_thousand_workers_are_listed_by_need_and_counted():
    endpoints = [worker(f"host{n // 8}/{n % 8}", num_running=n % 8) for n in range(1000)]
    endpoints[500] = worker("host62/4", ready=False)
    parts = {"0": await own_part(GatewayView("0", up=True), RecentRequests(), WorkerPool([]))}
    started = time.process_time()
    state = await whole_state(parts, model="m", endpoints=endpoints, encoder_caches={}, store=None)
    encoded = msgspec.json.encode(state)
    seconds = time.process_time() - started
    state = json.loads(encoded)
    assert (state["workers"]["num"], state["workers"]["states"]) == (1000, {"ready": 999, "lost": 1})
    assert len(state["workers"]["listed"]) == 100
    assert state["workers"]["listed"][0]["name"] == "host62/4"
    assert len(encoded) < 200_000
    assert seconds < 0.2  # once a second; 20 ms where nothing else runs


def test_documentation_has_each_field():
    page = (Path(__file__).parents[3] / "docs" / "reference" / "state.md").read_text()
    documents = [json.loads(text) for text in re.findall(r"```json\n(.*?)```", page, re.DOTALL)]
    state, listed, request = documents
    state["live"]["listed"], listed["requests"] = [request], [request]
    for document, kind in ((state, ServerState), (listed, RequestList), (request, RequestView)):
        assert json.loads(msgspec.json.encode(msgspec.convert(document, kind))) == document
