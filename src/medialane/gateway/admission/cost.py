"""What requests cost, in milliseconds learned from measured times, and so when each would have its first token.

An engine's time is that of `routing.EngineWork`, which is in assumed milliseconds: a `RateFit` of each kind of engine
learns how much longer each part of it takes. So what is queued, here and by other gateways, is counted by the router
alone. Preparers' times are learned by modality, of an item and of its size.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

import msgspec

from medialane.gateway.admission.fit import ENOUGH, Agreement, RateFit, Ratio, clipped
from medialane.routing import EngineWork
from medialane.types.stats import LearnedCost, PoolStats

if TYPE_CHECKING:
    from medialane.routing import Router

#: Assumed of a preparer, until it is learned: ms of an item, and of each MB of pixels or of encoded bytes.
_ITEM_MS: Final = 20.0
_MB_MS: Final = 20.0
_MB: Final = 1e6


_PREPARER_UNITS: Final = ("item", "size")


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


#: The router's estimate of a queue, as a sample of which the same rate is assumed as of requests' own work.
_QUEUE_PRIOR_MS: Final = 100.0
#: Queues are learned from those that take at least so many times as long as the request itself.
_DEEP: Final = 4.0


class EngineFit:
    """What was learned of one kind of engine.

    A request's own work is learned from those that hardly waited: how long others waited says nothing about it. Waiting
    is for what is queued, whose time is learned as a multiple of the router's estimate, or for sequences to end when
    there are as many as may run: by how long they take (Little's law).
    """

    def __init__(self) -> None:
        self.agreement = Agreement()
        self._own = RateFit(3)
        self._queue = Ratio()
        self._sequence_ms = Ratio()

    @property
    def rates(self) -> dict[str, float]:
        request, prefill, encoder = self._own.rates
        return {"request": request, "prefill": prefill, "encoder": encoder, "queue": self.queue_rate}

    @property
    def queue_rate(self) -> float:
        return self._queue.value(self._own.scale, _QUEUE_PRIOR_MS)

    @property
    def sequence_ms(self) -> float:
        """How long a sequence takes from its first token on."""
        return self._sequence_ms.value(0.0, 1e-6)

    def cost(self, work: EngineWork) -> Cost:
        request, prefill, encoder = self._own.rates
        prefill_ms = request * work.request_ms + prefill * work.prefill_ms
        return Cost(0.0, encoder * work.encoder_ms, prefill_ms, self.agreement.is_certain)

    def queued_ms(self, work: EngineWork) -> float:
        """Return what a request adds to its worker's queue, in ms as assumed by the router."""
        return self.cost(work).engine_ms / self._own.scale

    def wait_ms(self, work: EngineWork) -> float:
        queue_ms = self.queue_rate * work.queue_ms
        return max(queue_ms, work.ends * self.sequence_ms) if work.ends else queue_ms

    def learn(self, work: EngineWork, measured_ms: float) -> None:
        """Learn from a request's time to first token."""
        own_ms, wait_ms = self.cost(work).engine_ms, self.wait_ms(work)
        self.agreement.compare(own_ms + wait_ms, measured_ms)
        queue_ms = self.queue_rate * work.queue_ms
        if wait_ms <= own_ms or self._own.num_samples < ENOUGH:
            # While little is known, the wait is a share of the measured time.
            share = own_ms / (own_ms + wait_ms) if self._own.num_samples < ENOUGH else 1.0
            self._own.learn(_own_parts(work), share * measured_ms if share < 1 else max(measured_ms - wait_ms, 0.0))
        # A short queue is mostly a request that is being computed, of which a part is done.
        if queue_ms > _DEEP * own_ms and queue_ms >= wait_ms:
            self._queue.learn(clipped(max(measured_ms - own_ms, 0.0), queue_ms), work.queue_ms)

    def ended(self, seconds: float) -> None:
        """Learn from a sequence that has ended so long after its first token."""
        self._sequence_ms.learn(seconds * 1000, 1.0)


def _own_parts(work: EngineWork) -> tuple[float, float, float]:
    return work.request_ms, work.prefill_ms, work.encoder_ms


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
        self._engines: dict[str, EngineFit] = {}
        self._items: dict[str, tuple[RateFit, Agreement]] = {}
        self._stats: PoolStats | None = None
        self._reported_at = 0.0
        self._sent_ms = 0.0  # to preparers, since the last report of them

    def engine(self, kind: str) -> EngineFit:
        """Return what was learned of this kind of engine, of which the router's `EngineWork` are."""
        return self._engines.setdefault(kind, EngineFit())

    def new_item(self, num_embeds: int) -> Cost:
        """Return what an item with so many embeddings that is in no cache costs the fastest kind of engine."""
        config = self._router.config
        encoder_ms, prefill_ms = num_embeds * config.encoder_ms_per_token, num_embeds * config.prefill_ms_per_token
        work = EngineWork("", 0.0, prefill_ms, encoder_ms, 0.0, 0.0)
        costs = [fit.cost(work) for fit in self._engines.values()]
        return min(costs, key=lambda cost: cost.engine_ms, default=Cost())

    @property
    def num_workers(self) -> int:
        """Ranks of workers that accept requests, at least 1."""
        return max(1, self._router.num_open)

    @property
    def is_full(self) -> bool:
        """Whether each worker that accepts requests runs as many sequences as it may."""
        return self._router.is_full

    @property
    def num_preparers(self) -> int:
        """Preparers of this host, at least 1."""
        stats = self._preparers()
        return 1 if stats is None else max(1, stats.num_alive)

    def least_wait_ms(self) -> float:
        """Return the shortest wait at any worker whose kind is certain; 0 if one is not."""

        def rates_of(kind: str) -> tuple[float, float]:
            return self.rates_of(kind) if self.engine(kind).agreement.is_certain else (0.0, 0.0)

        wait_ms = self._router.least_wait_ms(rates_of)
        return wait_ms if wait_ms < math.inf else 0.0

    def rates_of(self, kind: str) -> tuple[float, float]:
        """Return by which factor what is queued at this kind of engine takes longer than assumed, and for how many ms a
        sequence runs, certain or not."""
        fit = self.engine(kind)
        return fit.queue_rate, fit.sequence_ms

    def preparing_ms(self, modality: str, num_bytes: int) -> float:
        """Return how long a preparer takes for an item whose pixels or encoded bytes are so many; 0 if not certain."""
        fit, agreement = self._preparer(modality)
        return fit.expected_ms(_item_work(num_bytes)) if agreement.is_certain else 0.0

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

    def sent_to_preparer(self, preparing_ms: float) -> None:
        """Count an item that is about to be prepared."""
        self._sent_ms += preparing_ms

    def learn_engine(self, work: EngineWork, *, num_more_cached: int, measured_ms: float) -> None:
        """Learn from a request's time to first token at its worker, whose KV cache had so many tokens more than was
        known."""
        cached_ms = num_more_cached * self._router.config.prefill_ms_per_token
        work = work._replace(prefill_ms=max(0.0, work.prefill_ms - cached_ms))
        self.engine(work.kind).learn(work, measured_ms)

    def learn_preparer(self, modality: str, num_bytes: int, measured_ms: float) -> None:
        """Learn from an item's time in a preparer."""
        fit, agreement = self._preparer(modality)
        agreement.compare(fit.expected_ms(_item_work(num_bytes)), measured_ms)
        fit.learn(_item_work(num_bytes), measured_ms)

    def _preparer(self, modality: str) -> tuple[RateFit, Agreement]:
        return self._items.setdefault(modality, (RateFit(len(_PREPARER_UNITS)), Agreement()))

    def learned(self) -> list[LearnedCost]:
        """Return all rates, for /metrics."""
        engines = [
            LearnedCost("engine", name, fit.rates, fit.agreement.is_certain) for name, fit in self._engines.items()
        ]
        preparers = [
            LearnedCost("preparer", name, dict(zip(_PREPARER_UNITS, fit.rates, strict=True)), agreement.is_certain)
            for name, (fit, agreement) in self._items.items()
        ]
        return engines + preparers


def _item_work(num_bytes: int) -> tuple[float, float]:
    return _ITEM_MS, num_bytes / _MB * _MB_MS
