"""A collector of traces, as OpenTelemetry's exporters see one: OTLP over gRPC and over HTTP."""

import gzip
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as messages
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc as service


class ReceivedSpan:
    """`service` is the name of the process's service."""

    def __init__(self, span, service: str) -> None:
        self.name = span.name
        self.service = service
        self.kind = span.kind
        self.trace_id, self.span_id, self.parent_id = span.trace_id.hex(), span.span_id.hex(), span.parent_span_id.hex()
        self.start_ns, self.end_ns = span.start_time_unix_nano, span.end_time_unix_nano
        self.status = (span.status.code, span.status.message)
        self.attributes = {each.key: _value(each.value) for each in span.attributes}

    def __repr__(self) -> str:
        return f"{self.name} {self.attributes}"


class Collector:
    """`headers` are the last export's; spans are in the order of their arrival."""

    def __init__(self) -> None:
        self.spans: list[ReceivedSpan] = []
        self.headers: dict[str, str] = {}
        self.endpoint = ""

    def add(self, request: messages.ExportTraceServiceRequest, headers) -> None:
        self.headers = {name.lower(): value for name, value in headers}
        for resource in request.resource_spans:
            name = {each.key: _value(each.value) for each in resource.resource.attributes}.get("service.name", "")
            for scope in resource.scope_spans:
                self.spans += [ReceivedSpan(span, name) for span in scope.spans]

    def named(self, prefix: str) -> list[ReceivedSpan]:
        return [span for span in self.spans if span.name.startswith(prefix)]

    def children(self, parent: ReceivedSpan) -> list[ReceivedSpan]:
        """In the order of their start."""
        found = [span for span in self.spans if span.parent_id == parent.span_id]
        return sorted(found, key=lambda span: span.start_ns)

    def tree(self, root: ReceivedSpan) -> dict[str, list]:
        """Return the names below a span."""
        return {root.name: [self.tree(child) for child in self.children(root)]}


def _value(value) -> object:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_value(each) for each in value.array_value.values]
    return getattr(value, kind)


@contextmanager
def http_collector() -> Iterator[Collector]:
    collector = Collector()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            body = gzip.decompress(body) if self.headers["content-encoding"] == "gzip" else body
            collector.add(messages.ExportTraceServiceRequest.FromString(body), self.headers.items())
            self.send_response(200)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        collector.endpoint = f"http://127.0.0.1:{server.server_port}/v1/traces"
        yield collector
        server.shutdown()
        thread.join()


@contextmanager
def grpc_collector(host: str = "127.0.0.1") -> Iterator[Collector]:
    collector = Collector()

    class Servicer(service.TraceServiceServicer):
        def Export(self, request, context):  # noqa: N802 - gRPC's name
            collector.add(request, context.invocation_metadata())
            return messages.ExportTraceServiceResponse()

    server = grpc.server(ThreadPoolExecutor(2))
    service.add_TraceServiceServicer_to_server(Servicer(), server)
    port = server.add_insecure_port(f"{host}:0")
    server.start()
    collector.endpoint = f"http://{host}:{port}"
    try:
        yield collector
    finally:
        server.stop(None).wait(5)
