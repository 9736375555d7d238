import pytest
from prometheus_client import CollectorRegistry, generate_latest

from medialane.observability import (
    Metrics,
    RequestTimeline,
    queue_metrics,
    routing_metrics,
    store_metrics,
    wait_metrics,
)
from medialane.types.request import Endpoint, ModelCard, WorkerLoad
from medialane.types.stats import (
    ArenaStats,
    EmbeddingStats,
    PoolStats,
    QueueStats,
    RoutingStats,
    StoreStats,
    WaitStats,
)


def arena_stats(**changed):
    return ArenaStats(**dict.fromkeys(ArenaStats.__struct_fields__, 0) | changed)


def pool_stats(**changed):
    return PoolStats(**dict.fromkeys(PoolStats.__struct_fields__, 0) | changed)


@pytest.fixture
def registry():
    return CollectorRegistry()


@pytest.fixture
def metrics(registry):
    return Metrics(registry)


def test_request_is_counted_by_stage_outcome_and_bytes(metrics, registry):
    timeline = RequestTimeline()
    timeline.add("decode", 0.02)
    timeline.num_hits, timeline.num_misses, timeline.copied_bytes = 2, 1, 1000
    metrics.observe(timeline)
    assert registry.get_sample_value("medialane_stage_seconds_sum", {"stage": "decode"}) == pytest.approx(0.02)
    assert registry.get_sample_value("medialane_request_seconds_count") == 1
    assert registry.get_sample_value("medialane_copied_bytes_total") == 1000
    lookups = "medialane_cache_lookups_total"
    assert registry.get_sample_value(lookups, {"kind": "feature", "outcome": "hit"}) == 2
    assert registry.get_sample_value(lookups, {"kind": "feature", "outcome": "miss"}) == 1


def test_time_to_first_token_is_of_requests_that_had_one(metrics, registry):
    timeline = RequestTimeline()
    metrics.observe(timeline)
    metrics.observe(timeline, 600.0)
    assert registry.get_sample_value("medialane_time_to_first_token_seconds_count") == 1
    assert registry.get_sample_value("medialane_time_to_first_token_seconds_bucket", {"le": "0.75"}) == 1
    assert registry.get_sample_value("medialane_request_seconds_count") == 2


def test_queues_and_waits_are_exposed_for_autoscalers(metrics, registry):
    waits = WaitStats({"w0": 2.5, "w1": 0.5}, 0.75)
    metrics.watch(lambda: queue_metrics({"engine": QueueStats(3, 1.5, 0.25)}))
    metrics.watch(lambda: wait_metrics(waits))
    value = registry.get_sample_value
    queue = {"queue": "engine"}
    names = ("requests", "seconds", "oldest_seconds")
    assert [value(f"medialane_queue_{name}", queue) for name in names] == [3, 1.5, 0.25]
    assert value("medialane_worker_wait_seconds", {"worker": "w0"}) == 2.5
    assert value("medialane_expected_wait_seconds") == 0.75
    waits = WaitStats({}, None)
    assert value("medialane_expected_wait_seconds") is None


def test_failures_are_counted_by_type(metrics, registry):
    metrics.request_errors.labels("invalid_image").inc()
    metrics.handover_fallbacks.labels("features/shm", "handover_failed").inc()
    metrics.worker_losses.labels("unix:/w0").inc()
    value = registry.get_sample_value
    assert value("medialane_request_errors_total", {"code": "invalid_image"}) == 1
    assert value("medialane_transfer_fallbacks_total", {"path": "features/shm", "reason": "handover_failed"}) == 1
    assert value("medialane_worker_losses_total", {"worker": "unix:/w0"}) == 1


def test_state_is_read_at_every_scrape(metrics, registry):
    arena = arena_stats(published_bytes=40, pinned_bytes=15, num_evictions=7)
    preparers = pool_stats(num_busy=1, num_restarts=5, num_queued=4, queue_s=1.5)
    metrics.watch(lambda: store_metrics(StoreStats(arena, preparers)))
    value = registry.get_sample_value
    assert value("medialane_arena_bytes", {"kind": "cached"}) == 25
    assert value("medialane_arena_evictions_total") == 7
    assert value("medialane_preparers", {"state": "busy"}) == 1
    assert value("medialane_preparer_restarts_total") == 5
    assert value("medialane_preparer_queue_seconds") == 1.5
    arena, preparers = arena_stats(published_bytes=40, pinned_bytes=40), pool_stats()
    assert value("medialane_arena_bytes", {"kind": "cached"}) == 0
    assert value("medialane_preparer_queue") == 0


def test_memory_of_all_processes_is_one_family(metrics, registry):
    of_host = [({}, {"store": 2, "preparer": 3}), ({"worker": "h/0"}, {"worker": 4, "engine": 5})]
    metrics.watch_memory(lambda: {"gateway": 1}, lambda: of_host)

    def value(**labels):
        return registry.get_sample_value("medialane_process_memory_bytes", labels)

    assert (value(kind="gateway"), value(kind="store"), value(kind="preparer")) == (1, 2, 3)
    assert (value(kind="worker", worker="h/0"), value(kind="engine", worker="h/0")) == (4, 5)
    assert generate_latest(registry).count(b"# TYPE medialane_process_memory_bytes gauge") == 1


