"""The id of a request in its response, and its line in the log, whatever ends it."""

import asyncio
import json
import logging
import re
from contextlib import suppress

import pytest
from prometheus_client import CollectorRegistry

from intakes import Intake
from medialane.gateway import ScopeMiddleware, current_scope
from medialane.observability import ACCESS_LOGGER, JsonFormatter, Metrics, PlainFormatter, request_id
from medialane.types.errors import NoWorkerReady

BODY = (
    b'{"model": "m", "messages": [{"role": "user", "content": [{"type": "text", "text": "a secret prompt"}, '
    b'{"type": "image_url", "image_url": {"url": "https://user:pw@host.example/a.png?signature=abc"}}]}], '
    b'"cache_salt": "salted"}'
)
JSON = (b"content-type", b"application/json")
STREAM = (b"content-type", b"text/event-stream")


@pytest.fixture(autouse=True)
def shown(caplog):
    caplog.set_level(logging.INFO, ACCESS_LOGGER)


class Exchange:
    """One request through the gateway's middleware. What is logged meanwhile is in `lines` as the log has it."""

    def __init__(self, app):
        self.sent, self.lines, self.texts = [], [], []
        self._intake = Intake(app)
        self._stack = ScopeMiddleware(self._intake, Metrics(CollectorRegistry()), logs_requests=True)
        self.gone = asyncio.Event()

    async def run(self, *, body=BODY, headers=(), path="/v1/chat/completions", method="POST"):
        messages = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive():
            if not messages:
                await self.gone.wait()
                return {"type": "http.disconnect"}
            return messages.pop(0)

        async def send(message):
            self.sent.append(message)

        class Log(logging.Handler):
            def emit(_self, record):  # noqa: N805 - of the exchange
                self.lines.append(json.loads(JsonFormatter("gateway").format(record)))
                self.texts.append(PlainFormatter().format(record))

        logger, log = logging.getLogger(ACCESS_LOGGER), Log()
        logger.addHandler(log)
        scope = {"type": "http", "method": method, "path": path, "headers": [JSON, *headers]}
        try:
            await self._stack(scope, receive, send)
        finally:
            logger.removeHandler(log)
            self._intake.close()
        return self

    @property
    def headers(self):
        return dict(self.sent[0]["headers"])

    @property
    def id(self):
        return self.headers[b"x-request-id"].decode()

    @property
    def json(self):
        return json.loads(self.sent[1]["body"])


def answering(status=200, body=b"{}", *headers):
    async def app(scope, receive, send):
        await receive()
        await send({"type": "http.response.start", "status": status, "headers": list(headers or [JSON])})
        await send({"type": "http.response.body", "body": body})

    return app


async def failing(_scope, _receive, _send):
    raise ZeroDivisionError


async def without_worker(_scope, _receive, _send):
    error = NoWorkerReady("no worker for https://a.example/?key=1")
    current_scope().fail(error)
    raise error


async def streaming_for_ever(_scope, receive, send):
    await receive()
    await send({"type": "http.response.start", "status": 200, "headers": [STREAM]})
    await send({"type": "http.response.body", "body": b"data: {}\n\n", "more_body": True})
    while (await receive())["type"] != "http.disconnect":
        pass


ENDS = {
    "an answer": (answering(), 200, None),
    "a stream": (answering(200, b"data: [DONE]\n\n", STREAM), 200, None),
    "an error of vLLM": (answering(400, b'{"error": {"message": "no", "code": 400}}'), 400, "400"),
    "an error of ours": (without_worker, 503, "no_worker_ready"),
    "a path without a route": (answering(404, b'{"detail": "Not Found"}'), 404, "404"),
    "an exception": (failing, 500, "500"),
    "a client that has gone": (streaming_for_ever, 200, "client_disconnected"),
}


@pytest.mark.parametrize("name", ENDS)
async def test_each_kind_of_end_has_one_line(name):
    app, status, error = ENDS[name]
    exchange = Exchange(app)
    if app is streaming_for_ever:
        asyncio.get_running_loop().call_later(0.05, exchange.gone.set)
    with suppress(ZeroDivisionError):
        await exchange.run(headers=[(b"x-request-id", b"mine-1")])
    (line,) = exchange.lines
    assert (line["status"], line.get("error"), line["request_id"]) == (status, error, "mine-1")
    assert (line["method"], line["path"], line["model"], line["logger"]) == (
        "POST",
        "/v1/chat/completions",
        "m",
        "medialane.access",
    )
    assert line["items"][0]["modality"] == "image"
    assert line["total_ms"] > 0
    assert line["stages_ms"].keys() >= {"upload", "intake"}
    assert request_id.get() == ""


async def test_cancelled_request_has_one_line():
    entered = asyncio.Event()

    async def waiting(_scope, _receive, _send):
        entered.set()
        await asyncio.Event().wait()

    exchange = Exchange(waiting)
    task = asyncio.create_task(exchange.run())
    await entered.wait()
    task.cancel()
    await asyncio.wait([task])
    assert len(exchange.lines) == 1


async def test_line_has_no_prompt_key_salt_or_url():
    for app in (answering(), without_worker, failing):
        exchange = Exchange(app)
        with suppress(ZeroDivisionError):
            await exchange.run(headers=[(b"authorization", b"Bearer the-key")], path="/v1/x\n2026 ERROR forged: line")
        written = json.dumps(exchange.lines) + "".join(exchange.texts)
        for secret in ("a secret prompt", "the-key", "salted", "signature", "a.png", "key=1"):
            assert secret not in written
        assert "\n" not in exchange.texts[0]


