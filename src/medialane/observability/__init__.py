"""Observability: timelines of requests, Prometheus metrics, logging."""

from medialane.observability.collectors import (
    exit_metrics,
    prediction_metrics,
    queue_metrics,
    routing_metrics,
    segment_metrics,
    store_metrics,
    up_metrics,
    wait_metrics,
)
from medialane.observability.logging import (
    ACCESS_LOGGER,
    REPORTED_ERROR,
    JsonFormatter,
    LimitedHandler,
    LoggingConfig,
    PlainFormatter,
    as_text,
    configure,
    configure_child,
    is_access_line,
    request_id,
    trace_id,
    unchanged_levels,
)
from medialane.observability.metrics import Metrics
from medialane.observability.timeline import INNER_STEPS, MAX_STEPS, STEPS, RequestTimeline, StepName, TimelineReport
from medialane.observability.worker_metrics import MetricMirror, MetricReader, engine_metrics

__all__ = [
    "ACCESS_LOGGER",
    "INNER_STEPS",
    "MAX_STEPS",
    "REPORTED_ERROR",
    "STEPS",
    "JsonFormatter",
    "LimitedHandler",
    "LoggingConfig",
    "MetricMirror",
    "MetricReader",
    "Metrics",
    "PlainFormatter",
    "RequestTimeline",
    "StepName",
    "TimelineReport",
    "as_text",
    "configure",
    "configure_child",
    "engine_metrics",
    "exit_metrics",
    "is_access_line",
    "prediction_metrics",
    "queue_metrics",
    "request_id",
    "routing_metrics",
    "segment_metrics",
    "store_metrics",
    "trace_id",
    "unchanged_levels",
    "up_metrics",
    "wait_metrics",
]
