"""The router: tracks the state of the workers and selects one for each request.

Single-threaded; nothing here blocks or does I/O. Worker state arrives by `join`, `report`, `change` and `leave`; the
requests sent to workers are known from `pick` and the methods of its result.

`pick` is on the request's critical path, so it only chooses; the bookkeeping is done by `RoutedRequest.begin`, after
the request was sent.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final, Literal, NamedTuple

import msgspec
import numpy as np
from cachetools import TTLCache

from medialane.routing.block_index import BlockIndex, PendingBlocks
from medialane.routing.config import RoutingConfig
from medialane.routing.cost import CostModel, PrefixEvictions, ScoringInput, encoder_items
from medialane.routing.encoder_cache import EncoderCaches
from medialane.routing.policies import Choice, Policy
from medialane.routing.routed_request import (
    AnnouncedRequest,
    PredictionCounts,
    PredictionMonitor,
    RoutedRequest,
    RouterState,
)
from medialane.routing.slots import RoutingRequest, SlotTable
from medialane.types.errors import NoWorkerReady, Permits
from medialane.types.kv_blocks import BlockIds, KvChange
from medialane.types.request import Endpoint, WorkerLoad
from medialane.types.stats import PendingWork

_BLOCK_ID: Final = np.dtype("<u8")
#: Until a worker has reported its own: vLLM's default on GPUs.
_BLOCK_SIZE: Final = 16

#: Why the worker that generates computes the prompt itself: no other one is ready that could do it for this one; it has
#: most of it cached; it costs less. Empty: no such workers are known.
WholeReason = Literal["", "no_prefill_worker", "few_tokens", "cheaper"]


class Split(NamedTuple):
    """The slot that generates; the one that computes the prompt for it, or None and why."""

    routed: RoutedRequest
    prefill: RoutedRequest | None = None
    reason: WholeReason = ""


class Router:
    """`clock` is monotonic, in seconds; `seed` is for policies that sample."""

    def __init__(
        self,
        config: RoutingConfig | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
        seed: int | None = None,
    ) -> None:
        config = config or RoutingConfig()
        self.config = config
        self.index, self._slots, costs = BlockIndex(), SlotTable(config), CostModel(config)
        self._state = state = RouterState(
            config.router,
            costs,
            self._slots,
            self.index,
            PendingBlocks(ttl_s=config.pending_ttl_s, clock=clock),
            PrefixEvictions(costs.rates.token),
            EncoderCaches(),
            PredictionMonitor(self.index.holds, clock=clock),
            TTLCache(config.max_sessions, config.session_ttl_s, clock),
            Permits(clock=clock),
        )
        self._policy = Policy(
            config.router,
            costs=costs,
            slots=state.slots,
            index=state.index,
            pending=state.pending,
            evictions=state.evictions,
            seed=seed,
        )

    @property
    def predictions(self) -> PredictionCounts:
        """Predicted compared with reported cache hits."""
        return self._state.predictions.counts

    @property
    def block_sizes(self) -> tuple[int, ...]:
        """Tokens per KV block, as reported by the workers: at least one number, without duplicates."""
        return self._slots.block_sizes or (_BLOCK_SIZE,)

    @property
    def num_encoder_items(self) -> int:
        """Media items assumed to be in at least one worker's encoder cache."""
        return self._state.caches.num_items

    def encoder_cache_use(self) -> dict[str, tuple[int, int]]:
        """Return how many embeddings are assumed to be in the encoder caches of each worker, and how many fit."""
        use: dict[str, tuple[int, int]] = {}
        for slot in self._slots:
            used, size = self._state.caches.use(slot.number)
            before = use.get(slot.place[0], (0, 0))
            use[slot.place[0]] = before[0] + used, before[1] + size
        return use

    @property
    def mean_sequences(self) -> float:
        """Sequences at a worker's rank that accepts requests, of all gateways, in the mean; 0 if there is none."""
        return self._slots.mean_sequences()

    @property
    def num_open(self) -> int:
        """Ranks of workers that accept requests."""
        return self._slots.open.bit_count()

    @property
    def num_with_room(self) -> int:
        """The workers whose engines can begin another request at once."""
        return self._slots.with_room.bit_count()

    def waits_s(self) -> dict[str, float]:
        """See `SlotTable.waits_s`."""
        return self._slots.waits_s()

    def least_wait_s(self) -> float | None:
        """Return the shortest of these waits at any rank that accepts requests; None if there is none."""
        return min((slot.measured_wait_s for slot in self._slots if self._slots.open >> slot.number & 1), default=None)

    @property
    def num_unsent(self) -> int:
        """Decisions whose request ended without having been sent."""
        return self._state.num_unsent

    def join(self, endpoint: Endpoint) -> int:
        """Add a worker, or one rank of it, and return its slot, which holds no blocks yet. Slot numbers are reused.
        Raises ValueError if this rank has a slot already."""
        slot = self._slots.join(endpoint)
        self._state.caches.join(slot.number, endpoint.card.encoder_cache_tokens if endpoint.card is not None else 0)
        self._state.predictions.join(slot.number, f"{endpoint.worker_id} (rank {endpoint.rank})")
        return slot.number

    def leave(self, slot: int) -> None:
        """Remove a lost worker and all state about it. Raises KeyError for an unknown slot, like the other methods."""
        self._slots.leave(self._slots[slot])
        self.index.clear(slot)
        self._state.pending.clear(slot)
        self._state.caches.leave(slot)
        self._state.predictions.leave(slot)

    def report(self, slot: int, load: WorkerLoad) -> None:
        """Update the worker's load, as reported by it."""
        changed = self._slots[slot]
        changed.load = load
        self._slots.update(changed)

    def change(self, slot: int, change: KvChange) -> None:
        """Apply a change of the worker's KV cache; changes must be passed in the order in which they were sent."""
        number = self._slots[slot].number
        stored = _ids(change.stored)
        if change.snapshot:
            self.index.replace(number, stored)
            return
        self.index.remove(number, _ids(change.removed))
        self.index.store(number, stored)

    def move(self, slot: int, *, same_host: bool) -> None:
        """Note whether the slot's worker has mapped the arena of this host."""
        self._slots.move(self._slots[slot], same_host=same_host)

    def drain(self, slot: int, *, draining: bool) -> None:
        """Choose this slot for no further request, or again."""
        changed = self._slots[slot]
        changed.draining = draining
        self._slots.update(changed)

    def clear_encoder(self, slot: int) -> None:
        """Forget the worker's encoder cache contents: it was cleared."""
        self._state.caches.clear(self._slots[slot].number)

    def announced(self, slot: int, work: PendingWork) -> AnnouncedRequest:
        """Count a request that another gateway has sent to the worker. The caller must end the result, unless the slot
        leaves before."""
        return self._state.announced(self._slots[slot], work)

    def pick(self, request: RoutingRequest) -> RoutedRequest:
        """Select a slot for this request. The caller must call `begin` right after sending it, and `release` in any
        case. Raises NoWorkerReady."""
        return self._routed(*self._choose(request))

    def pick_split(self, request: RoutingRequest) -> Split:
        """As `pick`, where another slot may compute the prompt. Both choices are as those of `pick`."""
        if self.config.prefill_at == "decode" or not self._slots.has_prefill:
            scoring_input, choice = self._choose(request)
            is_missed = self._slots[choice.slot].role == "decode" and self.config.prefill_at != "decode"
            return Split(self._routed(scoring_input, choice), None, "no_prefill_worker" if is_missed else "")
        scoring_input, choice = self._choose(msgspec.structs.replace(request, is_transferred=True))
        whole = msgspec.structs.replace(scoring_input, request=request)
        prefill, reason = self._pick_prefill(whole, choice)
        return Split(self._routed(whole if prefill is None else scoring_input, choice), prefill, reason)

    def _pick_prefill(self, whole: ScoringInput, choice: Choice) -> tuple[RoutedRequest | None, WholeReason]:
        """Select the slot that computes a prompt for the chosen one, or return why that does it itself."""
        slot, request, costs = self._slots[choice.slot], whole.request, self._state.costs
        num_transferred = request.num_tokens - choice.tokens
        if slot.prefills or not slot.kv_group:
            return None, "no_prefill_worker"
        if num_transferred < self.config.split_tokens:
            return None, "few_tokens"
        asked = msgspec.structs.replace(request, prefill_for=slot.kv_group, rank=None, session_id=None)
        if not self._slots.candidates(asked):
            return None, "no_prefill_worker"
        scoring_input, chosen = self._choose(asked)
        if self.config.prefill_at == "auto":
            at, own = self._slots[chosen.slot], costs.terms(whole, slot, choice.tokens)
            theirs = costs.terms(scoring_input, at, chosen.tokens)
            if not costs.prefers_split(own, slot, theirs, at, num_transferred=num_transferred):
                return None, "cheaper"
        return self._routed(scoring_input, chosen), ""

    def _routed(self, scoring_input: ScoringInput, choice: Choice) -> RoutedRequest:
        return RoutedRequest(self._state, scoring_input, choice, self._slots[choice.slot])

    def _choose(self, request: RoutingRequest) -> tuple[ScoringInput, Choice]:
        """Raises NoWorkerReady."""
        candidates = self._slots.candidates(request)
        if not candidates:
            raise self._no_candidate(request)
        items = encoder_items(request.media)
        scoring_input = ScoringInput(
            request,
            items,
            tuple([self._state.caches.holders(item.mm_hash) for item in items]),
            candidates,
            self._session_slot(request.session_id, candidates) if request.session_id is not None else None,
        )
        self._state.pending.expire()
        return scoring_input, self._policy.choose(scoring_input)

    def new_items(self, request: RoutingRequest) -> frozenset[str]:
        """Return the hashes of the items that every worker would have to encode: without embedding, in no worker's
        encoder cache, and beyond the longest prefix of the prompt in a KV cache."""
        candidates = self._slots.open & self._slots.serving(request)  # also the ones that only prefill
        items = [
            item
            for item in encoder_items(request.media)
            if not item.embedding_bytes and not self._state.caches.holders(item.mm_hash) & candidates
        ]
        if not items:
            return frozenset()
        longest = self._policy.longest_prefix(request, candidates)
        return frozenset(item.mm_hash for item in items if item.end > longest)

    def _session_slot(self, session_id: str, candidates: int) -> int | None:
        place = self._state.sessions.get(session_id)
        slot = self._slots.at(place) if place is not None else None
        return slot.number if slot is not None and candidates >> slot.number & 1 else None

    def _no_candidate(self, request: RoutingRequest) -> NoWorkerReady:
        if not any(not slot.draining for slot in self._slots):
            return NoWorkerReady("no worker is ready to take requests", retry_after_s=5)
        if not self._slots.serving(request):
            return NoWorkerReady("no worker serves this adapter or rank", retry_after_s=5)
        message = "all workers have reached their limit of requests"
        return NoWorkerReady(message, retry_after_s=self._state.permits.promise())


def _ids(packed: bytes) -> BlockIds:
    return np.frombuffer(packed, _BLOCK_ID)
