"""What a gateway shows its operators, assembled from its components."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from typing import Any

import medialane
from medialane.gateway import AccessKeys, GatewayMetrics, Health, WorkerPool
from medialane.gateway.http.metrics import no_others
from medialane.gateway.operators import OperatorEndpoints, Part, State, own_part, whole_state
from medialane.gateway.operators.decisions import decisions_page
from medialane.gateway.operators.page_files import PageFiles
from medialane.gateway.operators.part import Whose
from medialane.gateway.operators.state import Limits, OwnView, StoreView, store_view
from medialane.gateway.records import RecentRequests
from medialane.routing import Router
from medialane.store import StoreLink

#: How long is waited for new statistics of the store; then the last ones are shown.
_REFRESH_S = 0.5


class Operators:
    """Makes parts and states of one gateway."""

    def __init__(
        self,
        *,
        model: str,
        index: int,
        recent: RecentRequests,
        workers: WorkerPool,
        router: Router,
        store: StoreLink | None,
        health: Callable[[], Health],
    ) -> None:
        """`store` is None if the model takes no media."""
        self._model = model
        self._index = str(index)
        self._recent = recent
        self._workers = workers
        self._router = router
        self._store = store
        self._health = health
        self._started_at = time.time()

    def routes(
        self, keys: AccessKeys, group: GatewayMetrics | None, *, is_stopping: Callable[[], bool]
    ) -> dict[str, Any]:
        """Return the endpoints by method and path; its siblings are those of `group`."""
        endpoints = OperatorEndpoints(
            self._index,
            self._recent,
            own_part=self._part,
            state=self._state,
            refresh=self._refresh,
            begin_session=keys.session,
            end_session=keys.sessions.no_cookie,
            ask_others=no_others if group is None else group.ask_others,
            is_stopping=is_stopping,
        )
        if group is not None:
            group.answers.update(endpoints.answers)
        return {**endpoints.routes, **PageFiles().routes}

    def decisions(self, query: Mapping[str, str]) -> bytes:
        """Return the last routing decisions with their reasons as JSON, newest first. Raises InvalidRequest."""
        return decisions_page(self._recent, self._index, query)

    async def _part(self, limits: Limits) -> Part:
        health = self._health()
        whose = Whose(self._index, os.getpid(), self._started_at, health.status, health.problems)
        return await own_part(self._recent, self._workers, whose, num_live=limits.live, num_decisions=limits.decisions)

    async def _state(self, parts: Mapping[str, Part | None], limits: Limits) -> State:
        endpoints, caches = self._workers.endpoints(), self._router.encoder_cache_use()
        own = OwnView(medialane.__version__, self._model, endpoints, caches, self._store_view())
        return await whole_state(own, parts, self._index, limits)

    def _store_view(self) -> StoreView | None:
        if self._store is None:
            return None
        status = self._store.status
        if status is None:
            return store_view(None, self._store.problem, has_started=False)
        return store_view(status.stats, status.problem, has_started=status.has_started)

    async def _refresh(self) -> None:
        if self._store is not None:
            await self._store.refresh(_REFRESH_S)
