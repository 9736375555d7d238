"""Routing: selects a worker for each request."""

from medialane.routing.block_index import BlockIndex
from medialane.routing.config import RoutingConfig
from medialane.routing.cost import EncodeCosts, NewItem, choose_encoder, least_loaded
from medialane.routing.routed_request import AnnouncedRequest, RoutedRequest
from medialane.routing.router import Router, Split, WholeReason
from medialane.routing.slots import RoutingRequest

__all__ = [
    "AnnouncedRequest",
    "BlockIndex",
    "EncodeCosts",
    "NewItem",
    "RoutedRequest",
    "Router",
    "RoutingConfig",
    "RoutingRequest",
    "Split",
    "WholeReason",
    "choose_encoder",
    "least_loaded",
]
