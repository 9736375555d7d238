"""Workers that only encode, on virtual time, and the store of their embeddings: for `simulated_media`."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from medialane.testing.simulated import SimulatedConfig

#: The fixed part of a step, and the most embeddings of one, unless a single item has more.
STEP_MS = 2.0
MAX_EMBEDS = 8192
_MIB = 1 << 20


class EncodeStep(NamedTuple):
    """The items of one step, and the number of their embeddings."""

    mm_hashes: tuple[str, ...]
    num_embeds: int


def encode_step_s(config: SimulatedConfig, step: EncodeStep) -> float:
    """Return the duration of a step, in simulated seconds: encoding, and copying the results to the arena."""
    mib = step.num_embeds * config.embedding_bytes / _MIB
    ms = STEP_MS + config.embedding_ms * step.num_embeds + config.load_ms_per_mib * mib
    return ms * 1e-3


class EncoderScheduler:
    """Plans the steps of an encoder. It uses no clock and no event loop, like `Scheduler`."""

    def __init__(self, *, max_embeds: int = MAX_EMBEDS) -> None:
        self._max_embeds = max_embeds
        self._waiting: deque[tuple[str, int]] = deque()

    def add(self, mm_hash: str, num_embeds: int) -> None:
        self._waiting.append((mm_hash, num_embeds))

    def step(self) -> EncodeStep | None:
        """Plan the next step, of at most `max_embeds` embeddings, but at least one item. None if there is no work."""
        if not self._waiting:
            return None
        hashes: list[str] = []
        total = 0
        while self._waiting and (not hashes or total + self._waiting[0][1] <= self._max_embeds):
            mm_hash, num_embeds = self._waiting.popleft()
            hashes.append(mm_hash)
            total += num_embeds
        return EncodeStep(tuple(hashes), total)


#: Called with whether the item is known now.
Waiter = Callable[[bool], None]


@dataclass(slots=True)
class _Flight:
    client: str
    waiters: list[Waiter] = field(default_factory=list)


class EmbeddingStore:
    """The embeddings that the workers and encoders of a host share, as its store does: an item is known, or one client
    is computing it, and others may wait for that. Nothing is ever evicted."""

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
