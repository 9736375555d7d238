"""Watches whether engines cache what the router assumes.

With a request's first token its engine reports how many tokens of the prompt were cached. They are fewer than the
router has counted on, although the worker still reports their last block; or more, up to a block that the worker never
reported. If router and engine compute block ids differently, or events are lost, one of both shows, and cache-aware
routing silently degrades to routing by load. So both are counted, and a warning is logged if half of a worker's last
requests were such. Not counted:

* Blocks that were evicted between choice and prefill: their removal has been reported.
* Blocks that were only pending (of a request in flight): the engine may start both in one step.
* One block less than predicted: some schedulers recompute the last block (speculative decoding).
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import msgspec

from medialane.types.kv_blocks import BlockIds

logger = logging.getLogger(__name__)

_NUM_JUDGED: Final = 32
_NUM_ENOUGH: Final = 8
_WARN_INTERVAL_S: Final = 300.0


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
    monotonic, in seconds."""

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
