"""The spans of requests through a gateway and its workers, as a collector receives them."""

from __future__ import annotations

import asyncio
import tempfile
import threading
import time
from contextlib import AsyncExitStack, aclosing

import pytest
from gateway_parts import FakeWorker, Parts, png, prompt, request

from fake_engine import FakeContinuable, FakeEngine
from medialane.gateway import RequestTracing, ScopeMiddleware, current_scope
from medialane.gateway.records.trace import client_context
from medialane.types.errors import InvalidRequest, NoWorkerReady, StartupFailed
from otlp_collector import grpc_collector, http_collector
from waiting import eventually

PROTOCOL = "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL"
CHAT = "/v1/chat/completions"
TRACE_ID, SPAN_ID = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
CLIENT = f"00-{TRACE_ID}-{SPAN_ID}-01"
ERROR = 2


@pytest.fixture(params=["grpc", "http/protobuf"])
def protocol(request):
    return request.param


@pytest.fixture
def collector():
    with http_collector() as collector:
        yield collector


class RecordingEngine(FakeEngine):
    """Keeps the trace context of each request."""

    def __init__(self, **settings):
        super().__init__(**settings)
        self.contexts = []

    def generate(self, request, *rest):
        self.contexts.append((request.trace_headers or {}).get("traceparent"))
        return super().generate(request, *rest)


@pytest.fixture
async def workers(arena):
    async with AsyncExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(dir="/tmp"))
        workers = [FakeWorker(f"{folder}/{number}.sock", arena=arena, kind=RecordingEngine) for number in range(2)]
        for worker in workers:
            stack.push_async_callback(worker.close)
            await worker.start()
        yield workers


@pytest.fixture
async def parts(arena, preparers, workers):
    async with Parts(arena, preparers, workers) as parts:
        yield parts


class Traced:
    """Requests through the outermost middleware of a gateway; the spans are with the collector after the block."""

    def __init__(self, parts, collector, protocol="http/protobuf"):
        self._parts = parts
        self._tracing = RequestTracing(collector.endpoint, {PROTOCOL: protocol}, model="tiny")

    async def __aenter__(self):
        return self

    async def __aexit__(self, *_):
        await self._tracing.close()

    async def send(self, work, *media, context=None, path=CHAT, status=200, method="POST"):
        """Have the app do `work` for a request with these media, and respond with `status`."""

        async def app(scope, receive, send):
            current_scope().record.path = (
                path if path in (CHAT, "/tokenize") else ""
            )  # that of the route, if any has it
            current_scope().record.received(prompt(*media).items, model="tiny", streams=False)
            try:
                await work()
            finally:
                await send({"type": "http.response.start", "status": status, "headers": []})
                await send({"type": "http.response.body", "body": b""})

        async def ignore(message):
            pass

        middleware = ScopeMiddleware(app, self._parts.metrics, tracing=self._tracing)
        headers = [] if context is None else [(b"traceparent", context.encode())]
        await middleware({"type": "http", "method": method, "path": path, "headers": headers}, None, ignore)

    async def answer(self, *media, **sent):
        await self.send(lambda: self._parts.answer(prompt(*media), max_tokens=5), *media, **sent)


async def test_an_image_request_is_one_tree_below_the_span_of_its_client(parts, workers, protocol):
    with grpc_collector() if protocol == "grpc" else http_collector() as collector:
        async with Traced(parts, collector, protocol) as traced:
            await traced.answer(png(seed=1), context=CLIENT)
    (root,), (attempt,) = collector.named("chat tiny"), collector.named("medialane.attempt")
    assert {TRACE_ID} == {span.trace_id for span in collector.spans}
    assert (root.parent_id, root.kind, root.service) == (SPAN_ID, 2, "medialane-gateway")
    assert collector.tree(root)["chat tiny"] == [
        {"medialane.store": []},
        {"medialane.item": [{f"medialane.{step}": []} for step in ("fetch", "fetch", "decode", "process")]},
        {"medialane.assemble": []},
        {"medialane.route": []},
        {"medialane.attempt": [{"medialane.handover": []}]},
    ]
    for span in collector.spans:
        parents = [each for each in collector.spans if each.span_id == span.parent_id]
        assert all(each.start_ns <= span.start_ns <= span.end_ns <= each.end_ns for each in parents)
    # The worker's span becomes a child of the attempt, not of the client's.
    contexts = [context for worker in workers for context in worker.engine.contexts]
    assert contexts == [f"00-{TRACE_ID}-{attempt.span_id}-01"]


async def test_attributes_say_what_was_done_and_nothing_of_the_content(parts, collector):
    image = png(seed=2)
    async with Traced(parts, collector) as traced:
        await traced.answer(image)
        await traced.answer(image)
    items, roots = collector.named("medialane.item"), collector.named("chat tiny")
    outcomes = [item.attributes.pop("medialane.item.outcome") for item in items]
    assert sorted(outcomes) == ["hit", "new"]
    for item in items:
        assert len(item.attributes.pop("medialane.item.hash")) == 8
        assert item.attributes.pop("medialane.item.tokens") > 0
        assert item.attributes == {
            "mm.modality": "image",
            "medialane.item.source": "body",
            "medialane.item.bytes": len(image),
        }
    for root in roots:
        attributes = root.attributes
        assert attributes["gen_ai.usage.output_tokens"] == attributes["gen_ai.usage.completion_tokens"] == 5
        assert attributes["gen_ai.usage.input_tokens"] == attributes["gen_ai.usage.prompt_tokens"] > 0
        assert attributes["gen_ai.latency.e2e"] >= attributes["gen_ai.response.time_to_first_chunk"] > 0
        assert (attributes["gen_ai.operation.name"], attributes["gen_ai.request.model"]) == ("chat", "tiny")
        assert root.status == (0, "")
    routes = [route.attributes for route in collector.named("medialane.route")]
    predicted = [route["medialane.routing.cached_tokens"] for route in routes]
    assert predicted == [route["medialane.routing.engine_cached_tokens"] for route in routes]
    assert all(route["medialane.routing.cost_ms"] >= 0 for route in routes)
    assert routes[0]["medialane.routing.worker"] in {worker.address for worker in parts.workers}


