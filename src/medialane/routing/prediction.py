"""Whether workers cache what is predicted of them.

Two things are compared for each request that got its first token: the cached tokens that the engine reports against
those predicted, and whether the worker told of the prompt's last full block within a while. Where block ids are made
differently here and there, or events are lost, neither holds, and routing by cache degrades to routing by load without
a word. So the outcomes of the last requests of each slot are kept, and a warning is logged when half of them are bad.

What must not cry wolf:

* A block that is evicted between choice and prefill: its removal is seen, and the request is not judged.
* A block that was only expected (of a request under way): the engine may start both in one step.
* One block less than predicted: some schedulers compute the last block again (speculative decoding).
* A block that came and went before it was looked for: it is marked when it comes.
* A snapshot in between: what happened before it is unknown, so the requests under way are not judged.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from typing import Final

import msgspec

from medialane.core.kv_events import BlockIds

logger = logging.getLogger(__name__)

_NUM_JUDGED: Final = 32
_NUM_ENOUGH: Final = 8
_WARN_INTERVAL_S: Final = 300.0


class PredictionCounts(msgspec.Struct):
    """Since the start. Tokens are those of requests whose engine reported; `num_unexplained` had fewer cached tokens
    than predicted although nothing was evicted; `num_never_stored` prompts' last blocks were never told of."""

    num_reported: int = 0
    predicted_tokens: int = 0
    reported_tokens: int = 0
    num_fewer: int = 0
    num_more: int = 0
    num_unexplained: int = 0
    num_stored: int = 0
    num_never_stored: int = 0
    num_warnings: int = 0


class Expectation:
    """What is predicted of one request at one slot."""

    __slots__ = (
        "block_size", "due_s", "is_over", "last_id", "predicted_tokens", "prefix_id", "slot", "usable_tokens",
        "was_evicted", "was_stored",
    )  # fmt: skip

    def __init__(
        self, slot: _SlotOutcomes, *, block_size: int, usable_tokens: int, predicted_tokens: int, last_id: int | None
    ) -> None:
        self.slot = slot
        self.block_size = block_size
        self.usable_tokens = usable_tokens
        self.predicted_tokens = predicted_tokens
        self.last_id = last_id  # of the last full block, unless all that can be is predicted to be held
        self.prefix_id: int | None = None  # of the last held block that the worker has told of
        self.was_stored = False
        self.was_evicted = False
        self.is_over = False
        self.due_s = 0.0


class _SlotOutcomes:
    """One slot: expectations by the block whose storing or removal decides them, and the last outcomes."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.by_last: dict[int, list[Expectation]] = {}
        self.by_prefix: dict[int, list[Expectation]] = {}
        self.outcomes: deque[bool] = deque(maxlen=_NUM_JUDGED)
        self.warned_at: float | None = None


class PredictionMonitor:
    """Keeps the counts and warns. `clock` is monotonic, `grace_s` how long blocks may take to be told of; seconds."""

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
        """A prompt with these full blocks goes to `slot`. The engine may take the first `num_usable` from its cache and
        is predicted to take `num_held`; `is_reported`: by what the worker told, not by what was sent to it a moment
        ago."""
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
        """The worker tells that it holds these."""
        awaited = self._slots[slot].by_last
        for block_id in awaited.keys() & ids.tolist() if awaited else ():
            for expected in awaited[block_id]:
                expected.was_stored = True

    def removed(self, slot: int, ids: BlockIds) -> None:
        """The worker tells that it holds these no more."""
        predicted = self._slots[slot].by_prefix
        for block_id in predicted.keys() & ids.tolist() if predicted else ():
            for expected in predicted[block_id]:
                expected.was_evicted = True

    def forget_all(self, slot: int) -> None:
        """What happened at the slot is not known: nothing under way there is judged."""
        watched = self._slots[slot]
        for expected in [e for held in (watched.by_last, watched.by_prefix) for each in held.values() for e in each]:
            self.drop(expected)

    def prefilled(self, expected: Expectation, reported_tokens: int | None) -> None:
        """The first token has come, and the engine took so many tokens from its cache (None: it does not tell)."""
        self.look()
        if expected.is_over:
            return
        self._unlist(expected.slot.by_prefix, expected.prefix_id, expected)
        if reported_tokens is not None:
            self._compare(expected, reported_tokens)
            expected.was_stored |= reported_tokens >= expected.usable_tokens  # all was there: nothing to tell
        expected.due_s = self._clock() + self._grace_s
        self._due.append(expected)

    def drop(self, expected: Expectation) -> None:
        """The request ended before its first token: nothing is learnt. Idempotent."""
        if not expected.is_over:
            expected.is_over = True
            self._unlist(expected.slot.by_prefix, expected.prefix_id, expected)
            self._unlist(expected.slot.by_last, expected.last_id, expected)

    def look(self) -> None:
        """Judge the prompts whose blocks have had their time."""
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
        counts, predicted = self.counts, expected.predicted_tokens
        counts.num_reported += 1
        counts.predicted_tokens += predicted
        counts.reported_tokens += reported_tokens
        counts.num_fewer += reported_tokens < predicted
        counts.num_more += reported_tokens > predicted
        if expected.prefix_id is None or expected.was_evicted:
            return
        is_good = reported_tokens >= predicted - expected.block_size
        counts.num_unexplained += not is_good
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
            assert block_id is not None  # noqa: S101 - held was found by it
            del listed[block_id]
