"""Keys and bodies at the gateway's door. All routes of vLLM's app are in tests/contract/test_access.py."""

import asyncio
import contextlib
import hashlib
import socket
from pathlib import Path

import pytest
import uvicorn
from prometheus_client import CollectorRegistry

from intakes import Intake
from medialane.gateway import (
    AccessKeys,
    AccessMiddleware,
    BoundedServer,
    GatewayConfig,
    ScopeMiddleware,
    http_bounds,
    open_scope,
)
from medialane.gateway.http import ADMIN, CLIENT, CLIENT_PREFIXES, METRICS_PATH, OPEN
from medialane.observability import Metrics
from medialane.types.errors import StartupFailed

KEY = "authorization: Bearer key\r\n"
ROUTES = {path: path for path in ("/v1/models", "/ping", "/metrics", "/sleep", "/medialane/reload")}
JSON = {"content-type": "application/json", "content-length": "2"}


def keys(*api, **settings):
    return AccessKeys.load(GatewayConfig(**settings), api)


async def app(scope, receive, send):
    """Reads what it gets of the body, and says how much that was."""
    size, more = 0, True
    while more:
        message = await receive()
        size, more = size + len(message.get("body", b"")), message.get("more_body", False)
    status = 200 if scope["path"] in ROUTES else 404
    body = str(size).encode()
    await send({"type": "http.response.start", "status": status, "headers": [(b"content-length", b"%d" % len(body))]})
    await send({"type": "http.response.body", "body": body})


@contextlib.asynccontextmanager
async def serving(access_keys, *, header_timeout_s=20.0, **limits):
    """The gateway's middleware and HTTP server around `app`: the port."""
    config = GatewayConfig(header_timeout_s=header_timeout_s, **limits)
    intake = Intake(app, config)
    access = AccessMiddleware(intake, access_keys, lambda scope: ROUTES.get(scope["path"]))
    settings = uvicorn.Config(ScopeMiddleware(access, Metrics(CollectorRegistry())), lifespan="off", log_config=None)
    server = BoundedServer(settings, bounds=http_bounds(config))
    with socket.create_server(("127.0.0.1", 0)) as sock:
        task = asyncio.create_task(server.serve(sockets=[sock]))
        try:
            yield sock.getsockname()[1]
        finally:
            server.should_exit = True
            async with asyncio.timeout(10):
                await task
            intake.close()


def post(path, size, headers=""):
    return f"POST {path} HTTP/1.1\r\nhost: a\r\ncontent-length: {size}\r\n{headers}\r\n".encode()


async def answer(reader):
    """The status and the body of the next response."""
    head = await reader.readuntil(b"\r\n\r\n")
    lengths = [line.split(b":")[1] for line in head.lower().splitlines() if line.startswith(b"content-length")]
    return int(head.split()[1]), await reader.readexactly(int(lengths[0]))


@contextlib.asynccontextmanager
async def connection(port):
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        yield reader, writer
    finally:
        writer.close()


@pytest.mark.parametrize(
    ("path", "headers", "status"),
    [("/v1/models", "", 401), ("/nowhere", "", 401), ("/nowhere", KEY, 404), ("/ping", "", 200), ("/metrics", "", 200),
     ("/sleep", "", 401), ("/sleep", KEY, 403)],
)  # fmt: skip
async def test_answer_does_not_wait_for_the_body(path, headers, status):
    """A client that announces 60 MB, and sends none of them."""
    async with serving(keys("key", admin_key="admin")) as port, connection(port) as (reader, writer):
        writer.write(post(path, 60_000_000, headers))
        async with asyncio.timeout(5):
            assert (await answer(reader))[0] == status


@pytest.mark.parametrize("access_keys", [keys(), keys("key")], ids=["no key", "key"])
async def test_trickling_bodies_to_paths_that_do_not_exist_leave_the_memory_to_others(access_keys):
    async with contextlib.AsyncExitStack() as stack:
        port = await stack.enter_async_context(serving(access_keys, max_bodies_bytes=1 << 20))
        for _ in range(34):
            _, writer = await stack.enter_async_context(connection(port))
            writer.write(post("/nowhere", 60_000_000, KEY) + bytes(100_000))
        reader, writer = await stack.enter_async_context(connection(port))
        body = b'"%s"' % (b"1" * 899_998)
        writer.write(post("/v1/models", len(body), KEY + "content-type: application/json\r\n") + body)
        async with asyncio.timeout(10):
            assert await answer(reader) == (200, b"900000")


@pytest.mark.parametrize("path", ["/v1/models", "/nowhere"])
async def test_client_that_sends_its_whole_body_first_gets_the_answer(path):
    """Of larger bodies, see test_gateway_refused_bodies."""
    async with serving(keys("key")) as port, connection(port) as (reader, writer):
        writer.write(post(path, 1 << 20) + bytes(1 << 20))
        async with asyncio.timeout(10):
            await writer.drain()
        assert (await answer(reader))[0] == 401
        writer.write(post("/ping", 0))
        assert await answer(reader) == (200, b"0"), "the connection can be used again"


