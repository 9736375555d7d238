"""The trace of one request: a tree of spans, made when the request has ended, of what was measured anyway.

    chat {model}                    SERVER; its parent is the client's span
      medialane.intake
      medialane.item                one per media item
        medialane.fetch, .decode, .process, .encode
      medialane.admission, .assemble, .route
      medialane.attempt             CLIENT; one per worker and transfer path that was tried, linked to the one before
        medialane.handover
        llm_request                 the worker's own, by vLLM

Only the root and the attempts exist earlier: workers get the context of the attempt, so that their spans are its
children. Nothing of a request's content is in attributes: no prompts, URLs or salts, and of hashes eight digits.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

from opentelemetry.trace import Link, Status, StatusCode, set_span_in_context

from medialane.core.errors import MedialaneError
from medialane.core.request import EngineRequest, OutputDelta
from medialane.observability.timeline import ItemTimeline, StageTimeline, Step
from medialane.observability.tracing import Span, SpanKind, Tracing, client_context, context_headers
from medialane.routing import RoutedRequest

if TYPE_CHECKING:
    from opentelemetry.context import Context

    from medialane.gateway.transports import TransferPath

#: The operation of GenAI's semantic conventions, by path. Others are named by method and path, those that are not in
#: this table by the method alone: a client chooses the path.
_OPERATIONS: Final = {
    "/v1/chat/completions": "chat",
    "/v1/chat/completions/batch": "chat",
    "/v1/messages": "chat",
    "/v1/responses": "chat",
    "/v1/completions": "text_completion",
    "/inference/v1/generate": "text_completion",
    "/v1/embeddings": "embeddings",
}
_PATHS: Final = frozenset({
    *_OPERATIONS, "/v1/audio/transcriptions", "/v1/audio/translations", "/pooling", "/classify", "/score", "/v1/score",
    "/rerank", "/v1/rerank", "/v2/rerank", "/v2/embed", "/tokenize", "/detokenize", "/medialane/v1/media",
})  # fmt: skip
_NOT_TRACED: Final = frozenset({"/health", "/ping", "/metrics"})
_METHODS: Final = frozenset({"POST", "PUT"})

#: Spans of one request that are exported; `medialane.items` is the number of all items.
_MAX_ITEMS = 64
_MAX_ATTEMPTS = 32

Attributes = dict[str, Any]


class RequestTracing:
    """Begins the traces of a gateway's requests; `model` is the name under which the model is served."""

    def __init__(self, tracing: Tracing, model: str) -> None:
        self.tracer = tracing.tracer
        self.model = model

    def begin(self, scope: Mapping[str, Any], timeline: StageTimeline) -> RequestTrace | None:
        """Begin the trace of an HTTP request (an ASGI scope); None if there is none of such requests."""
        path: str = scope["path"].removeprefix(scope.get("root_path", "").rstrip("/"))
        if scope["method"] not in _METHODS or path in _NOT_TRACED:
            return None
        return RequestTrace(self, scope, path if path in _PATHS else "", timeline)


class AttemptTrace:
    """One request to one worker. `headers` make its spans children of this one."""

    def __init__(self, span: Span, routed: RoutedRequest, *, is_cumulative: bool) -> None:
        self.span = span
        self.routed = routed
        self.context = set_span_in_context(span)
        self.headers = context_headers(self.context)
        self.num_prompt_tokens = self.num_output_tokens = 0
        self.num_cached_tokens: int | None = None
        self.first_at: float | None = None
        self.finish_reasons: list[str] = []
        self._is_cumulative = is_cumulative

    def note_output(self, delta: OutputDelta) -> None:
        if self.first_at is None:
            self.first_at = time.perf_counter()
            self.num_cached_tokens = delta.num_cached_tokens
            token_ids = delta.prompt_token_ids
            self.num_prompt_tokens = self.routed.decision.num_tokens if token_ids is None else len(token_ids)
        num_tokens = 0
        for completion in delta.completions:
            num_tokens += len(completion.token_ids)
            if completion.finish_reason is not None:
                self.finish_reasons.append(completion.finish_reason)
        self.num_output_tokens = num_tokens if self._is_cumulative else self.num_output_tokens + num_tokens


