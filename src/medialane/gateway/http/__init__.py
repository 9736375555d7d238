"""The HTTP side of a gateway: connections and their limits, who may ask for what, ids, errors, health, and metrics."""

from medialane.gateway.http.access import (
    ADMIN,
    CLIENT,
    CLIENT_PREFIXES,
    LEASE_PATH,
    MEDIA_PATH,
    OPEN,
    AccessKeys,
    AccessMiddleware,
    RouteKind,
    admin_key,
    client_keys,
    kind_of,
    metrics_key,
)
from medialane.gateway.http.asgi import MAX_STREAMS
from medialane.gateway.http.health import Health, health_of
from medialane.gateway.http.metrics import (
    METRICS_PATH,
    MIN_INTERVAL_S,
    SCRAPE_TIMEOUT_S,
    AskOthers,
    GatewayMetrics,
    ScrapeMiddleware,
    WorkerScrape,
    merge,
    no_others,
)
from medialane.gateway.http.responses import ErrorSender, IdentifiedSend, error_form, send_error, usable_id
from medialane.gateway.http.server import MAX_DISCARDED_BYTES, MAX_HEADERS, MAX_TARGET_BYTES, BoundedServer, http_bounds
from medialane.gateway.http.sessions import SESSION_S, Sessions, is_from_this_machine

__all__ = [
    "ADMIN",
    "CLIENT",
    "CLIENT_PREFIXES",
    "LEASE_PATH",
    "MAX_DISCARDED_BYTES",
    "MAX_HEADERS",
    "MAX_STREAMS",
    "MAX_TARGET_BYTES",
    "MEDIA_PATH",
    "METRICS_PATH",
    "MIN_INTERVAL_S",
    "OPEN",
    "SCRAPE_TIMEOUT_S",
    "SESSION_S",
    "AccessKeys",
    "AccessMiddleware",
    "AskOthers",
    "BoundedServer",
    "ErrorSender",
    "GatewayMetrics",
    "Health",
    "IdentifiedSend",
    "RouteKind",
    "ScrapeMiddleware",
    "Sessions",
    "WorkerScrape",
    "admin_key",
    "client_keys",
    "error_form",
    "health_of",
    "http_bounds",
    "is_from_this_machine",
    "kind_of",
    "merge",
    "metrics_key",
    "no_others",
    "send_error",
    "usable_id",
]
