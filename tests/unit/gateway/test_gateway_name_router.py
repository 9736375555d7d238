"""The name router over real sockets: gateways are small servers that tell what they have got."""

import asyncio
import contextlib
import io
import json
import os
import tempfile
from pathlib import Path

import aiohttp
import pytest
import uvicorn
from yarl import URL

from medialane.gateway import (
    AccessKeys,
    BoundedServer,
    GatewayConfig,
    NameRouter,
    ServedModel,
    ServedModels,
    http_bounds,
)
from medialane.media import MediaConfig
from medialane.wire import bind_http, bind_unix
from waiting import eventually

CHAT = "/v1/chat/completions"
LARGE_BYTES = 64 << 20
IMAGE = "iVBORw0KGgo/" * 300_000  # 3.6 MB


class FakeGateway:
    """Answers with what it was asked; `/stream` in two pieces, the second when `proceed` is set."""

    def __init__(self, name, path):
        self.name, self.path = name, path
        self.proceed, self.gone = asyncio.Event(), asyncio.Event()
        self.requests, self.num_read, self.num_sent = [], 0, 0
        self.adapters = []
        self.answers = {}

    async def __call__(self, scope, receive, send):
        self.requests.append(scope)
        if scope["path"] == "/refuse":  # before its body is read
            return await self._send(send, 413, b"too large")
        body = await self.read(receive) or b""
        if scope["path"] in self.answers:
            return await self._send(send, *self.answers[scope["path"]])
        if scope["path"] == "/v1/models":
            cards = [{"id": name, "object": "model"} for name in (self.name, *self.adapters)]
            return await self._send(send, 200, json.dumps({"object": "list", "data": cards}).encode())
        if scope["path"] == "/stream":
            return await self._stream(receive, send)
        if scope["path"] == "/wait":
            await receive()
            return self.gone.set()
        if scope["path"] == "/large":
            return await self._send_large(send)
        if scope["path"] == "/break":
            await self._start(send, [(b"content-length", b"100")])
            raise ConnectionAbortedError
        seen = {
            "gateway": self.name,
            "target": scope["raw_path"].decode() + "?" + scope["query_string"].decode(),
            "method": scope["method"],
            "client": scope["client"],
            "scheme": scope["scheme"],
            "headers": [[name.decode(), value.decode()] for name, value in scope["headers"]],
            "body": body.decode("latin-1"),
        }
        return await self._send(send, 200, json.dumps(seen).encode())

    async def read(self, receive):
        body, more = b"", True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                self.gone.set()
                return body
            body, more = body + message["body"], message["more_body"]
            self.num_read = len(body)
        return body

    async def _stream(self, receive, send):
        await self._start(send, [(b"content-type", b"text/event-stream"), (b"x-request-id", b"theirs")])
        await send({"type": "http.response.body", "body": b"data: 1\n\n", "more_body": True})
        gone = asyncio.create_task(receive())
        proceed = asyncio.create_task(self.proceed.wait())
        done, rest = await asyncio.wait((gone, proceed), return_when=asyncio.FIRST_COMPLETED)
        for task in rest:
            task.cancel()
        if gone in done:
            return self.gone.set()
        return await send({"type": "http.response.body", "body": b"data: 2\n\n"})

    async def _send_large(self, send):
        await self._start(send, [])
        while self.num_sent < LARGE_BYTES:
            await send({"type": "http.response.body", "body": b"x" * (1 << 20), "more_body": True})
            self.num_sent += 1 << 20

    async def _start(self, send, headers, status=200):
        await send({"type": "http.response.start", "status": status, "headers": headers})

    async def _send(self, send, status, body, content_type=b"application/json"):
        await self._start(send, [(b"content-length", b"%d" % len(body)), (b"content-type", content_type)], status)
        await send({"type": "http.response.body", "body": body})


@contextlib.asynccontextmanager
async def served(app, sock, *, is_behind_router):
    config = uvicorn.Config(app, lifespan="off", log_config=None, access_log=False, server_header=False)
    server = BoundedServer(config, bounds=http_bounds(GatewayConfig()), is_behind_router=is_behind_router)
    serving = asyncio.create_task(server.serve([sock]))
    await eventually(lambda: server.started, "it serves", 5)
    try:
        yield server
    finally:
        server.should_exit = server.force_exit = True
        await serving
        sock.close()