class RequestTrace:
    """Begun by the outermost middleware, which also ends it. `headers` make the spans of other processes children of
    the root."""

    def __init__(self, tracing: RequestTracing, scope: Mapping[str, Any], path: str, timeline: StageTimeline) -> None:
        self._tracer = tracing.tracer
        self._model = tracing.model
        self._method, self._path = scope["method"], path
        self._timeline = timeline
        #: Adds the time since boot to the wall clock's at the start: steps of the clock move no span.
        self._epoch_ns = time.time_ns() - int(time.perf_counter() * 1e9)
        given = {k.decode("latin-1"): v.decode("latin-1") for k, v in scope["headers"] if k in _TRACE_HEADERS}
        self._root = self._tracer.start_span(
            self._name, client_context(given), SpanKind.SERVER, start_time=self._ns(timeline.started_at)
        )
        self._context = set_span_in_context(self._root)
        self.headers = context_headers(self._context)
        self._attempts: dict[str, list[AttemptTrace]] = {}
        self._num_attempts = 0
        self._first_id = ""
        self._status: int | None = None
        self._is_stream = False

    @property
    def _name(self) -> str:
        operation = _OPERATIONS.get(self._path)
        return f"{self._method} {self._path}".rstrip() if operation is None else f"{operation} {self._model}"

    @contextmanager
    def attempt(
        self, request: EngineRequest, routed: RoutedRequest, worker: str, path: TransferPath | None
    ) -> Iterator[AttemptTrace | None]:
        """Trace what the block sends to a worker; None if there have been too many."""
        self._first_id = self._first_id or request.request_id
        self._model = request.lora_name or self._model
        self._num_attempts += 1
        if self._num_attempts > _MAX_ATTEMPTS:
            yield None  # with the headers of the root
            return
        before = self._attempts.setdefault(request.request_id, [])
        links = [Link(before[-1].span.get_span_context(), {"medialane.attempt.reason": "retry"})] if before else ()
        span = self._tracer.start_span(
            "medialane.attempt", self._context, SpanKind.CLIENT, links=links, start_time=self._now
        )
        attempt = AttemptTrace(span, routed, is_cumulative=request.cumulative)
        before.append(attempt)
        try:
            yield attempt
        except MedialaneError as error:
            _fail(span, error.code)
            raise
        finally:
            if span.is_recording():
                span.set_attributes({"medialane.attempt": len(before), "medialane.worker": worker, **_path(path)})
            span.end(self._now)

    def note_response(self, start: Mapping[str, Any]) -> None:
        """Record the start of the response (a message of ASGI)."""
        self._status = start["status"]
        kinds = (value for name, value in start.get("headers", ()) if name.lower() == b"content-type")
        self._is_stream = next(kinds, b"").startswith(b"text/event-stream")

    def end(self, *, error_code: str | None, is_disconnected: bool) -> None:
        """Make all other spans, and end the root."""
        root = self._root
        if root.is_recording():
            cached = {each.routed: each.num_cached_tokens for each in self._all}
            for step in self._timeline.steps:
                attempt = step.detail if isinstance(step.detail, AttemptTrace) else None
                context = self._context if attempt is None else attempt.context
                self._step(step, context, _step_attributes(step, cached))
            for item in self._timeline.items[:_MAX_ITEMS]:
                self._item(item)
            root.update_name(self._name)
            root.set_attributes(self._attributes())
            code = error_code or ("client_disconnected" if is_disconnected else self._error_status)
            if code is not None:
                _fail(root, code)
        root.end(self._now)

    def _item(self, item: ItemTimeline) -> None:
        span = self._tracer.start_span(
            "medialane.item", self._context, attributes=_item_attributes(item), start_time=self._ns(item.started_at)
        )
        if item.error_code is not None:
            _fail(span, item.error_code)
        context = set_span_in_context(span)
        for step in item.steps:
            self._step(step, context, {})
        span.end(self._ns(item.ended_at))

    def _step(self, step: Step, context: Context, attributes: Attributes) -> None:
        span = self._tracer.start_span(
            f"medialane.{step.stage}", context, attributes=attributes, start_time=self._ns(step.started_at)
        )
        span.end(self._ns(step.started_at + step.seconds))

    @property
    def _error_status(self) -> str | None:
        """Errors of vLLM's app have only a status."""
        if self._status is None:
            return "no_response"
        return str(self._status) if self._status >= 400 else None

    def _attributes(self) -> Attributes:
        """Return those of the root, by the names of the conventions and by vLLM's older ones."""
        timeline, operation = self._timeline, _OPERATIONS.get(self._path)
        attributes: Attributes = {
            "http.request.method": self._method,
            "medialane.cache": timeline.cache,
            "medialane.items": len(timeline.items),
            "medialane.attempts": self._num_attempts,
            "gen_ai.latency.e2e": time.perf_counter() - timeline.started_at,
        }
        attributes |= {"http.route": self._path} if self._path else {}
        attributes |= {} if self._status is None else {"http.response.status_code": self._status}
        attributes |= {"gen_ai.request.id": self._first_id} if self._first_id else {}
        if operation is not None:
            attributes |= {
                "gen_ai.operation.name": operation,
                "gen_ai.provider.name": "vllm",
                "gen_ai.request.model": self._model,
                "gen_ai.response.model": self._model,
                "gen_ai.request.stream": self._is_stream,
            }
        return attributes | self._usage() | self._latencies()

    def _usage(self) -> Attributes:
        answered = [each for each in self._all if each.first_at is not None]
        if not answered:
            return {}
        # An answer that went on at another worker had the same prompt.
        prompts = [
            next((each for each in tried if each.first_at is not None), None) for tried in self._attempts.values()
        ]
        num_prompt = sum(each.num_prompt_tokens for each in prompts if each is not None)
        num_output = sum(each.num_output_tokens for each in answered)
        return {
            "gen_ai.usage.input_tokens": num_prompt,
            "gen_ai.usage.prompt_tokens": num_prompt,
            "gen_ai.usage.cache_read.input_tokens": sum(each.num_cached_tokens or 0 for each in prompts if each),
            "gen_ai.usage.output_tokens": num_output,
            "gen_ai.usage.completion_tokens": num_output,
            "gen_ai.response.finish_reasons": [reason for each in answered for reason in each.finish_reasons],
        }

    def _latencies(self) -> Attributes:
        seconds = self._timeline.seconds
        names = {"queue": "gen_ai.latency.time_in_queue", "prefill": "gen_ai.latency.time_in_model_prefill"}
        latencies: Attributes = {name: seconds[stage] for stage, name in names.items() if stage in seconds}
        first = min((each.first_at for each in self._all if each.first_at is not None), default=None)
        if first is not None:
            ttft = first - self._timeline.started_at
            latencies |= {"gen_ai.response.time_to_first_chunk": ttft, "gen_ai.latency.time_to_first_token": ttft}
        return latencies

    @property
    def _all(self) -> Sequence[AttemptTrace]:
        return [attempt for tried in self._attempts.values() for attempt in tried]

    @property
    def _now(self) -> int:
        return self._ns(time.perf_counter())

    def _ns(self, at: float) -> int:
        return self._epoch_ns + int(at * 1e9)


