"""Tenants at the gateway's door: keys of a file, their limits, and the gateways of a port that share them."""

import asyncio
import hashlib
import json
import logging
import multiprocessing

import pytest
from prometheus_client import CollectorRegistry

from medialane.gateway import AccessKeys, AccessMiddleware, GatewayConfig, ScopeMiddleware, current_scope
from medialane.gateway.admission import SharedCounts, Tenants
from medialane.observability import Metrics
from medialane.types.errors import LimitExceeded, StartupFailed
from waiting import eventually

ROUTES = {
    "/medialane/v1/features/{mm_hash}",
    "/v1/chat/completions",
    "/v1/models",
    "/v1/messages",
    "/health",
    "/metrics",
    "/sleep",
}


def sha256(key):
    return hashlib.sha256(key.encode()).hexdigest()


def line(name, **limits):
    return json.dumps({"name": name, "sha256": sha256(f"key of {name}"), **limits})


@pytest.fixture
def keys_file(tmp_path):
    path = tmp_path / "keys"

    def write(*lines):
        new = tmp_path / "new"
        new.write_text("\n".join(lines))
        new.chmod(0o600)
        new.replace(path)
        return str(path)

    return write


class Door:
    """A gateway's middleware in front of an app that answers once `may_answer` is set."""

    def __init__(self, path, counts=None, **settings):
        self.keys = AccessKeys.load(GatewayConfig(keys=path, **settings), (), counts)
        self.registry = CollectorRegistry()
        metrics = Metrics(self.registry)
        access = AccessMiddleware(
            self._app, self.keys, lambda scope: scope["path"] if scope["path"] in ROUTES else None, metrics
        )
        self._stack = ScopeMiddleware(access, metrics)
        self.may_answer = asyncio.Event()
        self.may_answer.set()
        self.tenants = []
        self.num_reads = 0

    async def _app(self, scope, receive, send):
        tenant = current_scope().tenant
        self.tenants.append(None if tenant is None else tenant.name)
        await self.may_answer.wait()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    async def ask(self, key=None, path="/v1/chat/completions", method="POST"):
        """Return status, headers and error of a request."""
        sent = []

        async def send(message):
            sent.append(message)

        async def receive():
            self.num_reads += 1
            return {"type": "http.request", "body": b"{}"}

        headers = [] if key is None else [(b"authorization", b"Bearer " + key.encode())]
        await self._stack({"type": "http", "method": method, "path": path, "headers": headers}, receive, send)
        body = sent[1]["body"]
        return sent[0]["status"], dict(sent[0]["headers"]), json.loads(body) if body[:1] == b"{" else None

    async def status(self, *args, **kwargs):
        return (await self.ask(*args, **kwargs))[0]

    def num_refused(self, tenant, reason):
        return self.registry.get_sample_value("medialane_refused_requests_total", {"tenant": tenant, "reason": reason})


async def test_tenant_is_whose_key_comes_with_the_request(keys_file):
    door = Door(keys_file("# teams", line("search"), "", line("nightly")))
    assert await door.status("key of nightly") == 200
    assert [await door.status(key) for key in (None, "other", "search", sha256("key of search"))] == [401] * 4
    assert door.tenants == ["nightly"]


async def test_tenant_may_have_two_keys_while_one_is_replaced(keys_file):
    door = Door(keys_file(json.dumps({"name": "a", "sha256": [sha256("old"), sha256("new")], "concurrency": 1})))
    assert [await door.status(key) for key in ("old", "new")] == [200, 200]


async def test_keys_of_tenants_open_nothing_administrative(keys_file):
    path = keys_file(line("a"))
    assert await Door(path).status("key of a", "/sleep") == 403
    door = Door(path, admin_key="admin")
    assert [await door.status("key of a", "/sleep"), await door.status("admin", "/sleep")] == [403, 200]


async def test_admin_health_and_metrics_pass_by_every_limit(keys_file):
    door = Door(keys_file(line("a", rate=0.001, burst=1)), admin_key="admin")
    assert [await door.status("key of a") for _ in range(2)] == [200, 429]
    assert [await door.status("admin") for _ in range(3)] == [200] * 3
    for path in ("/health", "/metrics"):
        assert await door.status("key of a", path, method="GET") == 200
    assert await door.status("key of a", "/v1/models", method="GET") == 200


async def test_rate_is_refused_from_the_header_alone_with_the_time_until_the_next_token(keys_file):
    door = Door(keys_file(line("a", rate=0.1, burst=3)))
    assert [await door.status("key of a") for _ in range(3)] == [200] * 3
    status, headers, error = await door.ask("key of a")
    assert (status, headers[b"retry-after"]) == (429, b"10")
    assert error["error"] == {
        "message": "this API key has exceeded its limit of 0.1 requests per second",
        "type": "rate_limit_error",
        "param": None,
        "code": "rate_limit_exceeded",
        "request_id": headers[b"x-request-id"].decode(),
    }
    assert door.num_reads == 0, "no body is read"
    assert door.num_refused("a", "rate_limit_exceeded") == 1