class Routed:
    """A router in front of the models `vision` (with two gateways, and the name `eyes`) and `org/text`."""

    def __init__(self, port, gateways, session, stack):
        self.url, self.port = f"http://127.0.0.1:{port}", port
        self.vision, self.vision_too, self.text = gateways
        self.session = session
        self.servers = {}
        self._stack = stack

    async def start(self, gateway):
        sock = bind_unix(gateway.path)
        self.servers[gateway.path] = await self._stack.enter_async_context(served(gateway, sock, is_behind_router=True))

    async def stop(self, gateway):
        server = self.servers[gateway.path]
        server.should_exit = True
        os.unlink(gateway.path)
        await eventually(lambda: not server.servers or not server.servers[0].is_serving(), "it has stopped", 5)

    async def ask(self, path, *, method="POST", **options):
        """Status and parsed body."""
        async with self.session.request(method, URL(self.url + path, encoded=True), **options) as response:
            body = await response.read()
            return response.status, json.loads(body) if body[:1] in (b"{", b"[") else body

    async def connection(self):
        return await asyncio.open_connection("127.0.0.1", self.port)


@contextlib.asynccontextmanager
async def routing(config=None, keys=None, *, started=True, **settings):
    """A router and its gateways."""
    with tempfile.TemporaryDirectory(prefix="ml-", dir="/tmp") as folder:
        gateways = [
            FakeGateway(name, str(Path(folder, f"{i}.sock"))) for i, name in enumerate(["vision", "vision", "org/text"])
        ]
        models = ServedModels([
            ServedModel("vision", ("vision", "eyes"), (gateways[0].path, gateways[1].path)),
            ServedModel("text", ("org/text",), (gateways[2].path,), ("fixed-adapter",)),
        ])  # fmt: skip
        config = config or GatewayConfig()
        settings.setdefault("max_body_bytes", MediaConfig().max_body_bytes)
        app = NameRouter(models, keys or AccessKeys.load(config), config, **settings)
        sock = bind_http("127.0.0.1", 0)
        async with contextlib.AsyncExitStack() as stack:
            stack.push_async_callback(models.close)
            session = await stack.enter_async_context(aiohttp.ClientSession())
            routed = Routed(sock.getsockname()[1], gateways, session, stack)
            if started:
                for each in gateways:
                    await routed.start(each)
            router = await stack.enter_async_context(served(app, sock, is_behind_router=False))
            try:
                yield routed
            finally:  # all at once
                for server in (router, *routed.servers.values()):
                    server.should_exit = server.force_exit = True


@pytest.fixture
async def routed():
    async with routing() as routed:
        yield routed


@pytest.mark.parametrize(
    ("model", "gateway"),
    [("vision", "vision"), ("eyes", "vision"), ("org/text", "org/text"), ("fixed-adapter", "org/text")],
)
async def test_request_is_passed_to_the_gateway_of_its_model(routed, model, gateway):
    body = {"messages": [{"role": "user", "content": "hello"}], "model": model}
    status, seen = await routed.ask(CHAT, json=body)
    assert status == 200
    assert seen["gateway"] == gateway
    assert json.loads(seen["body"]) == body
    assert seen["target"] == CHAT + "?"


async def test_body_of_megabytes_arrives_as_it_was_sent(routed):
    body = json.dumps({"messages": [{"image": IMAGE}], "model": "vision"}).replace("/", "\\/")
    status, seen = await routed.ask(CHAT, data=io.BytesIO(body.encode()))
    assert (status, seen["gateway"]) == (200, "vision")
    assert seen["body"] == body


async def test_chunked_body_arrives_whole(routed):
    async def pieces():
        yield b'{"messages": "' + b"x" * 100_000
        yield b'", "mod'
        yield b'el": "org/text", "n": '
        yield b"1}"

    status, seen = await routed.ask(CHAT, data=pieces())
    assert (status, seen["gateway"]) == (200, "org/text")
    assert seen["body"].endswith('"n": 1}')
    assert ["transfer-encoding", "chunked"] in seen["headers"]


async def test_form_is_passed_to_the_model_of_its_field(routed):
    form = aiohttp.FormData({"model": "org/text"})
    form.add_field("file", io.BytesIO(IMAGE.encode()), filename="a.wav")
    status, seen = await routed.ask("/v1/audio/transcriptions", data=form)
    assert (status, seen["gateway"]) == (200, "org/text")
    assert IMAGE in seen["body"]


