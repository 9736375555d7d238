"""Prometheus metrics of the gateway, in the same registry as those of vLLM's app.

Requests push: stages, cache lookups and errors are counted as they happen. State is pulled: arena, preparers and
workers are read on each scrape by the functions passed to the `watch_*` methods, so values are never stale. These
functions are not thread-safe: vLLM's app collects on the event loop.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Final

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Histogram
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from medialane.observability.collectors import (
    Memory,
    connection_metrics,
    exit_metrics,
    gauge,
    memory_metric,
    queue_metrics,
    routing_metrics,
    store_metrics,
    wait_metrics,
    worker_metrics,
)
from medialane.observability.timeline import StageTimeline
from medialane.observability.worker_metrics import MetricMirror, collect
from medialane.runtime.phase import ProcessExits
from medialane.types.request import Endpoint
from medialane.types.stats import ProcessKind, QueueStats, RoutingStats, StoreStats, WaitStats

_STAGE_BUCKETS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)
_ROUTING_BUCKETS = (0.00002, 0.00005, 0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01)
_REQUEST_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
#: Has each threshold that can be chosen in the variable `ttft_slo` of vLLM's dashboards.
_TTFT_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 10, 30, 60, 120, 300)


_HISTOGRAMS: Final = {
    # name: (help, labels, buckets in seconds)
    "medialane_stage_seconds": (
        "Duration of each step of a request; the slowest of several items counts. Steps overlap and leave gaps: they do"
        " not add up to medialane_request_seconds",
        ("stage",),
        _STAGE_BUCKETS,
    ),
    "medialane_request_seconds": (
        "From a POST request's header at the gateway to the end of its response, refused and failed requests included."
        " Without the connection and its TLS handshake",
        (),
        _REQUEST_BUCKETS,
    ),
    "medialane_time_to_first_token_seconds": (
        "From a request's header at the gateway to its first token, with upload, media and queues (unlike"
        " vllm:time_to_first_token_seconds). Without connection, TLS handshake, and requests that end without a token",
        (),
        _TTFT_BUCKETS,
    ),
    "medialane_migration_seconds": ("From the loss of a worker to the answer's next token", (), _REQUEST_BUCKETS),
    "medialane_routing_seconds": ("Duration of routing decisions, without hashing the prompt", (), _ROUTING_BUCKETS),
}

_COUNTERS: Final = {
    # name: (help, labels)
    "medialane_cache_lookups": (
        "Lookups of media items by cache (feature: processed items) and outcome",
        ("kind", "outcome"),
    ),
    "medialane_copied_bytes": ("Bytes of media and features copied by the gateway; shared memory needs no copy", ()),
    "medialane_request_errors": (
        "Requests that were refused or failed, by medialane's error code; http_requests_total also counts vLLM's own"
        " refusals",
        ("code",),
    ),
    "medialane_refused_requests": (
        "Requests refused for a tenant's limits or lack of capacity, by tenant (empty without --keys) and error code",
        ("tenant", "reason"),
    ),
    "medialane_transfer_fallbacks": (
        "Transfers of media to a worker that fell back to another path, by failed path and reason",
        ("path", "reason"),
    ),
    "medialane_migrations": (
        "Requests whose worker was lost, by error code and outcome: continued (an answer that had begun), repeated"
        " (none had), failed (no other worker, or too many tries), impossible (cannot continue elsewhere), refused (two"
        " workers were lost right after it arrived)",
        ("reason", "outcome"),
    ),
    "medialane_copied_requests": (
        "Requests whose media were copied by the worker's store, by mover: tcp or nixl",
        ("mover",),
    ),
    "medialane_worker_losses": ("Lost connections to a worker", ("worker",)),
    "medialane_prompt_tokens": (
        "Prompt tokens of requests that had a first token: all, predicted cached by the router, reported cached by the"
        " engine",
        ("kind",),
    ),
    "medialane_embeddings": (
        "Media items sent in stage features to workers that keep embeddings, by outcome: loaded from the arena,"
        " encoded (and kept), unkept (encoded, not kept), unneeded (tokens in the KV cache), fallback (sent again with"
        " tensors)",
        ("outcome",),
    ),
    "medialane_encoder_requests": (
        "New media items while encoders were ready, by outcome: encoded, unkept (encoded, not kept), late or failed"
        " (the worker encodes), worker (expected to encode with less delay)",
        ("outcome",),
    ),
    "medialane_embedding_loaded_bytes": ("Bytes of embeddings sent instead of media and loaded", ()),
    "medialane_encoder_saved_seconds": (
        "Expected encoder time saved by loaded embeddings, by --routing-encoder-ms-per-token",
        (),
    ),
    "medialane_media_items": (
        "Media items of prompts that had a first token, by whether the KV cache had all their tokens",
        ("modality", "outcome"),
    ),
}


class Metrics:
    """medialane's collectors; `close` unregisters them. Figures of the whole host, those of store and workers, are in
    the registry `host` (default: the same one): all gateways of the host have them."""

    def __init__(self, registry: CollectorRegistry = REGISTRY, *, host: CollectorRegistry | None = None) -> None:
        self.registry = registry
        self.host = registry if host is None else host
        self._histograms = {
            name: Histogram(name, text, labels, buckets=buckets, registry=registry)
            for name, (text, labels, buckets) in _HISTOGRAMS.items()
        }
        self._counters = {
            name: Counter(name, text, labels, registry=registry) for name, (text, labels) in _COUNTERS.items()
        }
        self._collectors: list[tuple[CollectorRegistry, Collector]] = [
            (registry, collector) for collector in (*self._histograms.values(), *self._counters.values())
        ]

    def observe(self, timeline: StageTimeline, ttft_ms: float | None = None) -> None:
        """Record a request that has ended, with the time to its first token if it had one."""
        for stage, seconds in timeline.seconds.items():
            self._histograms["medialane_stage_seconds"].labels(stage).observe(seconds)
        self._histograms["medialane_request_seconds"].observe(time.perf_counter() - timeline.started_at)
        if ttft_ms is not None:
            self._histograms["medialane_time_to_first_token_seconds"].observe(ttft_ms / 1000)
        self.count_lookups("feature", num_hits=timeline.num_hits, num_misses=timeline.num_misses)
        self._counters["medialane_copied_bytes"].inc(timeline.copied_bytes)

    def count_lookups(self, kind: str, *, num_hits: int = 0, num_misses: int = 0) -> None:
        """Count lookups in the cache `kind`: `feature`, `url`."""
        lookups = self._counters["medialane_cache_lookups"]
        if num_hits:
            lookups.labels(kind, "hit").inc(num_hits)
        if num_misses:
            lookups.labels(kind, "miss").inc(num_misses)

    def count_error(self, code: str) -> None:
        """Count a request that has ended with this error code."""
        self._counters["medialane_request_errors"].labels(code).inc()

    def count_refused(self, tenant: str, reason: str) -> None:
        """Count a request of `tenant` (empty: there are no tenants) that was refused with the error code `reason`."""
        self._counters["medialane_refused_requests"].labels(tenant, reason).inc()

    def forget_tenant(self, tenant: str) -> None:
        """Drop what is counted for a tenant that is no more."""
        self._counters["medialane_refused_requests"].remove_by_labels({"tenant": tenant})

    def count_fallback(self, transfer_path: str, reason: str) -> None:
        """Count a transfer by `transfer_path` that failed with error code `reason`; the next path is tried."""
        self._counters["medialane_transfer_fallbacks"].labels(transfer_path, reason).inc()

    def count_copied(self, movers: Iterable[str]) -> None:
        """Count a request whose media were copied to another host, by what has copied them."""
        for mover in movers:
            self._counters["medialane_copied_requests"].labels(mover).inc()

    def count_migration(self, reason: str, outcome: str) -> None:
        """Count a request, or one choice of its answer, whose worker was lost."""
        self._counters["medialane_migrations"].labels(reason, outcome).inc()

    def observe_migration(self, seconds: float) -> None:
        """Record the time from the loss of a worker to the next token."""
        self._histograms["medialane_migration_seconds"].observe(seconds)

    def count_worker_lost(self, worker: str) -> None:
        self._counters["medialane_worker_losses"].labels(worker).inc()

    def forget_worker(self, worker: str) -> None:
        """Drop what is counted for a worker that will not come back under this name."""
        self._counters["medialane_worker_losses"].remove(worker)

    def observe_routing(self, seconds: float) -> None:
        """Record the duration of one routing decision."""
        self._histograms["medialane_routing_seconds"].observe(seconds)

    def count_prompt(self, num_tokens: int, *, routed_cached: int, engine_cached: int | None) -> None:
        """Count a prompt's tokens on its first output; `engine_cached` is None if the engine does not report it."""
        tokens = self._counters["medialane_prompt_tokens"]
        tokens.labels("all").inc(num_tokens)
        tokens.labels("routed_cached").inc(routed_cached)
        tokens.labels("engine_cached").inc(engine_cached or 0)

    def count_media(self, modality: str, *, is_cached: bool) -> None:
        """Count a media item of a prompt on its first output."""
        self._counters["medialane_media_items"].labels(modality, "cached" if is_cached else "computed").inc()

    def count_embeddings(self, outcome: str, num_items: int = 1) -> None:
        """Count items by `outcome`: an `EmbeddingOutcome`, or `fallback`."""
        if num_items:
            self._counters["medialane_embeddings"].labels(outcome).inc(num_items)

    def count_encoder_request(self, outcome: str) -> None:
        """Count a new item for which an encoder was ready, by what became of it."""
        self._counters["medialane_encoder_requests"].labels(outcome).inc()

    def count_saved_encoding(self, num_bytes: int, saved_s: float) -> None:
        """Count an embedding that was loaded; `num_bytes` is 0 if the item's media were sent."""
        self._counters["medialane_embedding_loaded_bytes"].inc(num_bytes)
        self._counters["medialane_encoder_saved_seconds"].inc(saved_s)

    def watch_routing(self, read: Callable[[], RoutingStats]) -> None:
        """Expose the router's state, read on each scrape."""
        self._watch(self.registry, lambda: routing_metrics(read()))

    def watch_predictions(self, read: Callable[[], Mapping[str, float]]) -> None:
        """Expose of which modalities headers follow from the size of the media, read on each scrape."""
        text = "1 for a modality of which the tokens of an item are known from the size of its media"
        self._watch(self.registry, lambda: iter([gauge("medialane_headers_predicted", text, "modality", read())]))

    def watch_queues(self, read: Callable[[], Mapping[str, QueueStats]]) -> None:
        """Expose the requests that wait in this gateway, by what they wait for; read on each scrape."""
        self._watch(self.registry, lambda: queue_metrics(read()))

    def watch_waits(self, read: Callable[[], WaitStats]) -> None:
        """Expose how long requests wait for engines, read on each scrape."""
        self._watch(self.registry, lambda: wait_metrics(read()))

    def watch_store(self, read: Callable[[], StoreStats | None]) -> None:
        """Expose the state of the host's store, read on each scrape; nothing while there is none."""
        self._watch(self.host, lambda: store_metrics(read()))

    def watch_exits(self, read: Callable[[], Mapping[str, ProcessExits]]) -> None:
        """Expose how often the processes of the host have ended, read on each scrape."""
        self._watch(self.host, lambda: exit_metrics(read()))

    def watch_workers(self, read: Callable[[], Iterable[Endpoint]]) -> None:
        """Expose the state of the workers, read on each scrape."""
        self._watch(self.registry, lambda: connection_metrics(list(read())))
        self._watch(self.host, lambda: worker_metrics(list(read())))

    def watch_engines(self, read: Callable[[], Mapping[str, MetricMirror]]) -> None:
        """Expose vLLM's metrics of each worker's engine, read on each scrape."""
        self._watch(self.host, lambda: collect(read()))

    def watch_memory(
        self, own: Callable[[], Mapping[ProcessKind, int]], of_host: Callable[[], Iterable[Memory]]
    ) -> None:
        """Expose the memory of this process and of the host's others, read on each scrape."""
        if self.host is self.registry:  # a family may occur only once in a page
            self._watch(self.registry, lambda: iter([memory_metric([({}, own()), *of_host()])]))
        else:
            self._watch(self.registry, lambda: iter([memory_metric([({}, own())])]))
            self._watch(self.host, lambda: iter([memory_metric(of_host())]))

    def watch_gateways(self, read: Callable[[], Mapping[str, float]]) -> None:
        """Expose which gateways of the host respond, by index."""
        text = "1 for a gateway that has responded to this scrape, 0 for one whose last values are exposed"
        self._watch(self.host, lambda: iter([gauge("medialane_gateway_up", text, "gateway", read())]))

    def close(self) -> None:
        """Unregister all collectors. Idempotent."""
        while self._collectors:
            registry, collector = self._collectors.pop()
            registry.unregister(collector)

    def _watch(self, registry: CollectorRegistry, collect: Callable[[], Iterator[Metric]]) -> None:
        watched = _Watched(collect)
        registry.register(watched)
        self._collectors.append((registry, watched))


class _Watched(Collector):
    def __init__(self, collect: Callable[[], Iterator[Metric]]) -> None:
        self._collect = collect

    def describe(self) -> Iterable[Metric]:
        """Return nothing: without this method, the registry would call `collect` on registration to get the names."""
        return ()

    def collect(self) -> Iterable[Metric]:
        return self._collect()