async def test_refusal_has_the_format_of_its_api(keys_file):
    door = Door(keys_file(line("a", rate=0.1, burst=1)))
    await door.ask("key of a")
    _, _, error = await door.ask("key of a", "/v1/messages")
    assert error["type"] == "error"
    assert error["error"]["type"] == "rate_limit_error"


async def test_burst_fills_again_at_the_rate(keys_file):
    now = 100.0
    tenants = Tenants(keys_file(line("a", rate=2, burst=4)), clock=lambda: now)
    tenant = tenants.of(hashlib.sha256(b"key of a").digest())
    for expected in (4, 2, 4):
        assert num_admitted(tenant) == expected
        now += 1.0 if expected == 4 else 60.0


def num_admitted(tenant, limit=1000):
    """The number of requests that come now, and end at once, until one is refused."""
    for count in range(limit):
        try:
            with tenant.request():
                pass
        except LimitExceeded:
            return count
    return limit


async def test_concurrency_is_freed_however_a_request_ends(keys_file):
    door = Door(keys_file(line("a", concurrency=2), line("b")))
    door.may_answer.clear()
    running = [asyncio.create_task(door.ask("key of a")) for _ in range(2)]
    await asyncio.sleep(0)
    status, headers, error = await door.ask("key of a")
    assert (status, error["error"]["code"]) == (429, "concurrency_limit_exceeded")
    assert int(headers[b"retry-after"]) >= 1
    running[0].cancel()
    await asyncio.gather(running[0], return_exceptions=True)
    again = asyncio.create_task(door.ask("key of a"))
    await asyncio.sleep(0)
    assert await door.status("key of a") == 429
    door.may_answer.set()
    assert await door.status("key of b") == 200, "another tenant is not concerned"
    assert [(await task)[0] for task in (running[1], again)] == [200, 200]
    assert await door.status("key of a") == 200


async def test_changed_file_is_used_without_a_restart(keys_file):
    path = keys_file(line("a", rate=0.1, burst=1), line("b"))
    door = Door(path)
    assert [await door.status("key of a") for _ in range(2)] == [200, 429]
    keys_file(line("a"), line("c"))
    await door.keys.tenants.refresh()
    assert [await door.status(f"key of {name}") for name in "abc"] == [200, 401, 200]
    assert door.num_refused("a", "rate_limit_exceeded") == 1
    keys_file(line("c"))
    await door.keys.tenants.refresh()
    assert door.num_refused("a", "rate_limit_exceeded") is None, "a tenant that is no more has no series"


async def test_requests_in_flight_stay_counted_when_the_file_changes(keys_file):
    door = Door(keys_file(line("a", concurrency=1)))
    door.may_answer.clear()
    running = asyncio.create_task(door.ask("key of a"))
    await asyncio.sleep(0)
    keys_file(line("a", concurrency=1), line("b"))
    await door.keys.tenants.refresh()
    assert await door.status("key of a") == 429
    door.may_answer.set()
    await running
    assert await door.status("key of a") == 200


async def test_file_that_cannot_be_used_leaves_the_one_before(keys_file, caplog):
    door = Door(keys_file(line("a", rate=0.1, burst=1)))
    keys_file(line("a"), line("b", rate=-1))
    with caplog.at_level(logging.ERROR):
        await door.keys.tenants.refresh()
    (record,) = caplog.records
    assert "line 2" in record.getMessage()
    assert "$.rate" in record.getMessage()
    assert [await door.status(key) for key in ("key of a", "key of a", "key of b")] == [200, 429, 401]
    keys_file(line("b"))
    await door.keys.tenants.refresh()
    assert await door.status("key of b") == 200, "mended"


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([], "has no key"),
        ([line("a"), "{"], "line 2"),
        ([line("a"), "", line("a b")], r"line 3: .*\$.name"),
        ([line("a", concurrency=0)], r"line 1: .*\$.concurrency"),
        ([line("a", burst=3)], r"line 1: .*\$.burst"),
        ([line("a", priority="high")], r"line 1: .*\$.priority"),
        ([line("a", rps=3)], "line 1: .*`rps`"),
        ([line("a"), line("a")], r"line 2: line 1 has this name - at `\$.name`"),
        ([line("a"), json.dumps({"name": "b", "sha256": sha256("key of a")})], r"line 2: line 1 has this key"),
        ([json.dumps({"name": "b", "sha256": "my secret key"})], r"line 1: .*\$.sha256"),
    ],
)  # fmt: skip
def test_error_in_the_file_names_line_and_field_and_no_secret(keys_file, lines, message):
    with pytest.raises(StartupFailed, match=message) as refused:
        AccessKeys.load(GatewayConfig(keys=keys_file(*lines)))
    assert "secret" not in str(refused.value)


