"""Write the tables of docs/reference/metrics.md again, from what the code exposes: python tests/metric_reference.py

A gateway's metrics are made with everything that it can watch, and each counter is counted once, so that every family
has its labels.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace

from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families

from medialane.gateway.models import up_page
from medialane.observability import (
    Metrics,
    RequestTimeline,
    exit_metrics,
    prediction_metrics,
    queue_metrics,
    routing_metrics,
    segment_metrics,
    store_metrics,
    up_metrics,
    wait_metrics,
)
from medialane.runtime.phase import ProcessExits
from medialane.types.request import EmbeddingCounts, Endpoint, ModelCard, WorkerLoad
from medialane.types.stats import (
    ArenaStats,
    PoolStats,
    PullStats,
    QueueStats,
    RoutingStats,
    SegmentStats,
    StoreStats,
    WaitStats,
)
from medialane.worker.metrics_server import WorkerStatus

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "reference" / "metrics.md"
_HEAD = "| name | what it is |\n|---|---|\n"


def _store() -> StoreStats:
    pulls = PullStats({"tcp": 1}, {"tcp": 1}, {"tcp": 1})
    zeros = [dict.fromkeys(cls.__struct_fields__, 0) for cls in (ArenaStats, PoolStats)]
    return StoreStats(ArenaStats(**zeros[0]), PoolStats(**zeros[1]), pulls)


def _count_all(metrics: Metrics) -> None:
    timeline = RequestTimeline()
    timeline.add("decode", 1.0)
    timeline.num_hits = 1
    metrics.observe(timeline)
    metrics.request_errors.labels("code").inc()
    metrics.refused_requests.labels("tenant", "code").inc()
    metrics.handover_fallbacks.labels("path", "code").inc()
    metrics.copied_requests.labels("tcp").inc()
    metrics.migrations.labels("code", "outcome").inc()
    metrics.worker_losses.labels("w").inc()
    metrics.prefills.labels("split").inc()
    metrics.prompt_tokens.labels("all").inc()
    metrics.media_items.labels("image", "cached").inc()
    metrics.document_pages.labels("hit").inc()
    metrics.embeddings.labels("loaded").inc()
    metrics.encoder_requests.labels("encoded").inc()


def _watch_all(metrics: Metrics) -> None:
    card = ModelCard("m", 4096, 16, {})
    worker = Endpoint("w", "unix:/w", ready=True, load=WorkerLoad(), num_in_flight=0, card=card)
    routing = RoutingStats(0, 0, 0, 0, 0, 0, event_lag_s={"w": 1.0}, num_event_gaps={"w": 0})
    metrics.watch(lambda: routing_metrics(routing))
    metrics.watch(lambda: prediction_metrics(["image"]))
    metrics.watch(lambda: queue_metrics({"engine": QueueStats(0, 0.0, 0.0)}))
    metrics.watch(lambda: segment_metrics(SegmentStats()))
    metrics.watch(lambda: wait_metrics(WaitStats({"w": 0.0}, 0.0)))
    metrics.watch(lambda: store_metrics(_store()), of_host=True)
    metrics.watch(lambda: exit_metrics({"store": ProcessExits(1)}), of_host=True)
    metrics.watch_workers(lambda: [worker])
    metrics.watch_memory(lambda: {"gateway": 1}, lambda: [({"worker": "w"}, {"engine": 1})])
    metrics.watch(lambda: up_metrics({"0": 1.0}), of_host=True)


def _of_worker() -> list[Metric]:
    """Series of a worker's own port that a gateway does not have."""

    async def no_store() -> None:
        return None

    worker = SimpleNamespace(is_stalled=False, has_arena=True, memory=lambda: {"worker": 1}, exposed_store=no_store)
    engine = SimpleNamespace(embedding_counts=EmbeddingCounts())
    server = SimpleNamespace(num_gateways=1, num_in_flight=0)
    status = WorkerStatus(worker, engine, server)
    asyncio.run(status.refresh())
    return [metric for metric in status.collect() if metric.name.startswith("medialane_worker_")]


def families() -> dict[str, list[Metric]]:
    """By table: what a gateway counts, what is of its host, what only a worker's own port has, or the name router."""
    own, host = CollectorRegistry(), CollectorRegistry()
    metrics = Metrics(own, host=host)
    _count_all(metrics)
    _watch_all(metrics)
    router = list(text_string_to_metric_families(up_page({"vision": True}).decode()))
    return {"gateway": list(own.collect()), "host": list(host.collect()), "worker": _of_worker(), "router": router}


def shown_name(metric: Metric) -> str:
    return f"{metric.name}_total" if metric.type == "counter" else metric.name


def _row(metric: Metric) -> str:
    """Name and labels as in PromQL; the unit is the name's suffix, and a type that it does not tell is named."""
    labels = ",".join(dict.fromkeys(label for sample in metric.samples for label in sample.labels if label != "le"))
    shown = f"{shown_name(metric)}{{{labels}}}" if labels else shown_name(metric)
    text = metric.documentation.replace("|", "\\|")
    return f"| `{shown}` | {text}{' (histogram)' if metric.type == 'histogram' else ''} |\n"


def _table(found: Iterable[Metric]) -> str:
    return _HEAD + "".join(_row(metric) for metric in sorted(found, key=lambda each: each.name))


def with_tables(page: str) -> str:
    """The page with the tables of the code between its marks."""
    tables = {name: _table(found) for name, found in families().items()}
    for name, table in tables.items():
        begin, end = f"<!-- {name}: tests/metric_reference.py -->\n", f"<!-- end of {name} -->"
        pattern = re.compile(f"{re.escape(begin)}.*?{re.escape(end)}", re.DOTALL)
        page, number = pattern.subn((begin + table + end).replace("\\", r"\\"), page)
        assert number == 1, f"docs/reference/metrics.md has {number} places for the table {name}"
    return page


if __name__ == "__main__":
    PAGE.write_text(with_tables(PAGE.read_text()))
