"""Requests that wait for admission, ordered by priority, fairness between tenants by cost, and deadline."""

from __future__ import annotations

from typing import Protocol

from medialane.gateway.admission.cost import Cost


class Ticket(Protocol):
    """An admitted request's place."""

    def release(self) -> None:
        """Give the place to the next request. Idempotent; to be deferred to the end of the request's scope."""


class AdmissionQueue(Protocol):
    """The waiting requests of one gateway."""

    async def admit(self, tenant: str, priority: int, cost: Cost, deadline: float) -> Ticket:
        """Wait until the request is admitted; `deadline` is on the loop's clock. Cancellation leaves nothing behind.
        Raises Unavailable if the queue is full, or the deadline passes."""
