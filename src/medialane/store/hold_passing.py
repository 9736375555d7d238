"""Holds that a gateway passes to the worker that it sends a request to, so that the worker need not ask the store. With
them go the embeddings that the worker will want: those that are there, and memory for those that it is to write.

The gateway tells the store before it sends the request, and the store tells the worker while the request is on its way.
If a hold does not arrive in time, the worker asks for one itself (`HoldEntries`); it releases one that arrives for no
request.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from cachetools import TTLCache

from medialane.store.link import StoreLink
from medialane.store.messages import FindEmbedding, HoldsPassed, PassHolds
from medialane.types.feature import WantedEmbedding
from medialane.types.tensor import ArenaOffer, ArenaRange

#: Longest time for which a worker waits for a hold. The store takes 0.1 ms; if it is late, asking it takes as long.
MAX_WAIT_S = 0.1

#: After this time, no request is coming for a hold: its gateway was lost between the two messages.
MAX_AGE_S = 1.0

#: Entries that are remembered as held by a worker.
_MAX_REMEMBERED = 4096


class HoldPasser:
    """The gateway's side. Workers retain holds for `retention_s` after
    their last use: what was passed within this time is not passed again."""

    def __init__(self, link: StoreLink, *, retention_s: float) -> None:
        self._link = link
        self._recent: TTLCache[tuple[str, ArenaRange], None] = TTLCache(_MAX_REMEMBERED, retention_s)

    def pass_on(
        self, ranges: Sequence[ArenaRange], *, to: str, request_id: str, wanted: Sequence[WantedEmbedding] = ()
    ) -> bool:
        """Pass holds on entries, which the caller holds, to the store's client `to`, and on embeddings that it will
        want. Return False if none is passed: the client may hold the entries already."""
        new = [entry for entry in ranges if (to, entry) not in self._recent]
        embeddings = [FindEmbedding(0, *one) for one in wanted]
        is_passed = bool(to and (new or (ranges and embeddings))) and self._link.notify(
            ranges[0].arena, PassHolds(to, request_id, new, embeddings)
        )
        if is_passed or not new:
            for entry in ranges:
                self._recent[to, entry] = None
        return is_passed


class PassedHolds:
    """The worker's side: holds that have arrived, until the request that uses them does."""

    def __init__(self, link: StoreLink) -> None:
        self._link = link
        self._arrived: dict[str, tuple[HoldsPassed, asyncio.TimerHandle]] = {}
        self._awaited: dict[str, asyncio.Future[HoldsPassed | None]] = {}
        link.watch(self._arena_changed)
        link.watch_passed(self._arrive)

    async def take(self, request_id: str) -> HoldsPassed | None:
        """Wait for the holds of a request. The caller owns them; None if they do not arrive in time."""
        if request_id in self._arrived:
            return self._pop(request_id)
        if self._link.arena is None:
            return None
        loop = asyncio.get_running_loop()
        arrival: asyncio.Future[HoldsPassed | None] = loop.create_future()
        self._awaited[request_id] = arrival
        deadline = loop.call_later(MAX_WAIT_S, self._give_up, request_id)
        try:
            return await arrival
        except asyncio.CancelledError:
            if arrival.done() and not arrival.cancelled() and (unused := arrival.result()) is not None:
                self._link.release_passed(unused)
            raise
        finally:
            deadline.cancel()
            self._awaited.pop(request_id, None)

    def _arrive(self, passed: HoldsPassed) -> None:
        arrival = self._awaited.pop(passed.request_id, None)
        if arrival is not None and not arrival.done():
            arrival.set_result(passed)
            return
        expiry = asyncio.get_running_loop().call_later(MAX_AGE_S, self._expire, passed.request_id)
        self._arrived[passed.request_id] = passed, expiry

    def _give_up(self, request_id: str) -> None:
        arrival = self._awaited.pop(request_id, None)
        if arrival is not None and not arrival.done():
            arrival.set_result(None)

    def _expire(self, request_id: str) -> None:
        self._link.release_passed(self._pop(request_id))

    def _pop(self, request_id: str) -> HoldsPassed:
        passed, expiry = self._arrived.pop(request_id)
        expiry.cancel()
        return passed

    def _arena_changed(self, arena: ArenaOffer | None) -> None:
        """The holds have ended with their arena."""
        if arena is None:
            for request_id in list(self._arrived):
                self._expire(request_id)
            for request_id in list(self._awaited):
                self._give_up(request_id)
