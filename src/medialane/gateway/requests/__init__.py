"""What is known of each HTTP request while it lives and after it: for operators, logs, and reports to clients."""

from medialane.gateway.requests.recent import RecentRequests, RequestFilter
from medialane.gateway.requests.record import ItemRecord, RequestRecord, RequestView

__all__ = ["ItemRecord", "RecentRequests", "RequestFilter", "RequestRecord", "RequestView"]
