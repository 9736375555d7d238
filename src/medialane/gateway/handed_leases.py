"""The leases on what a worker may still read of this gateway's memory."""

from __future__ import annotations

from collections.abc import Sequence

from medialane.gateway.scope import Releasable


class HandedLeases:
    """By request. Each lease is released once; `len` is the number of requests whose leases have not been."""

    def __init__(self) -> None:
        self._until_released: dict[str, Sequence[Releasable]] = {}
        self._until_sent: dict[str, Sequence[Releasable]] = {}

    def __len__(self) -> int:
        return len(self._until_released)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._until_released

    def add(self, request_id: str, *, until_released: Sequence[Releasable], until_sent: Sequence[Releasable]) -> None:
        """Own these: until the worker has released the request, and until the request's bytes have been sent. The id
        must not be here already."""
        self._until_released[request_id] = until_released
        self._until_sent[request_id] = until_sent

    def sent(self, request_id: str) -> None:
        """The request's bytes have been sent, or never will be."""
        for lease in self._until_sent.pop(request_id, ()):
            lease.release()

    def released(self, request_id: str) -> None:
        """The worker reads nothing of the request any more."""
        self.sent(request_id)
        for lease in self._until_released.pop(request_id, ()):
            lease.release()

    def release_all(self) -> None:
        """The worker reads nothing any more."""
        for request_id in list(self._until_released):
            self.released(request_id)