def test_file_that_others_can_read_is_refused(keys_file, tmp_path):
    path = keys_file(line("a"))
    (tmp_path / "keys").chmod(0o644)
    with pytest.raises(StartupFailed, match="any user can access it"):
        AccessKeys.load(GatewayConfig(keys=path))


def test_keys_are_exclusive_with_api_keys(keys_file):
    with pytest.raises(StartupFailed, match="both set"):
        AccessKeys.load(GatewayConfig(keys=keys_file(line("a"))), ["key"])


def test_admin_key_that_is_a_tenants_is_refused(keys_file):
    with pytest.raises(StartupFailed, match="must differ"):
        AccessKeys.load(GatewayConfig(keys=keys_file(line("a")), admin_key="key of a"))


def gateways(path, tmp_path, number, clock):
    counts = [SharedCounts(str(tmp_path / "counts"), index=i, num_gateways=number) for i in range(number)]
    digest = hashlib.sha256(b"key of a").digest()
    return [Tenants(path, each, clock=clock).of(digest) for each in counts]


@pytest.mark.parametrize("number", [1, 4])
@pytest.mark.parametrize("spread", ["even", "one connection", "uneven"])
def test_rate_is_the_same_for_any_number_of_gateways(keys_file, tmp_path, number, spread):
    """50 requests a second for a minute, with a limit of 10."""
    now = 1000.0
    all_of_port = gateways(keys_file(line("a", rate=10, burst=5)), tmp_path, number, lambda: now)
    weights = {"even": [0, 1, 2, 3], "one connection": [0], "uneven": [0, 0, 0, 0, 0, 0, 1, 2]}[spread]
    num_admitted = 0
    for i in range(3000):
        try:
            with all_of_port[weights[i % len(weights)] % number].request():
                num_admitted += 1
        except LimitExceeded:
            pass
        now += 1 / 50
    assert 600 <= num_admitted <= 606


@pytest.mark.parametrize("number", [1, 4])
def test_concurrency_is_the_same_for_any_number_of_gateways(keys_file, tmp_path, number):
    all_of_port = gateways(keys_file(line("a", concurrency=10)), tmp_path, number, lambda: 0.0)
    running = []
    for i in range(30):
        try:
            running.append(all_of_port[(i * i) % number].request())
            running[-1].__enter__()
        except LimitExceeded:
            running.pop()
    assert len(running) == 10
    for request in running:
        request.__exit__(None, None, None)
    assert [num_admitted(tenant, 11) for tenant in all_of_port] == [11] * number


def test_what_a_killed_gateway_has_counted_ends_with_the_next_one(keys_file, tmp_path):
    path = keys_file(line("a", concurrency=2))
    first, second = gateways(path, tmp_path, 2, lambda: 0.0)
    with first.request(), first.request():
        assert num_admitted(second) == 0
        Tenants(path, SharedCounts(str(tmp_path / "counts"), index=0, num_gateways=2))  # instead of the first
        assert num_admitted(second, 3) == 3


def _take(path, counts, index, admitted):
    tenants = Tenants(path, SharedCounts(counts, index=index, num_gateways=2), clock=lambda: 5.0)
    admitted.put(num_admitted(tenants.of(hashlib.sha256(b"key of a").digest()), 500))


def test_processes_share_a_burst(keys_file, tmp_path):
    path, counts = keys_file(line("a", rate=1, burst=400)), str(tmp_path / "counts")
    context = multiprocessing.get_context("fork")
    admitted = context.SimpleQueue()
    processes = [context.Process(target=_take, args=(path, counts, index, admitted)) for index in range(2)]
    for process in processes:
        process.start()
    total = sum(admitted.get() for _ in processes)
    for process in processes:
        process.join(10)
    assert 400 <= total <= 440, "more only by changes that were lost in the same microsecond"


def test_names_that_hash_to_one_row_are_counted_apart():
    counts = SharedCounts()
    names = [f"tenant-{i}" for i in range(600)]  # of 65536 rows: some share one
    counts.assign(names)
    for number, name in enumerate(names):
        counts.set_own(name, number)
    assert [counts.total(name) for name in names] == list(range(600))
    counts.assign(names[::2])
    assert [counts.total(name) for name in names[::2]] == list(range(0, 600, 2))


async def test_reader_of_a_feature_counts_among_the_requests_of_its_tenant(keys_file):
    """It holds the arena as long as it reads; other requests without a body hold nothing."""
    door = Door(keys_file(line("ann", concurrency=1), line("ben", concurrency=1)))
    path = "/medialane/v1/features/{mm_hash}"
    door.may_answer.clear()
    reading = asyncio.create_task(door.ask("key of ann", path, "GET"))
    await eventually(lambda: len(door.tenants) == 1)
    status, _, error = await door.ask("key of ann", path, "GET")
    assert (status, error["error"]["code"]) == (429, "concurrency_limit_exceeded")
    door.may_answer.set()
    assert (await door.ask("key of ben", path, "GET"))[0] == 200
    assert (await door.ask("key of ann", "/v1/models", "GET"))[0] == 200
    assert (await reading)[0] == 200
