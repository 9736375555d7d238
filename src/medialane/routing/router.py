"""The router: keeps what it knows of the workers up to date, and picks one for each request.

One thread; nothing here waits or reads a socket. What workers tell comes in by `join`, `report`, `change`, `drain` and
`leave`; what is sent to them is known from `pick` and what becomes of its result.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from typing import Final

import numpy as np

from medialane.core.errors import NoWorkerReady
from medialane.core.kv_events import KvChange
from medialane.core.request import Alternative, Endpoint, RoutingDecision, WorkerLoad
from medialane.routing.block_index import BlockIndex
from medialane.routing.config import RoutingConfig
from medialane.routing.cost import CostModel, Offer, Terms, encoder_items
from medialane.routing.decisions import DecisionRecord, Decisions
from medialane.routing.encoder_cache import EncoderCaches
from medialane.routing.policies import Choice, policy
from medialane.routing.prediction import PredictionCounts, PredictionWatch
from medialane.routing.request import RoutingRequest
from medialane.routing.routed import Knowledge, Routed
from medialane.routing.sessions import Sessions
from medialane.routing.slots import Slot, SlotTable

_BLOCK_ID: Final = np.dtype("<u8")
#: While no worker has told: vLLM's own default on GPUs.
_BLOCK_SIZE: Final = 16


class Router:
    """`clock` is monotonic, `wall_clock` tells the time since the epoch, both in seconds; `seed` is for policies that
    draw."""

    def __init__(
        self,
        config: RoutingConfig | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
        seed: int | None = None,
    ) -> None:
        config = config or RoutingConfig()
        self.config = config
        self.index = BlockIndex(clock=clock, ttl_s=config.soon_ttl_s)
        self._slots = SlotTable(config)
        self._caches = EncoderCaches()
        self._predictions = PredictionWatch(grace_s=config.store_grace_s, clock=clock)
        self._decisions = Decisions(config.num_decisions)
        self._known = Knowledge(self._slots, self.index, self._caches, self._predictions, self._decisions, clock)
        self._sessions = Sessions(ttl_s=config.session_ttl_s, max_sessions=config.max_sessions, clock=clock)
        self._costs = CostModel(config, self._slots)
        self._policy = policy(
            config.router, costs=self._costs, slots=self._slots, temperature_ms=config.temperature_ms, seed=seed
        )
        self._wall_clock = wall_clock

    @property
    def predictions(self) -> PredictionCounts:
        """What became of what was predicted."""
        return self._predictions.counts

    @property
    def block_size(self) -> int:
        """Tokens of a KV block, as the workers have it. Those that have another than the first hold nothing for us."""
        cards = (slot.card for slot in self._slots if slot.card is not None)
        return next((card.block_size for card in cards), _BLOCK_SIZE)

    @property
    def num_slots(self) -> int:
        return sum(1 for _ in self._slots)

    @property
    def num_encoder_items(self) -> int:
        """Media items that are thought to be in some worker's encoder cache."""
        return self._caches.num_items

    @property
    def num_sessions(self) -> int:
        return len(self._sessions)

    def decisions(self, count: int | None = None) -> list[DecisionRecord]:
        """The last decisions, the newest first."""
        return self._decisions.last(count)

    def join(self, endpoint: Endpoint) -> int:
        """A worker, or one rank of it, from now on: its slot, which holds nothing yet. Its number may have been that of
        one that left. Raises ValueError if this rank has one."""
        slot = self._slots.join(endpoint)
        self._caches.join(slot.number, endpoint.card.encoder_cache_tokens if endpoint.card is not None else 0)
        self._predictions.join(slot.number, f"{endpoint.worker_id} (rank {endpoint.rank})")
        return slot.number

    def leave(self, slot: int) -> None:
        """The worker is lost, and with it all that it held. Raises KeyError for a slot that there is not; so do the
        others."""
        self._slots.leave(self._slots[slot])
        self.index.clear(slot)
        self._caches.leave(slot)
        self._predictions.leave(slot)

    def report(self, slot: int, load: WorkerLoad) -> None:
        """How busy the worker says that it is."""
        found = self._slots[slot]
        found.load = load
        self._slots.update(found)

    def drain(self, slot: int) -> None:
        """Send nothing more there."""
        found = self._slots[slot]
        found.draining = True
        self._slots.update(found)

    def change(self, slot: int, change: KvChange) -> None:
        """What the worker tells of its KV cache; in the order in which it was sent."""
        number = self._slots[slot].number
        stored = _ids(change.stored)
        if change.snapshot:
            self._predictions.forget_all(number)
            self.index.replace(number, stored)
            return
        removed = _ids(change.removed)
        self.index.remove(number, removed)
        self.index.store(number, stored)
        self._predictions.removed(number, removed)
        self._predictions.stored(number, stored)

    def pick(self, request: RoutingRequest, *, exclude: Collection[int] = ()) -> Routed:
        """The slot for this request, not one of `exclude`. Raises NoWorkerReady."""
        offer = self._offer(request, exclude)
        choice = self._policy.choose(offer)
        slot = self._slots[choice.slot]
        terms = self._costs.terms(offer, slot)
        decision = self._decision(offer, choice, slot, terms)
        number = self._decisions.add(request.request_id, decision, time_s=self._wall_clock())
        if request.session_id is not None:
            self._sessions.note(request.session_id, slot.place)
        return Routed(
            self._known,
            request,
            decision,
            slot,
            needed=terms.needed,
            is_told=offer.told.item(slot.number) == terms.cached_blocks,
            record=number,
        )

    def _offer(self, request: RoutingRequest, exclude: Collection[int]) -> Offer:
        candidates = self._slots.candidates(request, exclude)
        if not candidates:
            raise self._no_candidate(request)
        blocks, held = self.index.match(request.block_ids, candidates)
        usable = request.max_cached_blocks
        if usable < len(request.block_ids):
            blocks, held = np.minimum(blocks, usable), np.minimum(held, usable)
        items = encoder_items(request.media, request.block_size)
        return Offer(
            request,
            items,
            tuple([self._caches.holders(item.mm_hash) for item in items]),
            candidates,
            blocks,
            int(blocks.max()),
            held,
            self._session_slot(request.session_id, candidates),
        )

    def _session_slot(self, session_id: str | None, candidates: int) -> int | None:
        place = self._sessions.find(session_id) if session_id is not None else None
        slot = self._slots.at(place) if place is not None else None
        return slot.number if slot is not None and candidates >> slot.number & 1 else None

    def _decision(self, offer: Offer, choice: Choice, slot: Slot, terms: Terms) -> RoutingDecision:
        request = offer.request
        return RoutingDecision(
            worker_id=slot.place[0],
            rank=slot.place[1],
            num_ranks=slot.num_ranks,
            policy=self.config.router,
            reason=self._reason(offer, choice, terms),
            num_tokens=request.num_tokens,
            cached_tokens=terms.cached_blocks * request.block_size,
            num_items=len(offer.items),
            encoder_items_cached=len(offer.items) - terms.num_to_encode,
            expected_ms=terms.parts.expected_ms,
            parts=terms.parts,
            alternatives=tuple([self._alternative(offer, *other) for other in choice.alternatives]),
        )

    def _alternative(self, offer: Offer, number: int, score: float) -> Alternative:
        worker_id, rank = self._slots[number].place
        return Alternative(worker_id, rank, score, offer.prefixes.item(number) * offer.request.block_size)

    def _reason(self, offer: Offer, choice: Choice, terms: Terms) -> str:
        if not choice.alternatives:
            return "the only candidate"
        if self.config.router != "cost":
            return self.config.router
        if terms.cached_blocks < offer.longest:
            return "others hold more of it, and are busier"
        if terms.cached_blocks:
            return "no other holds more of it"
        if choice.slot == offer.session_slot:
            return "the session's last"
        return "no other is less busy"

    def _no_candidate(self, request: RoutingRequest) -> NoWorkerReady:
        if not any(not slot.draining for slot in self._slots):
            return NoWorkerReady("no worker is ready to take requests", retry_after_s=5)
        if not self._slots.serving(request):
            return NoWorkerReady("no worker serves this model, adapter or rank", retry_after_s=5)
        return NoWorkerReady("no worker has room for another request", retry_after_s=1)


def _ids(packed: bytes) -> list[int]:
    ids: list[int] = np.frombuffer(packed, _BLOCK_ID).tolist()
    return ids
