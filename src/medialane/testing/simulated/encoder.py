"""The encoders of the simulator: those of engines, with their cache, and workers that only encode."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from medialane.testing.simulated.config import SimulatedConfig

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


class EncoderCache:
    """The encoder cache of an engine, like vLLM 0.32's (v1/core/encoder_cache_manager.py).

    An item stays while requests refer to it, and then until its space is needed; the item unreferenced for the longest
    time is evicted first. Sizes are numbers of embeddings.
    """

    def __init__(self, size: int) -> None:
        self._num_free = size
        self._num_freeable = size  # free or unreferenced
        self._users: dict[str, set[str]] = {}
        self._sizes: dict[str, int] = {}
        self._unused: OrderedDict[str, int] = OrderedDict()

    def __contains__(self, mm_hash: str) -> bool:
        return mm_hash in self._users

    def use(self, mm_hash: str, request_id: str) -> bool:
        """Add a reference to a cached item; return False if it is not cached."""
        users = self._users.get(mm_hash)
        if users is None:
            return False
        if not users:
            self._num_freeable -= self._unused.pop(mm_hash)
        users.add(request_id)
        return True

    def make_room(self, num_embeds: int) -> bool:
        """Evict unused items until there is space. Return False, with no effect, if there cannot be enough."""
        if num_embeds > self._num_freeable:
            return False
        while num_embeds > self._num_free:
            mm_hash, size = self._unused.popitem(last=False)
            del self._users[mm_hash], self._sizes[mm_hash]
            self._num_free += size
        return True

    def add(self, mm_hash: str, num_embeds: int, request_id: str) -> None:
        """Add a new item after `make_room`."""
        self._users[mm_hash] = {request_id}
        self._sizes[mm_hash] = num_embeds
        self._num_free -= num_embeds
        self._num_freeable -= num_embeds

    def release(self, mm_hash: str, request_id: str) -> None:
        """Remove the request's reference to the item, if it has one."""
        users = self._users.get(mm_hash)
        if not users or request_id not in users:
            return
        users.discard(request_id)
        if not users:
            self._unused[mm_hash] = self._sizes[mm_hash]
            self._num_freeable += self._sizes[mm_hash]


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
