"""What is known of each HTTP request while it lives and after it: for operators, logs, and reports to clients."""

from medialane.gateway.requests.item_record import ItemRecord
from medialane.gateway.requests.recent import RecentRequests, RequestFilter
from medialane.gateway.requests.record import RequestRecord
from medialane.gateway.requests.views import RequestView

__all__ = ["ItemRecord", "RecentRequests", "RequestFilter", "RequestRecord", "RequestView"]
