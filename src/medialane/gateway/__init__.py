"""Request handling in the gateway: scope, intake, features, hand-over, workers."""

from medialane.gateway.admission import SharedCounts
from medialane.gateway.config import GatewayConfig, HandoverConfig, RecordingConfig
from medialane.gateway.encoders import Encoders
from medialane.gateway.http.access import AccessKeys, AccessMiddleware, admin_key, client_keys, metrics_key
from medialane.gateway.http.media_endpoint import MediaEndpoints
from medialane.gateway.http.metrics import (
    SCRAPE_TIMEOUT_S,
    GatewayMetrics,
    ScrapeMiddleware,
    WorkerScrape,
    no_others,
)
from medialane.gateway.http.middleware import IntakeMiddleware, ScopeMiddleware
from medialane.gateway.http.server import MAX_HEADERS, BoundedServer, http_bounds
from medialane.gateway.intake.places import References
from medialane.gateway.models import NameRouter, ServedModel, ServedModels
from medialane.gateway.operators import OperatorEndpoints, WorkerControl, WorkerInfo
from medialane.gateway.records import (
    RECORDING_FORMAT,
    MediaStandIn,
    RecentRequests,
    Recorder,
    RequestTracing,
    parse_stand_in,
    with_media,
)
from medialane.gateway.request.app_backend import AppBackend
from medialane.gateway.request.handover_paths import (
    HandoverPath,
    InlineTransport,
    PullTransport,
    ShmTransport,
    Transport,
    Transports,
)
from medialane.gateway.request.media import PlainHashes
from medialane.gateway.request.route import PromptPrefix, Route, Routes
from medialane.gateway.request.scope import OpenRequests, RequestScope, current_scope, open_scope
from medialane.gateway.request.store_items import StoreItems, wave_bytes, wave_size
from medialane.gateway.workers.link import WorkerLink
from medialane.gateway.workers.pool import Health, WorkerPool, health_of

__all__ = [
    "MAX_HEADERS",
    "RECORDING_FORMAT",
    "SCRAPE_TIMEOUT_S",
    "AccessKeys",
    "AccessMiddleware",
    "AppBackend",
    "BoundedServer",
    "Encoders",
    "GatewayConfig",
    "GatewayMetrics",
    "HandoverConfig",
    "HandoverPath",
    "Health",
    "InlineTransport",
    "IntakeMiddleware",
    "MediaEndpoints",
    "MediaStandIn",
    "NameRouter",
    "OpenRequests",
    "OperatorEndpoints",
    "PlainHashes",
    "PromptPrefix",
    "PullTransport",
    "RecentRequests",
    "Recorder",
    "RecordingConfig",
    "References",
    "RequestScope",
    "RequestTracing",
    "Route",
    "Routes",
    "ScopeMiddleware",
    "ScrapeMiddleware",
    "ServedModel",
    "ServedModels",
    "SharedCounts",
    "ShmTransport",
    "StoreItems",
    "Transport",
    "Transports",
    "WorkerControl",
    "WorkerInfo",
    "WorkerLink",
    "WorkerPool",
    "WorkerScrape",
    "admin_key",
    "client_keys",
    "current_scope",
    "health_of",
    "http_bounds",
    "metrics_key",
    "no_others",
    "open_scope",
    "parse_stand_in",
    "wave_bytes",
    "wave_size",
    "with_media",
]
