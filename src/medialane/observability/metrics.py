"""Prometheus metrics of the gateway, in the same registry as the metrics of vLLM's app.

Requests push: steps, cache lookups and errors are counted as they happen. State is pulled: arena, preparers and
workers are read on each scrape by the functions passed to `watch` (`collectors` makes their families), so values are
never stale. These functions are not thread-safe: vLLM's app collects on the event loop.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Histogram
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from medialane.observability.collectors import Memory, connection_metrics, memory_metric, worker_metrics
from medialane.observability.timeline import RequestTimeline
from medialane.types.request import Endpoint
from medialane.types.stats import ProcessKind

_STEP_BUCKETS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)
_ROUTING_BUCKETS = (0.00002, 0.00005, 0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01)
_REQUEST_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
#: Has each threshold that can be chosen in the variable `ttft_slo` of vLLM's dashboards.
_TTFT_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 10, 30, 60, 120, 300)


class Metrics:
    """medialane's collectors; `close` unregisters them. Figures of the whole host (store, workers) are in
    the registry `host` (default: the same one): all gateways of the host have them."""

    def __init__(self, registry: CollectorRegistry = REGISTRY, *, host: CollectorRegistry | None = None) -> None:
        self.registry = registry
        self.host = registry if host is None else host
        self._collectors: list[tuple[CollectorRegistry, Collector]] = []
        self.step_seconds = self._histogram(
            "medialane_stage_seconds",
            "Duration of each step of a request. fetch, decode and process (of the slowest item) are parts of store,"
            " first_token is transit, queue and prefill; the others add up to medialane_request_seconds",
            "stage",
            buckets=_STEP_BUCKETS,
        )
        #: A look-up by label takes as long as the observation.
        self._by_step: dict[str, Histogram] = {}
        self.request_seconds = self._histogram(
            "medialane_request_seconds",
            "From a POST request's header at the gateway to the end of its response, refused and failed requests"
            " included. Without the connection and its TLS handshake",
            buckets=_REQUEST_BUCKETS,
        )
        self.time_to_first_token_seconds = self._histogram(
            "medialane_time_to_first_token_seconds",
            "From a request's header at the gateway to its first token, with upload, media and queues (unlike"
            " vllm:time_to_first_token_seconds). Without connection, TLS handshake, and requests that end without a"
            " token",
            buckets=_TTFT_BUCKETS,
        )
        self.migration_seconds = self._histogram(
            "medialane_migration_seconds",
            "From the loss of a worker to the answer's next token",
            buckets=_REQUEST_BUCKETS,
        )
        self.routing_seconds = self._histogram(
            "medialane_routing_seconds",
            "Duration of routing decisions, without hashing the prompt",
            buckets=_ROUTING_BUCKETS,
        )
        self.cache_lookups = self._counter(
            "medialane_cache_lookups",
            "Lookups of media items by cache (feature: processed items) and outcome",
            "kind",
            "outcome",
        )
        self.copied_bytes = self._counter(
            "medialane_copied_bytes",
            "Bytes of media and features copied by the gateway; shared memory needs no copy",
        )
        self.request_errors = self._counter(
            "medialane_request_errors",
            "Requests that were refused or failed, by medialane's error code; http_requests_total also counts vLLM's"
            " own refusals",
            "code",
        )
        self.refused_requests = self._counter(
            "medialane_refused_requests",
            "Requests refused for a tenant's limits or lack of capacity, by tenant (empty without --keys) and error"
            " code",
            "tenant",
            "reason",
        )
        self.handover_fallbacks = self._counter(
            "medialane_transfer_fallbacks",
            "Hand-overs of media to a worker that fell back to another path, by failed path and reason",
            "path",
            "reason",
        )
        self.migrations = self._counter(
            "medialane_migrations",
            "Requests whose worker was lost, by error code and outcome: continued (an answer that had begun),"
            " repeated (none had), failed (no other worker, or too many tries), impossible (cannot continue"
            " elsewhere), refused (two workers were lost right after it arrived)",
            "reason",
            "outcome",
        )
        self.copied_requests = self._counter(
            "medialane_copied_requests",
            "Requests whose media were copied by the worker's store, by mover: tcp or nixl",
            "mover",
        )
        self.prefills = self._counter(
            "medialane_prefills",
            "Prompts while workers only compute prompts, by outcome: split (one of them has), failed (it has not), or"
            " why the worker of the answer has: no_prefill_worker (ready for it), few_tokens (not cached), cheaper",
            "outcome",
        )
        self.worker_losses = self._counter("medialane_worker_losses", "Lost connections to a worker", "worker")
        self.prompt_tokens = self._counter(
            "medialane_prompt_tokens",
            "Prompt tokens of requests that had a first token: all, predicted cached by the router, reported cached"
            " by the engine, transferred (read from the worker that has computed them)",
            "kind",
        )
        self.embeddings = self._counter(
            "medialane_embeddings",
            "Media items sent in stage features to workers that keep embeddings, by outcome: loaded from the arena,"
            " encoded (and kept), unkept (encoded, not kept), unneeded (tokens in the KV cache), fallback (sent again"
            " with tensors)",
            "outcome",
        )
        self.encoder_requests = self._counter(
            "medialane_encoder_requests",
            "New media items while encoders were ready, by outcome: encoded, unkept (encoded, not kept), late or"
            " failed (the worker encodes), worker (expected to encode with less delay)",
            "outcome",
        )
        self.embedding_loaded_bytes = self._counter(
            "medialane_embedding_loaded_bytes", "Bytes of embeddings sent instead of media and loaded"
        )
        self.encoder_saved_seconds = self._counter(
            "medialane_encoder_saved_seconds",
            "Expected encoder time saved by loaded embeddings, by --routing-encoder-ms-per-token",
        )
        self.media_items = self._counter(
            "medialane_media_items",
            "Media items of prompts that had a first token, by whether the KV cache had all their tokens",
            "modality",
            "outcome",
        )

        self.documents = self._counter("medialane_documents", "Documents in requests")
        self.document_pages = self._counter(
            "medialane_document_pages",
            "Pages of documents (of a request's first 64 items), by outcome: hit, shared, new, sent, failed",
            "outcome",
        )

    def observe(self, timeline: RequestTimeline, ttft_ms: float | None = None) -> None:
        """Record a request that has ended, with the time to its first token if it had one."""
        for step, seconds in timeline.durations().items():
            if (observed := self._by_step.get(step)) is None:
                observed = self._by_step[step] = self.step_seconds.labels(step)
            observed.observe(seconds)
        self.request_seconds.observe(time.perf_counter() - timeline.started_at)
        if ttft_ms is not None:
            self.time_to_first_token_seconds.observe(ttft_ms / 1000)
        for outcome, number in (("hit", timeline.num_hits), ("miss", timeline.num_misses)):
            if number:
                self.cache_lookups.labels("feature", outcome).inc(number)
        self.copied_bytes.inc(timeline.copied_bytes)

    def watch(self, read: Callable[[], Iterable[Metric]], *, of_host: bool = False) -> None:
        """Expose the families that `read` returns at each scrape (`collectors`)."""
        registry, watched = self.host if of_host else self.registry, _Watched(read)
        registry.register(watched)
        self._collectors.append((registry, watched))

    def watch_workers(self, read: Callable[[], Iterable[Endpoint]]) -> None:
        """Expose this gateway's connections to workers, and the workers."""
        self.watch(lambda: connection_metrics(list(read())))
        self.watch(lambda: worker_metrics(list(read())), of_host=True)

    def watch_memory(
        self, own: Callable[[], Mapping[ProcessKind, int]], of_host: Callable[[], Iterable[Memory]]
    ) -> None:
        """Expose the memory of this process and of the host's others."""
        if self.host is self.registry:  # a family may occur only once in a page
            self.watch(lambda: [memory_metric([({}, own()), *of_host()])])
        else:
            self.watch(lambda: [memory_metric([({}, own())])])
            self.watch(lambda: [memory_metric(of_host())], of_host=True)

    def close(self) -> None:
        """Unregister all collectors. Idempotent."""
        while self._collectors:
            registry, collector = self._collectors.pop()
            registry.unregister(collector)

    def _histogram(self, name: str, text: str, *labels: str, buckets: tuple[float, ...]) -> Histogram:
        histogram = Histogram(name, text, labels, buckets=buckets, registry=self.registry)
        self._collectors.append((self.registry, histogram))
        return histogram

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        counter = Counter(name, text, labels, registry=self.registry)
        self._collectors.append((self.registry, counter))
        return counter


class _Watched(Collector):
    def __init__(self, collect: Callable[[], Iterable[Metric]]) -> None:
        self._collect = collect

    def describe(self) -> Iterable[Metric]:
        """Return nothing: without this method, the registry would call `collect` on registration to get the names."""
        return ()

    def collect(self) -> Iterable[Metric]:
        return self._collect()