async def test_request_arrives_as_if_there_were_no_router(routed):
    headers = {
        "traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
        "x-request-id": "mine",
        "authorization": "Bearer key",
        "x-forwarded-for": "203.0.113.9",
        "x-medialane-client": '["https",["127.0.0.1",1],null]',
        "connection": "x-of-this-hop",
        "x-of-this-hop": "1",
        "accept-encoding": "br",
    }
    status, seen = await routed.ask(f"{CHAT}?a=%2F&model=vision&b=c+d", json={"model": "vision"}, headers=headers)
    got = dict(seen["headers"])
    assert status == 200
    assert seen["client"][0] == "203.0.113.9"  # said by this machine, which a server trusts by default
    assert seen["scheme"] == "http"
    assert seen["target"] == f"{CHAT}?a=%2F&b=c+d"
    assert got["host"] == f"127.0.0.1:{routed.port}"
    kept = {name: got.get(name) for name in headers}
    assert kept == headers | {"x-medialane-client": None, "x-of-this-hop": None, "connection": None}
    assert len(seen["headers"]) == len(got)
    del headers["x-forwarded-for"]
    _, seen = await routed.ask(CHAT, json={"model": "vision"}, headers=headers)
    assert seen["client"][0] == "127.0.0.1"
    assert seen["client"][1] > 1


@pytest.mark.parametrize("target", ["//a/../b", "/a%2e%2e/b?x=%zz&y"])
async def test_path_and_query_are_not_interpreted(routed, target):
    reader, writer = await routed.connection()
    query = "&" if "?" in target else "?"
    writer.write(f"GET {target}{query}model=vision HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n".encode("latin-1"))
    body = (await reader.read()).partition(b"\r\n\r\n")[2]
    writer.close()
    assert json.loads(body)["target"] == (target if "?" in target else f"{target}?")


async def test_request_id_in_the_body_is_not_overridden(routed):
    _, seen = await routed.ask(CHAT, json={"model": "vision", "request_id": "mine"})
    assert "x-request-id" not in dict(seen["headers"])


async def test_stream_arrives_piece_by_piece(routed):
    async with routed.session.post(routed.url + "/stream", json={"model": "vision"}) as response:
        assert await response.content.readany() == b"data: 1\n\n"
        assert response.headers["x-request-id"] == "theirs"
        for each in (routed.vision, routed.vision_too):
            each.proceed.set()
        assert await response.read() == b"data: 2\n\n"


async def test_client_that_leaves_its_answer_is_gone_at_the_gateway(routed):
    async with routed.session.post(routed.url + "/stream", json={"model": "org/text"}) as response:
        await response.content.readany()
        response.close()
    async with asyncio.timeout(5):
        await routed.text.gone.wait()


@pytest.mark.parametrize(
    ("path", "length"),
    [pytest.param(b"/wait", 21, id="its answer"), pytest.param(b"/x", 100, id="the end of its body")],
)
async def test_client_that_leaves_before_it_is_gone_at_the_gateway(routed, path, length):
    _, writer = await routed.connection()
    writer.write(b'POST %b HTTP/1.1\r\nhost: a\r\ncontent-length: %d\r\n\r\n{"model": "org/text"}' % (path, length))
    await eventually(lambda: routed.text.num_read, "the gateway has read what was sent", 5)
    writer.close()
    async with asyncio.timeout(5):
        await routed.text.gone.wait()


async def test_body_is_read_no_faster_than_the_gateway_reads_it(routed):
    """What follows the name is not kept by the router."""
    blocked = asyncio.Event()

    async def read_later(_receive):
        await blocked.wait()

    routed.text.read = read_later
    _, writer = await routed.connection()
    size = 64 << 20
    writer.write(b'POST /x HTTP/1.1\r\nhost: a\r\ncontent-length: %d\r\n\r\n{"model": "org/text", "x": "' % size)
    writer.transport.set_write_buffer_limits(high=0)
    num_sent = 0
    with contextlib.suppress(TimeoutError):
        while num_sent < size:
            writer.write(b"x" * (1 << 20))
            async with asyncio.timeout(1):
                await writer.drain()
            num_sent += 1 << 20
    assert num_sent < 24 << 20
    writer.transport.abort()
    blocked.set()


async def test_answer_is_read_no_faster_than_the_client_reads_it(routed):
    _, writer = await routed.connection()
    writer.write(b"GET /large?model=org/text HTTP/1.1\r\nhost: a\r\n\r\n")
    await eventually(lambda: routed.text.num_sent, "it is sent", 5)
    num_sent = 0
    while num_sent < routed.text.num_sent:
        num_sent = routed.text.num_sent
        await asyncio.sleep(0.5)  # time: a gateway that may send does so
    assert num_sent < LARGE_BYTES // 2
    writer.transport.abort()
    await eventually(lambda: routed.text.num_sent >= LARGE_BYTES, "the gateway gets rid of the rest", 5)