def test_embeddings_of_the_store_are_exposed_by_outcome_and_state(metrics, registry):
    embeddings = EmbeddingStats(num_found=6, num_filled=5, num_dropped=4, num_waited=3, num_writing=2, num_revoking=1)
    arena = arena_stats(encoded_bytes=1, decoded_bytes=2, processed_bytes=3, embedded_bytes=4)
    metrics.watch(lambda: store_metrics(StoreStats(arena, pool_stats(), embeddings=embeddings)))

    def values(name, label, *keys):
        return [registry.get_sample_value(name, {label: key}) for key in keys]

    outcomes = ("found", "filled", "dropped", "waited")
    assert values("medialane_store_embeddings_total", "outcome", *outcomes) == [6, 5, 4, 3]
    assert values("medialane_store_embedding_ranges", "state", "reserved", "revoked") == [2, 1]
    assert values("medialane_arena_media_bytes", "kind", "encoded", "decoded", "processed", "embedded") == [1, 2, 3, 4]


def test_lost_store_has_no_state_rather_than_a_stale_one(metrics, registry):
    stats = StoreStats(arena_stats(num_evictions=7), pool_stats(num_busy=1))
    metrics.watch(lambda: store_metrics(stats))
    value = registry.get_sample_value
    assert value("medialane_arena_evictions_total") == 7
    stats = None
    assert value("medialane_arena_evictions_total") is None
    assert value("medialane_preparers", {"state": "busy"}) is None


def test_router_is_read_at_every_scrape(metrics, registry):
    stats = RoutingStats(
        num_blocks=10,
        num_entries=15,
        num_encoder_items=3,
        num_fewer_cached=1,
        num_more_cached=2,
        num_unsent=5,
        event_lag_s={"w0": 0.25},
        num_event_gaps={"w0": 4},
    )
    metrics.watch(lambda: routing_metrics(stats))
    value = registry.get_sample_value
    assert value("medialane_routing_blocks") == 10
    assert value("medialane_routing_entries") == 15
    assert value("medialane_routing_encoder_items") == 3
    assert value("medialane_routing_missed_predictions_total", {"kind": "fewer_cached"}) == 1
    assert value("medialane_routing_missed_predictions_total", {"kind": "more_cached"}) == 2
    assert value("medialane_routing_unsent_decisions_total") == 5
    assert value("medialane_kv_event_lag_seconds", {"worker": "w0"}) == 0.25
    assert value("medialane_kv_event_gaps_total", {"worker": "w0"}) == 4


def test_reason_why_a_worker_keeps_no_embeddings_is_exposed(metrics, registry):
    card = ModelCard("m", 4096, 16, {}, no_embeddings="the encoder's ranks differ")
    workers = [Endpoint("w0", "unix:/w0", ready=True, load=WorkerLoad(), num_in_flight=0, card=card)]
    metrics.watch_workers(lambda: workers)
    labels = {"worker": "w0", "reason": "the encoder's ranks differ"}
    assert registry.get_sample_value("medialane_worker_keeps_embeddings", labels) == 0


def test_worker_is_in_exactly_one_state(metrics, registry):
    workers = [
        Endpoint("w0", "unix:/w0", ready=True, load=WorkerLoad(3, 2, 0.5), num_in_flight=4),
        Endpoint("w1", "unix:/w1", ready=False, load=WorkerLoad(), num_in_flight=0),
    ]
    metrics.watch_workers(lambda: workers)
    value = registry.get_sample_value
    states = {
        (w, s): value("medialane_worker_state", {"worker": w, "state": s})
        for w in ("w0", "w1")
        for s in ("ready", "lost")
    }
    assert states == {("w0", "ready"): 1, ("w0", "lost"): 0, ("w1", "ready"): 0, ("w1", "lost"): 1}
    assert value("medialane_worker_in_flight", {"worker": "w0"}) == 4
    assert [value("medialane_worker_connected", {"worker": worker}) for worker in ("w0", "w1")] == [1, 0]
    assert value("medialane_worker_kv_usage_ratio", {"worker": "w0"}) == 0.5


def test_closed_metrics_unregister(metrics, registry):
    metrics.watch(lambda: store_metrics(StoreStats(arena_stats(), pool_stats())))
    metrics.close()
    metrics.close()
    assert b"medialane" not in generate_latest(registry)
    Metrics(registry).close()


def test_figures_of_the_host_are_apart_from_those_of_the_gateway():
    own, host = CollectorRegistry(), CollectorRegistry()
    metrics = Metrics(own, host=host)
    metrics.watch_workers(
        lambda: [Endpoint("w0", "unix:/w0", ready=True, num_in_flight=2, load=WorkerLoad(num_running=3))]
    )
    metrics.watch(lambda: store_metrics(StoreStats(arena_stats(num_entries=4), pool_stats())), of_host=True)
    assert own.get_sample_value("medialane_worker_in_flight", {"worker": "w0"}) == 2
    assert own.get_sample_value("medialane_worker_connected", {"worker": "w0"}) == 1, "others may not reach it"
    assert own.get_sample_value("medialane_worker_running", {"worker": "w0"}) is None
    assert host.get_sample_value("medialane_worker_running", {"worker": "w0"}) == 3
    assert own.get_sample_value("medialane_arena_entries") is None
    assert host.get_sample_value("medialane_arena_entries") == 4
    metrics.close()
    assert not list(own.collect())
    assert not list(host.collect())