async def test_an_attempt_after_a_lost_worker_is_a_span_beside_the_one_before(parts, workers, collector):
    async def lose_one():
        wanted = request("r", [1, 2, 3], max_tokens=12, token_s=0.02)
        deltas = parts.gateway.generate(wanted, None, FakeContinuable(wanted.sampling_params))
        num_tokens = 0
        async with aclosing(deltas):
            async for _ in deltas:
                num_tokens += 1
                if num_tokens == 4:
                    next(worker for worker in workers if worker.engine.num_reading).drop_connections()

    async with Traced(parts, collector) as traced:
        await traced.send(lose_one)
    (root,), (first, second) = collector.named("chat tiny"), collector.children(collector.named("chat tiny")[0])[1::2]
    assert (first.name, second.name) == ("medialane.attempt", "medialane.attempt")
    assert (first.status, first.attributes["error.type"]) == ((ERROR, "worker_lost"), "worker_lost")
    assert second.status == (0, "")
    assert first.attributes["medialane.worker"] != second.attributes["medialane.worker"]
    assert (root.status, root.attributes["gen_ai.usage.output_tokens"]) == ((0, ""), 12)


async def test_a_failure_has_its_code_as_the_status_of_its_spans(parts, collector):
    async def refused():
        current_scope().fail(NoWorkerReady("no worker is ready"))

    async with Traced(parts, collector) as traced:
        with pytest.raises(InvalidRequest):
            await traced.answer(b"not an image", status=400)
        await traced.send(refused, status=503)
    (item,) = collector.named("medialane.item")
    assert item.status == (ERROR, item.attributes["error.type"])
    ends = {span.attributes["http.response.status_code"]: span.status for span in collector.named("chat tiny")}
    assert ends == {400: (ERROR, "400"), 503: (ERROR, "no_worker_ready")}


async def test_probes_and_scrapes_make_no_spans_and_paths_without_a_route_name_none(parts, collector):
    async def nothing():
        pass

    async with Traced(parts, collector) as traced:
        for method, path in (("GET", "/health"), ("GET", "/metrics"), ("POST", "/ping"), ("GET", CHAT)):
            await traced.send(nothing, method=method, path=path)
        await traced.send(nothing, path="/whatever/a/client/asks")
        await traced.send(nothing, path="/tokenize")
    assert sorted(span.name for span in collector.spans) == ["POST", "POST /tokenize"]


async def test_a_request_that_is_refused_makes_no_span(parts, collector):
    async def refuse():
        current_scope().is_refused = True

    async with Traced(parts, collector) as traced:
        await traced.send(refuse, status=401, context=CLIENT)
    assert not collector.spans


def test_long_state_of_other_vendors_is_not_parsed():
    started = time.thread_time()
    context = client_context({"traceparent": CLIENT, "tracestate": " " * 60_000})
    assert time.thread_time() - started < 0.1
    assert context is not None


@pytest.mark.parametrize("context", [None, f"{CLIENT[:-1]}0"])
async def test_what_is_not_sampled_is_not_sampled_by_workers_either(parts, workers, collector, monkeypatch, context):
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "parentbased_traceidratio")
    monkeypatch.setenv("OTEL_TRACES_SAMPLER_ARG", "0")
    async with Traced(parts, collector) as traced:
        await traced.answer(context=context)
        await traced.answer(context=CLIENT)
    assert {span.trace_id for span in collector.spans} == {TRACE_ID}
    contexts = [seen for worker in workers for seen in worker.engine.contexts]
    sampled = {seen for seen in contexts if int(seen[-2:], 16) & 1}
    assert (len(contexts), {seen.split("-")[1] for seen in sampled}) == (2, {TRACE_ID})
    assert len(sampled) == 1


async def test_headers_and_name_of_the_service_are_those_of_the_environment(parts, collector, monkeypatch):
    monkeypatch.setenv("OTEL_SERVICE_NAME", "front")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_HEADERS", "x-team=vision")
    environ = {PROTOCOL: "http/protobuf", "OTEL_SERVICE_NAME": "front"}
    tracing = RequestTracing(collector.endpoint, environ, model="tiny")
    tracing.tracer.start_span("one").end()
    await tracing.close()
    assert [span.service for span in collector.spans] == ["front"]
    assert collector.headers["x-team"] == "vision"


async def test_a_collector_that_is_gone_does_not_delay_the_stop(monkeypatch):
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_TIMEOUT", "3")
    tracing = RequestTracing("http://127.0.0.1:9", {}, model="tiny")
    tracing.tracer.start_span("one").end()
    async with asyncio.timeout(2.8):
        await tracing.close()
    await eventually(lambda: not any(thread.name == "tracing-shutdown" for thread in threading.enumerate()))


def test_unknown_protocols_are_refused():
    with pytest.raises(StartupFailed, match="http/json"):
        RequestTracing("http://127.0.0.1:9", {PROTOCOL: "http/json"}, model="tiny")
