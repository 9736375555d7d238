"""Prometheus metrics of the gateway, in the same registry as those of vLLM's app.

Requests push: stages, cache lookups and errors are counted as they happen. State is pulled: arena, preparers and
workers are read on each scrape by the functions passed to the `watch_*` methods, so values are never stale. These
functions are not thread-safe: vLLM's app collects on the event loop.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Final

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Histogram
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from medialane.core.process.memory import ProcessKind
from medialane.core.request import WORKER_STATES, Endpoint
from medialane.core.stats import (
    ArenaStats,
    EmbeddingStats,
    LearnedCost,
    MediaLeaseStats,
    PoolStats,
    PullStats,
    QueueStats,
    RoutingStats,
    StoreStats,
    WaitStats,
)
from medialane.observability.timeline import StageTimeline
from medialane.observability.worker_metrics import MetricMirror, collect

#: Labels, and bytes by kind of process.
Memory = tuple[Mapping[str, str], Mapping[ProcessKind, int]]

_STAGE_BUCKETS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)
_ROUTING_BUCKETS = (0.00002, 0.00005, 0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01)
_REQUEST_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
#: Has each threshold that can be chosen in the variable `ttft_slo` of vLLM's dashboards.
_TTFT_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 10, 30, 60, 120, 300)


_HISTOGRAMS: Final = {
    # name: (help, labels, buckets in seconds)
    "medialane_stage_seconds": (
        "Duration of each step of a request, of several items that of the slowest. Steps overlap, and time between them"
        " belongs to none: they do not add up to medialane_request_seconds",
        ("stage",),
        _STAGE_BUCKETS,
    ),
    "medialane_request_seconds": (
        "From a POST request's header at the gateway to the end of its response, also of refused and failed ones: with"
        " upload, media, queues and the client's reading. Left out: the connection and its TLS handshake",
        (),
        _REQUEST_BUCKETS,
    ),
    "medialane_time_to_first_token_seconds": (
        "From a request's header at the gateway to its first token: with upload, media and queues, of which"
        " vllm:time_to_first_token_seconds knows nothing. Left out: connection, TLS handshake, way to the client,"
        " and requests that end without a token",
        (),
        _TTFT_BUCKETS,
    ),
    "medialane_migration_seconds": ("From the loss of a worker to the answer's next token", (), _REQUEST_BUCKETS),
    "medialane_ttft_seconds": (
        "Time to first token of streams with a limit (--gateway-ttft-limit), measured from the end of the body, and as"
        " it was expected when the request was admitted",
        ("kind",),
        _REQUEST_BUCKETS,
    ),
    "medialane_routing_seconds": (
        "Duration of routing decisions. Left out: hashing the prompt's blocks",
        (),
        _ROUTING_BUCKETS,
    ),
}

_COUNTERS: Final = {
    # name: (help, labels)
    "medialane_cache_lookups": (
        "Lookups of media items by cache (feature: items as prepared for the model) and outcome",
        ("kind", "outcome"),
    ),
    "medialane_copied_bytes": (
        "Bytes of media and features copied by the gateway. Left out: shared memory, which needs no copy, and copies by"
        " stores and workers",
        (),
    ),
    "medialane_request_errors": (
        "Requests that were refused or failed, by medialane's error code. Left out: what vLLM's own app or a worker's"
        " vLLM refuses (http_requests_total counts it)",
        ("code",),
    ),
    "medialane_refused_requests": (
        "Requests refused by the limits of a tenant, or as there was no capacity, by tenant (empty without --keys) and"
        " error code",
        ("tenant", "reason"),
    ),
    "medialane_transfer_fallbacks": (
        "Failed transfers of media to a worker that fell back to another path, by failed path and reason",
        ("path", "reason"),
    ),
    "medialane_migrations": (
        "Requests whose worker was lost, by the error's code and by outcome: continued (an answer that had begun, at"
        " another worker), repeated (none was), failed (no other worker, or too many tries), impossible (what had begun"
        " cannot go on elsewhere), refused (two workers were lost right after it arrived)",
        ("reason", "outcome"),
    ),
    "medialane_copied_requests": (
        "Requests whose media the store of the worker's host had copied from this one, by mover: tcp or nixl",
        ("mover",),
    ),
    "medialane_worker_losses": ("Lost connections to a worker", ("worker",)),
    "medialane_prompt_tokens": (
        "Prompt tokens: all, predicted cached by the router, reported cached by the engine. Left out: prompts without a"
        " first token",
        ("kind",),
    ),
    "medialane_embeddings": (
        "Media items sent in stage features to workers that keep embeddings, by what was done about the embedding:"
        " loaded from the arena, encoded and kept, encoded and not kept, unneeded (tokens in the KV cache), or a"
        " fallback (sent again with tensors, as the worker could not load it)",
        ("outcome",),
    ),
    "medialane_encoder_requests": (
        "New media items while encoders were ready, by outcome: encoded, unkept (encoded, but not kept in the arena),"
        " late or failed (the worker encodes), or worker (the worker was expected to encode with less delay)",
        ("outcome",),
    ),
    "medialane_embedding_loaded_bytes": ("Bytes of embeddings sent instead of media and loaded", ()),
    "medialane_encoder_saved_seconds": (
        "Expected time of the encoder runs that loaded embeddings have avoided, by --routing-encoder-ms-per-token",
        (),
    ),
    "medialane_media_items": (
        "Media items of prompts that had a first token, by whether their tokens were entirely in the engine's KV cache",
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

    def observe_ttft(self, expected_s: float, measured_s: float) -> None:
        """Record the time to first token of a request with a limit."""
        self._histograms["medialane_ttft_seconds"].labels("expected").observe(expected_s)
        self._histograms["medialane_ttft_seconds"].labels("measured").observe(measured_s)

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
        self._watch(self.registry, lambda: _routing(read()))

    def watch_costs(self, read: Callable[[], Iterable[LearnedCost]], factor: Callable[[], float]) -> None:
        """Expose what was learned of the costs of requests, and the factor of expected waits; read on each scrape."""
        self._watch(self.registry, lambda: _costs(read(), factor()))

    def watch_predictions(self, read: Callable[[], Mapping[str, float]]) -> None:
        """Expose of which modalities headers follow from the size of the media, read on each scrape."""
        text = "1 for a modality of which the tokens of an item are known from the size of its media"
        self._watch(self.registry, lambda: iter([_gauge("medialane_headers_predicted", text, "modality", read())]))

    def watch_queues(self, read: Callable[[], Mapping[str, QueueStats]]) -> None:
        """Expose the requests that wait in this gateway, by what they wait for; read on each scrape."""
        self._watch(self.registry, lambda: _queues(read()))

    def watch_waits(self, read: Callable[[], WaitStats]) -> None:
        """Expose how long requests are expected to wait for engines, read on each scrape."""
        self._watch(self.registry, lambda: _waits(read()))

    def watch_store(self, read: Callable[[], StoreStats | None]) -> None:
        """Expose the state of the host's store, read on each scrape; nothing while there is none."""
        self._watch(self.host, lambda: store_metrics(read()))

    def watch_workers(self, read: Callable[[], Iterable[Endpoint]]) -> None:
        """Expose the state of the workers, read on each scrape."""
        self._watch(self.registry, lambda: _connections(list(read())))
        self._watch(self.host, lambda: _workers(list(read())))

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
        self._watch(self.host, lambda: iter([_gauge("medialane_gateway_up", text, "gateway", read())]))

    def close(self) -> None:
        """Unregister all collectors. Idempotent."""
        while self._collectors:
            registry, collector = self._collectors.pop()
            registry.unregister(collector)

    def _watch(self, registry: CollectorRegistry, collect: Callable[[], Iterator[Metric]]) -> None:
        watched = _Watched(collect)
        registry.register(watched)
        self._collectors.append((registry, watched))


