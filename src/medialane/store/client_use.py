"""What one client of the store may still read or write."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from medialane.arena import Reservation
from medialane.store.embeddings import Fill
from medialane.store.messages import HeldEntry
from medialane.types.errors import ProtocolViolation
from medialane.types.feature import Hold
from medialane.types.tensor import ArenaRange


class UnknownEntry(Exception):
    """A client holds an entry that the arena's table does not have."""


class ClientUse:
    """The holds of one client by id, and the ranges that it is writing. `end` releases all of it, once the client has
    stopped using them. Ids are not reused while the client has them, also over several connections."""

    def __init__(self) -> None:
        self._holds: dict[int, Sequence[Hold]] = {}
        self._writing: set[Reservation] = set()
        self._fills: dict[ArenaRange, Fill] = {}  # of an earlier store, whose ids are not known yet
        self._last_id = 0

    def __len__(self) -> int:
        return len(self._holds) + len(self._writing) + len(self._fills)

    def hold(self, leases: Sequence[Hold]) -> int:
        """Own `leases` until `release` of the id that is returned."""
        self._last_id += 1
        self._holds[self._last_id] = leases
        return self._last_id

    def release(self, hold_id: int) -> None:
        """Release a hold. Raises ProtocolViolation if there is none with this id."""
        leases = self._holds.pop(hold_id, None)
        if leases is None:
            raise ProtocolViolation(f"there is no hold {hold_id}")
        for lease in leases:
            lease.release()

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

    def _claimed(self, held: HeldEntry, claim: Callable[[ArenaRange], Hold | None]) -> Sequence[Hold]:
        """Return the holds behind one that an earlier store has granted."""
        if held.is_fill:
            fill = self._fills.pop(held.range, None)
            return [] if fill is None else [fill]  # it may have ended before its client released it
        lease = claim(held.range)
        if lease is None:
            raise UnknownEntry(f"a client holds an entry that the arena does not have: {held.range}")
        return [lease]
