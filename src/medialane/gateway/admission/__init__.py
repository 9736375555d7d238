"""Admission: which requests are served now, by what they cost."""

from medialane.gateway.admission.concurrency import Admission
from medialane.gateway.admission.cost import Cost, CostForecast
from medialane.gateway.admission.fair_order import QueuedRequest
from medialane.gateway.admission.queue import AdmissionQueue, QueueLimits, Ticket
from medialane.gateway.admission.queues import MustWait, Preparation, Queues
from medialane.gateway.admission.shared_counts import SharedCounts
from medialane.gateway.admission.tenants import Tenant, Tenants
from medialane.gateway.admission.ttft_limit import NewItem, TtftExpectation, TtftLimit

__all__ = [
    "Admission",
    "AdmissionQueue",
    "Cost",
    "CostForecast",
    "MustWait",
    "NewItem",
    "Preparation",
    "QueueLimits",
    "QueuedRequest",
    "Queues",
    "SharedCounts",
    "Tenant",
    "Tenants",
    "Ticket",
    "TtftExpectation",
    "TtftLimit",
]
