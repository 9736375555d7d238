"""Middleware in front of vLLM's app: bounded bodies, one scope per request, timings on every response."""

import asyncio
import base64
import json
import tracemalloc

import pytest
from prometheus_client import CollectorRegistry

from intakes import Intake
from medialane.gateway import GatewayConfig, ScopeMiddleware, current_scope
from medialane.media import MediaConfig
from medialane.observability import Metrics
from medialane.types.errors import BodyTooLarge
from medialane.types.feature import Feature, StagedItem
from medialane.types.media import MediaSize

JSON = [(b"content-type", b"application/json")]
DATA = bytes(range(256)) * 40
URL = "data:image/png;base64," + base64.b64encode(DATA).decode()
BODY = json.dumps(
    {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": URL}}]}]}
).encode()


class App:
    """Reads the body as an app does, and keeps what it saw."""

    def __init__(self, status=200, error=None):
        self.status, self.error = status, error
        self.calls = 0
        self.body = b""
        self.after_body = None

    async def __call__(self, scope, receive, send):
        self.calls += 1
        self.scope, self.receive = scope, receive
        self.request = current_scope()
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                break
            self.body += message.get("body", b"")
            if not message.get("more_body", False):
                break
        if self.error is not None:
            raise self.error
        await send({"type": "http.response.start", "status": self.status, "headers": []})
        await send({"type": "http.response.body", "body": b"answer"})


class Exchange:
    """One request through both middlewares, the client's messages given beforehand."""

    def __init__(self, app, config=None, **limits):
        self.registry = CollectorRegistry()
        self.sent = []
        self._intake = Intake(app, config, MediaConfig(**limits))
        self._stack = ScopeMiddleware(self._intake, Metrics(self.registry))

    async def run(
        self, *chunks, method="POST", headers=JSON, leaves=False, kind="http", path="/v1/chat/completions", stays=True
    ):
        messages = [
            {"type": "http.request", "body": chunk, "more_body": leaves or i < len(chunks) - 1}
            for i, chunk in enumerate(chunks)
        ] or ([] if leaves else [{"type": "http.request", "body": b"", "more_body": False}])

        async def receive():
            if stays and not (messages or leaves):
                await asyncio.Event().wait()
            return messages.pop(0) if messages else {"type": "http.disconnect"}

        async def send(message):
            self.sent.append(message)

        try:
            await self._stack({"type": kind, "method": method, "path": path, "headers": headers}, receive, send)
        finally:
            self._intake.close()
        return self

    @property
    def status(self):
        return self.sent[0]["status"]

    @property
    def error(self):
        return json.loads(self.sent[1]["body"])["error"]

    def header(self, name):
        return dict(self.sent[0]["headers"])[name].decode()

    def num_errors(self, code):
        return self.registry.get_sample_value("medialane_request_errors_total", {"code": code}) or 0


@pytest.mark.parametrize("size", [13, 100, len(BODY)])  # a byte a piece takes the loop too long in debug mode
async def test_app_gets_the_body_without_media_however_chunked(size):
    app = App()
    chunks = [BODY[at : at + size] for at in range(0, len(BODY), size)]
    headers = [*JSON, (b"transfer-encoding", b"chunked"), (b"x-other", b"1")]
    await Exchange(app).run(*chunks, headers=headers)
    assert app.request.references.text(0).encode() in app.body
    assert len(app.body) < 200
    assert dict(app.scope["headers"]) == {
        b"content-type": b"application/json",
        b"content-length": str(len(app.body)).encode(),
        b"x-other": b"1",
        b"x-request-id": app.request.record.id.encode(),
    }


async def test_reference_holds_the_bytes_while_the_request_lasts_and_no_longer():
    class Looking(App):
        async def __call__(self, scope, receive, send):
            self.data = current_scope().resolve(current_scope().references.text(0)).data
            await super().__call__(scope, receive, send)

    app = Looking()
    await Exchange(app).run(BODY)
    assert app.data == DATA
    assert app.request.extracted.refs == ()


async def test_only_extracted_media_are_held_during_the_response():
    data = bytes(1_000_000)
    url = "data:image/png;base64," + base64.b64encode(data).decode()
    body = BODY.replace(URL.encode(), url.encode())
    chunks = body[:1000], body[1000:]
    held = []

    class Looking(App):
        async def __call__(self, scope, receive, send):
            held.append(tracemalloc.get_traced_memory()[0])
            await super().__call__(scope, receive, send)

    exchange = Exchange(Looking())
    tracemalloc.start()
    try:
        await exchange.run(*chunks)
    finally:
        tracemalloc.stop()
    assert len(data) <= held[0] < 1.2 * len(data)


async def test_client_disconnecting_during_upload_never_reaches_the_app():
    for chunks in ((), (b"",), (BODY[:10],)):
        app = App()
        exchange = await Exchange(app).run(*chunks, leaves=True)
        assert app.calls == 0
        assert exchange.sent == []


async def test_disconnect_after_the_body_is_forwarded():
    app = App()
    await Exchange(app).run(BODY, stays=False)
    assert (await app.receive())["type"] == "http.disconnect"


@pytest.mark.parametrize("method", ["GET", "HEAD", "OPTIONS"])
async def test_requests_without_a_body_are_forwarded(method):
    app = App()
    exchange = await Exchange(app).run(method=method, headers=[])
    assert (app.calls, exchange.status) == (1, 200)
    assert "total;dur=" in exchange.header(b"server-timing")


async def test_non_http_events_have_no_scope():
    seen = []

    async def app(scope, receive, send):
        seen.append(scope["type"])
        with pytest.raises(LookupError):
            current_scope()

    await Exchange(app).run(kind="lifespan")
    assert seen == ["lifespan"]


@pytest.mark.parametrize("body", [b"", b"{", b"\xff\xff", b"[1]", b"null", b'{"messages": 3}'])
async def test_body_of_unknown_structure_is_left_to_the_app(body):
    app = App()
    await Exchange(app).run(body)
    assert (app.calls, app.body) == (1, body)


@pytest.mark.parametrize("content_type", [b"application/json", b"text/plain", b"multipart/form-data"])
async def test_content_length_over_the_limit_is_rejected_before_reading(content_type):
    app = App()
    headers = [(b"content-type", content_type), (b"content-length", b"1001")]
    exchange = await Exchange(app, GatewayConfig(max_text_bytes=1000), max_body_bytes=1000).run(b"a", headers=headers)
    assert (app.calls, exchange.status, exchange.error["code"]) == (0, 413, "body_too_large")


async def test_false_content_length_does_not_bypass_the_limit():
    app = App()
    headers = [*JSON, (b"content-length", b"10")]
    exchange = await Exchange(app, max_body_bytes=1000).run(b"a" * 600, b"a" * 600, headers=headers)
    assert (app.calls, exchange.status) == (0, 413)
    assert exchange.num_errors("body_too_large") == 1
    assert "total;dur=" in exchange.header(b"server-timing")


async def test_non_numeric_content_length_is_not_trusted():
    app = App()
    await Exchange(app).run(b"{}", headers=[*JSON, (b"content-length", b"\xb2")])
    assert app.body == b"{}"


async def test_non_json_body_is_bounded_while_the_app_reads_it():
    class Refused(App):
        async def __call__(self, scope, receive, send):
            with pytest.raises(BodyTooLarge):
                await App.__call__(self, scope, receive, send)
            self.refused = True

    app = Refused()
    chunks = [b"a" * 600, b"a" * 600, b"a"]
    config = GatewayConfig(max_text_bytes=1000)
    form = [(b"content-type", b"application/x-www-form-urlencoded")]
    exchange = await Exchange(app, config).run(*chunks, headers=form)
    assert app.refused
    assert len(app.body) == 600
    assert exchange.num_errors("body_too_large") == 1


async def test_media_extraction_error_response_names_the_field():
    app = App()
    broken = BODY.replace(URL.encode(), b"data:image/png;base64,%%%" + b"!" * 2000)
    exchange = await Exchange(app).run(broken)
    assert (app.calls, exchange.status) == (0, 400)
    assert exchange.error["param"] == "messages[0].content[0].image_url"
    assert exchange.num_errors(exchange.error["code"]) == 1


async def test_every_response_has_timings():
    exchange = await Exchange(App(status=500)).run(BODY)
    steps = [metric.split(";")[0] for metric in exchange.header(b"server-timing").split(", ")]
    assert steps == ["upload", "intake", "parse", "cache", "copied", "total"]


async def test_scope_closes_when_the_app_raises():
    released = []

    class Holding:
        def release(self):
            released.append(True)

    class Failing(App):
        async def __call__(self, scope, receive, send):
            current_scope().defer(Holding().release)
            raise ZeroDivisionError

    exchange = Exchange(Failing())
    with pytest.raises(ZeroDivisionError):
        await exchange.run(BODY)
    assert released == [True]
    assert exchange.sent == []


async def test_scope_closes_when_the_request_is_cancelled():
    class Waiting(App):
        async def __call__(self, scope, receive, send):
            self.request = current_scope()
            self.called.set()
            await asyncio.Event().wait()

    app = Waiting()
    app.called = asyncio.Event()
    task = asyncio.create_task(Exchange(app).run(BODY))
    await app.called.wait()
    assert app.request.extracted.refs
    task.cancel()
    await asyncio.wait([task])
    assert app.request.extracted.refs == ()


@pytest.mark.parametrize(("method", "count"), [("POST", 1), ("GET", 0)])
async def test_only_inference_requests_are_observed(method, count):
    exchange = await Exchange(App()).run(BODY, method=method)
    assert exchange.registry.get_sample_value("medialane_request_seconds_count") == count


ASKING = BODY.replace(b'{"messages"', b'{"medialane": {"report": true}, "messages"')


class Answering(App):
    """Notes its item as the gateway does, and answers in JSON."""

    async def __call__(self, scope, receive, send):
        await receive()
        request = current_scope()
        ref = request.resolve(request.references.text(0))
        item = StagedItem(ref, Feature("image", "h", b"", (), MediaSize()), None, is_hit=True)
        request.record.prepared([item], [4])
        headers = [(b"content-type", b"application/json"), (b"content-length", b"9")]
        await send({"type": "http.response.start", "status": self.status, "headers": headers})
        await send({"type": "http.response.body", "body": b'{"id":"a"}'})


async def test_requested_report_is_in_the_response():
    exchange = await Exchange(Answering()).run(ASKING)
    found = json.loads(exchange.sent[1]["body"])
    assert exchange.header(b"content-length") == str(len(exchange.sent[1]["body"]))
    assert found["id"] == "a"
    (item,) = found["medialane"]["items"]
    assert item == {
        "param": "messages[0].content[0].image_url",
        "modality": "image",
        "cache": "hit",
        "mm_hash": "h",
        "num_tokens": 4,
    }
    assert found["medialane"]["times_ms"].keys() == {"upload", "intake", "parse"}


async def test_response_without_requested_report_is_unchanged():
    exchange = await Exchange(Answering()).run(BODY)
    assert exchange.sent[1]["body"] == b'{"id":"a"}'
    assert exchange.header(b"content-length") == "9"


async def test_unknown_medialane_field_is_rejected_without_the_app():
    app = App()
    exchange = await Exchange(app).run(BODY.replace(b'{"messages"', b'{"medialane": {"x": 1}, "messages"'))
    assert (app.calls, exchange.status, exchange.error["param"]) == (0, 400, "medialane.x")


@pytest.mark.parametrize(("trusts", "limit_ms"), [(True, 250.0), (False, None)])
async def test_requests_own_limit_of_the_time_to_first_token_counts_where_headers_are_trusted(trusts, limit_ms):
    app = App()
    headers = [*JSON, (b"x-llm-d-slo-ttft-ms", b"250")]
    await Exchange(app, GatewayConfig(trust_headers=trusts)).run(BODY, headers=headers)
    assert app.request.ttft_limit_ms == limit_ms


@pytest.mark.parametrize("value", [b"soon", b"0", b"-5", b"nan", b"inf"])
async def test_limit_that_is_no_number_of_milliseconds_is_rejected(value):
    app = App()
    headers = [*JSON, (b"x-llm-d-slo-ttft-ms", value)]
    exchange = await Exchange(app, GatewayConfig(trust_headers=True)).run(BODY, headers=headers)
    assert (app.calls, exchange.status) == (0, 400)
    assert "x-llm-d-slo-ttft-ms" in exchange.error["message"]


async def test_names_of_media_belong_to_the_clients_key():
    class Looking(App):
        async def __call__(self, scope, receive, send):
            self.clients = [ref.alias.owner for ref in current_scope().extracted.refs]
            await super().__call__(scope, receive, send)

    app, found = Looking(), []
    body = BODY.replace(b'"type": "image_url"', b'"uuid": "u", "type": "image_url"')
    for key in (b"Bearer one", b"bearer one", b"Bearer two", b""):
        await Exchange(app).run(body, headers=[*JSON, (b"authorization", key)])
        found += app.clients
    one, same, two, none = found
    assert one == same
    assert len({one, two, none}) == 3
    assert "one" not in one


@pytest.mark.parametrize("is_deaf", [False, True])
async def test_app_is_cancelled_when_the_client_leaves(is_deaf):
    """Its waits for what the request's scope has end too, should it go on."""

    class Waiting(App):
        async def __call__(self, scope, receive, send):
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                self.was_open = bool(current_scope().extracted.refs)
                if not is_deaf:
                    raise
            async with current_scope().connected():
                await asyncio.Event().wait()

    app = Waiting()
    async with asyncio.timeout(5):
        exchange = await Exchange(app).run(BODY, stays=False)
    assert app.was_open
    assert exchange.status == 408
    assert exchange.num_errors("client_disconnected") == 0


async def test_cancelled_request_of_a_client_that_stays_is_cancelled():
    class Waiting(App):
        async def __call__(self, scope, receive, send):
            asyncio.current_task().cancel()
            await asyncio.Event().wait()

    with pytest.raises(asyncio.CancelledError):
        await Exchange(Waiting()).run(BODY)


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ("No `x`. Valid aliases: <path>", "No `x`. Valid aliases: /srv/m."),
        (
            "No `x`. Valid aliases: <path>.",
            "No `x`. Valid aliases: /srv/m.",
        ),
        ("No `x`. Valid aliases: m.", "No `x`. Valid aliases: m."),
        ("cannot read <path>", "cannot read <path>"),
    ],
)
async def test_error_about_an_unknown_model_names_the_one_that_is_served(message, expected):
    """vLLM replaces all paths in its errors, the name of a model in a folder among them."""
    sent = []

    async def app(_scope, _receive, send):
        body = json.dumps({"error": {"message": message, "type": "NotFoundError", "param": "model", "code": 404}})
        await send({"type": "http.response.start", "status": 404, "headers": JSON})
        await send({"type": "http.response.body", "body": body.encode()})

    async def receive():
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(each):
        sent.append(each)

    middleware = ScopeMiddleware(app, Metrics(CollectorRegistry()), model="/srv/m")
    scope = {"type": "http", "method": "POST", "path": "/v1/chat/completions", "headers": [], "query_string": b""}
    await middleware(scope, receive, send)
    assert json.loads(sent[-1]["body"])["error"]["message"] == expected
    lengths = [value for name, value in sent[0]["headers"] if name == b"content-length"]
    assert lengths == [str(len(sent[-1]["body"])).encode()]
