"""A request from the router's choice until its release: what it occupies at its slot is a queue position until its
first token, and one in flight until its end; of another gateway's request, the queue position. With its first
token, the engine's number of cached tokens is compared with the prediction (`PredictionMonitor`).
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import msgspec
import numpy as np
from cachetools import TTLCache

from medialane.routing.block_index import BlockIndex, PendingBlocks, PendingPrefix
from medialane.routing.config import PolicyName
from medialane.routing.cost import CostModel, PrefixEvictions, ScoringInput, SlotCost
from medialane.routing.encoder_cache import EncoderCaches
from medialane.routing.policies import Choice
from medialane.routing.slots import RoutingRequest, Slot, SlotTable, WorkerRank
from medialane.types.errors import Permits
from medialane.types.kv_blocks import BlockIds
from medialane.types.request import Alternative, RoutingDecision
from medialane.types.stats import MAX_ITEMS, PendingWork

logger = logging.getLogger(__name__)

#: A response may arrive before the KV events of its blocks: the worker collects events for 10 ms
#: (`worker.block_table`), and event loops under load lag. Long enough for that, and short compared with the turnover
#: time of a cache.
_EVENT_DELAY_S: Final = 0.5

_NUM_JUDGED: Final = 32
_NUM_ENOUGH: Final = 8
_WARN_INTERVAL_S: Final = 300.0


@dataclass
class RouterState:
    """What the router and its requests share. `sessions` has the worker of each session's last request; `num_unsent`
    are the decisions whose request ended without having been sent."""

    policy: PolicyName
    costs: CostModel
    slots: SlotTable
    index: BlockIndex
    pending: PendingBlocks
    evictions: PrefixEvictions
    caches: EncoderCaches
    predictions: PredictionMonitor
    sessions: TTLCache[str, WorkerRank]
    permits: Permits
    num_unsent: int = 0

    def announced(self, slot: Slot, work: PendingWork) -> AnnouncedRequest:
        """Count a request that another gateway has sent to the slot, which must not have left."""
        self.pending.expire()
        prefix = self.pending.add_stored(slot.number, np.frombuffer(work.block_ids, "<u8").tolist())
        pinned = self.caches.pin(slot.number, work.items)
        self.slots.queue(slot, work.work_ms, announced=True)
        return AnnouncedRequest(self, slot, work.work_ms, prefix, pinned)

    def evict(self, scoring_input: ScoringInput, choice: Choice) -> float:
        """Return the cost of what a chosen slot evicts for a request, beyond what another would (ms); if it was chosen
        for its prefix, note that it is because of that."""
        request, longest = scoring_input.request, choice.longest
        new_tokens = request.num_tokens - choice.tokens
        evicted_ms = new_tokens * self.costs.rates_of(request).evicted * self.slots.reuse.item(choice.slot)
        if choice.tokens < longest:
            self.evictions.copied(request, longest)
            return evicted_ms
        return evicted_ms + self.evictions.add(request, longest, evicted_ms)

    def end_pending(self, prefix: PendingPrefix, *, is_computed: bool) -> None:
        """End the pending prefix of a request. If it is computed, and the slot has not reported its last block yet, the
        KV events may still be in transit: then it ends a little later."""
        if is_computed and prefix.ids and not self.index.holds(prefix.slot, prefix.ids[-1]):
            self.pending.shorten_deadline(prefix, _EVENT_DELAY_S)
        else:
            self.pending.forget(prefix)


@dataclass(slots=True, eq=False)
class AnnouncedRequest:
    """A queued request of another gateway. The owner must call `end`."""

    _state: RouterState
    _slot: Slot
    _work_ms: float
    _prefix: PendingPrefix
    _pinned: list[str]
    _is_ended: bool = False

    def end(self, *, is_computed: bool) -> None:
        """Release everything: the request has its first token (`is_computed`), or has ended without one. Its blocks
        count a little longer if their KV events may still be in transit. Idempotent; may be called after the slot has
        left."""
        state, slot = self._state, self._slot
        if self._is_ended or not state.slots.is_current(slot):
            return
        self._is_ended = True
        state.slots.unqueue(slot, self._work_ms)
        state.slots.finish(slot, announced=True)
        state.caches.unpin(slot.number, self._pinned, computed=is_computed)
        state.end_pending(self._prefix, is_computed=is_computed)


@dataclass(slots=True, eq=False)
class _Occupied:
    """What a request has at its slot. `on_dequeued` informs other gateways, if they know of it, that it has its first
    token, or never will."""

    work_ms: float
    predicted: Prediction
    prefix: PendingPrefix
    items: list[tuple[str, int]]
    pinned: list[str]
    on_dequeued: Callable[[bool], None] | None = None
    is_queued: bool = True
    is_computed: bool = False


class RoutedRequest:
    """A routing choice, available at once: `slot`, and the `worker_id`, `rank` and `num_ranks` of its worker.

    `begin` does the bookkeeping of the choice. Call it right after the request was sent, before anything else is
    reported to the router or routed. It sets `decision`; until its first token the request counts in its slot's queue
    and pins its items in the encoder cache there; until its release it is in flight, and blocks that the worker has not
    reported yet count as pending.

    The request's scope must call `release`. All methods are idempotent but for `announce`, and may be called after the
    slot has left; without `begin`, or after `release`, they only count that the request was not sent.
    """

    def __init__(self, state: RouterState, scoring_input: ScoringInput, choice: Choice, slot: Slot) -> None:
        self.slot = slot.number
        self.worker_id, self.rank = slot.place
        self.num_ranks = slot.num_ranks
        self.is_sent = False
        self._state = state
        self._slot = slot
        self._pending: tuple[ScoringInput, Choice] | None = (scoring_input, choice)
        self._decision: RoutingDecision | None = None
        self._occupied: _Occupied | None = None
        self._is_released = False

    @property
    def decision(self) -> RoutingDecision:
        """The choice and its reason. Raises RuntimeError before `begin`."""
        if self._decision is None:
            raise RuntimeError("the request has not begun")
        return self._decision

    @property
    def has_begun(self) -> bool:
        return self._decision is not None

    def begin(self, *, is_sent: bool = True) -> bool:
        """Count the request at its slot, the first time, which returns True. With `is_sent` False it is about to be
        sent: call this again once it was."""
        pending, self._pending = self._pending, None
        if pending is not None:
            self._begin(*pending)
            self._state.permits.take(self)
        self.is_sent |= is_sent and self.has_begun
        return pending is not None

    def announce(self, send: Callable[[PendingWork], Callable[[bool], None]]) -> None:
        """Announce the request to other gateways by `send`, and its end by the function that it returns. To be called
        at most once, right after `begin`."""
        if (occupied := self._occupied) is not None and occupied.is_queued:
            ids, items = np.array(occupied.prefix.ids, "<u8").tobytes(), tuple(occupied.items[:MAX_ITEMS])
            occupied.on_dequeued = send(PendingWork(self.rank, ids, items, occupied.work_ms))

    def prefilled(self, num_cached_tokens: int | None, *, waited_s: float | None = None) -> None:
        """Record the first token; `num_cached_tokens` were KV-cache hits (None: the engine does not report them), and
        it has waited that long in the engine, if that is known."""
        if (occupied := self._occupied) is not None and occupied.is_queued:
            if waited_s is not None:
                self._slot.wait_s = waited_s
            self._unqueue(occupied, computed=True)
            if num_cached_tokens is not None and self._state.slots.is_current(self._slot):
                self._state.predictions.compare(occupied.predicted, num_cached_tokens)

    def release(self) -> None:
        """Release what the request holds; it has finished, failed or been aborted."""
        if self._is_released:
            return
        self._is_released = True
        self._pending = None
        self._state.permits.free(self)
        self._state.num_unsent += not self.is_sent
        occupied, self._occupied = self._occupied, None
        if occupied is None:
            return
        if occupied.is_queued:
            self._unqueue(occupied, computed=False)
        if self._state.slots.is_current(self._slot):
            self._state.end_pending(occupied.prefix, is_computed=occupied.is_computed)
            self._state.slots.finish(self._slot)

    def _begin(self, scoring_input: ScoringInput, choice: Choice) -> None:
        """Explain the choice, and count the request at its slot unless that has left."""
        state, slot, request = self._state, self._slot, scoring_input.request
        eviction_ms = state.evict(scoring_input, choice)
        terms = state.costs.terms(scoring_input, slot, choice.tokens, eviction_ms=eviction_ms)
        self._decision = _explain(scoring_input, choice, slot, terms, policy=state.policy)
        if request.session_id is not None:
            state.sessions[request.session_id] = slot.place
        if state.slots.is_current(slot):
            cached_elsewhere = choice.alternatives[0][2] if choice.alternatives else 0
            state.slots.count_new(slot, request.num_tokens - choice.tokens, request.num_tokens - cached_elsewhere)
            self._occupied = self._occupy(request, terms, is_reported=choice.is_reported)

    def _occupy(self, request: RoutingRequest, terms: SlotCost, *, is_reported: bool) -> _Occupied:
        """`is_reported`: its cached prefix there was reported by the worker, not inferred from requests in flight."""
        state, slot = self._state, self._slot
        block_size, block_ids = request.blocks_at(slot.card)
        predicted = Prediction(
            slot.number, block_ids, block_size, terms.cached_tokens // block_size, is_reported=is_reported
        )
        prefix = state.pending.add(slot.number, block_ids)
        items = [(item.mm_hash, item.num_embeds) for item in terms.needed]
        pinned = state.caches.pin(slot.number, items)
        work_ms = 0.0 if request.is_transferred else terms.work_ms  # the engine reads its blocks beside its steps
        state.slots.queue(slot, work_ms)
        return _Occupied(work_ms, predicted, prefix, items, pinned)

    def _unqueue(self, occupied: _Occupied, *, computed: bool) -> None:
        occupied.is_queued, occupied.is_computed = False, computed
        if occupied.on_dequeued is not None:
            occupied.on_dequeued(computed)
        if self._state.slots.is_current(self._slot):
            self._state.slots.unqueue(self._slot, occupied.work_ms)
            self._state.caches.unpin(self._slot.number, occupied.pinned, computed=computed)


def _explain(
    scoring_input: ScoringInput, choice: Choice, slot: Slot, terms: SlotCost, *, policy: PolicyName
) -> RoutingDecision:
    """Describe the choice, with the state of the slot before the request counts there."""
    alternatives = tuple([Alternative(*other.place, score, tokens) for other, score, tokens in choice.alternatives])
    return RoutingDecision(
        worker_id=slot.place[0],
        rank=slot.place[1],
        num_ranks=slot.num_ranks,
        policy=policy,
        reason=_reason(scoring_input, choice, policy) if alternatives else "the only candidate",
        num_tokens=scoring_input.request.num_tokens,
        cached_tokens=terms.cached_tokens,
        num_items=len(scoring_input.items),
        encoder_items_cached=len(scoring_input.items) - terms.num_to_encode - terms.num_to_load,
        encoder_items_loaded=terms.num_to_load,
        expected_ms=terms.parts.expected_ms,
        parts=terms.parts,
        alternatives=alternatives,
    )


def _reason(scoring_input: ScoringInput, choice: Choice, policy: PolicyName) -> str:
    if policy != "cost":
        return policy
    if choice.tokens < choice.longest:
        return "longer prefix elsewhere, but higher load or more evictions"
    if choice.tokens:
        return "longest cached prefix"
    if choice.slot == scoring_input.session_slot:
        return "worker of the session's last request"
    return "lowest load"


class PredictionCounts(msgspec.Struct):
    """Requests since the start whose engines had fewer tokens cached than predicted, and more."""

    num_fewer: int = 0
    num_more: int = 0


class Prediction(NamedTuple):
    """Of the full blocks of a prompt that is sent to `slot`, which are `block_ids`, the first `num_cached` are expected
    to be cached there; `is_reported`: by the worker's reports, not because of requests in flight."""

    slot: int
    block_ids: BlockIds
    block_size: int
    num_cached: int
    is_reported: bool