def _queues(queues: Mapping[str, QueueStats]) -> Iterator[Metric]:
    text = "Requests that wait in this gateway to be sent to an engine, or for their media to be prepared"
    numbers: dict[str, float] = {name: stats.num_requests for name, stats in queues.items()}
    yield _gauge("medialane_queue_requests", text, "queue", numbers)
    text = (
        "In which time all requests that wait in this gateway are expected to have been sent, by the pace of the last"
        " ones: 0 until one had to wait"
    )
    expected = {name: stats.expected_s for name, stats in queues.items()}
    yield _gauge("medialane_queue_seconds", text, "queue", expected)
    text = "How long the oldest request that waits in this gateway has waited"
    yield _gauge("medialane_queue_oldest_seconds", text, "queue", {n: stats.oldest_s for n, stats in queues.items()})


def _waits(waits: WaitStats) -> Iterator[Metric]:
    text = (
        "In which time a worker's engine is expected to have begun all requests that wait there, those of other"
        " gateways included. Left out: the request's own prefill, and what waits in gateways"
    )
    yield _gauge("medialane_worker_wait_seconds", text, "worker", waits.workers_s)
    text = (
        "How long a request without media that arrives now is expected to wait: in this gateway's queue, if there is"
        " one, and at the worker with the shortest queue. Missing while no worker accepts requests"
    )
    yield GaugeMetricFamily("medialane_expected_wait_seconds", text, value=waits.expected_s)


