"""Monitors whether workers cache what the router predicts.

Two predictions are checked for each request that got its first token: the number of cached tokens that the engine
reports, and that a KV event reports the prompt's last full block within the grace period. If router and engine compute
block ids differently, or events are lost, both checks fail, and cache-aware routing silently degrades to routing by
load. So the outcomes of each slot's last requests are kept, and a warning is logged if half of them are bad.

Cases that must not raise a false alarm:

* A block that is evicted between choice and prefill: its removal is seen, and the request is not judged.
* A block that was only pending (of a request in flight): the engine may start both in one step.
* One block less than predicted: some schedulers recompute the last block (speculative decoding).
* A block that was stored and removed before it was checked: it is marked when it is stored.
* A snapshot in between: earlier events are unknown, so the requests in flight are not judged.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import msgspec

from medialane.types.kv_events import BlockIds

logger = logging.getLogger(__name__)

_NUM_JUDGED: Final = 32
_NUM_ENOUGH: Final = 8
_WARN_INTERVAL_S: Final = 300.0


class PredictionCounts(msgspec.Struct):
    """Totals since the start: `num_unexplained` requests had fewer cached tokens than predicted although nothing was
    evicted; the last blocks of `num_never_stored` prompts were never reported."""

    num_unexplained: int = 0
    num_stored: int = 0
    num_never_stored: int = 0
    num_warnings: int = 0


@dataclass(slots=True, eq=False)
class Expectation:
    """The prediction for one request at one slot. `last_id` is the last full block, None if the prediction covers all
    usable blocks; `prefix_id` is the last block of the predicted prefix, if the worker reported it."""

    slot: _SlotOutcomes
    block_size: int
    usable_tokens: int
    predicted_tokens: int
    last_id: int | None
    prefix_id: int | None = None
    was_stored: bool = False
    was_evicted: bool = False
    is_over: bool = False
    due_s: float = 0.0


class _SlotOutcomes:
    """One slot: expectations by the block whose storing or removal decides them, and the latest outcomes."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.by_last: dict[int, list[Expectation]] = {}
        self.by_prefix: dict[int, list[Expectation]] = {}
        self.outcomes: deque[bool] = deque(maxlen=_NUM_JUDGED)
        self.warned_at: float | None = None


class PredictionMonitor:
    """Keeps the counts and logs warnings. `clock` is monotonic, `grace_s` the longest delay of KV events, in
    seconds."""

    def __init__(self, *, grace_s: float, clock: Callable[[], float]) -> None:
        self.counts = PredictionCounts()
        self._grace_s = grace_s
        self._clock = clock
        self._slots: dict[int, _SlotOutcomes] = {}
        self._due: deque[Expectation] = deque()

    def join(self, slot: int, name: str) -> None:
        self._slots[slot] = _SlotOutcomes(name)

    def leave(self, slot: int) -> None:
        self.forget_all(slot)
        del self._slots[slot]

    def sent(
        self, slot: int, block_ids: BlockIds, *, block_size: int, num_usable: int, num_held: int, is_reported: bool
    ) -> Expectation:
        """Record a prompt with these full blocks that is sent to `slot`. The engine can use at most the first
        `num_usable` from its cache and is predicted to use `num_held`; `is_reported`: the worker reported them, they
        are not only pending."""
        watched = self._slots[slot]
        expected = Expectation(
            watched,
            block_size=block_size,
            usable_tokens=num_usable * block_size,
            predicted_tokens=num_held * block_size,
            last_id=block_ids.item(-1) if num_held < num_usable else None,
        )
        if expected.last_id is not None:
            watched.by_last.setdefault(expected.last_id, []).append(expected)
        if num_held and is_reported:
            expected.prefix_id = block_ids.item(num_held - 1)
            watched.by_prefix.setdefault(expected.prefix_id, []).append(expected)
        return expected

    def stored(self, slot: int, ids: BlockIds) -> None:
        """Apply a report that the worker stored these blocks."""
        awaited = self._slots[slot].by_last
        for block_id in awaited.keys() & ids.tolist() if awaited else ():
            for expected in awaited[block_id]:
                expected.was_stored = True

    def removed(self, slot: int, ids: BlockIds) -> None:
        """Apply a report that the worker removed these blocks."""
        predicted = self._slots[slot].by_prefix
        for block_id in predicted.keys() & ids.tolist() if predicted else ():
            for expected in predicted[block_id]:
                expected.was_evicted = True

    def forget_all(self, slot: int) -> None:
        """Drop all expectations of the slot: its events up to now are unknown."""
        watched = self._slots[slot]
        for expected in [e for held in (watched.by_last, watched.by_prefix) for each in held.values() for e in each]:
            self.drop(expected)

    def prefilled(self, expected: Expectation, reported_tokens: int | None) -> None:
        """Record the first token and the cached tokens that the engine reported (None: it does not report them)."""
        self.look()
        if expected.is_over:
            return
        self._unlist(expected.slot.by_prefix, expected.prefix_id, expected)
        if reported_tokens is not None:
            self._compare(expected, reported_tokens)
            expected.was_stored |= reported_tokens >= expected.usable_tokens  # fully cached: no event will follow
        expected.due_s = self._clock() + self._grace_s
        self._due.append(expected)

    def drop(self, expected: Expectation) -> None:
        """Drop the expectation of a request that ended before its first token. Idempotent."""
        if not expected.is_over:
            expected.is_over = True
            self._unlist(expected.slot.by_prefix, expected.prefix_id, expected)
            self._unlist(expected.slot.by_last, expected.last_id, expected)

    def look(self) -> None:
        """Judge the prompts whose grace period has passed."""
        now = self._clock()
        while self._due and self._due[0].due_s <= now:
            expected = self._due.popleft()
            if expected.is_over:
                continue
            self.drop(expected)
            if expected.last_id is None:
                continue
            self.counts.num_stored += expected.was_stored
            self.counts.num_never_stored += not expected.was_stored
            self._judge(expected.slot, is_good=expected.was_stored)

    def _compare(self, expected: Expectation, reported_tokens: int) -> None:
        if expected.prefix_id is None or expected.was_evicted:
            return
        is_good = reported_tokens >= expected.predicted_tokens - expected.block_size
        self.counts.num_unexplained += not is_good
        self._judge(expected.slot, is_good=is_good)

    def _judge(self, watched: _SlotOutcomes, *, is_good: bool) -> None:
        outcomes = watched.outcomes
        outcomes.append(is_good)
        num_bad = outcomes.count(False)
        if len(outcomes) < _NUM_ENOUGH or num_bad * 2 < len(outcomes):
            return
        now = self._clock()
        if watched.warned_at is not None and now - watched.warned_at < _WARN_INTERVAL_S:
            return
        watched.warned_at = now
        self.counts.num_warnings += 1
        logger.warning(
            "worker %s does not cache as predicted: %d of the last %d checks failed (fewer cached tokens than its "
            "KV events indicate, or blocks that were never reported as stored). Its "
            "predicted cache contents are unreliable; is prefix caching enabled there?",
            watched.name,
            num_bad,
            len(outcomes),
        )

    @staticmethod
    def _unlist(listed: dict[int, list[Expectation]], block_id: int | None, expected: Expectation) -> None:
        held = listed.get(block_id) if block_id is not None else None
        if held is None or expected not in held:
            return
        held.remove(expected)
        if not held:
            assert block_id is not None  # noqa: S101 - `held` is of this block
            del listed[block_id]
