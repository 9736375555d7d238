"""The router's view of the workers: one slot for each data-parallel rank of a worker.

Costs that depend on a slot alone are kept in arrays indexed by slot and updated when the slot changes, so that a choice
among a thousand slots is a few operations on arrays.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from medialane.routing.config import RoutingConfig
from medialane.routing.request import RoutingRequest
from medialane.types.request import Endpoint, ModelCard, WorkerLoad

#: worker_id and data-parallel rank: a worker that reconnects gets its sessions back.
WorkerRank = tuple[str, int]

#: Element i is slot i's.
Scores = NDArray[np.float64]
#: Rows of `SlotTable.table`, which has a column for each slot: initial scores of policies.
BASE_COST, SEQUENCES, NONE, _QUEUE, _ENDS, _NUM_ROWS = range(6)

#: The bits of each byte, the lowest first.
_BITS: Final[Scores] = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little").astype(float)
_FIRST_CAPACITY: Final = 64
#: Weight of the newest request in the moving average of work per request: about the last fifty count.
_NEWEST: Final = 0.04


@dataclass(slots=True, eq=False)
class Slot:
    """One rank of one worker: its reported state, and the requests sent from here that have not ended. Requests that
    another gateway has announced (`num_announced`) are among `num_in_flight` and `num_queued` until their first token.
    `parts` are those of its base cost (ms): queue, running sequences, KV pressure."""

    number: int
    place: WorkerRank
    num_ranks: int
    same_host: bool
    card: ModelCard | None
    draining: bool
    load: WorkerLoad
    num_in_flight: int = 0
    num_queued: int = 0
    num_announced: int = 0
    queued_ms: float = 0.0
    parts: tuple[float, float, float] = (0.0, 0.0, 0.0)

    @property
    def kind(self) -> str:
        """What the speed of its engine depends on, as far as the card says: model, encoder, sizes of its batches."""
        card = self.card
        if card is None:
            return ""
        encoder = card.encoder.digest[:8] if card.encoder is not None else "-"
        return f"{card.model} {encoder} {card.max_num_seqs} {card.max_num_batched_tokens}"

    @property
    def num_above(self) -> int:
        """Sequences that must end before the next one can start: those beyond max_num_seqs."""
        capacity = self.card.max_num_seqs if self.card is not None else 0
        return max(0, self.num_sequences + 1 - capacity) if capacity else 0

    @property
    def ends(self) -> float:
        """`num_above` as a multiple of max_num_seqs."""
        return self.num_above / self.card.max_num_seqs if self.card is not None and self.num_above else 0.0

    @property
    def num_sequences(self) -> int:
        """Sequences at the engine, of all gateways. The reported load may be older than the last requests sent."""
        return max(self.num_in_flight, self.load.num_running + self.load.num_waiting)

    @property
    def num_running(self) -> int:
        return max(self.num_in_flight - self.num_queued, self.load.num_running)

    @property
    def num_waiting_elsewhere(self) -> int:
        """Waiting sequences that are neither requests of this gateway nor announced: queued ones count with their own
        work, even while sequences of other gateways run."""
        waiting = self.load.num_waiting - self.num_queued
        return min(waiting, self.num_sequences - self.num_in_flight) if waiting > 0 else 0

    def serves(self, model: str | None, *, lora: bool) -> bool:
        if self.card is None:
            return True
        return model in (None, self.card.model) and (not lora or self.card.max_loras != 0)


class SlotTable:
    """Slots by number; numbers are reused. The scores of a number without a slot, draining or full are outdated."""

    def __init__(self, config: RoutingConfig) -> None:
        self._config = config
        self._slots: list[Slot | None] = []
        self._by_place: dict[WorkerRank, Slot] = {}
        self._by_worker: dict[str, set[int]] = {}
        self._serving: dict[tuple[str | None, bool, int | None], int] = {}
        self._kinds: dict[str, int] = {}  # bit masks of slots
        self._request_ms = config.request_ms
        #: Tokens per KV block, of all slots; changes only when a slot joins or leaves.
        self.block_sizes: tuple[int, ...] = ()
        self.open = 0  # bit mask of the slots that accept requests
        self.remote = 0  # bit mask of the slots on another host
        self.table: Scores = np.zeros((_NUM_ROWS, _FIRST_CAPACITY))

    def __len__(self) -> int:
        """One more than the highest number used so far."""
        return len(self._slots)

    def __iter__(self) -> Iterator[Slot]:
        return (slot for slot in self._slots if slot is not None)

    def __getitem__(self, number: int) -> Slot:
        """Raises KeyError if the number has no slot."""
        slot = self._slots[number] if 0 <= number < len(self._slots) else None
        if slot is None:
            raise KeyError(number)
        return slot

    def at(self, place: WorkerRank) -> Slot | None:
        return self._by_place.get(place)

    def join(self, endpoint: Endpoint) -> Slot:
        """Add a slot. Raises ValueError if this rank of the worker has one."""
        place = (endpoint.worker_id, endpoint.rank)
        if place in self._by_place:
            raise ValueError(f"rank {endpoint.rank} of worker {endpoint.worker_id} has joined already")
        number = self._free_number()
        slot = Slot(
            number,
            place,
            endpoint.num_ranks,
            endpoint.same_host,
            endpoint.card,
            endpoint.draining or endpoint.state != "ready",
            endpoint.load,
        )
        self._slots[number] = slot
        self._by_place[place] = slot
        self._by_worker.setdefault(endpoint.worker_id, set()).add(number)
        self._serving.clear()
        self._find_block_sizes()
        self._kinds[slot.kind] = self._kinds.get(slot.kind, 0) | 1 << slot.number
        self.move(slot, same_host=slot.same_host)
        self.update(slot)
        return slot

    def move(self, slot: Slot, *, same_host: bool) -> None:
        slot.same_host = same_host
        self.remote = self.remote & ~(1 << slot.number) | (not same_host) << slot.number

    def leave(self, slot: Slot) -> None:
        self._slots[slot.number] = None
        del self._by_place[slot.place]
        ranks = self._by_worker[slot.place[0]]
        ranks.discard(slot.number)
        if not ranks:
            del self._by_worker[slot.place[0]]
        self._serving.clear()
        self._find_block_sizes()
        self._kinds[slot.kind] &= ~(1 << slot.number)
        self.open &= ~(1 << slot.number)

    def mean_sequences(self) -> float:
        """Return the mean number of sequences of the slots that accept requests; 0 if there is none."""
        return (
            float(self.table[SEQUENCES, bit_rows([self.open], self.table.shape[1])[0] > 0].mean()) if self.open else 0.0
        )

    def is_current(self, slot: Slot) -> bool:
        """Whether the slot has not left."""
        return self._slots[slot.number] is slot

    def candidates(self, request: RoutingRequest) -> int:
        """Return the bit mask of the slots that accept the request."""
        candidates = self.open & self.serving(request)
        for worker_id in request.excluded:
            for number in self._by_worker.get(worker_id, ()):
                candidates &= ~(1 << number)
        return candidates

    def serving(self, request: RoutingRequest) -> int:
        """Return the bit mask of the slots that serve the model, the adapter and the rank, open or not."""
        asked = (request.model, request.lora is not None, request.rank)
        slots = self._serving.get(asked)
        if slots is None:
            model, lora, rank = asked
            slots = sum(1 << s.number for s in self if rank in (None, s.place[1]) and s.serves(model, lora=lora))
            if slots:  # clients may request any name: cache only what is served, so that the cache is bounded
                self._serving[asked] = slots
        return slots

    def queue(self, slot: Slot, work_ms: float, *, announced: bool = False) -> None:
        """Count a request of `work_ms` that is sent to the slot, by this gateway or by another that announced it."""
        slot.num_in_flight += 1
        slot.num_announced += announced
        slot.num_queued += 1
        slot.queued_ms += work_ms
        self._request_ms += _NEWEST * (work_ms - self._request_ms)
        self.update(slot)

    def unqueue(self, slot: Slot, work_ms: float) -> None:
        """Remove a request that is prefilled, or never will be, from the queue."""
        slot.num_queued -= 1
        slot.queued_ms = slot.queued_ms - work_ms if slot.num_queued else 0.0  # drops the rounding error
        self.update(slot)

    def finish(self, slot: Slot, *, announced: bool = False) -> None:
        """Remove a finished request, or an announced one that is no longer queued, from those in flight."""
        slot.num_in_flight -= 1
        slot.num_announced -= announced
        self.update(slot)

    def update(self, slot: Slot) -> None:
        """Update the slot's row of the table after a change."""
        number, limit, table = slot.number, self._config.max_in_flight, self.table
        if slot.draining or (limit and slot.num_in_flight - slot.num_announced >= limit):
            self.open &= ~(1 << number)
            return
        self.open |= 1 << number
        queue, running, kv_pressure = self.queue_ms(slot), self.running_ms(slot), self.kv_pressure_ms(slot.load)
        slot.parts = queue, running, kv_pressure
        table[SEQUENCES, number] = slot.num_sequences
        table[_QUEUE, number] = queue
        table[_ENDS, number] = slot.ends
        table[BASE_COST, number] = queue + running + kv_pressure

    def queue_ms(self, slot: Slot) -> float:
        """Return the expected time to work off the queue: our and announced requests by their own work, others by the
        mean."""
        return slot.queued_ms + slot.num_waiting_elsewhere * self._request_ms

    def running_ms(self, slot: Slot) -> float:
        """Return the cost of running sequences in each step, and of waiting for one to finish if max_num_seqs is
        reached."""
        config = self._config
        return slot.num_running * config.running_ms + slot.num_above * config.over_capacity_ms

    def kv_pressure_ms(self, load: WorkerLoad) -> float:
        """Rise linearly from 0 at `kv_pressure_threshold` to the full cost at a full cache, where sequences are
        preempted."""
        start = self._config.kv_pressure_threshold
        if load.kv_usage <= start:
            return 0.0
        return self._config.kv_pressure_ms * (load.kv_usage - start) / (1 - start)

    def _free_number(self) -> int:
        for number, slot in enumerate(self._slots):
            if slot is None:
                return number
        self._slots.append(None)
        if len(self._slots) > self.table.shape[1]:
            self.table = np.concatenate([self.table, np.zeros_like(self.table)], axis=1)
        return len(self._slots) - 1

    @property
    def is_full(self) -> bool:
        """Whether no slot that accepts requests can run another sequence at once."""
        if not self.open:
            return True
        return bool(self.table[_ENDS].any()) and self.least_wait_ms(lambda _: (0.0, 1.0)) > 0

    def least_wait_ms(self, rates_of: Callable[[str], tuple[float, float]]) -> float:
        """Return the shortest wait before any slot that accepts requests computes another one; infinite if there is
        none. `rates_of` returns for a kind of engines by which factor what is queued takes longer than `RoutingConfig`
        says, and for how many ms a sequence runs."""
        least, table = math.inf, self.table
        for kind, slots in self._kinds.items():
            if slots & self.open:
                queue, running_ms = rates_of(kind)
                is_open = bit_rows([slots & self.open], table.shape[1])[0] > 0
                least = min(least, float(np.maximum(queue * table[_QUEUE], running_ms * table[_ENDS])[is_open].min()))
        return least

    def waits_ms(self, rates_of: Callable[[str], tuple[float, float]]) -> dict[str, float]:
        """Return by worker, of several ranks that of the longest queue, the wait before it computes another request;
        `rates_of` as for `least_wait_ms`."""
        waits: dict[str, float] = {}
        for slot in self:
            queue, running_ms = rates_of(slot.kind)
            wait_ms = max(queue * self.queue_ms(slot), running_ms * slot.ends)
            waits[slot.place[0]] = max(wait_ms, waits.get(slot.place[0], 0.0))
        return waits

    def _find_block_sizes(self) -> None:
        sizes = dict.fromkeys(slot.card.block_size for slot in self if slot.card is not None)
        self.block_sizes = tuple(size for size in sizes if size)


def bit_rows(masks: Sequence[int], num_slots: int) -> Scores:
    """Return an array with a row of zeros and ones for each bit mask, and a column for each slot. `num_slots` is a
    multiple of 8."""
    packed = b"".join([mask.to_bytes(num_slots // 8, "little") for mask in masks])
    return _BITS.take(np.frombuffer(packed, np.uint8), axis=0).reshape(len(masks), num_slots)
