"""The spans of requests through a gateway and its workers, as a collector receives them."""

from __future__ import annotations

import pytest
from gateway_parts import FakeWorker, Parts, png, prompt

from medialane.core.errors import InvalidImage
from medialane.gateway import ScopeMiddleware, current_scope
from medialane.gateway.trace import RequestTracing
from medialane.observability.tracing import Tracing
from otlp_collector import grpc_collector, http_collector

CLIENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
NOT_SAMPLED = CLIENT[:-2] + "00"


@pytest.fixture(params=["grpc", "http/protobuf"])
def protocol(request):
    return request.param


@pytest.fixture
def collector(protocol):
    with grpc_collector() if protocol == "grpc" else http_collector() as collector:
        yield collector


class Traced:
    """Requests through the outermost middleware of a gateway. `close` sends what is left to the collector."""

    def __init__(self, parts, collector, protocol="http/protobuf", **environ):
        self.parts = parts
        environ = {"OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": protocol} | environ
        self._tracing = Tracing(collector.endpoint, environ, service_name="medialane-gateway")

    async def request(self, work, *, traceparent=None, path="/v1/chat/completions", status=200, method="POST"):
        async def app(scope, receive, send):
            try:
                self.result = await work(current_scope())
            finally:
                await send({"type": "http.response.start", "status": status, "headers": []})
                await send({"type": "http.response.body", "body": b""})

        async def send(message):
            pass

        middleware = ScopeMiddleware(app, self.parts.metrics, tracing=RequestTracing(self._tracing, "tiny"))
        headers = [] if traceparent is None else [(b"traceparent", traceparent.encode())]
        await middleware({"type": "http", "method": method, "path": path, "headers": headers}, None, send)
        return self.result

    async def close(self):
        await self._tracing.close()


async def test_an_image_request_is_one_tree_below_the_clients_span(arena, preparers, worker, collector, protocol):
    async with Parts(arena, preparers, [worker]) as parts:
        traced = Traced(parts, collector, protocol)
        await traced.request(lambda _: parts.answer(prompt(png(seed=1)), max_tokens=5), traceparent=CLIENT)
        await traced.close()
    (root,) = collector.named("chat tiny")
    assert {root.trace_id} == {span.trace_id for span in collector.spans} == {CLIENT.split("-")[1]}
    assert (root.parent_id, root.kind, root.service) == (CLIENT.split("-")[2], 2, "medialane-gateway")
    assert collector.tree(root)["chat tiny"] == [
        {"medialane.item": [{f"medialane.{step}": []} for step in ("fetch", "fetch", "decode", "process")]},
        {"medialane.assemble": []},
        {"medialane.route": []},
        {"medialane.attempt": [{"medialane.handover": []}]},
    ]
    for span in collector.spans:
        parents = [each for each in collector.spans if each.span_id == span.parent_id]
        assert all(each.start_ns <= span.start_ns <= span.end_ns <= each.end_ns for each in parents)
