"""Admission: which requests are accepted, and in which order they are served, by how long others have waited."""

from medialane.gateway.admission.fair_order import QueuedRequest
from medialane.gateway.admission.flow import Flow
from medialane.gateway.admission.queues import (
    AdmissionQueue,
    MustWait,
    OldestFirst,
    Preparation,
    QueueLimits,
    Queues,
    Ticket,
)
from medialane.gateway.admission.tenants import Admission, SharedCounts, Tenant, TenantLimits, Tenants

__all__ = [
    "Admission",
    "AdmissionQueue",
    "Flow",
    "MustWait",
    "OldestFirst",
    "Preparation",
    "QueueLimits",
    "QueuedRequest",
    "Queues",
    "SharedCounts",
    "Tenant",
    "TenantLimits",
    "Tenants",
    "Ticket",
]
