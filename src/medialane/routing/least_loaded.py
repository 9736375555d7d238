"""Pick the ready worker that has the least to do."""

from __future__ import annotations

from collections.abc import Iterable

from medialane.core.errors import NoWorkerReady
from medialane.core.request import Endpoint, RoutingDecision


class LeastLoaded:
    """Score: requests in flight from here, or what the worker reports if that is more; ties go round."""

    def __init__(self) -> None:
        self._turn = 0

    def pick(self, endpoints: Iterable[Endpoint]) -> RoutingDecision:
        """Choose a worker. Raises NoWorkerReady."""
        scores = {e.worker_id: self._score(e) for e in endpoints if e.ready}
        if not scores:
            raise NoWorkerReady("no worker is ready to take requests", retry_after_s=5)
        least = min(scores.values())
        best = [worker for worker, score in scores.items() if score == least]
        self._turn += 1
        return RoutingDecision(best[self._turn % len(best)], "least loaded")

    @staticmethod
    def _score(endpoint: Endpoint) -> float:
        reported = endpoint.load.num_running + endpoint.load.num_waiting
        return float(max(endpoint.num_in_flight, reported))