_TRACE_HEADERS: Final = frozenset({b"traceparent", b"tracestate"})


def _fail(span: Span, code: str) -> None:
    span.set_attribute("error.type", code)
    span.set_status(Status(StatusCode.ERROR, code))


def _path(path: TransferPath | None) -> Attributes:
    if path is None:
        return {}
    return {"medialane.stage": path.stage.name, "medialane.transport": path.transport.name}


def _step_attributes(step: Step, cached: Mapping[RoutedRequest, int | None]) -> Attributes:
    routed = step.detail
    if not isinstance(routed, RoutedRequest) or not routed.has_begun:
        return {}
    decision = routed.decision
    names = ("policy", "reason", "rank", "num_tokens", "cached_tokens", "expected_ms")
    attributes = {f"medialane.routing.{name}": getattr(decision, name) for name in names}
    attributes["medialane.routing.worker"] = decision.worker_id
    attributes["medialane.routing.cost_ms"] = decision.parts.total
    if (num_cached := cached.get(routed)) is not None:
        attributes["medialane.routing.engine_cached_tokens"] = num_cached
    for second in decision.alternatives[:1]:
        attributes |= {
            "medialane.routing.runner_up.worker": second.worker_id,
            "medialane.routing.runner_up.score": second.score,
            "medialane.routing.runner_up.cached_tokens": second.cached_tokens,
        }
    return attributes


def _item_attributes(item: ItemTimeline) -> Attributes:
    attributes: Attributes = {"mm.modality": item.modality, "medialane.item.outcome": item.outcome}
    attributes |= {"medialane.item.field": item.param}
    attributes |= {"medialane.item.hash": item.mm_hash[:8]} if item.mm_hash else {}
    attributes |= {"medialane.item.bytes": item.media_bytes} if item.media_bytes else {}
    attributes |= {"medialane.item.tokens": item.num_tokens} if item.num_tokens else {}
    attributes |= {"medialane.item.embedding": item.embedding} if item.embedding else {}
    return attributes
