"""Holds of a worker on entries of the arena of its host."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import cast

from medialane.core.tensor import ArenaOffer, ArenaRange
from medialane.store.hold_cache import HoldCache
from medialane.store.link import StoreLink
from medialane.store.messages import EntriesHeld, HoldEntries


class EntriesHold:
    """The holds of one request (`core.feature.Hold`)."""

    def __init__(self, holds: ExitStack) -> None:
        self._holds: ExitStack | None = holds

    def release(self) -> None:
        holds, self._holds = self._holds, None
        if holds is None:
            raise RuntimeError("the hold was already released")
        holds.close()


class StoreEntries:
    """Entries of the arena that gateways refer to (implements `worker.HostArena`). They are retained for `retention_s`
    after their last use (`HoldCache`)."""

    def __init__(self, link: StoreLink, *, retention_s: float = 0.0) -> None:
        self._link = link
        self._holds: HoldCache[ArenaRange, None] = HoldCache(link, retention_s=retention_s)

    def watch(self, listener: Callable[[ArenaOffer | None], None]) -> None:
        self._link.watch(listener)

    async def hold(self, ranges: Sequence[ArenaRange]) -> EntriesHold:
        with ExitStack() as holds:
            missing = [entry for entry in ranges if not self._use(entry, holds)]
            if missing:
                reply = await self._link.call_at(missing[0].arena, lambda call_id: HoldEntries(call_id, missing))
                hold_ids = cast("EntriesHeld", reply).hold_ids
                for entry, hold_id in zip(missing, hold_ids, strict=True):
                    holds.callback(self._holds.add(entry, hold_id, entry, None).release)
            return EntriesHold(holds.pop_all())

    def _use(self, entry: ArenaRange, holds: ExitStack) -> bool:
        if (hold := self._holds.use(entry)) is None:
            return False
        holds.callback(hold.release)
        return True