async def test_client_is_asked_to_continue_when_the_gateway_asks_for_the_body(routed):
    reader, writer = await routed.connection()
    writer.write(
        b"POST /refuse?model=org/text HTTP/1.1\r\nhost: a\r\nexpect: 100-continue\r\ncontent-length: 9\r\n\r\n"
    )
    assert (await reader.readline()).startswith(b"HTTP/1.1 413 ")
    writer.close()
    reader, writer = await routed.connection()
    writer.write(b"POST /x?model=org/text HTTP/1.1\r\nhost: a\r\nexpect: 100-continue\r\ncontent-length: 9\r\n\r\n")
    assert (await reader.readline()).startswith(b"HTTP/1.1 100 ")
    await reader.readline()
    writer.write(b"body text")
    assert (await reader.readline()).startswith(b"HTTP/1.1 200 ")
    writer.close()


async def test_unknown_model_gets_the_answer_of_vllm_with_the_names_of_all(routed):
    status, body = await routed.ask(CHAT, json={"model": "no such"}, headers={"x-request-id": "mine"})
    assert status == 404
    assert body == {
        "error": {
            "message": "The model `no such` does not exist. Valid aliases: vision, eyes, org/text.",
            "type": "NotFoundError",
            "param": "model",
            "code": 404,
            "request_id": "mine",
        }
    }


async def test_adapter_loaded_at_run_time_is_found(routed):
    routed.text.adapters.append("loaded")
    status, seen = await routed.ask(CHAT, json={"model": "loaded"})
    assert (status, seen["gateway"]) == (200, "org/text")


async def test_request_without_a_model_is_refused(routed):
    for body in ({"messages": []}, {"model": None}, {"model": ""}, {"model": ["vision"]}):
        status, answer = await routed.ask(CHAT, json=body)
        assert (status, answer["error"]["code"], answer["error"]["param"]) == (400, "model_required", "model")
        assert "vision, eyes, org/text" in answer["error"]["message"]
    assert not routed.vision.requests
    assert not routed.text.requests


async def test_calls_of_operators_must_name_their_model(routed):
    for method, path in (("POST", "/sleep?level=1"), ("GET", "/is_sleeping"), ("POST", "/medialane/workers/a/drain")):
        status, answer = await routed.ask(path, method=method)
        assert (status, answer["error"]["code"]) == (400, "model_required")
        assert "?model=NAME" in answer["error"]["message"]
        query = "&model=org%2Ftext" if "?" in path else "?model=org%2Ftext"
        status, seen = await routed.ask(path + query, method=method)
        assert (status, seen["gateway"], seen["target"]) == (200, "org/text", path if "?" in path else path + "?")


async def test_models_of_all_are_listed(routed):
    routed.vision.adapters = routed.vision_too.adapters = ["cats"]
    status, body = await routed.ask("/v1/models", method="GET")
    assert status == 200
    assert [card["id"] for card in body["data"]] == ["vision", "cats", "org/text"]
    assert body["object"] == "list"


async def test_model_that_does_not_run_is_unavailable_and_others_are_served():
    async with routing(started=False) as routed:
        await routed.start(routed.text)
        status, answer = await routed.ask(CHAT, json={"model": "vision"})
        assert (status, answer["error"]["code"]) == (503, "model_unavailable")
        status, seen = await routed.ask(CHAT, json={"model": "org/text"})
        assert (status, seen["gateway"]) == (200, "org/text")
        status, body = await routed.ask("/v1/models", method="GET")
        assert [card["id"] for card in body["data"]] == ["org/text"]


async def test_other_gateway_of_the_model_serves_if_one_is_lost(routed):
    await routed.stop(routed.vision)
    for _ in range(4):
        status, _ = await routed.ask(CHAT, json={"model": "vision"})
        assert status == 200
    assert not routed.vision.requests
    assert len(routed.vision_too.requests) == 4


async def test_gateways_of_a_model_share_its_requests(routed):
    async with asyncio.TaskGroup() as tasks:
        for _ in range(6):
            tasks.create_task(routed.ask("/stream", json={"model": "vision"}))
        await eventually(lambda: len(routed.vision.requests) == len(routed.vision_too.requests) == 3, "shared", 5)
        routed.vision.proceed.set()
        routed.vision_too.proceed.set()


async def test_broken_answer_is_not_completed(routed):
    with pytest.raises(aiohttp.ClientPayloadError):
        await routed.ask("/break", json={"model": "vision"})


