"""How many requests there are at a time: with media in all, and of those that move to another worker."""

from __future__ import annotations

import asyncio
import heapq
import itertools
import time
from collections.abc import Callable

from medialane.gateway.request.scope import RequestScope
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


class OldestFirst:
    """At most `limit()` turns are taken at a time; the next one goes to whoever has the least `since`. One event
    loop."""

    def __init__(self, limit: Callable[[], int]) -> None:
        self._limit = limit
        self._num_taken = 0
        self._waiting: list[tuple[float, int, asyncio.Future[None]]] = []
        self._numbers = itertools.count()

    async def take(self, since: float) -> Callable[[], None]:
        """Wait for a turn. Return what ends it; idempotent."""
        turn = asyncio.get_running_loop().create_future()
        heapq.heappush(self._waiting, (since, next(self._numbers), turn))
        self._give()
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self._end()
            raise
        is_taken = True

        def end() -> None:
            nonlocal is_taken
            if is_taken:
                is_taken = False
                self._end()

        return end

    def _end(self) -> None:
        self._num_taken -= 1
        self._give()

    def _give(self) -> None:
        while self._waiting and (self._num_taken < max(1, self._limit()) or self._waiting[0][2].cancelled()):
            turn = heapq.heappop(self._waiting)[2]
            if not turn.cancelled():
                self._num_taken += 1
                turn.set_result(None)