@dataclass
class _Outcomes:
    """Whether the predictions of a slot's last requests were good."""

    name: str
    latest: deque[bool] = field(default_factory=lambda: deque(maxlen=_NUM_JUDGED))
    warned_at: float = float("-inf")


class PredictionMonitor:
    """Keeps the counts and logs warnings. `holds` returns whether the worker of a slot reports a block; `clock` is
    monotonic, in seconds.

    It shows whether engines cache what the router assumes. With a request's first token its engine reports how many
    tokens of the prompt were cached. They are fewer than the router has counted on, although the worker still reports
    their last block; or more, up to a block that the worker never reported. If router and engine compute block ids
    differently, or events are lost, one of both shows, and cache-aware routing silently degrades to routing by load. So
    both are counted, and a warning is logged if half of a worker's last requests were such. Not counted:

    * Blocks that were evicted between choice and prefill: their removal has been reported.
    * Blocks that were only pending (of a request in flight): the engine may start both in one step.
    * One block less than predicted: some schedulers recompute the last block (speculative decoding).
    """

    def __init__(self, holds: Callable[[int, int], bool], *, clock: Callable[[], float]) -> None:
        self.counts = PredictionCounts()
        self._holds = holds
        self._clock = clock
        self._outcomes: dict[int, _Outcomes] = {}

    def join(self, slot: int, name: str) -> None:
        self._outcomes[slot] = _Outcomes(name)

    def leave(self, slot: int) -> None:
        del self._outcomes[slot]

    def compare(self, predicted: Prediction, reported_tokens: int) -> None:
        """Judge a prediction by the cached tokens that the engine has reported. Its slot must not have left."""
        if not predicted.is_reported:
            return
        ids, num_cached = predicted.block_ids, min(reported_tokens // predicted.block_size, len(predicted.block_ids))
        is_fewer = num_cached < predicted.num_cached - 1 and self._holds(
            predicted.slot, ids.item(predicted.num_cached - 1)
        )
        is_more = num_cached > predicted.num_cached and not self._holds(predicted.slot, ids.item(num_cached - 1))
        self.counts.num_fewer += is_fewer
        self.counts.num_more += is_more
        self._judge(self._outcomes[predicted.slot], is_good=not (is_fewer or is_more))

    def _judge(self, outcomes: _Outcomes, *, is_good: bool) -> None:
        latest, now = outcomes.latest, self._clock()
        latest.append(is_good)
        num_bad = latest.count(False)
        if len(latest) < _NUM_ENOUGH or num_bad * 2 < len(latest) or now - outcomes.warned_at < _WARN_INTERVAL_S:
            return
        outcomes.warned_at = now
        logger.warning(
            "worker %s does not cache as predicted: for %d of its last %d requests its engine had fewer tokens cached "
            "than its KV events say, or more. Requests may go to workers that have not cached their prompts",
            outcomes.name,
            num_bad,
            len(latest),
        )
