"""Holds of a client on entries of the arena of its host."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import cast

from medialane.core.remote_entry import RemoteEntry
from medialane.core.tensor import ArenaOffer, ArenaRange
from medialane.store.link import StoreLink
from medialane.store.messages import EntriesHeld, EntriesPulled, GrantPulls, HoldEntries, PullEntries, PullsGranted


class StoreHold:
    """A hold on one item (`core.feature.Hold`). Duplicates share the hold at the store, which ends with the last."""

    def __init__(self, link: StoreLink, hold_id: int, arena: str, users: list[StoreHold] | None = None) -> None:
        self._link = link
        self._hold_id = hold_id
        self._arena = arena
        self._users = [] if users is None else users
        self._users.append(self)

    def duplicate(self) -> StoreHold:
        if self not in self._users:
            raise RuntimeError("the hold was already released")
        return StoreHold(self._link, self._hold_id, self._arena, self._users)

    def release(self) -> None:
        if self not in self._users:
            raise RuntimeError("the hold was already released")
        self._users.remove(self)
        if not self._users:
            self._link.release(self._hold_id, self._arena)


class StoreGrants:
    """Grants other hosts the entries that this client holds (implements `gateway.handover.Grants`)."""

    def __init__(self, link: StoreLink) -> None:
        self._link = link

    async def grant(self, ranges: Sequence[ArenaRange]) -> list[RemoteEntry]:
        if not ranges:
            return []
        reply = await self._link.call_at(ranges[0].arena, lambda call_id: GrantPulls(call_id, list(ranges)))
        return cast("PullsGranted", reply).entries


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

    async def pull(self, entries: Sequence[RemoteEntry]) -> tuple[StoreHold, list[ArenaRange]]:
        reply = await self._link.call(lambda call_id: PullEntries(call_id, list(entries)))
        pulled = cast("EntriesPulled", reply)
        return StoreHold(self._link, pulled.hold_id, pulled.ranges[0].arena), pulled.ranges
