"""The router's view of a request, and of the workers: one slot for each data-parallel rank of a worker.

Costs that depend on a slot alone are kept in arrays indexed by slot and updated when the slot changes, so that a choice
among a thousand slots is a few operations on arrays.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from medialane.routing.config import RoutingConfig
from medialane.types.feature import MediaSpan
from medialane.types.kv_blocks import BlockIds
from medialane.types.request import PREFILL, Endpoint, ModelCard, WorkerLoad, WorkerRole

#: worker_id and data-parallel rank: a worker that reconnects gets its sessions back.
WorkerRank = tuple[str, int]

#: Element i is slot i's.
Scores = NDArray[np.float64]

#: Rows of `SlotTable.table`, which has a column for each slot: initial scores of policies, the new tokens that it got
#: lately, and what is infinite for numbers without a slot.
BASE_COST, SEQUENCES, NONE, _NEW, _ABSENT, _NUM_ROWS = range(6)

#: The bits of each byte, the lowest first.
_BITS: Final[Scores] = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little").astype(float)

_FIRST_CAPACITY: Final = 64

#: Weight of the newest request in the moving average of work per request: about the last fifty count.
_NEWEST: Final = 0.04

#: New prompts per slot that count as lately; above this scale their tokens are scaled down again.
_WINDOW: Final = 32
_MAX_SCALE: Final = 1e100
#: New tokens, as part of a cache, that tell too little to say which worker evicts more: a gateway of many has sent few.
_FEW: Final = 0.02

#: Tokens of a step, of engines that do not report how many they compute in one.
_BATCH_TOKENS: Final = 2048


@dataclass(slots=True, eq=False)
class Slot:
    """One rank of one worker: its reported state, and the requests sent from here that have not ended. Requests that
    another gateway has announced (`num_announced`) are among `num_in_flight` and `num_queued` until their first token.
    `wait_s` is how long the last one that has begun had waited in its engine. `parts` are the terms of its base cost
    (ms): queue, running sequences, KV pressure."""

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
    wait_s: float = 0.0
    parts: tuple[float, float, float] = (0.0, 0.0, 0.0)

    @property
    def num_above(self) -> int:
        """Sequences that must end before the next one can start: those beyond max_num_seqs."""
        capacity = self.card.max_num_seqs if self.card is not None else 0
        return max(0, self.num_sequences + 1 - capacity) if capacity else 0

    @property
    def num_batch_tokens(self) -> int:
        """Tokens that its engine computes in a step."""
        return (self.card.max_num_batched_tokens if self.card is not None else 0) or _BATCH_TOKENS

    @property
    def measured_wait_s(self) -> float:
        """`wait_s` while requests wait in its engine."""
        return self.wait_s if self.load.num_waiting else 0.0

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

    @property
    def role(self) -> WorkerRole:
        return "worker" if self.card is None else self.card.role

    @property
    def prefills(self) -> bool:
        """Whether its worker only computes prompts for other ones."""
        return self.role == PREFILL

    @property
    def kv_group(self) -> str:
        return "" if self.card is None else self.card.kv_group

    @property
    def serves_adapters(self) -> bool:
        return self.card is None or self.card.max_loras != 0


class SlotTable:
    """Slots by number; numbers are reused. The scores of a number without a slot, draining or full are outdated."""

    def __init__(self, config: RoutingConfig) -> None:
        self._config = config
        self._slots: list[Slot | None] = []
        self._by_place: dict[WorkerRank, Slot] = {}
        self._by_worker: dict[str, set[int]] = {}
        self._serving: dict[tuple[bool, int | None], int] = {}
        self._request_ms = config.request_ms
        #: Tokens per KV block, of all slots; changes only when a slot joins or leaves.
        self.block_sizes: tuple[int, ...] = ()
        self.open = 0  # bit mask of the slots that accept requests
        self.with_room = 0  # bit mask of slots whose engines can begin another request at once
        self.remote = 0  # bit mask of the slots on another host
        self._prefill: dict[str, int] = {}  # bit masks of the slots that only prefill, by their KV group
        self.table: Scores = _new_columns()
        self._scale = 1.0  # of the row of new tokens: a token now counts this much
        #: How much likelier the blocks that a slot evicts for new ones would be used again than those of the slot that
        #: got the fewest new tokens: the more it got, the sooner after their last use its blocks are evicted.
        self.reuse: Scores = np.zeros(_FIRST_CAPACITY)

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
        self.table[_ABSENT, number] = 0.0
        self._by_place[place] = slot
        self._by_worker.setdefault(endpoint.worker_id, set()).add(number)
        if slot.prefills:
            self._prefill[slot.kv_group] = self._prefill.get(slot.kv_group, 0) | 1 << number
        self._serving.clear()
        self._find_block_sizes()
        self._find_reuse()
        self.move(slot, same_host=slot.same_host)
        self.update(slot)
        return slot

    def move(self, slot: Slot, *, same_host: bool) -> None:
        slot.same_host = same_host
        self.remote = self.remote & ~(1 << slot.number) | (not same_host) << slot.number

    def leave(self, slot: Slot) -> None:
        self._slots[slot.number] = None
        del self._by_place[slot.place]
        if slot.prefills:
            self._prefill[slot.kv_group] ^= 1 << slot.number
        ranks = self._by_worker[slot.place[0]]
        ranks.discard(slot.number)
        if not ranks:
            del self._by_worker[slot.place[0]]
        self._serving.clear()
        self._find_block_sizes()
        self._close(slot)
        self.table[_NEW, slot.number], self.table[_ABSENT, slot.number] = 0.0, np.inf

    def mean_sequences(self) -> float:
        """Return the mean number of sequences of the slots that accept requests; 0 if there is none."""
        return (
            float(self.table[SEQUENCES, bit_rows([self.open], self.table.shape[1])[0] > 0].mean()) if self.open else 0.0
        )

    def is_current(self, slot: Slot) -> bool:
        """Whether the slot has not left."""
        return self._slots[slot.number] is slot

    def candidates(self, request: RoutingRequest) -> int:
        """Return the bit mask of the slots that accept the request: ones that prefill only if there are no others."""
        candidates = self.open & self.serving(request)
        for worker_id in request.excluded:
            for number in self._by_worker.get(worker_id, ()):
                candidates &= ~(1 << number)
        if request.prefill_for is not None:
            return candidates & self._prefill.get(request.prefill_for, 0)
        for prefill in self._prefill.values():
            candidates = candidates & ~prefill or candidates
        return candidates

    @property
    def has_prefill(self) -> bool:
        """Whether a slot that only prefills accepts requests."""
        return any(self.open & slots for slots in self._prefill.values())

    def serving(self, request: RoutingRequest) -> int:
        """Return the bit mask of the slots that serve the adapter and the rank, open or not."""
        asked = has_adapter, rank = (request.lora is not None, request.rank)
        slots = self._serving.get(asked)
        if slots is None:
            of_rank = (slot for slot in self if rank in (None, slot.place[1]))
            slots = sum(1 << slot.number for slot in of_rank if slot.serves_adapters or not has_adapter)
            if slots:  # clients may request any rank: cache only what is served, so that the cache is bounded
                self._serving[asked] = slots
        return slots

    def queue(self, slot: Slot, work_ms: float, *, announced: bool = False) -> None:
        """Count a request of `work_ms` that is sent to the slot, by this gateway or by another that announced it."""
        slot.num_in_flight += 1
        slot.num_announced += announced
        slot.num_queued += 1
        slot.queued_ms += work_ms
        if work_ms:
            self._request_ms += _NEWEST * (work_ms - self._request_ms)
        self.update(slot)

    def unqueue(self, slot: Slot, work_ms: float) -> None:
        """Remove a request that is prefilled, or never will be, from the queue."""
        slot.num_queued -= 1
        slot.queued_ms = slot.queued_ms - work_ms if slot.num_queued else 0.0  # drops the rounding error
        self.update(slot)

    def finish(self, slot: Slot, *, announced: bool = False) -> None:
        """Remove a finished request, or an announced one that is no longer queued, from the requests in flight."""
        slot.num_in_flight -= 1
        slot.num_announced -= announced
        self.update(slot)

    def update(self, slot: Slot) -> None:
        """Update the slot's row of the table after a change."""
        number, limit, table = slot.number, self._config.max_in_flight, self.table
        if slot.draining or (limit and slot.num_in_flight - slot.num_announced >= limit):
            self._close(slot)
            return
        self.open |= 1 << number
        self.with_room = self.with_room & ~(1 << number) | self.has_room(slot) << number
        queue, running, kv_pressure = self.queue_ms(slot), self.running_ms(slot), self.kv_pressure_ms(slot.load)
        slot.parts = queue, running, kv_pressure
        table[SEQUENCES, number] = slot.num_sequences
        table[BASE_COST, number] = queue + running + kv_pressure

    def count_new(self, slot: Slot, num_new: int, num_elsewhere: int) -> None:
        """Count the new tokens of a prompt that is sent to the slot, relative to the size of its cache. They count less
        if there were more at the next best slot, `num_elsewhere`, so there was no choice: all later turns of a chat
        count less than its first, or new chats would make up for old ones that go on, and be alone with each other.
        Earlier tokens count less, by a factor e after `_WINDOW` new prompts for each slot."""
        size = slot.card.num_kv_blocks * slot.card.block_size if slot.card is not None else 0
        if not size or not num_new:
            return
        weight = min(1.0, num_new / max(1, num_elsewhere)) ** 2
        self._scale *= math.exp(weight / (_WINDOW * len(self._by_place)))
        self.table[_NEW, slot.number] += weight * num_new / size * self._scale
        if self._scale > _MAX_SCALE:
            self.table[_NEW] /= self._scale
            self._scale = 1.0
        self._find_reuse()

    def has_room(self, slot: Slot) -> bool:
        """Return whether nothing waits in the slot's engine, as it was last reported, and what is to be prefilled there
        is one request, or less than its next two steps: so it always has work, and the rest can still be reordered."""
        batch_ms = slot.num_batch_tokens * self._config.prefill_ms_per_token
        is_short = slot.num_queued <= 1 or slot.queued_ms < 2 * batch_ms
        return is_short and not slot.num_above and not slot.load.num_waiting

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
            columns = [_new_columns() for _ in range(self.table.shape[1] // _FIRST_CAPACITY)]
            self.table = np.concatenate([self.table, *columns], axis=1)
        return len(self._slots) - 1

    def waits_s(self) -> dict[str, float]:
        """Return by worker, of several ranks the longest, how long the last request that has begun there had waited in
        its engine; 0 if nothing waits there."""
        waits: dict[str, float] = {}
        for slot in self:
            waits[slot.place[0]] = max(slot.measured_wait_s, waits.get(slot.place[0], 0.0))
        return waits

    def _close(self, slot: Slot) -> None:
        self.open &= ~(1 << slot.number)
        self.with_room &= ~(1 << slot.number)

    def _find_reuse(self) -> None:
        new = self.table[_NEW]
        # 0.5 with as many as the others, once that is more than a few; `_scale` is a whole cache.
        likely = new / (new + float(new.sum()) / len(self._by_place) + _FEW * self._scale)
        self.reuse = likely - (likely + self.table[_ABSENT]).min()

    def _find_block_sizes(self) -> None:
        sizes = dict.fromkeys(slot.card.block_size for slot in self if slot.card is not None)
        self.block_sizes = tuple(size for size in sizes if size)


def bit_rows(masks: Sequence[int], num_slots: int) -> Scores:
    """Return an array with a row of zeros and ones for each bit mask, and a column for each slot. `num_slots` is a
    multiple of 8."""
    packed = b"".join([mask.to_bytes(num_slots // 8, "little") for mask in masks])
    return _BITS.take(np.frombuffer(packed, np.uint8), axis=0).reshape(len(masks), num_slots)


def _new_columns() -> Scores:
    columns = np.zeros((_NUM_ROWS, _FIRST_CAPACITY))
    columns[_ABSENT] = np.inf
    return columns


class RoutingRequest(msgspec.Struct, frozen=True, eq=False):
    """A prompt to be routed.

    `block_ids` are the ids of its full blocks, in order, by the tokens per block: at least one size, and every one that
    a worker has. `media` are in the order of their offsets. `handover_bytes` is the size of its media if sent to a
    worker on another host. `lora` is the adapter's name with its version, `rank` the data-parallel rank that the client
    requested (None: any). `excluded` are workers that must not be chosen. With `prefill_for`, a worker is to compute
    the prompt for another one of that KV group; if it `is_transferred`, another worker computes it for this one.
    """

    block_ids: dict[int, BlockIds]
    num_tokens: int
    media: tuple[MediaSpan, ...] = ()
    handover_bytes: int = 0
    lora: str | None = None
    session_id: str | None = None
    rank: int | None = None
    excluded: frozenset[str] = frozenset()
    prefill_for: str | None = None
    is_transferred: bool = False

    def blocks_at(self, card: ModelCard | None) -> tuple[int, BlockIds]:
        """Return a worker's block size and the prompt's block ids; none if the ids for this size are not known, or it
        has no prefix cache."""
        size, ids = next(iter(self.block_ids.items()))
        if card is None or card.block_size == size:
            return size, ids
        return card.block_size or size, self.block_ids.get(card.block_size, ids[:0])

    def num_usable(self, block_size: int) -> int:
        """Most blocks of this size that can come from an engine's cache: it always computes at least the last token."""
        return max(self.num_tokens - 1, 0) // block_size

    def __repr__(self) -> str:
        return f"RoutingRequest({self.num_tokens} tokens, {len(self.media)} items)"
