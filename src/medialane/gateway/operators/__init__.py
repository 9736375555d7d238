"""What operators see of all requests: state and requests as JSON, and the page.

`part` is what one gateway knows, `state` the parts of all added up, `endpoints` answers for both.
"""

from medialane.gateway.operators.endpoints import OperatorEndpoints, RequestList
from medialane.gateway.operators.part import GatewayPart, GatewayView, Limits, own_part
from medialane.gateway.operators.state import HostView, ServerState, StoreView, whole_state, worker_host

__all__ = [
    "GatewayPart",
    "GatewayView",
    "HostView",
    "Limits",
    "OperatorEndpoints",
    "RequestList",
    "ServerState",
    "StoreView",
    "own_part",
    "whole_state",
    "worker_host",
]
