"""What operators see of all requests: state and requests as JSON, and the page.

`part` is what one gateway knows, `state` the parts of all added up, `endpoints` answers for both.
"""

from medialane.gateway.operators.endpoints import MAX_STREAMS, OperatorEndpoints, RequestList
from medialane.gateway.operators.part import GatewayView, Limits, Part, own_part
from medialane.gateway.operators.state import HostView, State, StoreView, whole_state, worker_host

__all__ = [
    "MAX_STREAMS",
    "GatewayView",
    "HostView",
    "Limits",
    "OperatorEndpoints",
    "Part",
    "RequestList",
    "State",
    "StoreView",
    "own_part",
    "whole_state",
    "worker_host",
]
