"""Limits the number of concurrent requests with media."""

from __future__ import annotations

import time
from collections.abc import Callable

from medialane.gateway.scope import RequestScope
from medialane.types.errors import ConcurrencyLimitExceeded, MediaOverloaded
from medialane.types.media_lease import TenantShares
from medialane.types.retry_after import Places


class Admission:
    """The admitted requests, at most `limit`, of which one tenant has a share. One event loop."""

    def __init__(self, limit: int, *, tenant_share: float = 1.0, clock: Callable[[], float] = time.monotonic) -> None:
        self._admitted: set[RequestScope] = set()
        self._shares = TenantShares(limit, tenant_share=tenant_share)
        self._places = Places(clock=clock)

    @property
    def num_in_flight(self) -> int:
        return len(self._admitted)

    def admit(self, scope: RequestScope) -> None:
        """Admit a request until its scope ends; again for the same one has no effect. Raises MediaOverloaded if
        there is no free slot, ConcurrencyLimitExceeded if its tenant has all that it may have."""
        if scope in self._admitted:
            return
        tenant = "" if scope.tenant is None else scope.tenant.name
        if tenant and self._shares.free_of(tenant) <= 0:
            most = self._shares.most_of(tenant)
            message = f"this API key has {most} requests with media in flight, its share of what the server accepts"
            raise ConcurrencyLimitExceeded(message, retry_after_s=self._places.promise())
        if self._shares.free <= 0:
            message = "too many concurrent requests with media"
            raise MediaOverloaded(message, retry_after_s=self._places.promise())
        self._admitted.add(scope)
        self._shares.add(tenant, 1)
        self._places.take(scope)
        scope.defer(lambda: self._end(scope, tenant))

    def _end(self, scope: RequestScope, tenant: str) -> None:
        self._admitted.discard(scope)
        self._shares.add(tenant, -1)
        self._places.free(scope)
