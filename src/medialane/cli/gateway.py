"""`medialane gateway`: one gateway process, assembled from its components: vLLM's app around them, with our endpoints
and the metrics of all of them."""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import uvicorn
import uvloop
from prometheus_client import CollectorRegistry
from starlette.middleware import Middleware

from medialane.cli.reloading import RELOAD, Reloading, reloaded_by_hangup
from medialane.cli.serving import EssentialTasks, http_listener, tune_process, unless_set
from medialane.cluster.vllm_flags import TRACES_ENDPOINT, flag_value, untraced_flags
from medialane.config import Config, process_environ
from medialane.gateway import (
    SCRAPE_TIMEOUT_S,
    AccessKeys,
    AccessMiddleware,
    BoundedServer,
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
    WorkerLink,
    WorkerPool,
    WorkerScrape,
    health_of,
    http_bounds,
    no_others,
)
from medialane.gateway.intake import warm_up
from medialane.gateway.workers.join_server import JoinServer
from medialane.observability.collectors import (
    Memory,
    exit_metrics,
    prediction_metrics,
    queue_metrics,
    routing_metrics,
    store_metrics,
    wait_metrics,
)
from medialane.observability.metrics import Metrics
from medialane.observability.tracing import Tracing
from medialane.observability.worker_metrics import engine_metrics
from medialane.routing import Router
from medialane.routing.encode_choice import EncodeCosts
from medialane.runtime.phase import enter_phase, exits_of_host, hang_problems, show_ready, watched
from medialane.runtime.resources import MemoryUse
from medialane.runtime.stop import Stop, stopped_by_signals
from medialane.runtime.tasks import LoopFairness
from medialane.store import HoldPasser, StoreGrants, StoreLink
from medialane.types.errors import GatewayDraining, StartupFailed
from medialane.types.hashing import digest
from medialane.types.stage import RAW_STAGE, STAGES, prepared_stage
from medialane.vllm_bridge.frontend import prebuilt
from medialane.vllm_bridge.frontend.app import Action, Frontend
from medialane.vllm_bridge.frontend.engine_client import encode_params
from medialane.wire.address import consecutive_ports, parse_named
from medialane.wire.protocol import Hello
from medialane.wire.security import is_loopback

logger = logging.getLogger(__name__)

#: Exit status of a gateway that cannot continue: EX_SOFTWARE of sysexits.h. It should be restarted.
EXIT_FAILED = 70

#: How long the first attempts to connect to workers may hold up the start. One that is ready answers in milliseconds.
_TRIED_S = 2.0


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


def prebuild(model: str, vllm_args: Sequence[str]) -> None:
    """In the process that gateways are forked from: build what those for this model and these flags start with. No
    thread remains. Raises StartupFailed, or what vLLM raises."""
    warm_up()
    prebuilt.build(model, untraced_flags(vllm_args))


def run(
    reloading: Reloading,
    model: str,
    vllm_args: Sequence[str],
    addresses: GatewayAddresses,
    *,
    listen_fd: int | None = None,
    http_socket: Path | None = None,
) -> int:
    """Serve until SIGINT or SIGTERM (0), or until an essential task has ended (EXIT_FAILED), on the inherited socket
    `listen_fd` if given, or behind the name router, on the unix socket `http_socket`.

    Raises StartupFailed.
    """
    tune_process()
    with http_listener(reloading.config.server, listen_fd, http_socket) as sock:
        return uvloop.run(serve(reloading, model, vllm_args, addresses=addresses, sock=sock))


async def serve(
    reloading: Reloading, model: str, vllm_args: Sequence[str], *, addresses: GatewayAddresses, sock: socket.socket
) -> int:
    """Implement `run` on a bound socket, in the main thread's event loop."""
    config = reloading.config
    async with AsyncExitStack() as stack:
        stop = stack.enter_context(stopped_by_signals())
        tasks = EssentialTasks(stop.asked)
        # The name router, in front of a unix socket, listens at the host of these settings.
        host = config.server.host if sock.family == socket.AF_UNIX else sock.getsockname()[0]
        is_local = is_loopback(host)
        await stack.enter_async_context(reloaded_by_hangup(reloading.reload))
        starting = _start(
            reloading, model, vllm_args, addresses=addresses, stack=stack, tasks=tasks, stop=stop, is_local=is_local
        )
        started = await unless_set(stop.asked, starting)
        if started is not None:
            components, app, group = started
            if group is not None:
                sock.listen(socket.SOMAXCONN)  # ready means that connections are accepted
                await stack.enter_async_context(group.endpoint())
            await _serve_http(reloading, components, app, sock=sock)
            if not stop.asked.is_set():
                tasks.fail("the HTTP server")
    return EXIT_FAILED if tasks.failed else 0


