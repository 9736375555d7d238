"""What operators see of all requests: state and requests as JSON, the page, and who may look."""

from medialane.gateway.http.sessions import Sessions
from medialane.gateway.operators.decisions import decisions_page
from medialane.gateway.operators.endpoints import OperatorEndpoints
from medialane.gateway.operators.page_files import PageFiles
from medialane.gateway.operators.part import Part, Whose, own_part
from medialane.gateway.operators.state import (
    HostView,
    Limits,
    OwnView,
    State,
    StoreView,
    store_view,
    whole_state,
    worker_host,
)

__all__ = [
    "HostView",
    "Limits",
    "OperatorEndpoints",
    "OwnView",
    "PageFiles",
    "Part",
    "Sessions",
    "State",
    "StoreView",
    "Whose",
    "decisions_page",
    "own_part",
    "store_view",
    "whole_state",
    "worker_host",
]
