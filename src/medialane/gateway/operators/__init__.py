"""What operators see of all requests: state and requests as JSON, the page, and who may look."""

from medialane.gateway.operators.endpoints import OperatorEndpoints
from medialane.gateway.operators.part import Part, own_part
from medialane.gateway.operators.sessions import Sessions
from medialane.gateway.operators.state import HostView, State, whole_state

__all__ = ["HostView", "OperatorEndpoints", "Part", "Sessions", "State", "own_part", "whole_state"]
