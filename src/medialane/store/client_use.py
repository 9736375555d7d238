"""What clients of the store may still read or write (`ClientUse`), also clients that are not connected
(`AbsentClients`).

A client that has lost its connection may still read what it holds, and write what it was asked for. What it uses is
kept until it has connected again, or the lock of its slot is gone: then its process has exited (`arena.ClientSlot`).

A store that has adopted an arena begins with such clients, whose slots are locked. It does not know what they
hold before they list it, so

* no entry is evicted until all of them have connected or exited (`Arena.end_takeover`);
* no memory is reserved until then, or for HOLD_BACK_S: a hold that the arena's table does not know shows that the table
  is wrong, before any byte has been reused. Calls that need memory wait; what is cached is found at once;
* ranges that were being written are kept like the holds of their writers: until these have connected, and so stopped,
  or exited. The earlier store is a writer, too, with the processes that it has started: they have its slot.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping

from medialane.arena import Arena, Reservation
from medialane.store.embeddings import Embeddings, Fill
from medialane.store.messages import HeldEntry
from medialane.types.errors import ProtocolViolation
from medialane.types.feature import Hold
from medialane.types.tensor import ArenaRange

logger = logging.getLogger(__name__)

#: Clients whose store is lost connect every 50 ms.
HOLD_BACK_S = 2.0

#: Between two looks at the locks of absent clients.
POLL_INTERVAL_S = 0.05


class UnknownEntry(Exception):
    """A client holds an entry that the arena's table does not have."""


class ClientUse:
    """The holds of one client by id, and the ranges that it is writing. `end` releases all of it, once the client has
    stopped using them. Ids are not reused while the client has them, also over several connections."""

    def __init__(self) -> None:
        self._holds: dict[int, Hold | None] = {}  # None: it has ended before its client released it
        self._writing: set[Reservation] = set()
        self._fills: dict[ArenaRange, Fill] = {}  # of an earlier store, whose ids are not known yet
        self._last_id = 0

    def __len__(self) -> int:
        return len(self._holds) + len(self._writing) + len(self._fills)

    def hold(self, pin: Hold) -> int:
        """Own `pin` until `release` of the id that is returned."""
        self._last_id += 1
        self._holds[self._last_id] = pin
        return self._last_id

    def release(self, hold_id: int) -> None:
        """Release a hold. Raises ProtocolViolation if there is none with this id."""
        if hold_id not in self._holds:
            raise ProtocolViolation(f"there is no hold {hold_id}")
        if (pin := self._holds.pop(hold_id)) is not None:
            pin.release()

    def keep_only(self, listed: Mapping[int, HeldEntry], claim: Callable[[ArenaRange], Hold | None]) -> None:
        """The client has connected again: it has stopped writing, and holds only what it has `listed` by id. What it
        holds from an earlier store is claimed. Raises UnknownEntry if `claim` returns None."""
        for hold_id in self._holds.keys() - listed.keys():
            self.release(hold_id)
        for hold_id in listed.keys() - self._holds.keys():
            self._holds[hold_id] = self._claimed(listed[hold_id], claim)
            self._last_id = max(self._last_id, hold_id)
        self._end_writing()

    def add_fill(self, fill: Fill) -> None:
        """Own a fill of an earlier store until the client has listed it, or has not."""
        self._fills[fill.reservation.range] = fill

    def start_writing(self, reservation: Reservation) -> None:
        self._writing.add(reservation)

    def stop_writing(self, reservation: Reservation) -> bool:
        """The client has stopped writing: return True if the caller owns the reservation now, False if it has ended."""
        if reservation not in self._writing:
            return False
        self._writing.remove(reservation)
        return True

    def end(self) -> None:
        """Release everything. Idempotent."""
        while self._holds:
            self.release(next(iter(self._holds)))
        self._end_writing()

    def _end_writing(self) -> None:
        while self._writing:
            self._writing.pop().abandon()
        while self._fills:
            self._fills.popitem()[1].release()

    def _claimed(self, held: HeldEntry, claim: Callable[[ArenaRange], Hold | None]) -> Hold | None:
        """Return what is behind a hold that an earlier store has granted."""
        if held.is_fill:
            return self._fills.pop(held.range, None)
        if (pin := claim(held.range)) is None:
            raise UnknownEntry(f"a client holds an entry that the arena does not have: {held.range}")
        return pin


class AbsentClients:
    """What clients without a connection may still be using, by slot. The owner calls `close`."""

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        self._uses: dict[int, ClientUse] = {}
        self._awaited: set[int] = set()  # clients of an earlier store; some of their holds are unknown
        #: Whether there may be holds that are not known yet: any published entry may be held.
        self.is_taking_over = False
        self._polling: asyncio.TimerHandle | None = None
        self._holding_back: asyncio.TimerHandle | None = None
        #: Set when memory may be reserved.
        self.may_reserve = asyncio.Event()
        self.may_reserve.set()

    def __len__(self) -> int:
        return len(self._uses)

    def take_over(self, embeddings: Embeddings) -> None:
        """Keep what clients of an earlier store of the arena are using. No effect if there was none."""
        if not self._arena.was_adopted:
            return
        self._awaited = self._arena.live_slots()
        self._uses = {slot: ClientUse() for slot in self._awaited}
        for range_ in self._arena.unfinished():
            use = self._uses.setdefault(range_.writer, ClientUse())
            if range_.value is None:
                use.start_writing(range_.reservation)
            elif (fill := embeddings.resume(range_)) is not None:
                use.add_fill(fill)
        logger.info("the arena of an earlier store is taken over, with %d clients", len(self._awaited))
        self.is_taking_over = True
        self.may_reserve.clear()
        self._holding_back = asyncio.get_running_loop().call_later(HOLD_BACK_S, self._allow)
        self._poll()
        self._settle()

    def add(self, slot: int, use: ClientUse) -> None:
        """End `use` when the client's process has exited, unless it is taken before. Owns it."""
        self._uses[slot] = use
        self._poll_soon()

    def take(self, slot: int) -> ClientUse | None:
        """Return what the client is using, which has connected again: the caller owns it. `settle` follows."""
        return self._uses.pop(slot, None)

    def settle(self, slot: int) -> None:
        """The holds of the client with this slot are known."""
        self._awaited.discard(slot)
        self._settle()

    def close(self) -> None:
        """End everything. Idempotent."""
        for timer in (self._polling, self._holding_back):
            if timer is not None:
                timer.cancel()
        while self._uses:
            self._uses.popitem()[1].end()

    def _poll(self) -> None:
        """End the uses of clients that have exited."""
        self._polling = None
        live = self._arena.live_slots()
        for slot in self._uses.keys() - live:
            self._uses.pop(slot).end()
            self.settle(slot)
        if self._uses:
            self._poll_soon()

    def _poll_soon(self) -> None:
        if self._polling is None:
            self._polling = asyncio.get_running_loop().call_later(POLL_INTERVAL_S, self._poll)

    def _settle(self) -> None:
        """End the take-over if all clients have connected or exited."""
        if self.is_taking_over and not self._awaited:
            self.is_taking_over = False
            self._arena.end_takeover()
            self._allow()
            logger.info("all clients of the earlier store have connected or exited")

    def _allow(self) -> None:
        self._arena.allow_reserving()
        self.may_reserve.set()
