"""Which worker a request goes to."""

from medialane.routing.config import RoutingConfig
from medialane.routing.decisions import DecisionRecord
from medialane.routing.prediction import PredictionCounts
from medialane.routing.request import RoutingRequest
from medialane.routing.routed import Routed
from medialane.routing.router import Router

__all__ = [
    "DecisionRecord",
    "PredictionCounts",
    "Routed",
    "Router",
    "RoutingConfig",
    "RoutingRequest",
]
