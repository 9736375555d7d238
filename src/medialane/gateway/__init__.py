"""Request handling in the gateway: scope, intake, features, transfer, workers."""

from medialane.gateway.access import AccessKeys, AccessMiddleware
from medialane.gateway.config import GatewayConfig
from medialane.gateway.gateway import Gateway
from medialane.gateway.gateway_metrics import GatewayMetrics
from medialane.gateway.health import Health, health_of
from medialane.gateway.middleware import IntakeMiddleware, ScopeMiddleware
from medialane.gateway.route import Routes
from medialane.gateway.scope import ExtractedMedia, RequestScope, current_scope, open_scope
from medialane.gateway.scrape import ScrapeMiddleware, WorkerScrape
from medialane.gateway.store_features import StoreFeatures
from medialane.gateway.worker_link.link import WorkerLink
from medialane.gateway.worker_pool import WorkerPool

__all__ = [
    "AccessKeys",
    "AccessMiddleware",
    "ExtractedMedia",
    "Gateway",
    "GatewayConfig",
    "GatewayMetrics",
    "Health",
    "IntakeMiddleware",
    "RequestScope",
    "Routes",
    "ScopeMiddleware",
    "ScrapeMiddleware",
    "StoreFeatures",
    "WorkerLink",
    "WorkerPool",
    "WorkerScrape",
    "current_scope",
    "health_of",
    "open_scope",
]
