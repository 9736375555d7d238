"""The HTTP side of a gateway: connections and their limits, who may ask for what, ids, errors, health, and metrics."""

from medialane.gateway.http.access import (
    ADMIN,
    CLIENT,
    CLIENT_PREFIXES,
    LEASE_PATH,
    MEDIA_PATH,
    OPEN,
    RouteKind,
    is_from_this_machine,
    kind_of,
)
from medialane.gateway.http.metrics import (
    METRICS_PATH,
    MIN_INTERVAL_S,
    merge,
)
from medialane.gateway.http.responses import ErrorSender, error_form, send_error, usable_id
from medialane.gateway.http.server import MAX_DISCARDED_BYTES, MAX_TARGET_BYTES

__all__ = [
    "ADMIN",
    "CLIENT",
    "CLIENT_PREFIXES",
    "LEASE_PATH",
    "MAX_DISCARDED_BYTES",
    "MAX_TARGET_BYTES",
    "MEDIA_PATH",
    "METRICS_PATH",
    "MIN_INTERVAL_S",
    "OPEN",
    "ErrorSender",
    "RouteKind",
    "error_form",
    "is_from_this_machine",
    "kind_of",
    "merge",
    "send_error",
    "usable_id",
]