def _costs(learned: Iterable[LearnedCost], factor: float) -> Iterator[Metric]:
    text = "By how much a kind of work takes longer than assumed (--routing-*; of preparers 20 ms an item and MB)"
    rates = GaugeMetricFamily("medialane_learned_cost", text, labels=("of", "name", "work"))
    text = "1 if enough measured times agree with what was learned, so that requests may be refused by it"
    certain = GaugeMetricFamily("medialane_learned_cost_certain", text, labels=("of", "name"))
    for cost in learned:
        for work, rate in cost.rates.items():
            rates.add_metric((cost.of, cost.name, work), rate)
        certain.add_metric((cost.of, cost.name), cost.is_certain)
    yield rates
    yield certain
    text = "By which expected waits are multiplied, as requests broke their limit of the time to first token"
    yield GaugeMetricFamily("medialane_ttft_factor", text, value=factor)


class _Watched(Collector):
    def __init__(self, collect: Callable[[], Iterator[Metric]]) -> None:
        self._collect = collect

    def describe(self) -> Iterable[Metric]:
        """Return nothing: without this method, the registry would call `collect` on registration to get the names."""
        return ()

    def collect(self) -> Iterable[Metric]:
        return self._collect()


def _filled(family: CounterMetricFamily | GaugeMetricFamily, values: Mapping[str, float]) -> Metric:
    """Add one sample for each value of the family's label."""
    for key, value in values.items():
        family.add_metric([key], value)
    return family


def memory_metric(memory: Iterable[Memory]) -> Metric:
    """Return the memory of processes."""
    text = (
        "Memory by kind of process: proportional set size, in which a page that n processes share counts 1/n. Without"
        " shared memory (medialane_arena_bytes), page tables, and the process of `medialane serve`"
    )
    family = Metric("medialane_process_memory_bytes", text, "gauge")
    for labels, sizes in memory:
        for kind, num_bytes in sizes.items():
            family.add_sample(family.name, {"kind": kind, **labels}, num_bytes)
    return family


def store_metrics(stats: StoreStats | None) -> Iterator[Metric]:
    """Yield the series of a host's store; none without one."""
    if stats is not None:
        yield from _arena(stats.arena)
        yield from _preparers(stats.preparers)
        yield from _pulls(stats.pulls)
        yield from _embeddings(stats.embeddings)
        yield from _leases(stats.leases)


def _gauge(name: str, text: str, label: str, values: Mapping[str, float]) -> Metric:
    return _filled(GaugeMetricFamily(name, text, labels=[label]), values)


def _counter(name: str, text: str, label: str, values: Mapping[str, float]) -> Metric:
    return _filled(CounterMetricFamily(name, text, labels=[label]), values)