async def test_unread_body_is_not_awaited_for_ever():
    async with serving(keys("key"), header_timeout_s=0.2) as port, connection(port) as (reader, writer):
        writer.write(post("/nowhere", 1000) + b"x")
        assert (await answer(reader))[0] == 401
        async with asyncio.timeout(5):
            assert await reader.read() == b""


async def test_websocket_is_refused_with_an_http_response():
    handshake = "connection: upgrade\r\nupgrade: websocket\r\nsec-websocket-version: 13\r\n"
    handshake += "sec-websocket-key: bWVkaWFsYW5lLXJvdXRlcg==\r\n"
    async with serving(keys("key", admin_key="admin")) as port, connection(port) as (reader, writer):
        writer.write(f"GET /sleep HTTP/1.1\r\nhost: a\r\n{KEY}{handshake}\r\n".encode())
        async with asyncio.timeout(5):
            assert (await answer(reader))[0] == 501


async def test_authorised_body_is_read():
    async with serving(keys("key")) as port, connection(port) as (reader, writer):
        writer.write(post("/v1/models", 2, KEY + "content-type: application/json\r\n") + b"{}")
        assert await answer(reader) == (200, b"2")


async def test_client_that_waits_for_100_continue_is_refused_at_once():
    async with serving(keys("key")) as port, connection(port) as (reader, writer):
        writer.write(post("/v1/models", 60_000_000, "expect: 100-continue\r\n"))
        assert (await answer(reader))[0] == 401


async def status(access_keys, path, key=None):
    headers = [] if key is None else [(b"authorization", b"Bearer " + key)]
    sent = []

    async def send(message):
        sent.append(message)

    async def receive():
        return {"type": "http.request", "body": b""}

    middleware = AccessMiddleware(app, access_keys, lambda scope: ROUTES.get(scope["path"]))
    with open_scope():
        await middleware({"type": "http", "method": "GET", "path": path, "headers": headers}, receive, send)
    return sent[0]["status"]


async def test_admin_key_without_api_key_closes_only_what_is_administrative():
    access_keys = keys(admin_key="admin")
    assert [await status(access_keys, path) for path in ("/v1/models", "/metrics", "/sleep")] == [200, 200, 401]
    assert await status(access_keys, "/sleep", b"admin") == 200


async def test_metrics_key_without_api_key_closes_only_metrics():
    access_keys = keys(metrics_key="metrics")
    assert [await status(access_keys, path) for path in ("/v1/models", "/sleep", "/metrics")] == [200, 200, 401]
    assert await status(access_keys, "/metrics", b"metrics") == 200


async def test_api_key_opens_what_is_administrative_without_an_admin_key():
    assert await status(keys("key"), "/sleep", b"key") == 200
    assert await status(keys("key"), "/sleep", b"kez") == 401


async def test_keys_are_read_from_private_files(tmp_path):
    file = tmp_path / "keys"
    file.write_text("first admin\n\n second \n")
    file.chmod(0o600)
    access_keys = keys("key", admin_key_file=str(file))
    assert [await status(access_keys, "/sleep", key) for key in (b"first admin", b"second")] == [200, 200]
    assert await status(access_keys, "/sleep", b"first") == 401
    file.chmod(0o644)
    with pytest.raises(StartupFailed, match="--admin-key-file"):
        keys(admin_key_file=str(file))


async def test_keys_of_changed_files_replace_those_before_all_or_none(tmp_path):
    admin, metrics = tmp_path / "admin", tmp_path / "metrics"
    for file in (admin, metrics):
        file.touch(0o600)
        file.write_text(f"{file.name} 1")
    config = GatewayConfig(admin_key_file=str(admin), metrics_key_file=str(metrics))
    access_keys = AccessKeys.load(config)
    admin.write_text("admin 2")
    metrics.write_text("")
    with pytest.raises(StartupFailed, match="--metrics-key-file"):
        access_keys.read_again(config)
    assert await status(access_keys, "/sleep", b"admin 1") == 200
    metrics.write_text("metrics 2")
    use, files = access_keys.read_again(config)
    assert await status(access_keys, "/sleep", b"admin 2") == 401
    use()
    assert files == ["--admin-key-file", "--metrics-key-file"]
    assert [await status(access_keys, "/sleep", key) for key in (b"admin 1", b"admin 2")] == [401, 200]
    assert [await status(access_keys, "/metrics", key) for key in (b"metrics 1", b"metrics 2")] == [401, 200]


def test_tenants_keys_are_read_again_and_may_not_be_the_admin_key(tmp_path):
    file = tmp_path / "keys"
    file.touch(0o600)

    def write(*names):
        hashes = {name: hashlib.sha256(name.encode()).hexdigest() for name in names}
        file.write_text("\n".join(f'{{"name": "{name}", "sha256": "{digest}"}}' for name, digest in hashes.items()))

    write("first")
    config = GatewayConfig(keys=str(file), admin_key="admin")
    access_keys = AccessKeys.load(config)
    write("second", "admin")
    with pytest.raises(StartupFailed, match="must differ from the keys of --keys"):
        access_keys.read_again(config)
    write("second")
    access_keys.read_again(config)[0]()
    found = [access_keys.is_client(hashlib.sha256(name).digest()) for name in (b"first", b"second")]
    assert found == [False, True]


