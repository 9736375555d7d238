"""What requests cost, in milliseconds learned from measured times, and so when each would have its first token.

An engine's time is that of `routing.EngineWork`, which is in assumed milliseconds: a `RateFit` of each kind of engine
learns how much longer each part of it takes. So what is queued, here and by other gateways, is counted by the router
alone. Preparers' times are learned by modality, of an item and of its size.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec

from medialane.core.stats import PoolStats
from medialane.gateway.admission.fit import RateFit

if TYPE_CHECKING:
    from medialane.routing import EngineWork, Router

#: Assumed of a preparer, until it is learned: ms of an item, and of each MB of pixels or of encoded bytes.
_ITEM_MS: Final = 20.0
_MB_MS: Final = 20.0
_MB: Final = 1e6


class Cost(msgspec.Struct, frozen=True):
    """The expected work of one request, ms: preparing its media, encoding them, and prefilling its prompt, of each what
    no cache has. Not `is_certain` while too few measured requests agree with the model: then it may rank requests, but
    must refuse none."""

    prepare_ms: float = 0.0
    encode_ms: float = 0.0
    prefill_ms: float = 0.0
    is_certain: bool = False

    @property
    def engine_ms(self) -> float:
        return self.encode_ms + self.prefill_ms

    @property
    def total_ms(self) -> float:
        return self.prepare_ms + self.encode_ms + self.prefill_ms


class LearnedRate(NamedTuple):
    """Of an `engine` or a `preparer`: by how much a kind of work (`unit`) takes longer than assumed."""

    of: str
    name: str
    unit: str
    rate: float
    is_certain: bool


#: The parts of `EngineWork`, and of an item that is prepared.
_ENGINE_UNITS: Final = ("request", "prefill", "encoder", "queue", "above_capacity")
_PREPARER_UNITS: Final = ("item", "size")
_REQUEST, _PREFILL, _ENCODER, _QUEUE, _ABOVE = range(5)


class CostForecast:
    """Learns and predicts. `preparers` returns the latest statistics of the preparers (the same object until there are
    newer ones; None if there are none), `num_gateways` how many gateways share them. `clock` is in seconds."""

    def __init__(
        self,
        router: Router,
        *,
        preparers: Callable[[], PoolStats | None] = lambda: None,
        num_gateways: Callable[[], int] = lambda: 1,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._router = router
        self._preparers = preparers
        self._num_gateways = num_gateways
        self._clock = clock
        self._engines: dict[str, RateFit] = {}
        self._items: dict[str, RateFit] = {}
        self._stats: PoolStats | None = None
        self._reported_at = 0.0
        self._sent_ms = 0.0  # to preparers, since the last report of them

    def engine(self, kind: str) -> RateFit:
        return self._engines.setdefault(kind, RateFit(len(_ENGINE_UNITS)))

    def preparer(self, modality: str) -> RateFit:
        return self._items.setdefault(modality, RateFit(len(_PREPARER_UNITS)))

    def cost(self, work: EngineWork) -> Cost:
        """Return what a request costs the engine of one worker."""
        fit = self.engine(work.kind)
        rates = fit.rates
        prefill_ms = rates[_REQUEST] * work.request_ms + rates[_PREFILL] * work.prefill_ms
        return Cost(0.0, rates[_ENCODER] * work.encoder_ms, prefill_ms, fit.is_certain)

    def wait_ms(self, work: EngineWork) -> float:
        """Return how long the request waits at that worker."""
        rates = self.engine(work.kind).rates
        return rates[_QUEUE] * work.queue_ms + rates[_ABOVE] * work.above_ms

    def new_item(self, num_embeds: int) -> Cost:
        """Return what an item with so many embeddings that is in no cache costs the fastest kind of engine."""
        config = self._router.config
        encode_ms, prefill_ms = num_embeds * config.encoder_ms_per_token, num_embeds * config.prefill_ms_per_token
        fits = list(self._engines.values())
        costs = [Cost(0.0, f.rates[_ENCODER] * encode_ms, f.rates[_PREFILL] * prefill_ms, f.is_certain) for f in fits]
        return min(costs, key=lambda cost: cost.engine_ms, default=Cost())

    @property
    def num_workers(self) -> int:
        """Ranks of workers that accept requests, at least 1."""
        return max(1, self._router.num_open)

    def least_wait_ms(self) -> float:
        """Return the shortest wait at any worker whose kind is certain; 0 if one is not."""

        def rates_of(kind: str) -> tuple[float, float]:
            fit = self.engine(kind)
            return (fit.rates[_QUEUE], fit.rates[_ABOVE]) if fit.is_certain else (0.0, 0.0)

        wait_ms = self._router.least_wait_ms(rates_of)
        return wait_ms if wait_ms < math.inf else 0.0

    def preparing_ms(self, modality: str, num_bytes: int) -> float:
        """Return how long a preparer takes for an item whose pixels or encoded bytes are so many; 0 if not certain."""
        fit = self.preparer(modality)
        return fit.expected_ms(_item_work(num_bytes)) if fit.is_certain else 0.0

    def preparer_wait_ms(self) -> float:
        """Return how long an item waits for a preparer: the queue when it was last reported, with what all gateways
        have sent since, less what has been done since."""
        stats = self._preparers()
        if stats is None:
            return 0.0
        if stats is not self._stats:
            self._stats, self._reported_at, self._sent_ms = stats, self._clock(), 0.0
        sent_ms = self._sent_ms * self._num_gateways() / max(1, stats.num_alive)
        return max(0.0, stats.queue_s * 1000 + sent_ms - (self._clock() - self._reported_at) * 1000)

    def expected_ttft_ms(self, cost: Cost) -> float:
        """Return in how many ms a request of this cost would have its first token at the best worker."""
        prepared_ms = self.preparer_wait_ms() + cost.prepare_ms if cost.prepare_ms else 0.0
        return prepared_ms + self.least_wait_ms() + cost.engine_ms

    def sent_to_preparer(self, preparing_ms: float) -> None:
        """Count an item that is about to be prepared."""
        self._sent_ms += preparing_ms

    def learn_engine(self, work: EngineWork, *, cached_ms: float, measured_ms: float) -> None:
        """Learn from a request's time to first token at its worker, whose KV cache had `cached_ms` of prefill more than
        was known."""
        parts = list(work.parts)
        parts[_PREFILL] = max(0.0, parts[_PREFILL] - cached_ms)
        self.engine(work.kind).learn(parts, measured_ms)

    def learn_preparer(self, modality: str, num_bytes: int, measured_ms: float) -> None:
        """Learn from an item's time in a preparer."""
        self.preparer(modality).learn(_item_work(num_bytes), measured_ms)

    def learned(self) -> list[LearnedRate]:
        """Return all rates, for /metrics."""
        groups: list[tuple[str, Mapping[str, RateFit], tuple[str, ...]]] = [
            ("engine", self._engines, _ENGINE_UNITS),
            ("preparer", self._items, _PREPARER_UNITS),
        ]
        return [
            LearnedRate(of, name, unit, rate, fit.is_certain)
            for of, fits, units in groups
            for name, fit in fits.items()
            for unit, rate in zip(units, fit.rates, strict=True)
        ]


def _item_work(num_bytes: int) -> tuple[float, float]:
    return _ITEM_MS, num_bytes / _MB * _MB_MS
