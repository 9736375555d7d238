"""Spans by OpenTelemetry's SDK, exported by OTLP from a thread of its own, as vLLM does it in the same cluster.

What the SDK reads from its environment variables holds here: sampler, limits of spans and of batches, headers,
certificates, resource attributes. The tracer is not the process's global one: vLLM has decorators that use that.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from medialane import __version__
from medialane.core.errors import StartupFailed

if TYPE_CHECKING:  # the SDK is loaded only if requests are traced
    from opentelemetry.context import Context
    from opentelemetry.sdk.trace.export import SpanExporter

#: vLLM reads no other for it, and the endpoint is the same.
PROTOCOL: Final = "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL"
SERVICE_NAME: Final = "OTEL_SERVICE_NAME"

#: How long spans that are left may be sent when the process stops.
_FLUSH_S = 2.0

_CONTEXT = TraceContextTextMapPropagator()


class Tracing:
    """Makes the spans of one process. Off is no `Tracing` at all. The owner calls `close`."""

    def __init__(self, endpoint: str, environ: Mapping[str, str], *, service_name: str) -> None:
        """`service_name` is used unless `environ` has another one. Raises StartupFailed."""
        try:
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
        except ImportError as error:
            raise StartupFailed("--otlp-traces-endpoint needs the package opentelemetry-sdk") from error
        own = {} if environ.get(SERVICE_NAME) else {"service.name": service_name}
        self._provider = TracerProvider(resource=Resource.create(own), shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(_exporter(endpoint, environ.get(PROTOCOL) or "grpc")))
        self.tracer = self._provider.get_tracer("medialane", __version__)

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


def client_context(headers: Mapping[str, str]) -> Context | None:
    """Return the W3C trace context of a request's headers, if they have one."""
    return _CONTEXT.extract(headers) if "traceparent" in headers else None


def context_headers(context: Context) -> dict[str, str]:
    """Return the headers by which another process makes its spans children of the current one of `context`."""
    headers: dict[str, str] = {}
    _CONTEXT.inject(headers, context)
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