@pytest.mark.parametrize(
    ("api", "settings", "message"),
    [
        (["same"], {"admin_key": "same"}, "must differ"),
        ([], {"admin_key": "same", "metrics_key": "same"}, "must differ"),
        ([], {"admin_key": " "}, "MEDIALANE_ADMIN_KEY has no key"),
        ([], {"metrics_key": "a", "metrics_key_file": "b"}, "MEDIALANE_METRICS_KEY and --metrics-key-file are both"),
        ([], {"admin_key": "sch\u00f6n"}, "MEDIALANE_ADMIN_KEY: a key must be of printable ASCII"),
        ([], {"metrics_key_file": "/nowhere/key"}, "cannot read --metrics-key-file /nowhere/key"),
    ],
)
def test_unusable_keys_are_refused(api, settings, message):
    with pytest.raises(StartupFailed, match=message):
        keys(*api, **settings)


def test_keys_are_not_shown():
    config = GatewayConfig(admin_key="hidden-1", metrics_key="hidden-2")
    assert "hidden-" not in f"{config!r}{keys('hidden-3', admin_key='hidden-1')!r}"


def test_documentation_lists_what_needs_no_admin_key():
    text = Path(__file__).parents[3].joinpath("docs", "security.md").read_text()
    section = text.partition("## Who may ask")[2].partition("\n## ")[0]
    listed = (
        OPEN | ADMIN | CLIENT - {"/docs/oauth2-redirect"} | {METRICS_PATH, *(f"{each}..." for each in CLIENT_PREFIXES)}
    )
    assert not [path for path in listed if f"`{path}`" not in section]


async def change(access_keys, path="/sleep", *, method="POST", **headers):
    """The status of a request that changes something, and whether it was refused."""
    given = {name.replace("_", "-"): value for name, value in ({"host": "127.0.0.1:8000"} | headers).items()}
    scope = {"type": "http", "method": method, "path": path, "client": ("127.0.0.1", 1), "server": ("127.0.0.1", 8000)}
    scope["headers"] = [(name.encode(), value.encode()) for name, value in given.items()]
    sent = []

    async def send(message):
        sent.append(message)

    async def receive():
        return {"type": "http.request", "body": b"{}"}

    middleware = AccessMiddleware(app, access_keys, lambda scope: ROUTES.get(scope["path"]))
    with open_scope() as request:
        await middleware(scope, receive, send)
    return sent[0]["status"], request.is_refused


PAGES = [
    {"origin": "http://evil.example"},
    {"origin": "null"},
    {"sec_fetch_site": "cross-site"},
    {"sec_fetch_site": "same-site"},
    {"host": "evil.example:8000", "origin": "http://evil.example:8000"},
]


@pytest.mark.parametrize("page", PAGES)
@pytest.mark.parametrize("path", ["/sleep", "/medialane/reload"])
async def test_page_of_another_site_changes_nothing_without_a_key(page, path):
    local = AccessKeys.load(GatewayConfig(), is_local=True)
    assert await change(local, path, **JSON, **page) == (403, True)


async def test_page_of_another_site_reads_nothing_administrative_without_a_key():
    assert await change(keys(), method="GET", origin="http://evil.example") == (403, True)


@pytest.mark.parametrize(
    "headers", [{}, {"host": "service"}, {"origin": "http://127.0.0.1:8000", "sec_fetch_site": "same-origin"}, JSON]
)
async def test_programs_and_pages_of_the_server_need_no_key_where_there_is_none(headers):
    assert await change(keys(), **headers) == (200, False)


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data", ""])
async def test_form_changes_nothing_without_a_key(kind):
    assert await change(keys(), content_type=kind, content_length="2") == (415, True)


async def test_key_is_enough_whatever_page_sends_it():
    with_key = {"authorization": "Bearer admin", "content_type": "text/plain", "content_length": "2"}
    assert await change(keys(admin_key="admin"), **with_key, **PAGES[0]) == (200, False)


async def test_no_route_gets_cookies_which_its_framework_would_parse():
    seen = []

    async def routed(scope, receive, send):
        seen.extend(scope["headers"])
        await app(scope, receive, send)

    access = AccessMiddleware(routed, keys(), lambda scope: ROUTES.get(scope["path"]))
    sent = []

    async def send(message):
        sent.append(message)

    async def receive():
        return {"type": "http.request", "body": b""}

    headers = [(b"cookie", b'a="%b"' % (rb"\\" * 30_000)), (b"host", b"h")]
    with open_scope():
        await access({"type": "http", "method": "GET", "path": "/ping", "headers": headers}, receive, send)
    assert seen == [(b"host", b"h")]
