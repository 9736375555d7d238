"""Refuses requests whose first token is expected later than their limit.

Theory of operation. A request is judged at most three times, each time by what is known then, and never once its media
have been prepared:

* before anything is done for its media: by the least wait for an engine;
* when the store does not have one of its items: also by the wait for a preparer and what the item costs, by its
  header's size or its encoded bytes;
* when its worker is chosen, if nothing had to be prepared: by that worker's queue and caches.

What is not certain counts as nothing (`fit.RateFit`), so a model that has not been learned refuses nothing. One that
has been learned may still be wrong. So waits are multiplied by a factor that is raised when an admitted request breaks
its limit, at most once for all that were admitted before, and is lowered a little by each one that keeps it. And if
everything is refused, nothing is learned: then one request is admitted from time to time.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from medialane.core.errors import TtftLimitExceeded
from medialane.core.retry_after import MAX_RETRY_AFTER_S, retry_after
from medialane.gateway.admission.cost import Cost, CostForecast

if TYPE_CHECKING:
    from medialane.core.request import OutputDelta
    from medialane.observability.metrics import Metrics
    from medialane.routing import EngineWork

#: The factor's largest value, by what it is raised and lowered.
_MAX_FACTOR: Final = 4.0
_RAISED: Final = 1.2
_LOWERED: Final = 0.004
#: A limit counts as broken beyond this multiple of it: the rest is noise.
_BROKEN: Final = 1.05
#: If nothing was learned of an engine or preparer for so long, one request is admitted to learn from it.
_PROBE_S: Final = 2.0


class TtftExpectation:
    """One request's limit and what is expected of it. Times are in ms; `began_at` is in seconds of the limit's
    clock."""

    def __init__(self, limit_ms: float, began_at: float, tenant: str) -> None:
        self.limit_ms = limit_ms
        self.began_at = began_at
        self.tenant = tenant
        self.cost = Cost()
        self.is_prepared = False
        self.expected_ms = 0.0
        self.judged_at = began_at
        self._items: dict[str, tuple[float, int]] = {}

    def add_item(self, param: str, preparing_ms: float, engine: Cost) -> bool:
        """Count an item that must be prepared. False if it is counted already."""
        if param in self._items:
            return False
        self._items[param] = preparing_ms, 0
        self.is_prepared = True
        cost = self.cost
        self.cost = Cost(
            max(cost.prepare_ms, preparing_ms),  # items are prepared at the same time
            cost.encode_ms + engine.encode_ms,
            cost.prefill_ms + engine.prefill_ms,
            engine.is_certain,
        )
        return True


class TtftLimit:
    """Judges the requests of one gateway. `limit_s` is that of requests without their own; 0 is none. `clock` is in
    seconds, that of `began_at`."""

    def __init__(
        self,
        limit_s: float,
        forecast: CostForecast,
        metrics: Metrics,
        *,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.forecast = forecast
        self.factor = 1.0
        self._limit_ms = limit_s * 1000
        self._metrics = metrics
        self._clock = clock
        self._raised_at = float("-inf")
        self._learned_at: dict[str, float] = {}
        self._promised_at = float("-inf")

    def expect(self, began_at: float, limit_ms: float | None, tenant: str = "") -> TtftExpectation:
        """Return the expectation of a request that began then, with its own limit if it has one."""
        return TtftExpectation(self._limit_ms if limit_ms is None else limit_ms, began_at, tenant)

    def judge_arrival(self, expectation: TtftExpectation) -> None:
        """Judge a request with media before anything is done for them. Raises TtftLimitExceeded."""
        self._judge(expectation, self.forecast.least_wait_ms(), 0.0, "engine")

    def judge_item(
        self, expectation: TtftExpectation, param: str, modality: str, *, num_bytes: int, num_embeds: int
    ) -> None:
        """Judge a request one of whose items must be prepared; its pixels or encoded bytes are so many, as far as that
        is known. Raises TtftLimitExceeded."""
        forecast = self.forecast
        preparing_ms = forecast.preparing_ms(modality, num_bytes)
        engine = forecast.new_item(num_embeds)
        if not expectation.add_item(param, preparing_ms, engine):
            return
        cost = expectation.cost
        wait_ms = forecast.least_wait_ms() + (forecast.preparer_wait_ms() if preparing_ms else 0.0)
        own_ms = cost.prepare_ms + (cost.engine_ms if cost.is_certain else 0.0)
        self._judge(expectation, wait_ms, own_ms, modality)
        forecast.sent_to_preparer(preparing_ms)

    def judge_route(self, expectation: TtftExpectation, work: EngineWork) -> None:
        """Judge a request whose worker is chosen. Raises TtftLimitExceeded."""
        cost, wait_ms = self.forecast.cost(work), self.forecast.wait_ms(work)
        if expectation.is_prepared or not cost.is_certain:
            elapsed_ms = (self._clock() - expectation.began_at) * 1000
            expectation.expected_ms = elapsed_ms + self.factor * wait_ms + cost.engine_ms
            expectation.judged_at = self._clock()
        else:
            self._judge(expectation, wait_ms, cost.engine_ms, work.kind)

    def prepared(self, modality: str, *, num_bytes: int, seconds: float) -> None:
        """Learn from an item's time in a preparer."""
        self._learned_at[modality] = self._clock()
        self.forecast.learn_preparer(modality, num_bytes, seconds * 1000)

    def answered(
        self, expectation: TtftExpectation, work: EngineWork, first: OutputDelta, *, cached_ms: float, seconds: float
    ) -> None:
        """Learn from a request's first output, which has come `seconds` after it was sent to its worker.

        The whole answer may be its first output: then the engine's times say when it had its first token.
        """
        if first.finished:
            if first.times is None:
                return
            seconds = first.times.queue_s + first.times.prefill_s
        now = self._clock()
        self._learned_at[work.kind] = self._learned_at["engine"] = now
        self.forecast.learn_engine(work, cached_ms=cached_ms, measured_ms=seconds * 1000)
        if not first.finished:
            self._correct(expectation, (now - expectation.began_at) * 1000)

    def _judge(self, expectation: TtftExpectation, wait_ms: float, own_ms: float, kind: str) -> None:
        now = self._clock()
        own_ms += (now - expectation.began_at) * 1000
        expectation.expected_ms = own_ms + self.factor * wait_ms
        expectation.judged_at = now
        limit_ms = expectation.limit_ms
        if not limit_ms or expectation.expected_ms <= limit_ms or self._is_probe(kind, now):
            return
        self._metrics.count_refused(expectation.tenant, TtftLimitExceeded.code)
        expected_s, limit_s = expectation.expected_ms / 1000, limit_ms / 1000
        message = f"the first token is expected after {expected_s:.2f} s, later than the limit of {limit_s:g} s"
        raise TtftLimitExceeded(message, retry_after_s=self._promise(now, expectation.expected_ms - limit_ms, own_ms))

    def _is_probe(self, kind: str, now: float) -> bool:
        if now - self._learned_at.get(kind, now) < _PROBE_S:
            self._learned_at.setdefault(kind, now)
            return False
        self._learned_at[kind] = now
        return True

    def _promise(self, now: float, excess_ms: float, own_ms: float) -> int:
        """Return the Retry-After of a refused request: when the waits have gone down by `excess_ms`, and the requests
        that were promised an earlier time have come back."""
        at = max(now + excess_ms / 1000, self._promised_at + own_ms / 1000 / self.forecast.num_workers)
        self._promised_at = min(at, now + MAX_RETRY_AFTER_S)
        return retry_after(self._promised_at - now)

    def _correct(self, expectation: TtftExpectation, measured_ms: float) -> None:
        self._metrics.observe_ttft(expectation.expected_ms / 1000, measured_ms / 1000)
        limit_ms = expectation.limit_ms
        if not limit_ms:
            return
        if measured_ms <= _BROKEN * limit_ms:
            self.factor = max(1.0, self.factor - _LOWERED)
        elif expectation.judged_at > self._raised_at:
            self._raised_at = self._clock()
            self.factor = min(_MAX_FACTOR, self.factor * _RAISED)
