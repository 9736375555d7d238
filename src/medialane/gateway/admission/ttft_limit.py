"""Refuses requests whose first token is expected later than their limit.

Theory of operation. A request is judged at most three times, each time by what is known then, and never once its media
have been prepared:

* before anything is done for its media: by the least wait for an engine;
* when the store does not have one of its items: also by the wait for a preparer and what the item costs, by its
  header's size or its encoded bytes;
* when its worker is chosen, if nothing had to be prepared: by that worker's queue and caches.

What is not certain counts as nothing (`fit.RateFit`), so a model that has not been learned refuses nothing. One that
has been learned may still be wrong. So waits are multiplied by a factor that is raised when an admitted request breaks
its limit, at most once for all that were admitted before, and is lowered a little by each one that keeps it closely.
And if everything is refused, nothing is learned: then one request is admitted from time to time.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Final, NamedTuple

from medialane.gateway.admission.cost import Cost, CostForecast
from medialane.types.errors import TtftLimitExceeded
from medialane.types.retry_after import MAX_RETRY_AFTER_S, retry_after

if TYPE_CHECKING:
    from medialane.observability.metrics import Metrics
    from medialane.routing import EngineWork
    from medialane.types.request import OutputDelta

#: The factor's first and largest value, by what it is raised and lowered.
_FIRST_FACTOR: Final = 1.25
_MAX_FACTOR: Final = 4.0
_LEAST_RAISE, _MOST_RAISE = 1.1, 1.5
_LOWERED: Final = 0.001
#: Of the limit, how late a request must be expected for it to say something about the factor.
_NEAR: Final = 0.5
#: If nothing was learned of an engine or preparer for so long, one request is admitted to learn from it.
_PROBE_S: Final = 2.0
#: Name of all engines together, in `TtftLimit.is_probe`.
_ENGINE: Final = "engine"


class NewItem(NamedTuple):
    """An item that must be prepared: the bytes of its pixels, or else of its file (0 if unknown), and its tokens (0 if
    unknown)."""

    param: str
    modality: str
    num_bytes: int
    num_tokens: int


class TtftLimit:
    """The state that the requests of one gateway share. `limit_s` is the limit of requests without their own; 0 is
    none. `clock` is in seconds, that of `began_at`."""

    def __init__(
        self,
        limit_s: float,
        forecast: CostForecast,
        metrics: Metrics,
        *,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.forecast = forecast
        self.factor = _FIRST_FACTOR
        self.clock = clock
        self.limit_s = limit_s
        self._metrics = metrics
        self._raised_at = float("-inf")
        self._learned_at: dict[str, float] = {}
        self._promised_at = float("-inf")

    def expect(self, began_at: float, limit_ms: float | None = None, tenant: str = "") -> TtftExpectation:
        """Return the expectation of a request that began then, with its own limit if it has one."""
        return TtftExpectation(self, self.limit_s * 1000 if limit_ms is None else limit_ms, began_at, tenant)

    def refuse(self, expectation: TtftExpectation, own_ms: float) -> TtftLimitExceeded:
        """Return the error of a request that takes `own_ms` besides what it waits for."""
        self._metrics.count_refused(expectation.tenant, TtftLimitExceeded.code)
        expected_ms, limit_ms = expectation.expected_ms, expectation.limit_ms
        if own_ms > limit_ms:
            message = f"the request takes {own_ms / 1000:.2f} s until its first token, longer than its limit"
            return TtftLimitExceeded(message, retry_after_s=MAX_RETRY_AFTER_S)
        retry_after_s = self._promise((expected_ms - limit_ms) / self.factor, own_ms)
        message = f"the first token is expected after {expected_ms / 1000:.2f} s, later than {limit_ms / 1000:g} s"
        return TtftLimitExceeded(message, retry_after_s=retry_after_s)

    def is_probe(self, kind: str) -> bool:
        """Whether to admit a request in any case, as nothing was learned of this kind for a while."""
        now = self.clock()
        if now - self._learned_at.setdefault(kind, now) < _PROBE_S:
            return False
        self._learned_at[kind] = now
        return True

    def learned(self, *kinds: str) -> None:
        now = self.clock()
        for kind in kinds:
            self._learned_at[kind] = now

    def correct(self, expectation: TtftExpectation, measured_ms: float) -> None:
        """Compare the first token of a request with its limit, and with what was expected."""
        self._metrics.observe_ttft(expectation.expected_ms / 1000, measured_ms / 1000)
        if not expectation.limit_ms:
            return
        if measured_ms <= expectation.limit_ms:
            if expectation.expected_ms > _NEAR * expectation.limit_ms:  # others would have kept it anyway
                self.factor = max(1.0, self.factor - _LOWERED)
        elif expectation.judged_at > self._raised_at:
            self._raised_at = self.clock()
            by = min(max(measured_ms / expectation.limit_ms, _LEAST_RAISE), _MOST_RAISE)
            self.factor = min(_MAX_FACTOR, self.factor * by)

    def _promise(self, excess_ms: float, own_ms: float) -> int:
        """Return the Retry-After of a refused request: when the waits have gone down by `excess_ms`, and the requests
        that were promised an earlier time have come back."""
        now = self.clock()
        at = max(now + excess_ms / 1000, self._promised_at + own_ms / 1000 / self.forecast.num_workers)
        self._promised_at = min(at, now + MAX_RETRY_AFTER_S)
        return retry_after(self._promised_at - now)


class TtftExpectation:
    """One request: its limit, and when its first token is expected after `began_at`, both in ms. Judging raises
    TtftLimitExceeded."""

    def __init__(self, limit: TtftLimit, limit_ms: float, began_at: float, tenant: str) -> None:
        self.limit_ms = limit_ms
        self.tenant = tenant
        self.expected_ms = 0.0
        self.judged_at = began_at
        self._began_at = began_at
        self._limit = limit
        self._cost = Cost()
        self._items: set[str] = set()

    def judge_arrival(self) -> None:
        """Judge a request with media before anything is done for them."""
        self._judge(self._limit.forecast.least_wait_ms(), 0.0, _ENGINE)

    def judge_item(self, item: NewItem) -> None:
        """Judge a request one of whose items must be prepared. No effect for an item that has been counted."""
        if item.param in self._items:
            return
        self._items.add(item.param)
        forecast, cost = self._limit.forecast, self._cost
        preparing_ms, engine = forecast.preparing_ms(item.modality, item.num_bytes), forecast.new_item(item.num_tokens)
        self._cost = cost = Cost(
            max(cost.prepare_ms, preparing_ms),  # items are prepared at the same time
            cost.encode_ms + engine.encode_ms,
            cost.prefill_ms + engine.prefill_ms,
            engine.is_certain,
        )
        wait_ms = forecast.least_wait_ms() + (forecast.preparer_wait_ms() if preparing_ms else 0.0)
        self._judge(wait_ms, cost.prepare_ms + (cost.engine_ms if cost.is_certain else 0.0), item.modality)
        forecast.sent_to_preparer(preparing_ms)

    def judge_route(self, work: EngineWork) -> float:
        """Judge a request whose worker is chosen; not one whose media have been prepared for it. Return what it adds to
        the worker's queue, in ms as assumed by the router."""
        engine = self._limit.forecast.engine(work.kind)
        cost, wait_ms = engine.cost(work), engine.wait_ms(work)
        if self._items or not cost.is_certain:
            self._expect(wait_ms, cost.engine_ms)
        else:
            self._judge(wait_ms, cost.engine_ms, work.kind)
        return engine.queued_ms(work)

    def prepared(self, item: NewItem, seconds: float) -> None:
        """Learn from an item's time in a preparer."""
        self._limit.learned(item.modality)
        self._limit.forecast.learn_preparer(item.modality, item.num_bytes, seconds * 1000)

    def answered(self, work: EngineWork, first: OutputDelta, *, cached_tokens: int, seconds: float) -> None:
        """Learn from a request's first output, whose first token has come `seconds` after it was sent to its worker,
        and for which so many tokens were expected to be cached.

        The whole answer may be its first output: then only the engine's times say when it had its first token.
        """
        if first.finished and first.times is None:
            return
        limit, num_cached = self._limit, first.num_cached_tokens
        limit.learned(work.kind, _ENGINE)
        num_more = 0 if num_cached is None else num_cached - cached_tokens
        limit.forecast.learn_engine(work, num_more_cached=num_more, measured_ms=seconds * 1000)
        if not first.finished:
            limit.correct(self, self._elapsed_ms())

    def ended(self, work: EngineWork, seconds: float) -> None:
        """Learn from a sequence that has ended so long after its first token."""
        self._limit.forecast.engine(work.kind).ended(seconds)

    def _judge(self, wait_ms: float, own_ms: float, kind: str) -> None:
        self._expect(wait_ms, own_ms)
        if self.limit_ms and self.expected_ms > self.limit_ms and not self._limit.is_probe(kind):
            raise self._limit.refuse(self, own_ms)

    def _expect(self, wait_ms: float, own_ms: float) -> None:
        self.judged_at = self._limit.clock()
        self.expected_ms = self._elapsed_ms() + self._limit.factor * wait_ms + own_ms

    def _elapsed_ms(self) -> float:
        return (self._limit.clock() - self._began_at) * 1000
