"""Holds of a client on entries of the arena of its host."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import cast

from medialane.core.tensor import ArenaOffer, ArenaRange
from medialane.store.link import StoreLink
from medialane.store.messages import EntriesHeld, HoldEntries


class StoreHold:
    """A hold on one item, or on the items of one request (`core.feature.Hold`)."""

    def __init__(self, link: StoreLink, hold_id: int, arena: str) -> None:
        self._link = link
        self._hold_id: int | None = hold_id
        self._arena = arena

    def release(self) -> None:
        hold_id, self._hold_id = self._hold_id, None
        if hold_id is None:
            raise RuntimeError("the hold was already released")
        self._link.release(hold_id, self._arena)


class StoreEntries:
    """Entries of the arena that gateways refer to (implements `worker.HostArena`)."""

    def __init__(self, link: StoreLink) -> None:
        self._link = link

    def watch(self, listener: Callable[[ArenaOffer | None], None]) -> None:
        self._link.watch(listener)

    async def hold(self, ranges: Sequence[ArenaRange]) -> StoreHold:
        arena = ranges[0].arena
        reply = await self._link.call_at(arena, lambda call_id: HoldEntries(call_id, list(ranges)))
        return StoreHold(self._link, cast("EntriesHeld", reply).hold_id, arena)
