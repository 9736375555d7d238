"""Prometheus series of the state of a gateway, its router, its workers and its store, read at each scrape."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric

from medialane.runtime.phase import ProcessExits
from medialane.types.request import WORKER_STATES, Endpoint
from medialane.types.stats import (
    ArenaStats,
    EmbeddingStats,
    MediaLeaseStats,
    PoolStats,
    ProcessKind,
    PullStats,
    QueueStats,
    RoutingStats,
    SegmentStats,
    StoreStats,
    WaitStats,
)

#: Labels, and bytes by kind of process.
Memory = tuple[Mapping[str, str], Mapping[ProcessKind, int]]


def _gauge(name: str, text: str, label: str, values: Mapping[str, float]) -> Metric:
    """Return a gauge with one sample for each value of its label."""
    return _filled(GaugeMetricFamily(name, text, labels=[label]), values)


def _counter(name: str, text: str, label: str, values: Mapping[str, float]) -> Metric:
    return _filled(CounterMetricFamily(name, text, labels=[label]), values)


def _filled(family: CounterMetricFamily | GaugeMetricFamily, values: Mapping[str, float]) -> Metric:
    for key, value in values.items():
        family.add_metric([key], value)
    return family


def queue_metrics(queues: Mapping[str, QueueStats]) -> Iterator[Metric]:
    """Yield the series of the requests that wait in this gateway."""
    text = "Requests that wait in this gateway for an engine or a preparer"
    yield _gauge(
        "medialane_queue_requests", text, "queue", {name: stats.num_requests for name, stats in queues.items()}
    )
    text = "Expected time until all requests that wait in this gateway are sent; 0 until some had to wait"
    yield _gauge("medialane_queue_seconds", text, "queue", {name: stats.expected_s for name, stats in queues.items()})
    text = "Wait of the oldest request that waits in this gateway"
    yield _gauge("medialane_queue_oldest_seconds", text, "queue", {n: stats.oldest_s for n, stats in queues.items()})


def segment_metrics(stats: SegmentStats) -> Iterator[Metric]:
    """Yield the series of the cache of prompts' tokens."""
    text = (
        "Characters of prompts that have at least 256, by where their tokens are from: cached (earlier prompts) or new"
    )
    yield _counter("medialane_prompt_characters", text, "tokens", {"cached": stats.num_cached, "new": stats.num_new})
    yield GaugeMetricFamily("medialane_token_cache_bytes", "Memory of tokens of earlier prompts", value=stats.num_bytes)


def wait_metrics(waits: WaitStats) -> Iterator[Metric]:
    """Yield the series of waits."""
    text = (
        "Wait in the worker's engine of the last request that began there, without its prefill or the gateway's queue;"
        " 0 while none waits there"
    )
    yield _gauge("medialane_worker_wait_seconds", text, "worker", waits.workers_s)
    text = (
        "Wait for engines: of the oldest request in this gateway's queue, plus of the last one that began at the worker"
        " with the shortest wait. Missing while no worker accepts requests"
    )
    yield GaugeMetricFamily("medialane_expected_wait_seconds", text, value=waits.expected_s)