async def test_health_is_that_of_all_models():
    async with routing(started=False) as routed:
        status, body = await routed.ask("/health", method="GET")
        assert (status, body["status"]) == (503, "unavailable")
        await routed.start(routed.text)
        routed.text.answers["/health"] = 200, b""
        status, body = await routed.ask("/health", method="GET")
        assert (status, body["status"]) == (200, "degraded")
        assert body["problems"] == ["vision: starting, or its gateways do not run"]
        await routed.start(routed.vision)
        routed.vision.answers["/health"] = 200, b""
        assert await routed.ask("/health", method="GET") == (200, b"")


async def test_series_of_all_models_have_the_name_of_their_model(routed):
    page = b'# HELP a Text.\n# TYPE a counter\na 1\na{x="y"} 2\na{model_name="own",x="z"} 3\n'
    for each in (routed.vision, routed.vision_too, routed.text):
        each.answers["/metrics"] = 200, page
    _, body = await routed.ask("/metrics", method="GET")
    lines = body.decode().splitlines()
    assert lines.count("# TYPE a counter") == 1
    for name in ("vision", "org/text"):
        assert f'a{{model_name="{name}"}} 1' in lines
        assert f'a{{model_name="{name}",x="y"}} 2' in lines
        assert f'medialane_model_up{{model_name="{name}"}} 1' in lines
    assert lines.count('a{model_name="own",x="z"} 3') == 2


async def test_state_is_that_of_all_models_and_requests_those_of_one(routed):
    for each in (routed.vision, routed.vision_too, routed.text):
        each.answers["/medialane/state"] = 200, json.dumps({"of": each.name}).encode()
    _, body = await routed.ask("/medialane/state", method="GET")
    assert [(each["name"], each["state"]) for each in body["models"]] == [
        ("vision", {"of": "vision"}),
        ("text", {"of": "org/text"}),
    ]
    status, body = await routed.ask("/medialane/requests", method="GET")
    assert (status, body["error"]["code"]) == (400, "model_required")
    routed.text.answers["/medialane/requests"] = 200, b'{"requests": []}'
    assert await routed.ask("/medialane/requests?model=org/text", method="GET") == (200, {"requests": []})


KEYED = GatewayConfig(api_keys=("client",), admin_key="admin")


def keyed():
    return AccessKeys.load(KEYED, KEYED.api_keys)


async def test_body_of_a_caller_without_a_key_is_not_read():
    async with routing(KEYED, keyed()) as routed:
        reader, writer = await routed.connection()
        writer.write(b'POST /x HTTP/1.1\r\nhost: a\r\ncontent-length: 10000000\r\n\r\n{"messages": "')
        assert (await reader.readline()).startswith(b"HTTP/1.1 401 ")
        writer.close()
        assert (await routed.ask(CHAT, json={"model": "nope"}))[0] == 401
        assert (await routed.ask("/sleep?model=nope"))[0] == 401
        assert not routed.vision.requests
        for key in ("client", "admin"):
            headers = {"authorization": f"Bearer {key}"}
            assert (await routed.ask(CHAT, json={"model": "vision"}, headers=headers))[0] == 200
            assert (await routed.ask(CHAT, json={"model": "nope"}, headers=headers))[0] == 404


async def test_refusal_of_a_model_is_that_of_all(routed):
    routed.text.answers["/medialane/state"] = 403, b'{"error": {"code": "denied"}}'
    routed.vision.answers["/medialane/state"] = routed.vision_too.answers["/medialane/state"] = 200, b"{}"
    status, body = await routed.ask("/medialane/state", method="GET", headers={"x-request-id": "mine"})
    assert (status, body) == (403, {"error": {"code": "denied", "request_id": "mine"}})
    (asked,) = routed.text.requests
    assert (b"x-request-id", b"mine") in asked["headers"]


async def test_body_and_memory_are_bounded():
    async with routing(GatewayConfig(max_bodies_bytes=1 << 20), max_body_bytes=2 << 20) as routed:
        status, answer = await routed.ask(CHAT, data=io.BytesIO(b'{"x": "' + b"x" * (3 << 20)))
        assert (status, answer["error"]["code"]) == (413, "body_too_large")
        status, answer = await routed.ask(CHAT, data=io.BytesIO(b'{"x": "' + b"x" * (3 << 19)))
        assert (status, answer["error"]["code"]) == (503, "body_memory_exhausted")
        for _ in range(3):  # nothing stays charged
            status, _ = await routed.ask(CHAT, data=b'{"x": "' + b"x" * (3 << 18) + b'", "model": "vision"}')
            assert status == 200


async def test_websocket_is_refused():
    async with routing(KEYED, keyed()) as routed:
        with pytest.raises(aiohttp.WSServerHandshakeError) as failed:
            await routed.session.ws_connect(routed.url + "/v1/realtime?model=nope")
    assert failed.value.status == 501