def _pulls(stats: PullStats) -> Iterator[Metric]:
    yield _counter("medialane_store_pulls", "Entries copied from other hosts' stores", "mover", stats.num_pulls)
    yield _counter(
        "medialane_store_pulled_bytes", "Bytes of entries copied from other hosts' stores", "mover", stats.num_bytes
    )
    yield _counter(
        "medialane_store_failed_pulls", "Copies from other hosts' stores that have failed", "mover", stats.num_failed
    )
    text = "Ranges that a failed copy may still write to, and that are not reused before it has ended"
    yield GaugeMetricFamily("medialane_store_quarantined_ranges", text, value=stats.num_quarantined)


def _embeddings(stats: EmbeddingStats) -> Iterator[Metric]:
    calls: dict[str, float] = {
        "found": stats.num_found,
        "filled": stats.num_filled,
        "dropped": stats.num_dropped,
        "waited": stats.num_waited,
    }
    text = (
        "Embeddings (encoder outputs) found in shared memory, filled by an engine, dropped as no engine wrote them; and"
        " searches that waited for another engine"
    )
    yield _counter("medialane_store_embeddings", text, "outcome", calls)
    ranges: dict[str, float] = {"reserved": stats.num_writing, "revoked": stats.num_revoking}
    text = "Ranges for embeddings: reserved for an engine; revoked, and freed when a process no longer writes there"
    yield _gauge("medialane_store_embedding_ranges", text, "state", ranges)


def _leases(stats: MediaLeaseStats) -> Iterator[Metric]:
    text = "Media that clients have sent once, and that are kept for them until their leases end"
    yield GaugeMetricFamily("medialane_store_leased_media", text, value=stats.num_leases)
    sizes: dict[str, float] = {"leased": stats.num_bytes, "limit": stats.max_bytes}
    text = "Bytes of media that are kept for clients, uploads included, and how many there may be (--media-lease-share)"
    yield _gauge("medialane_store_leased_bytes", text, "kind", sizes)


def _arena(stats: ArenaStats) -> Iterator[Metric]:
    kinds: dict[str, float] = {
        "size": stats.size_bytes,
        "free": stats.free_bytes,
        "writing": stats.writing_bytes,
        "cached": stats.published_bytes - stats.pinned_bytes,
        "pinned": stats.pinned_bytes,
    }
    yield _gauge(
        "medialane_arena_bytes",
        "Shared memory by state: size is the total, cached may be evicted, pinned is held by leases",
        "kind",
        kinds,
    )
    media: dict[str, float] = {
        "encoded": stats.encoded_bytes,
        "decoded": stats.decoded_bytes,
        "processed": stats.processed_bytes,
        "embedded": stats.embedded_bytes,
    }
    yield _gauge("medialane_arena_media_bytes", "Shared memory in use by kind of entry", "kind", media)
    yield GaugeMetricFamily("medialane_arena_entries", "Entries in shared memory", value=stats.num_entries)
    yield GaugeMetricFamily("medialane_arena_leases", "Leases on entries that are held", value=stats.num_leases)
    yield CounterMetricFamily("medialane_arena_evictions", "Evicted cache entries", value=stats.num_evictions)


def _preparers(stats: PoolStats) -> Iterator[Metric]:
    states: dict[str, float] = {"alive": stats.num_alive, "busy": stats.num_busy}
    yield _gauge("medialane_preparers", "Preparer processes", "state", states)
    yield GaugeMetricFamily("medialane_preparer_queue", "Items waiting for a preparer", value=stats.num_queued)
    text = (
        "Expected time of the waiting items in preparers, divided by the number of preparers. Left out: what is being"
        " fetched, and items in preparation"
    )
    yield GaugeMetricFamily("medialane_preparer_queue_seconds", text, value=stats.queue_s)
    yield CounterMetricFamily(
        "medialane_preparer_restarts", "Preparers restarted after a crash or kill", value=stats.num_restarts
    )
    jobs: dict[str, float] = {"done": stats.num_done, "failed": stats.num_failed}
    yield _counter("medialane_preparer_jobs", "Preparation jobs by outcome", "outcome", jobs)