def memory_metric(memory: Iterable[Memory]) -> Metric:
    """Return the memory of processes."""
    text = (
        "Memory by kind of process: proportional set size, without shared memory (medialane_arena_bytes), page tables,"
        " and the process of `medialane serve`"
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


def _pulls(stats: PullStats) -> Iterator[Metric]:
    yield _counter("medialane_store_pulls", "Entries copied from other hosts' stores", "mover", stats.num_pulls)
    yield _counter(
        "medialane_store_pulled_bytes", "Bytes of entries copied from other hosts' stores", "mover", stats.num_bytes
    )
    yield _counter("medialane_store_failed_pulls", "Failed copies from other hosts' stores", "mover", stats.num_failed)
    text = "Ranges that a failed copy may still write to; not reused until it has ended"
    yield GaugeMetricFamily("medialane_store_quarantined_ranges", text, value=stats.num_quarantined)


def _embeddings(stats: EmbeddingStats) -> Iterator[Metric]:
    text = (
        "Embeddings (encoder outputs) found in shared memory, filled by an engine, dropped as no engine wrote them;"
        " waited: for another engine"
    )
    yield _counter(
        "medialane_store_embeddings",
        text,
        "outcome",
        {
            "found": stats.num_found,
            "filled": stats.num_filled,
            "dropped": stats.num_dropped,
            "waited": stats.num_waited,
        },
    )
    text = "Ranges for embeddings: reserved for an engine; revoked, freed when no process writes there"
    yield _gauge(
        "medialane_store_embedding_ranges",
        text,
        "state",
        {"reserved": stats.num_writing, "revoked": stats.num_revoking},
    )


def _leases(stats: MediaLeaseStats) -> Iterator[Metric]:
    text = "Media that clients have sent once and that are kept until their leases end"
    yield GaugeMetricFamily("medialane_store_leased_media", text, value=stats.num_leases)
    text = "Bytes of media kept for clients, uploads included, and their limit (--media-lease-share)"
    yield _gauge("medialane_store_leased_bytes", text, "kind", {"leased": stats.num_bytes, "limit": stats.max_bytes})


def _arena(stats: ArenaStats) -> Iterator[Metric]:
    yield _gauge(
        "medialane_arena_bytes",
        "Shared memory by state: size is the total, cached may be evicted, pinned is being read",
        "kind",
        {
            "size": stats.size_bytes,
            "free": stats.free_bytes,
            "writing": stats.writing_bytes,
            "cached": stats.published_bytes - stats.pinned_bytes,
            "pinned": stats.pinned_bytes,
        },
    )
    yield _gauge(
        "medialane_arena_media_bytes",
        "Shared memory in use by kind of entry",
        "kind",
        {
            "encoded": stats.encoded_bytes,
            "decoded": stats.decoded_bytes,
            "processed": stats.processed_bytes,
            "embedded": stats.embedded_bytes,
        },
    )
    yield GaugeMetricFamily("medialane_arena_entries", "Entries in shared memory", value=stats.num_entries)
    yield GaugeMetricFamily("medialane_arena_leases", "Pins on entries, one for each hold", value=stats.num_leases)
    yield CounterMetricFamily("medialane_arena_evictions", "Evicted cache entries", value=stats.num_evictions)


def _preparers(stats: PoolStats) -> Iterator[Metric]:
    yield _gauge(
        "medialane_preparers", "Preparer processes", "state", {"alive": stats.num_alive, "busy": stats.num_busy}
    )
    yield GaugeMetricFamily("medialane_preparer_queue", "Items waiting for a preparer", value=stats.num_queued)
    text = (
        "Expected preparation time of the waiting items, divided by the number of preparers. Without items that are"
        " being fetched or prepared"
    )
    yield GaugeMetricFamily("medialane_preparer_queue_seconds", text, value=stats.queue_s)
    yield CounterMetricFamily(
        "medialane_preparer_restarts", "Preparers restarted after a crash or kill", value=stats.num_restarts
    )
    text = "Fork servers of preparers replaced after they exited or hung"
    yield CounterMetricFamily("medialane_forkserver_restarts", text, value=stats.num_forkserver_restarts)
    yield _counter(
        "medialane_preparer_jobs",
        "Preparation jobs by outcome",
        "outcome",
        {"done": stats.num_done, "failed": stats.num_failed},
    )


def exit_metrics(exits: Mapping[str, ProcessExits]) -> Iterator[Metric]:
    """Yield the series of the ends of the host's processes."""
    text = "Ends of processes that are restarted, by cause: exited (or drained), hung (killed)"
    family = CounterMetricFamily("medialane_process_exits", text, labels=("process", "cause"))
    for name, each in exits.items():
        family.add_metric((name, "exited"), each.num - each.num_hung)
        family.add_metric((name, "hung"), each.num_hung)
    yield family


def routing_metrics(stats: RoutingStats) -> Iterator[Metric]:
    """Yield the series of the router's state."""
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
    text = "Prompts whose engines had fewer tokens cached than predicted, or more"
    yield _counter(
        "medialane_routing_missed_predictions",
        text,
        "kind",
        {"fewer_cached": stats.num_fewer_cached, "more_cached": stats.num_more_cached},
    )
    text = "Routing decisions whose request was not sent: cancelled, failed or rerouted"
    yield CounterMetricFamily("medialane_routing_unsent_decisions", text, value=stats.num_unsent)
    text = "Age of a worker's latest KV event when the worker reported it"
    yield _gauge("medialane_kv_event_lag_seconds", text, "worker", stats.event_lag_s)
    text = "Times that too many queued KV events of a worker were replaced by a snapshot, since its last connection"
    yield _counter("medialane_kv_event_gaps", text, "worker", stats.num_event_gaps)


def prediction_metrics(modalities: Iterable[str]) -> Iterator[Metric]:
    """Yield the modalities whose headers follow from the size of the media."""
    text = "1 for a modality whose items' tokens are known from the size of the media"
    yield _gauge("medialane_headers_predicted", text, "modality", dict.fromkeys(modalities, 1.0))


def up_metrics(up: Mapping[str, float]) -> Iterator[Metric]:
    """Yield which gateways of the host respond, by index."""
    text = "1 for a gateway that has responded to this scrape, 0 for one whose last values are exposed"
    yield _gauge("medialane_gateway_up", text, "gateway", up)


def connection_metrics(endpoints: Sequence[Endpoint]) -> Iterator[Metric]:
    """Yield the series of this gateway's connections to workers."""
    yield _gauge(
        "medialane_worker_connected",
        "1 for a worker that this gateway is connected to",
        "worker",
        {e.worker_id: float(e.ready) for e in endpoints},
    )
    yield _gauge(
        "medialane_worker_in_flight",
        "Requests of this gateway in flight at a worker",
        "worker",
        {e.worker_id: e.num_in_flight for e in endpoints},
    )
    text = "1 for how media reach a connected worker: shm, pull (by its host's store), inline"
    paths = GaugeMetricFamily("medialane_worker_transport", text, labels=["worker", "transport"])
    for endpoint in endpoints:
        if endpoint.ready:
            paths.add_metric([endpoint.worker_id, _transport(endpoint)], 1.0)
    yield paths


def _transport(endpoint: Endpoint) -> str:
    return "shm" if endpoint.same_host else "pull" if endpoint.can_pull else "inline"


def worker_metrics(endpoints: Sequence[Endpoint]) -> Iterator[Metric]:
    """Yield the series of the workers themselves, which are the same in each gateway of the host."""
    state = GaugeMetricFamily("medialane_worker_state", "1 for the state a worker is in", labels=["worker", "state"])
    for endpoint in endpoints:
        for name in WORKER_STATES:
            state.add_metric([endpoint.worker_id, name], float(endpoint.state == name))
    yield state
    role = GaugeMetricFamily("medialane_worker_role", "1 for the role of a worker", labels=["worker", "role"])
    for endpoint in endpoints:
        role.add_metric([endpoint.worker_id, endpoint.role], 1.0)
    yield role
    text = "1 for a worker that keeps its encoder's outputs, otherwise 0 and the reason"
    kept = GaugeMetricFamily("medialane_worker_keeps_embeddings", text, labels=["worker", "reason"])
    for endpoint in endpoints:
        if endpoint.card is not None:
            is_kept = endpoint.card.encoder is not None
            kept.add_metric([endpoint.worker_id, endpoint.card.no_embeddings], float(is_kept))
    yield kept
    yield _gauge(
        "medialane_worker_running",
        "Requests running in a worker's engine, as last reported",
        "worker",
        {e.worker_id: e.load.num_running for e in endpoints},
    )
    yield _gauge(
        "medialane_worker_waiting",
        "Requests waiting in a worker's engine, as last reported",
        "worker",
        {e.worker_id: e.load.num_waiting for e in endpoints},
    )
    yield _gauge(
        "medialane_worker_kv_usage_ratio",
        "KV-cache utilisation of a worker, 0 to 1, as last reported",
        "worker",
        {e.worker_id: e.load.kv_usage for e in endpoints},
    )
