"""What one client of the store may still read or write."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from medialane.arena import Reservation
from medialane.core.errors import ProtocolViolation
from medialane.core.feature import Hold


class ClientUse:
    """The holds of one client by id, and the ranges that it is writing. `end` releases all of it, once the client has
    stopped using them. Ids are not reused, also over several connections of the client."""

    def __init__(self) -> None:
        self._holds: dict[int, Sequence[Hold]] = {}
        self._writing: set[Reservation] = set()
        self._num_holds = 0

    def __len__(self) -> int:
        return len(self._holds) + len(self._writing)

    def hold(self, leases: Sequence[Hold]) -> int:
        """Own `leases` until `release` of the id that is returned."""
        self._num_holds += 1
        self._holds[self._num_holds] = leases
        return self._num_holds

    def release(self, hold_id: int) -> None:
        """Release a hold. Raises ProtocolViolation if there is none with this id."""
        leases = self._holds.pop(hold_id, None)
        if leases is None:
            raise ProtocolViolation(f"there is no hold {hold_id}")
        for lease in leases:
            lease.release()

    def keep_only(self, hold_ids: Collection[int]) -> None:
        """The client has connected again: it has stopped writing, and holds only `hold_ids` of what it held."""
        for hold_id in self._holds.keys() - set(hold_ids):
            self.release(hold_id)
        self._end_writing()

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
