"""Spans by OpenTelemetry's SDK, exported by OTLP from a thread of its own, as vLLM does it in the same cluster.

What the SDK reads from its environment holds here: sampler, limits of batches, headers, certificates, resource
attributes. The provider is not the process's global one: vLLM has decorators that use that.

Only the first span of a trace is started by the SDK, which decides whether it is sampled. Those below it are known
whole when they are made: to start and to end each of them there would take half of what tracing costs.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from medialane import __version__
from medialane.types.errors import StartupFailed

if TYPE_CHECKING:  # the SDK is loaded only if requests are traced
    from opentelemetry.context import Context
    from opentelemetry.sdk.trace.export import SpanExporter

#: vLLM reads no other for it, and the endpoint is the same.
PROTOCOL: Final = "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL"
SERVICE_NAME: Final = "OTEL_SERVICE_NAME"

#: Longer state of other vendors is not passed on: W3C's specification requires only this much.
_MAX_TRACESTATE_CHARACTERS = 512

#: How long spans that are left may be sent when the process stops.
_FLUSH_S = 2.0

Attributes = dict[str, Any]


class Tracing:
    """Makes the spans of one process. Off is no `Tracing` at all. The owner calls `close`."""

    def __init__(self, endpoint: str, environ: Mapping[str, str], *, service_name: str) -> None:
        """`service_name` is used unless `environ` has another one. Raises StartupFailed."""
        try:
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
            from opentelemetry.sdk.util.instrumentation import InstrumentationScope
        except ImportError as error:
            raise StartupFailed("--otlp-traces-endpoint needs the package opentelemetry-sdk") from error
        own = {} if environ.get(SERVICE_NAME) else {"service.name": service_name}
        self._provider = TracerProvider(resource=Resource.create(own), shutdown_on_exit=False)
        self._processor = BatchSpanProcessor(_exporter(endpoint, environ.get(PROTOCOL) or "grpc"))
        self._provider.add_span_processor(self._processor)
        self._make, self._scope = ReadableSpan, InstrumentationScope("medialane", __version__)
        self.tracer = self._provider.get_tracer("medialane", __version__)

    def child(self, parent: SpanContext) -> SpanContext:
        """Return the context of a span that will be added."""
        span_id = self._provider.id_generator.generate_span_id()
        return SpanContext(
            parent.trace_id, span_id, is_remote=False, trace_flags=parent.trace_flags, trace_state=parent.trace_state
        )

    def add(
        self,
        name: str,
        context: SpanContext,
        parent: SpanContext,
        times_ns: tuple[int, int],
        *,
        attributes: Attributes,
        kind: SpanKind = SpanKind.INTERNAL,
        error: str = "",
    ) -> None:
        """Add a span that has ended, below one that is sampled. `error` is the code with which it failed."""
        if error:
            attributes["error.type"] = error
        span = self._make(
            name,
            context,
            parent,
            self._provider.resource,
            attributes,
            kind=kind,
            status=error_status(error) if error else Status(),
            start_time=times_ns[0],
            end_time=times_ns[1],
            instrumentation_scope=self._scope,
        )
        self._processor.on_end(span)

    async def close(self) -> None:
        """Send what is left, for a limited time: a collector that is gone must not delay the stop."""
        loop, closed = asyncio.get_running_loop(), asyncio.Event()

        def shut_down() -> None:
            self._provider.shutdown()
            loop.call_soon_threadsafe(closed.set)

        threading.Thread(target=shut_down, name="tracing-shutdown", daemon=True).start()
        try:
            async with asyncio.timeout(_FLUSH_S):
                await closed.wait()
        except TimeoutError:
            return


def error_status(code: str) -> Status:
    return Status(StatusCode.ERROR, code)


def client_context(headers: Mapping[str, str]) -> Context | None:
    """Return the W3C trace context of a request's headers, if they have one."""
    if "traceparent" not in headers:
        return None
    short = {name: value for name, value in headers.items() if len(value) <= _MAX_TRACESTATE_CHARACTERS}
    return TraceContextTextMapPropagator().extract(short)


def context_headers(context: SpanContext) -> dict[str, str]:
    """Return the headers by which another process makes its spans children of the one with this context."""
    headers = {"traceparent": f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}"}
    if context.trace_state:
        headers["tracestate"] = context.trace_state.to_header()
    return headers


def _exporter(endpoint: str, protocol: str) -> SpanExporter:
    """Return what vLLM would use; but https is https, also by gRPC."""
    if protocol == "grpc":
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as GrpcExporter

        return GrpcExporter(endpoint=endpoint, insecure=not endpoint.startswith("https://"))
    if protocol == "http/protobuf":
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as HttpExporter

        return HttpExporter(endpoint=endpoint)
    raise StartupFailed(f"{PROTOCOL}={protocol}: must be grpc or http/protobuf")
