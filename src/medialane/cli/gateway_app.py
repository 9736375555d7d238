"""What a gateway consists of, and vLLM's app around it, with our endpoints and the metrics of all components."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from starlette.middleware import Middleware

from medialane.cli.reloading import RELOAD, Reloading
from medialane.config import Config
from medialane.gateway import (
    SCRAPE_TIMEOUT_S,
    AccessKeys,
    AccessMiddleware,
    Encoders,
    Gateway,
    GatewayConfig,
    GatewayMetrics,
    Health,
    InlineTransport,
    IntakeMiddleware,
    MediaEndpoint,
    OpenRequests,
    OperatorEndpoints,
    PlainHashes,
    PullTransport,
    RecentRequests,
    Recorder,
    RequestTracing,
    ScopeMiddleware,
    ScrapeMiddleware,
    SharedCounts,
    ShmTransport,
    StoreFeatures,
    Transports,
    WorkerControl,
    WorkerPool,
    WorkerScrape,
    health_of,
    no_others,
)
from medialane.observability.collectors import Memory
from medialane.observability.metrics import Metrics
from medialane.routing import Router
from medialane.routing.encode_choice import EncodeCosts
from medialane.runtime.loop_fairness import LoopFairness
from medialane.runtime.phase import exits_of_host, hang_problems
from medialane.runtime.resources import MemoryUse
from medialane.runtime.stop import Stop
from medialane.store import HoldPasser, StoreGrants, StoreLink
from medialane.types.errors import GatewayDraining
from medialane.types.hashing import digest
from medialane.vllm_bridge.frontend.app import Action, Frontend
from medialane.vllm_bridge.frontend.engine_client import encode_params

logger = logging.getLogger(__name__)


class GatewayAddresses(NamedTuple):
    """The addresses that a gateway needs: of the workers, with their names (`parse_named`), and of the store on this
    host, unless the model is text-only. If several gateways share a port: the paths of all their sockets (see
    `GatewayMetrics`), and the index of this one."""

    workers: Sequence[str]
    store: str | None
    gateways: Sequence[str] = ()
    gateway_index: int = 0


@dataclass(frozen=True)
class Components:
    """The components of a gateway. `gateway_config` is `config.gateway` with the stage that the model supports."""

    config: Config
    gateway_config: GatewayConfig
    frontend: Frontend
    keys: AccessKeys
    store: StoreLink
    links: WorkerPool
    router: Router
    fairness: LoopFairness
    metrics: Metrics
    requests: OpenRequests
    recent: RecentRequests
    counts: SharedCounts
    tracing: RequestTracing | None
    recorder: Recorder | None
    stop: Stop

    @property
    def media_store(self) -> StoreLink | None:
        """None for a text-only model."""
        return self.store if self.frontend.takes_media else None

    def health(self) -> Health:
        needed = None if self.gateway_config.render_only else self.links
        return health_of(needed, [*hang_problems(), None if self.media_store is None else self.media_store.problem])

    def is_stopping(self) -> bool:
        return self.stop.asked.is_set()

    def give_up(self) -> None:
        """End all requests with an error: the gateway stops, and their time is over."""
        error = GatewayDraining("the gateway is restarted, and the request has not ended in time (--drain-timeout)")
        logger.warning("%d requests have not ended while draining", len(self.requests))
        self.requests.give_up(error)
        self.links.fail(error)


def gateway_of(components: Components) -> Gateway:
    """Return what answers requests."""
    features = StoreFeatures(
        components.store,
        processor_digest=digest(components.frontend.processor_settings),
        fairness=components.fairness,
        media=components.config.media,
        retention_s=components.config.store.hold_retention_s,
    )
    router, transfer, store = components.router, components.config.transfer, components.store
    shm = ShmTransport(HoldPasser(store, retention_s=components.config.store.hold_retention_s))
    pull = PullTransport(StoreGrants(store), transfer.mover)
    inline = InlineTransport(store.tensor, transfer.max_inline_bytes)
    return Gateway(
        config=components.gateway_config,
        transports=Transports([shm, pull, inline], transfer.transport),
        features=features,
        assembler=components.frontend.assembler,
        workers=components.links,
        router=router,
        metrics=components.metrics,
        counts=components.counts,
        has_priorities=components.frontend.has_priorities,
        plain=_plain_hashes(components, features),
        encoders=Encoders(
            components.links,
            shm,
            params=encode_params(),
            costs=EncodeCosts.of(router.config),
            mean_sequences=lambda: router.mean_sequences,
            config=components.gateway_config,
            metrics=components.metrics,
        ),
    )


def _plain_hashes(components: Components, features: StoreFeatures) -> PlainHashes | None:
    hasher = components.frontend.media_hasher() if components.gateway_config.render_only else None
    if hasher is None:
        return None
    return PlainHashes(hasher, features, fairness=components.fairness, media=components.config.media)


async def gateway_app(
    components: Components,
    gateway: Gateway,
    addresses: GatewayAddresses,
    model_tasks: tuple[str, ...] | None,
    *,
    reloading: Reloading,
) -> tuple[Any, GatewayMetrics | None]:
    """Build vLLM's app around the gateway, and register the metrics of all components."""
    metrics, links = components.metrics, components.links
    _watch(components, gateway)
    scrape = WorkerScrape(links)
    metrics.watch_engines(scrape.mirrors)
    memory = MemoryUse(lambda: {"gateway": [os.getpid()]})
    metrics.watch_memory(lambda: memory.latest, lambda: _memory(components.store, scrape))

    health = components.health
    group = (
        GatewayMetrics(
            addresses.gateways,
            addresses.gateway_index,
            metrics=metrics,
            health=lambda: health().response(),
            refresh_own=partial(memory.refresh, SCRAPE_TIMEOUT_S / 2),
        )
        if addresses.gateways
        else None
    )

    async def refresh() -> None:
        await asyncio.gather(
            scrape.refresh(),
            components.store.refresh(SCRAPE_TIMEOUT_S),
            group.refresh() if group is not None else memory.refresh(SCRAPE_TIMEOUT_S),
        )

    ask_others = no_others if group is None else group.ask_others

    async def reload(_parameters: Mapping[str, str]) -> bytes:
        """Read keys, certificates and the log's level again; what else has changed needs a restart, and is named."""
        return await reloading.reload_all(ask_others)

    control = WorkerControl(links, ask_others=ask_others, index=str(addresses.gateway_index))
    if group is not None:
        group.answers.update({**control.answers, RELOAD: reloading.answer})
    actions: dict[str, Action] = {
        "GET /medialane/workers": control.listed,
        "POST /medialane/workers/{name:path}/drain": control.drain,
        "POST /medialane/reload": reload,
    }
    if components.config.media.allow_rdma:
        actions["POST /medialane/publish"] = gateway.publish_images
    media = MediaEndpoint(
        components.store,
        components.gateway_config,
        components.fairness,
        admit=gateway.admit,
        num_tokens=gateway.num_image_tokens,
    )
    operators = OperatorEndpoints(
        addresses.gateway_index,
        model=components.frontend.model_name,
        recent=components.recent,
        workers=links,
        router=components.router,
        store=components.media_store,
        health=health,
        keys=components.keys,
        ask_others=ask_others,
        is_stopping=components.is_stopping,
    )
    endpoints: dict[str, Any] = dict(media.routes) if components.frontend.takes_media else {}
    if components.gateway_config.page:
        endpoints |= operators.routes
        if group is not None:
            group.answers.update(operators.answers)
    app = await components.frontend.app(
        gateway,
        outer=Middleware(
            ScopeMiddleware,
            logs_requests=components.config.logging.access,
            metrics=metrics,
            requests=components.requests,
            recent=components.recent,
            names_takers=components.config.store.debug_holds,
            tracing=components.tracing,
            recorder=components.recorder,
            model=components.frontend.model_name,
        ),
        access=lambda route_of: Middleware(AccessMiddleware, keys=components.keys, route_of=route_of, metrics=metrics),
        inner=[
            Middleware(ScrapeMiddleware, refresh=refresh, page=group.page if group is not None else None),
            Middleware(
                IntakeMiddleware,
                media=components.config.media,
                config=components.gateway_config,
                fairness=components.fairness,
                queues=gateway.queues,
                keeps_bodies=components.recorder is not None,
            ),
        ],
        pages={"/medialane/decisions": operators.decisions},
        actions=actions,
        endpoints=endpoints,
        probes={
            "/health": lambda: health().response(),
            "/ready": lambda: health().readiness(is_stopping=components.is_stopping()),
            "/live": lambda: (200, b""),
        },
        tasks=model_tasks,
        render_only=components.gateway_config.render_only,
        render_payload=components.gateway_config.default_payload,
        fairness=components.fairness,
    )
    return app, group


def _watch(components: Components, gateway: Gateway) -> None:
    """Register the metrics of what the gateway has, read on each scrape."""
    metrics = components.metrics
    metrics.watch_store(lambda: status.stats if (status := components.store.status) is not None else None)
    metrics.watch_exits(exits_of_host)
    metrics.watch_workers(components.links.endpoints)
    metrics.watch_routing(gateway.routes.stats)
    metrics.watch_predictions(lambda: dict.fromkeys(components.frontend.assembler.predicted, 1.0))
    if gateway.queues is not None:
        metrics.watch_queues(gateway.queues.stats)
    metrics.watch_waits(gateway.waits)


def _memory(store: StoreLink, workers: WorkerScrape) -> Iterator[Memory]:
    """Yield the memory of the processes that the gateways of this host have in common."""
    if store.status is not None:
        yield {}, store.status.stats.memory
    yield from workers.memory()
