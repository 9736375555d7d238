"""What operators see of all requests: state and requests as JSON, and the page.

`part` is what one gateway knows, `state` the parts of all added up, `endpoints` answers for both.
"""

from medialane.gateway.operators.endpoints import OperatorEndpoints, RequestList
from medialane.gateway.operators.part import GatewayView, Limits, RequestSums, own_part
from medialane.gateway.operators.state import ServerState, whole_state, worker_host

__all__ = [
    "GatewayView",
    "Limits",
    "OperatorEndpoints",
    "RequestList",
    "RequestSums",
    "ServerState",
    "own_part",
    "whole_state",
    "worker_host",
]
