"""What operators see of all requests: state and requests as JSON, and the page; and what they do to workers.

`state` is what all gateways of a port know, added up from a part of each; `endpoints` answers for it.
"""

from medialane.gateway.operators.endpoints import OperatorEndpoints, RequestList, WorkerControl, WorkerInfo
from medialane.gateway.operators.state import GatewayView, RequestSums, ServerState, own_part, whole_state

__all__ = [
    "GatewayView",
    "OperatorEndpoints",
    "RequestList",
    "RequestSums",
    "ServerState",
    "WorkerControl",
    "WorkerInfo",
    "own_part",
    "whole_state",
]
