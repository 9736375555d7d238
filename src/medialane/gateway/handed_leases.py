"""The leases on memory of this gateway that a worker may still read."""

from __future__ import annotations

from collections.abc import Sequence

from medialane.gateway.scope import Releasable


class HandedLeases:
    """Leases by request id. Each is released exactly once; `len` is the number of requests that still have leases."""

    def __init__(self) -> None:
        self._until_released: dict[str, Sequence[Releasable]] = {}
        self._until_sent: dict[str, Sequence[Releasable]] = {}

    def __len__(self) -> int:
        return len(self._until_released)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._until_released

    def add(self, request_id: str, *, until_released: Sequence[Releasable], until_sent: Sequence[Releasable]) -> None:
        """Own leases until the worker has released the request, or until its bytes have been sent. The id must be
        new."""
        self._until_released[request_id] = until_released
        self._until_sent[request_id] = until_sent

    def sent(self, request_id: str) -> None:
        """Release `until_sent`: the request's bytes have been sent, or never will be."""
        for lease in self._until_sent.pop(request_id, ()):
            lease.release()

    def released(self, request_id: str) -> None:
        """Release all leases of the request: the worker no longer reads its media."""
        self.sent(request_id)
        for lease in self._until_released.pop(request_id, ()):
            lease.release()

    def release_all(self) -> None:
        """Release all leases: the worker no longer reads anything."""
        for request_id in list(self._until_released):
            self.released(request_id)