def _routing(stats: RoutingStats) -> Iterator[Metric]:
    yield GaugeMetricFamily(
        "medialane_routing_blocks", "Distinct KV blocks in the router's index", value=stats.num_blocks
    )
    yield GaugeMetricFamily(
        "medialane_routing_entries",
        "KV blocks in the router's index, summed over workers",
        value=stats.num_entries,
    )
    yield GaugeMetricFamily(
        "medialane_routing_encoder_items",
        "Media items predicted to be in encoder caches",
        value=stats.num_encoder_items,
    )
    text = "Prompts with fewer cached tokens than predicted, or whose blocks were never reported as stored"
    missed = {"fewer_cached": stats.num_unexplained, "never_stored": stats.num_never_stored}
    yield _counter("medialane_routing_missed_predictions", text, "kind", missed)
    text = "Routing decisions whose request was cancelled, failed or rerouted before it was sent"
    yield CounterMetricFamily("medialane_routing_unsent_decisions", text, value=stats.num_unsent)
    text = "Age of a worker's latest KV event when the worker reported it"
    yield _gauge("medialane_kv_event_lag_seconds", text, "worker", stats.event_lag_s)
    text = "Gaps in a worker's KV events that required a snapshot, since the worker was last connected"
    yield _counter("medialane_kv_event_gaps", text, "worker", stats.num_event_gaps)


def _connections(endpoints: Sequence[Endpoint]) -> Iterator[Metric]:
    connected: dict[str, float] = {e.worker_id: float(e.ready) for e in endpoints}
    yield _gauge("medialane_worker_connected", "1 for a worker that this gateway is connected to", "worker", connected)
    in_flight: dict[str, float] = {e.worker_id: e.num_in_flight for e in endpoints}
    yield _gauge("medialane_worker_in_flight", "Requests of this gateway in flight at a worker", "worker", in_flight)
    text = "1 for how media reach a connected worker: shm, pull (by the store of its host), inline"
    paths = GaugeMetricFamily("medialane_worker_transport", text, labels=["worker", "transport"])
    for endpoint in endpoints:
        if endpoint.ready:
            paths.add_metric([endpoint.worker_id, _transport(endpoint)], 1.0)
    yield paths


def _transport(endpoint: Endpoint) -> str:
    return "shm" if endpoint.same_host else "pull" if endpoint.can_pull else "inline"


def _workers(endpoints: Sequence[Endpoint]) -> Iterator[Metric]:
    state = GaugeMetricFamily("medialane_worker_state", "1 for the state a worker is in", labels=["worker", "state"])
    for endpoint in endpoints:
        for name in WORKER_STATES:
            state.add_metric([endpoint.worker_id, name], float(endpoint.state == name))
    yield state
    role = GaugeMetricFamily("medialane_worker_role", "1 for the role of a worker", labels=["worker", "role"])
    for endpoint in endpoints:
        role.add_metric([endpoint.worker_id, endpoint.role], 1.0)
    yield role
    text = "1 for a worker that keeps its encoder's outputs, 0 and the reason for another"
    kept = GaugeMetricFamily("medialane_worker_keeps_embeddings", text, labels=["worker", "reason"])
    for endpoint in endpoints:
        if endpoint.card is not None:
            is_kept = endpoint.card.encoder is not None
            kept.add_metric([endpoint.worker_id, endpoint.card.no_embeddings], float(is_kept))
    yield kept
    running: dict[str, float] = {e.worker_id: e.load.num_running for e in endpoints}
    waiting: dict[str, float] = {e.worker_id: e.load.num_waiting for e in endpoints}
    usage = {e.worker_id: e.load.kv_usage for e in endpoints}
    yield _gauge(
        "medialane_worker_running", "Requests running in a worker's engine, as it has last reported", "worker", running
    )
    yield _gauge(
        "medialane_worker_waiting", "Requests waiting in a worker's engine, as it has last reported", "worker", waiting
    )
    yield _gauge(
        "medialane_worker_kv_usage_ratio",
        "KV-cache utilisation of a worker, 0 to 1, as it has last reported",
        "worker",
        usage,
    )
