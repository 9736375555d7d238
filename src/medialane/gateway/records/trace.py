"""The trace of one request: a tree of spans, made of its record when it has ended. They are exported by OpenTelemetry's
SDK, by OTLP from a thread of its own, as vLLM does it in the same cluster.

    chat {model}                    SERVER; its parent is the client's span
      medialane.upload, .intake, .open
      medialane.item                one per media item
        medialane.fetch, .decode, .process, .encode
      medialane.admission, .assemble, .route
      medialane.attempt             CLIENT; one per worker and hand-over path that was tried
        medialane.handover
        llm_request                 the worker's own, by vLLM

Only the root and the attempts exist earlier: workers get the context of the attempt, so that their spans are its
children. Nothing of a request's content is in attributes: no prompts, URLs or salts, and of hashes eight digits.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from medialane import __version__
from medialane.gateway.records.record import HASH_DIGITS, ItemRecord, RequestRecord
from medialane.observability.timeline import Step
from medialane.routing import RoutedRequest
from medialane.types.errors import MedialaneError, StartupFailed
from medialane.types.request import EngineRequest, OutputDelta

if TYPE_CHECKING:  # the SDK is loaded only if requests are traced
    from opentelemetry.context import Context
    from opentelemetry.sdk.trace.export import SpanExporter

    from medialane.gateway.request.handover_paths import HandoverPath

#: vLLM reads no other for it, and the endpoint is the same.
PROTOCOL: Final = "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL"
SERVICE_NAME: Final = "OTEL_SERVICE_NAME"

#: Longer state of other vendors is not passed on: W3C's specification requires only this much.
_MAX_TRACESTATE_CHARACTERS = 512

#: How long spans that are left may be sent when the process stops.
_FLUSH_S = 2.0

Attributes = dict[str, Any]

#: The operation of GenAI's semantic conventions, by path. Others are named by method and route: a client chooses the
#: path.
_OPERATIONS: Final = {
    "/v1/chat/completions": "chat",
    "/v1/chat/completions/batch": "chat",
    "/v1/messages": "chat",
    "/v1/responses": "chat",
    "/v1/completions": "text_completion",
    "/inference/v1/generate": "text_completion",
    "/v1/embeddings": "embeddings",
}
_NOT_TRACED: Final = frozenset({"/health", "/ping", "/metrics"})
_METHODS: Final = frozenset({"POST", "PUT"})
_TRACE_HEADERS: Final = frozenset({b"traceparent", b"tracestate"})

#: Attempts that have a span: a beam search makes one for each token.
_MAX_ATTEMPTS = 32

_ROUTING: Final = ("policy", "reason", "rank", "num_tokens", "cached_tokens", "expected_ms")


class RequestTracing:
    """Makes the spans of a gateway's requests; `model` is the name under which the model is served. Off is no
    `RequestTracing` at all. The owner calls `close`.

    What the SDK reads from its environment holds here: sampler, limits of batches, headers, certificates, resource
    attributes. The provider is not the process's global one: vLLM has decorators that use that.

    Only the first span of a trace is started by the SDK, which decides whether it is sampled. Those below it are known
    whole when they are made: to start and to end each of them there would take half of what tracing costs.
    """

    def __init__(self, endpoint: str, environ: Mapping[str, str], *, model: str) -> None:
        """Raises StartupFailed."""
        self.model = model
        try:
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
            from opentelemetry.sdk.util.instrumentation import InstrumentationScope
        except ImportError as error:
            raise StartupFailed("--otlp-traces-endpoint needs the package opentelemetry-sdk") from error
        own = {} if environ.get(SERVICE_NAME) else {"service.name": "medialane-gateway"}
        self._provider = TracerProvider(resource=Resource.create(own), shutdown_on_exit=False)
        self._processor = BatchSpanProcessor(_exporter(endpoint, environ.get(PROTOCOL) or "grpc"))
        self._provider.add_span_processor(self._processor)
        self._make, self._scope = ReadableSpan, InstrumentationScope("medialane", __version__)
        self.tracer = self._provider.get_tracer("medialane", __version__)

    def begin(self, scope: Mapping[str, Any], record: RequestRecord) -> RequestTrace | None:
        """Begin the trace of an HTTP request (an ASGI scope); None if such requests have none."""
        path: str = scope["path"].removeprefix(scope.get("root_path", "").rstrip("/"))
        if scope["method"] not in _METHODS or path in _NOT_TRACED:
            return None
        return RequestTrace(self, scope, _OPERATIONS.get(path), record)

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
            status=Status(StatusCode.ERROR, error) if error else Status(),
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


class AttemptTrace:
    """One request to one worker. `headers` make its spans children of this one."""

    def __init__(self, context: SpanContext) -> None:
        self.context = context
        self.headers = context_headers(context)
        self.finish_reasons: list[str] = []

    def note_output(self, delta: OutputDelta) -> None:
        for completion in delta.completions:
            if completion.finish_reason is not None:
                self.finish_reasons.append(completion.finish_reason)


class RequestTrace:
    """Begun and ended by the outermost middleware. `headers` make the spans of other processes children of the root."""

    def __init__(
        self, tracing: RequestTracing, scope: Mapping[str, Any], operation: str | None, record: RequestRecord
    ) -> None:
        self._tracing = tracing
        self._model = tracing.model
        self._method, self._operation = scope["method"], operation
        self._record = record
        #: What is measured is added to the time at the start: steps of the clock move no span.
        self._epoch_ns = time.time_ns() - int(time.perf_counter() * 1e9)
        given = {k.decode("latin-1"): v.decode("latin-1") for k, v in scope["headers"] if k in _TRACE_HEADERS}
        self._root = self._tracing.tracer.start_span(
            self._name, client_context(given), SpanKind.SERVER, start_time=self._ns(record.timeline.started_at)
        )
        self._context = self._root.get_span_context()
        self._is_sampled = self._root.is_recording() and self._context.trace_flags.sampled
        self.headers = context_headers(self._context)
        self._attempts: list[AttemptTrace] = []

    @property
    def trace_id(self) -> str:
        """The id of the trace as in W3C's headers."""
        return f"{self._context.trace_id:032x}"

    @property
    def _name(self) -> str:
        if self._operation is None:
            return f"{self._method} {self._record.path}".rstrip()
        return f"{self._operation} {self._model}"

    @contextmanager
    def attempt(self, request: EngineRequest, worker: str, path: HandoverPath | None) -> Iterator[AttemptTrace | None]:
        """Trace what the block sends to a worker; None if that has no span of its own."""
        self._model = request.lora_name or self._model
        if not self._is_sampled or len(self._attempts) == _MAX_ATTEMPTS:
            yield None
            return
        attempt, started_at, code = AttemptTrace(self._tracing.child(self._context)), self._now, ""
        self._attempts.append(attempt)
        attributes: Attributes = {"medialane.worker": worker, "gen_ai.request.id": request.request_id}
        if path is not None:
            attributes |= {"medialane.stage": path.stage.name, "medialane.transport": path.transport.name}
        try:
            yield attempt
        except MedialaneError as error:
            code = error.code
            raise
        finally:
            self._tracing.add(
                "medialane.attempt",
                attempt.context,
                self._context,
                (started_at, self._now),
                attributes=attributes,
                kind=SpanKind.CLIENT,
                error=code,
            )

    def end(self) -> None:
        """Make all other spans of the record, which has ended, and end the root."""
        root, record = self._root, self._record
        if self._is_sampled:
            for step in record.timeline.steps:
                parent = step.detail.context if isinstance(step.detail, AttemptTrace) else self._context
                self._step(step, parent, self._routing(step))
            for item in record.items.values():
                if item.ended_at:
                    self._item(item)
            root.update_name(self._name)
            root.set_attributes(self._attributes() | self._usage())
            if record.error is not None:
                root.set_attribute("error.type", record.error.code)
                root.set_status(Status(StatusCode.ERROR, record.error.code))
        for step in record.timeline.steps:
            step.detail = None  # the record is kept for longer
        root.end(self._now)

    def _item(self, item: ItemRecord) -> None:
        context = self._tracing.child(self._context)
        for step in item.timeline.steps:
            self._step(step, context, {})
        times_ns = self._ns(item.started_at), self._ns(item.ended_at)
        attributes = _item_attributes(item)
        self._tracing.add("medialane.item", context, self._context, times_ns, attributes=attributes, error=item.error)

    def _step(self, step: Step, parent: SpanContext, attributes: Attributes) -> None:
        times_ns = self._ns(step.started_at), self._ns(step.started_at + step.seconds)
        context = self._tracing.child(parent)
        self._tracing.add(f"medialane.{step.name}", context, parent, times_ns, attributes=attributes)

    def _routing(self, step: Step) -> Attributes:
        """Return the attributes of the choice of a worker, if the step is one that was used."""
        routed = step.detail
        if not isinstance(routed, RoutedRequest) or not routed.has_begun:
            return {}
        decision = routed.decision
        attributes: Attributes = {f"medialane.routing.{name}": getattr(decision, name) for name in _ROUTING}
        attributes |= {
            "medialane.routing.worker": decision.worker_id,
            "medialane.routing.cost_ms": decision.parts.total,
        }
        for attempt in self._record.attempts:
            if attempt.decision is decision and attempt.engine_cached_tokens is not None:
                attributes["medialane.routing.engine_cached_tokens"] = attempt.engine_cached_tokens
        return attributes

    def _attributes(self) -> Attributes:
        record = self._record
        attributes: Attributes = {
            "http.request.method": self._method,
            "medialane.request.id": record.id,
            "medialane.cache": record.timeline.cache,
            "medialane.num_items": record.num_items,
        }
        attributes |= {"http.route": record.path} if record.path else {}
        if record.prefill is not None:
            attributes["medialane.prefill.outcome"] = record.prefill.outcome
            attributes["medialane.prefill.transferred_tokens"] = record.prefill.transferred_tokens
        attributes |= {} if record.status is None else {"http.response.status_code": record.status}
        if self._operation is not None:
            attributes |= {
                "gen_ai.operation.name": self._operation,
                "gen_ai.provider.name": "vllm",
                "gen_ai.request.model": record.model or self._model,
                "gen_ai.request.stream": bool(record.streams),
                "gen_ai.response.model": self._model,
            }
        return attributes

    def _usage(self) -> Attributes:
        """Return tokens and times, by the names of the conventions and by vLLM's older ones."""
        record, seconds = self._record, self._record.timeline.durations()
        usage: Attributes = {"gen_ai.latency.e2e": record.total_ms / 1000}
        usage |= {"gen_ai.latency.time_in_queue": seconds["queue"]} if "queue" in seconds else {}
        usage |= {"gen_ai.latency.time_in_model_prefill": seconds["prefill"]} if "prefill" in seconds else {}
        if record.first_token_at is None:
            return usage
        ttft_s, num_prompt, num_output = (record.ttft_ms or 0) / 1000, record.prompt_tokens, record.generated_tokens
        usage |= {
            "gen_ai.response.time_to_first_chunk": ttft_s,
            "gen_ai.latency.time_to_first_token": ttft_s,
            "gen_ai.usage.input_tokens": num_prompt,
            "gen_ai.usage.prompt_tokens": num_prompt,
            "gen_ai.usage.output_tokens": num_output,
            "gen_ai.usage.completion_tokens": num_output,
            "gen_ai.response.finish_reasons": [reason for each in self._attempts for reason in each.finish_reasons],
        }
        if record.cached_tokens is not None:
            usage["gen_ai.usage.cache_read.input_tokens"] = record.cached_tokens
        return usage

    @property
    def _now(self) -> int:
        return self._ns(time.perf_counter())

    def _ns(self, at: float) -> int:
        return self._epoch_ns + int(at * 1e9)


def _item_attributes(item: ItemRecord) -> Attributes:
    attributes = {
        "medialane.item.source": item.source,
        "medialane.item.outcome": item.outcome,
        "medialane.item.hash": item.mm_hash[:HASH_DIGITS],
        "medialane.item.bytes": item.num_bytes,
        "medialane.item.tokens": item.num_tokens,
        "medialane.item.embedding": item.embedding,
    }
    return {"mm.modality": item.modality} | {name: value for name, value in attributes.items() if value}


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
