"""Routing: selects a worker for each request.

The router is imported lazily: processes that only parse settings do not pay for numba.
"""

from typing import TYPE_CHECKING

from medialane.routing.config import RoutingConfig
from medialane.routing.decisions import DecisionRecord
from medialane.routing.prediction import PredictionCounts
from medialane.routing.request import RoutingRequest

if TYPE_CHECKING:
    from medialane.routing.reservation import AnnouncedReservation
    from medialane.routing.routed_request import RoutedRequest
    from medialane.routing.router import Router

__all__ = [
    "AnnouncedReservation",
    "DecisionRecord",
    "PredictionCounts",
    "RoutedRequest",
    "Router",
    "RoutingConfig",
    "RoutingRequest",
]


def __getattr__(name: str) -> object:
    """Load the router on first use (PEP 562)."""
    if name not in ("AnnouncedReservation", "RoutedRequest", "Router"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from medialane.routing import router

    return getattr(router, name)