async def test_line_of_text():
    exchange = await Exchange(without_worker).run(headers=[(b"x-request-id", b"mine-1")])
    (line,) = exchange.texts
    assert re.search(
        r" INFO medialane\.access \[mine-1\]: POST /v1/chat/completions 503 error=no_worker_ready "
        r"reason='no worker for https://a\.example/\.\.\.' model=m stream=no num_items=1 items=image:none total_ms=",
        line,
    )


@pytest.mark.parametrize(
    ("given", "found"),
    [
        (b"00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01", "0af7651916cd43dd8448eb211c80319c"),
        (b"00-" + b"0" * 32 + b"-b7ad6b7169203331-01", None),
        (b"00-zz", None),
    ],
)
async def test_line_has_the_clients_trace(given, found):
    exchange = await Exchange(answering()).run(headers=[(b"traceparent", given)])
    assert exchange.lines[0].get("trace_id") == found


@pytest.mark.parametrize("path", ["/health", "/metrics"])
async def test_probes_have_no_line(path):
    async def app(scope, receive, send):
        current_scope().record.path = path
        await answering()(scope, receive, send)

    assert (await Exchange(app).run(method="GET", path=path)).lines == []


@pytest.mark.parametrize("given", [b"", b"a b", b"x" * 129, b"a\xe9", b'"', b"a]\tb"])
async def test_unusable_id_is_replaced_by_one_of_ours(given):
    seen = []

    async def app(scope, receive, send):
        seen.append([value for name, value in scope["headers"] if name == b"x-request-id"])
        await answering()(scope, receive, send)

    exchange = await Exchange(app).run(headers=[(b"x-request-id", given)])
    assert re.fullmatch("[0-9a-f]{32}", exchange.id)
    assert seen == [[exchange.id.encode()]], "vLLM's app makes its ids of it"


async def test_id_in_the_body_is_left_to_vllm():
    seen = []

    async def app(scope, receive, send):
        seen.extend(name for name, _ in scope["headers"])
        await answering()(scope, receive, send)

    exchange = await Exchange(app).run(body=b'{"request_id": "theirs", "prompt": "x"}')
    assert b"x-request-id" not in seen
    assert exchange.id == exchange.lines[0]["request_id"]


@pytest.mark.parametrize(
    "body", [b'{"prompt": "x", "tools": [{"request_id": 1}]}', b'{"request_id": null}', b'{"prompt": ["request_id"]}']
)
async def test_other_mention_of_an_id_leaves_the_request_its_own(body):
    seen = []

    async def app(scope, receive, send):
        seen.extend(value for name, value in scope["headers"] if name == b"x-request-id")
        await answering()(scope, receive, send)

    exchange = await Exchange(app).run(body=body)
    assert seen == [exchange.id.encode()]


@pytest.mark.parametrize(
    ("body", "where"),
    [
        (b'{"error": {"message": "m", "type": "t", "param": null, "code": 400}}', ("error", "request_id")),
        (b'{"type": "error", "error": {"type": "t", "message": "m"}}', ("request_id",)),
        (b'{"error": "Unauthorized"}', ("request_id",)),
        (b'{"detail": "Not Found"}', ("request_id",)),
        (b'{"message": "m", "code": "c"}', ("request_id",)),
    ],
)
async def test_body_of_an_error_has_the_id(body, where):
    exchange = await Exchange(answering(400, body, JSON, (b"content-length", b"%d" % len(body)))).run()
    found = exchange.json
    for name in where:
        found = found[name]
    assert found == exchange.id
    assert exchange.headers[b"content-length"] == b"%d" % len(exchange.sent[1]["body"])


@pytest.mark.parametrize("body", [b'{"problems": ["no worker"]}', b"[1]", b"{", b""])
async def test_what_is_no_error_document_is_unchanged(body):
    exchange = await Exchange(answering(503, body)).run()
    assert exchange.sent[1]["body"] == body
    assert exchange.id


async def test_error_of_a_stream_has_the_id():
    async def app(_scope, _receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": [STREAM]})
        await send({"type": "http.response.body", "body": b"data: {}\n\n", "more_body": True})
        current_scope().fail(NoWorkerReady("lost"))
        raise ZeroDivisionError

    exchange = await Exchange(app).run()
    assert json.loads(exchange.sent[-1]["body"].removeprefix(b"data: "))["error"]["request_id"] == exchange.id


@pytest.mark.parametrize(("value", "is_wanted"), [(b"true", True), (b"1", True), (b"false", False), (b"0", False)])
async def test_header_asks_for_a_report(value, is_wanted):
    exchange = await Exchange(answering()).run(headers=[(b"x-medialane-report", value)])
    assert ("medialane" in exchange.json) == is_wanted
    if is_wanted:
        assert exchange.json["medialane"]["request_id"] == exchange.id


async def test_wrong_value_of_the_reports_header_is_refused():
    exchange = await Exchange(answering()).run(headers=[(b"x-medialane-report", b"please")])
    assert exchange.json["error"]["message"] == "x-medialane-report must be true or false"
