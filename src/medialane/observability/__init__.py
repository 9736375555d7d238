"""Observability: timelines of requests, Prometheus metrics, logging.

`tracing` is not imported here: only gateways need OpenTelemetry.
"""

from medialane.observability.collectors import Memory, memory_metric, store_metrics
from medialane.observability.logging import (
    ACCESS_LOGGER,
    JsonFormatter,
    LimitedHandler,
    LoggingConfig,
    LogProcess,
    PlainFormatter,
    as_text,
    configure,
    configure_child,
    is_access_line,
    is_json,
    request_id,
    set_level,
    trace_id,
    trace_of,
    unchanged_levels,
    write_line,
)
from medialane.observability.metrics import Metrics
from medialane.observability.timeline import MAX_STEPS, LiveStage, ReportedStep, StageTimeline, Step, TimelineReport
from medialane.observability.worker_metrics import WORKER_LABEL, MetricMirror, MetricReader

__all__ = [
    "ACCESS_LOGGER",
    "MAX_STEPS",
    "WORKER_LABEL",
    "JsonFormatter",
    "LimitedHandler",
    "LiveStage",
    "LogProcess",
    "LoggingConfig",
    "Memory",
    "MetricMirror",
    "MetricReader",
    "Metrics",
    "PlainFormatter",
    "ReportedStep",
    "StageTimeline",
    "Step",
    "TimelineReport",
    "as_text",
    "configure",
    "configure_child",
    "is_access_line",
    "is_json",
    "memory_metric",
    "request_id",
    "set_level",
    "store_metrics",
    "trace_id",
    "trace_of",
    "unchanged_levels",
    "write_line",
]