async def _serve_http(reloading: Reloading, components: Components, app: Any, *, sock: socket.socket) -> None:
    config, frontend, stop = components.config, components.frontend, components.stop
    if not config.gateway.render_only:
        enter_phase("waiting for workers")

    def server_of(of_vllm: uvicorn.Config) -> BoundedServer:
        server = BoundedServer(
            of_vllm,
            bounds=http_bounds(config.gateway, max_headers=frontend.max_headers),
            is_behind_router=sock.family == socket.AF_UNIX,
            on_listening=lambda: show_ready(str(components.health())),
        )
        reloading.files.append(server.read_certificate)
        return server

    async with watched(lambda: "stopping" if stop.asked.is_set() else str(components.health())):
        await frontend.serve(
            app,
            sock,
            stop,
            drain_timeout_s=config.stop.drain_timeout_s,
            give_up=components.give_up,
            server_of=server_of,
            logs_requests=not config.logging.access,
        )


async def _start(
    reloading: Reloading,
    model: str,
    vllm_args: Sequence[str],
    *,
    addresses: GatewayAddresses,
    stack: AsyncExitStack,
    tasks: EssentialTasks,
    stop: Stop,
    is_local: bool,
) -> tuple[Components, Any, GatewayMetrics | None]:
    """Create all components, owned by `stack`, and vLLM's app around them; return also the gateways that share the
    port. Raises StartupFailed."""
    config = reloading.config
    # Imports and processors take seconds, during which the event loop must handle signals.
    enter_phase("loading the model's processor")
    frontend = await asyncio.to_thread(Frontend, model, untraced_flags(vllm_args), config.gateway.api_keys)
    counts = _counts(addresses)
    keys = AccessKeys.load(config.gateway, frontend.api_keys, counts, is_local=is_local)
    reloading.files.append(partial(keys.read_again, config.gateway))
    share = config.gateway.share(max(1, len(addresses.gateways)), max_body_bytes=config.media.max_body_bytes)
    gateway_config = fit_stage(share, frontend)
    await asyncio.to_thread(warm_up)
    fairness, metrics = LoopFairness(), Metrics(host=CollectorRegistry() if addresses.gateways else None)
    stack.callback(fairness.close)
    store = StoreLink(
        addresses.store or "",
        rpc=config.rpc,
        arena_directory=config.arena.directory,
        wait_timeout_s=config.store.wait_timeout_s,
        processor=frontend.processor_settings,
        writable=True,
        scraped="gateway",
        names_takers=config.store.debug_holds,
    )
    if (recorder := Recorder.open(config.recording)) is not None:
        stack.push_async_callback(recorder.close)
    links = _links(config, frontend, store=store, addresses=addresses, metrics=metrics)
    components = Components(
        config=config,
        gateway_config=gateway_config,
        frontend=frontend,
        keys=keys,
        store=store,
        links=links,
        router=Router(config.routing),
        fairness=fairness,
        metrics=metrics,
        requests=OpenRequests(),
        recent=RecentRequests(),
        counts=counts,
        tracing=_tracing(frontend, vllm_args, stack),
        recorder=recorder,
        stop=stop,
    )
    gateway = gateway_of(components)
    stack.callback(gateway.close)
    await stack.enter_async_context(tasks)
    if keys.tenants is not None:
        tasks.start(keys.tenants.watch(), "reading --keys")
    if frontend.takes_media:
        if addresses.store is None:
            raise StartupFailed("this model takes media: start `medialane store` on this host, and pass its --store")
        tasks.start(store.run(), "connecting to the media store")
        enter_phase("waiting for the media store")
        await store.ready()
    model_tasks = None
    if frontend.is_pooling:
        if config.gateway.render_only:
            raise StartupFailed("a model that is served for pooling has no calls without an engine")
        enter_phase("waiting for workers")
        await _connect_to_workers(components, addresses, stack, tasks)
        model_tasks = (await links.first_card()).tasks
    enter_phase("preparing the HTTP server")
    # Before workers are connected: it may take longer than they wait for a heartbeat.
    app, group = await gateway_app(components, gateway, addresses, model_tasks, reloading=reloading)
    if not frontend.is_pooling:
        await _connect_to_workers(components, addresses, stack, tasks)
    return components, app, group


def _tracing(frontend: Frontend, vllm_args: Sequence[str], stack: AsyncExitStack) -> RequestTracing | None:
    """Return what traces requests, if vLLM's flag has an endpoint for that. Raises StartupFailed."""
    if (endpoint := flag_value(vllm_args, TRACES_ENDPOINT)) is None:
        return None
    tracing = Tracing(endpoint, process_environ(), service_name="medialane-gateway")
    stack.push_async_callback(tracing.close)
    return RequestTracing(tracing, frontend.served_model)


