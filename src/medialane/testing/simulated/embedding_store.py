"""The embeddings that the simulated workers and encoders of a host share, as its store does: an item is known, or one
client is computing it, and others may wait for that. Nothing is ever evicted."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

#: Called with whether the item is known now.
Waiter = Callable[[bool], None]


@dataclass(slots=True)
class _Flight:
    client: str
    waiters: list[Waiter] = field(default_factory=list)


class EmbeddingStore:
    def __init__(self) -> None:
        self._known: set[str] = set()
        self._flights: dict[str, _Flight] = {}

    def __contains__(self, mm_hash: str) -> bool:
        return mm_hash in self._known

    def writer(self, mm_hash: str) -> str | None:
        """Return the client that computes the item, if one does."""
        flight = self._flights.get(mm_hash)
        return flight.client if flight is not None else None

    def begin(self, mm_hash: str, client: str) -> bool:
        """Have `client` compute a new item. Return False if it is known, or another flight has begun."""
        if mm_hash in self._known or mm_hash in self._flights:
            return False
        self._flights[mm_hash] = _Flight(client)
        return True

    def wait(self, mm_hash: str, waiter: Waiter) -> None:
        """Call `waiter` when the item's flight ends. Raises KeyError if there is none."""
        self._flights[mm_hash].waiters.append(waiter)

    def end(self, mm_hash: str, *, is_computed: bool) -> None:
        """End the item's flight: it is known if it `is_computed`. Raises KeyError if there is none."""
        flight = self._flights.pop(mm_hash)
        if is_computed:
            self._known.add(mm_hash)
        for waiter in flight.waiters:
            waiter(is_computed)
