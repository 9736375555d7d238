"""Admission: which requests are served now, by what they cost."""

from medialane.gateway.admission.concurrency import Admission
from medialane.gateway.admission.cost import Cost
from medialane.gateway.admission.queue import AdmissionQueue, Ticket

__all__ = ["Admission", "AdmissionQueue", "Cost", "Ticket"]