def _counts(addresses: GatewayAddresses) -> SharedCounts:
    """Return what the gateways of this port count together, in a file beside their sockets."""
    if not addresses.gateways:
        return SharedCounts()
    path = os.path.join(os.path.dirname(addresses.gateways[0]), "counts")
    return SharedCounts(path, index=addresses.gateway_index, num_gateways=len(addresses.gateways))


async def _connect_to_workers(
    components: Components, addresses: GatewayAddresses, stack: AsyncExitStack, tasks: EssentialTasks
) -> None:
    tasks.start(components.links.run(), "connecting to workers")
    if components.gateway_config.join_listen:
        server = JoinServer(components.config.rpc, components.links.serve_joined)
        stack.push_async_callback(server.close)
        join_at = _join_addresses(components.gateway_config, addresses)[addresses.gateway_index]
        logger.info("workers join at %s", await server.serve(join_at))
    # When a gateway is restarted, clients wait in the queue of its socket, and its workers are ready.
    await components.links.tried(_TRIED_S)


def _join_addresses(config: GatewayConfig, addresses: GatewayAddresses) -> list[str]:
    """Return the address at which workers join each gateway of this host; empty if they do not. Raises
    StartupFailed."""
    if not config.join_listen:
        return []
    return consecutive_ports(config.join_listen, max(1, len(addresses.gateways)), "--join-listen")


def fit_stage(config: GatewayConfig, frontend: Frontend) -> GatewayConfig:
    """Return the settings with a stage that this model supports. With `auto` that of a request depends on its items: if
    they cannot be processed one by one, workers do it (`Assembler.fallback_stages`). Raises StartupFailed."""
    profile = frontend.profile
    if profile is None:
        return msgspec.structs.replace(config, stage=RAW_STAGE)
    stage = prepared_stage(config.stage)
    if stage.is_decoded:
        frontend.check_media_options()
    if not profile.unfit or not stage.is_processed:
        return config
    if config.stage != "auto" or stage.instead is None:
        others = " or ".join(each.name for each in STAGES.values() if not each.is_processed)
        raise StartupFailed(f"{profile.unfit_reason}: use --stage auto, {others}")
    which = "" if profile.is_unfit else f", for prompts with {' or '.join(profile.unfit)}"
    instead = " or ".join(sorted(set(profile.fallback_stages.values())))
    logger.warning("stage %s, not %s%s: %s", instead, stage.name, which, profile.unfit_reason)
    return config


def _links(
    config: Config,
    frontend: Frontend,
    *,
    store: StoreLink,
    addresses: GatewayAddresses,
    metrics: Metrics,
) -> WorkerPool:
    processor = frontend.processor_settings
    hello = Hello(
        gateway_id=secrets.token_hex(16),
        processor=processor,
        join_ports=[int(address.rpartition(":")[2]) for address in _join_addresses(config.gateway, addresses)],
    )

    def link(name: str, address: str) -> WorkerLink:
        return WorkerLink(
            name,
            hello,
            address=address,
            rpc=config.rpc,
            config=config.gateway,
            metrics=metrics,
            own_arena=lambda: store.arena,
            can_grant=lambda: store.can_grant,
        )

    pool = WorkerPool(
        [link(*parse_named(each, "--worker")) for each in addresses.workers],
        new_link=link,
        processor=processor,
        config=config.gateway,
    )
    store.watch(lambda _: pool.arena_changed())
    return pool


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
    metrics.watch(lambda: engine_metrics(scrape.mirrors()), of_host=True)
    memory = MemoryUse(lambda: {"gateway": [os.getpid()]})
    metrics.watch_memory(lambda: memory.latest, lambda: _shared_memory(components.store, scrape))

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
    metrics.watch(lambda: store_metrics(None if (now := components.store.status) is None else now.stats), of_host=True)
    metrics.watch(lambda: exit_metrics(exits_of_host()), of_host=True)
    metrics.watch_workers(components.links.endpoints)
    metrics.watch(lambda: routing_metrics(gateway.routes.stats()))
    metrics.watch(lambda: prediction_metrics(components.frontend.assembler.predicted))
    if (queues := gateway.queues) is not None:
        metrics.watch(lambda: queue_metrics(queues.stats()))
    metrics.watch(lambda: wait_metrics(gateway.waits()))


def _shared_memory(store: StoreLink, workers: WorkerScrape) -> Iterator[Memory]:
    """Yield the memory of the processes that the gateways of this host have in common."""
    if store.status is not None:
        yield {}, store.status.stats.memory
    yield from workers.memory()
