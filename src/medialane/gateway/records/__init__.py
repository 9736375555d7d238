"""One record of each HTTP request, while it lives and after it, and what is made of it.

`record` is filled by the request's scope, `recent` keeps the last ones. Of a record are made: what operators see and
the line of the log (`view`), the report in a response (`report`), spans (`trace`), and a line of a recording
(`recording`).
"""

from medialane.gateway.records.recent import (
    STEP_S,
    CacheSums,
    RateStep,
    RecentRequests,
    RequestFilter,
    RequestRates,
    Series,
    Sums,
    Waits,
    series,
)
from medialane.gateway.records.record import (
    EmbeddingOutcome,
    ItemRecord,
    PrefillOutcome,
    PrefillReport,
    RequestRecord,
    embedding_outcome,
)
from medialane.gateway.records.recording import (
    MAX_PENDING_BYTES,
    RECORDING_FORMAT,
    MediaStandIn,
    Recordable,
    Recorder,
    parse_stand_in,
    with_media,
)
from medialane.gateway.records.report import ReportSender, report_schema, request_report, routing_report
from medialane.gateway.records.trace import AttemptTrace, RequestTrace, RequestTracing
from medialane.gateway.records.view import RequestView, log_end, request_view

__all__ = [
    "MAX_PENDING_BYTES",
    "RECORDING_FORMAT",
    "STEP_S",
    "AttemptTrace",
    "CacheSums",
    "EmbeddingOutcome",
    "ItemRecord",
    "MediaStandIn",
    "PrefillOutcome",
    "PrefillReport",
    "RateStep",
    "RecentRequests",
    "Recordable",
    "Recorder",
    "ReportSender",
    "RequestFilter",
    "RequestRates",
    "RequestRecord",
    "RequestTrace",
    "RequestTracing",
    "RequestView",
    "Series",
    "Sums",
    "Waits",
    "embedding_outcome",
    "log_end",
    "parse_stand_in",
    "report_schema",
    "request_report",
    "request_view",
    "routing_report",
    "series",
    "with_media",
]
