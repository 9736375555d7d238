"""The gateway process, assembled from its components: vLLM's app around them, with our endpoints and the metrics of all
of them. `gateway_command` is its command line."""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import uvicorn
import uvloop
from prometheus_client import CollectorRegistry
from starlette.middleware import Middleware

from medialane.cli.serving import EssentialTasks, http_listener, tune_process, unless_set
from medialane.cli.settings import RELOAD, Reloading, reloaded_by_hangup
from medialane.cluster.vllm_flags import TRACES_ENDPOINT, flag_value, untraced_flags
from medialane.config import process_environ
from medialane.gateway import (
    SCRAPE_TIMEOUT_S,
    AccessKeys,
    AccessMiddleware,
    AppBackend,
    BoundedServer,
    Encoders,
    GatewayConfig,
    GatewayMetrics,
    Health,
    InlineTransport,
    IntakeMiddleware,
    MediaEndpoints,
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
    StoreItems,
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
from medialane.gateway.workers.pool import JoinServer
from medialane.observability.collectors import (
    Memory,
    exit_metrics,
    prediction_metrics,
    queue_metrics,
    routing_metrics,
    segment_metrics,
    store_metrics,
    wait_metrics,
)
from medialane.observability.metrics import Metrics
from medialane.observability.worker_metrics import engine_metrics
from medialane.routing import Router
from medialane.routing.cost import EncodeCosts
from medialane.runtime.phase import enter_phase, exits_of_host, hang_problems, show_ready, watched
from medialane.runtime.resources import MemoryUse
from medialane.runtime.stop import Stop, stopped_by_signals
from medialane.runtime.tasks import LoopFairness
from medialane.store import HoldPasser, StoreGrants, StoreLink
from medialane.types.errors import GatewayDraining, StartupFailed
from medialane.types.hashing import digest
from medialane.types.media import RAW_STAGE, STAGES, prepared_stage
from medialane.vllm_bridge.frontend import (
    Action,
    Frontend,
    VllmMediaHasher,
    build_frontend,
    encode_params,
    serve_http,
    take_frontend,
)
from medialane.vllm_bridge.items.options import check_model_io
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


def prebuild(model: str, vllm_args: Sequence[str]) -> None:
    """In the process that gateways are forked from: build what gateways for this model and these flags start with. No
    thread remains. Raises StartupFailed, or what vLLM raises."""
    warm_up()
    build_frontend(model, untraced_flags(vllm_args))


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
    async with AsyncExitStack() as stack:
        stop = stack.enter_context(stopped_by_signals())
        process = _Gateway(reloading, addresses, sock, stack=stack, stop=stop)
        await stack.enter_async_context(reloaded_by_hangup(reloading.reload))
        app = await unless_set(stop.asked, process.start(model, vllm_args))
        if app is not None:
            await process.serve(app)
    return EXIT_FAILED if process.tasks.failed else 0


class _Gateway:
    """The components of a gateway, which `stack` owns."""

    def __init__(
        self,
        reloading: Reloading,
        addresses: GatewayAddresses,
        sock: socket.socket,
        *,
        stack: AsyncExitStack,
        stop: Stop,
    ) -> None:
        self.tasks = EssentialTasks(stop.asked)
        self._reloading = reloading
        self._config = reloading.config
        self._addresses = addresses
        self._socket = sock
        self._stack = stack
        self._stop = stop
        self._siblings: GatewayMetrics | None = None
        self._requests, self._recent, self._counts = OpenRequests(), RecentRequests(), _counts(addresses)
        self._router = Router(self._config.routing)
        self._fairness = LoopFairness()
        self._metrics = Metrics(host=CollectorRegistry() if addresses.gateways else None)
        stack.callback(self._fairness.close)

    async def start(self, model: str, vllm_args: Sequence[str]) -> Any:
        """Create all components, and return vLLM's app around them. Raises StartupFailed."""
        config, stack = self._config, self._stack
        # Imports and processors take seconds, during which the event loop must handle signals.
        enter_phase("loading the model's processor")
        self._frontend = frontend = await asyncio.to_thread(
            take_frontend, model, untraced_flags(vllm_args), config.gateway.api_keys
        )
        # The name router, in front of a unix socket, listens at the host of these settings.
        is_unix = self._socket.family == socket.AF_UNIX
        host = config.server.host if is_unix else self._socket.getsockname()[0]
        self._keys = AccessKeys.load(config.gateway, frontend.api_keys, self._counts, is_local=is_loopback(host))
        self._reloading.files.append(partial(self._keys.read_again, config.gateway))
        num_gateways = max(1, len(self._addresses.gateways))
        own_config = config.gateway.share(num_gateways, max_body_bytes=config.media.max_body_bytes)
        self._settings = fit_stage(own_config, frontend)
        await asyncio.to_thread(warm_up)
        self._store = StoreLink(
            self._addresses.store or "",
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
        self._recorder = recorder
        self._workers = self._worker_pool()
        self._tracing = _tracing(frontend, vllm_args, stack)
        backend = self._backend()
        stack.callback(backend.close)
        await stack.enter_async_context(self.tasks)
        if self._keys.tenants is not None:
            self.tasks.start(self._keys.tenants.watch(), "reading --keys")
        if frontend.takes_media:
            await self._connect_to_store()
        model_tasks = None
        if frontend.is_pooling:
            if config.gateway.render_only:
                raise StartupFailed("a model that is served for pooling has no calls without an engine")
            enter_phase("waiting for workers")
            await self._connect_to_workers()
            model_tasks = (await self._workers.first_card()).tasks
        enter_phase("preparing the HTTP server")
        # Before workers are connected: it may take longer than they wait for a heartbeat.
        app = await self._app(backend, model_tasks)
        if not frontend.is_pooling:
            await self._connect_to_workers()
        return app

    async def serve(self, app: Any) -> None:
        """Serve until the process is to stop."""
        config, stop = self._config, self._stop
        if self._siblings is not None:
            self._socket.listen(socket.SOMAXCONN)  # ready means that connections are accepted
            await self._stack.enter_async_context(self._siblings.endpoint())
        if not config.gateway.render_only:
            enter_phase("waiting for workers")

        def server_of(of_vllm: uvicorn.Config) -> BoundedServer:
            server = BoundedServer(
                of_vllm,
                bounds=http_bounds(config.gateway),
                max_headers=self._frontend.max_headers,
                is_behind_router=self._socket.family == socket.AF_UNIX,
                on_listening=lambda: show_ready(str(self._health())),
            )
            self._reloading.files.append(server.read_certificate)
            return server

        async with watched(lambda: "stopping" if stop.asked.is_set() else str(self._health())):
            await serve_http(
                app,
                self._frontend.args,
                self._socket,
                stop,
                drain_timeout_s=config.stop.drain_timeout_s,
                give_up=self._give_up,
                server_of=server_of,
                logs_requests=not config.logging.access,
            )
        if not stop.asked.is_set():
            self.tasks.fail("the HTTP server")

    def _health(self) -> Health:
        needed = None if self._settings.render_only else self._workers
        return health_of(needed, [*hang_problems(), self._store.problem if self._frontend.takes_media else None])

    def _give_up(self) -> None:
        """End all requests with an error: the gateway stops, and their time is over."""
        error = GatewayDraining("the gateway is restarted, and the request has not ended in time (--drain-timeout)")
        logger.warning("%d requests have not ended while draining", len(self._requests))
        self._requests.give_up(error)
        self._workers.fail(error)

    async def _connect_to_store(self) -> None:
        if self._addresses.store is None:
            raise StartupFailed("this model takes media: start `medialane store` on this host, and pass its --store")
        self.tasks.start(self._store.run(), "connecting to the media store")
        enter_phase("waiting for the media store")
        await self._store.ready()

    async def _connect_to_workers(self) -> None:
        self.tasks.start(self._workers.run(), "connecting to workers")
        if self._settings.join_listen:
            server = JoinServer(self._config.rpc, self._workers.serve_joined)
            self._stack.push_async_callback(server.close)
            join_at = self._join_addresses()[self._addresses.gateway_index]
            logger.info("workers join at %s", await server.serve(join_at))
        # When a gateway is restarted, clients wait in the queue of its socket, and its workers are ready.
        await self._workers.tried(_TRIED_S)

    def _join_addresses(self) -> list[str]:
        """Return the address at which workers join each gateway of this host; empty if they do not. Raises
        StartupFailed."""
        if not self._config.gateway.join_listen:
            return []
        num_gateways = max(1, len(self._addresses.gateways))
        return consecutive_ports(self._config.gateway.join_listen, num_gateways, "--join-listen")

    def _worker_pool(self) -> WorkerPool:
        config, processor, store = self._config, self._frontend.processor_settings, self._store
        hello = Hello(
            gateway_id=secrets.token_hex(16),
            processor=processor,
            join_ports=[int(address.rpartition(":")[2]) for address in self._join_addresses()],
        )

        def link(name: str, address: str) -> WorkerLink:
            return WorkerLink(
                name,
                hello,
                address=address,
                rpc=config.rpc,
                config=config.gateway,
                metrics=self._metrics,
                own_arena=lambda: store.arena,
                can_grant=lambda: store.can_grant,
            )

        pool = WorkerPool(
            [link(*parse_named(each, "--worker")) for each in self._addresses.workers],
            new_link=link,
            processor=processor,
            config=config.gateway,
        )
        store.watch(lambda _: pool.arena_changed())
        return pool

    def _backend(self) -> AppBackend:
        """Return what answers requests."""
        config, router, store = self._config, self._router, self._store
        retention_s = config.store.hold_retention_s
        store_items = StoreItems(
            store,
            processor_digest=digest(self._frontend.processor_settings),
            fairness=self._fairness,
            media=config.media,
            retention_s=retention_s,
        )
        shm = ShmTransport(HoldPasser(store, retention_s=retention_s))
        pull = PullTransport(StoreGrants(store), config.handover.mover)
        inline = InlineTransport(store.tensor, config.handover.max_inline_bytes)
        plain = None
        if self._settings.render_only and (profile := self._frontend.profile) is not None:
            plain = PlainHashes(
                VllmMediaHasher(profile.processor), store_items, fairness=self._fairness, media=config.media
            )
        return AppBackend(
            config=self._settings,
            transports=Transports([shm, pull, inline], config.handover.transport),
            store_items=store_items,
            assembler=self._frontend.assembler,
            workers=self._workers,
            router=router,
            metrics=self._metrics,
            counts=self._counts,
            has_priorities=self._frontend.has_priorities,
            plain=plain,
            encoders=Encoders(
                self._workers,
                shm,
                params=encode_params(),
                costs=EncodeCosts.of(router.config),
                mean_sequences=lambda: router.mean_sequences,
                config=self._settings,
                metrics=self._metrics,
            ),
        )

    async def _app(self, backend: AppBackend, model_tasks: tuple[str, ...] | None) -> Any:
        """Build vLLM's app around the backend, and register the metrics of all components."""
        config, metrics, links, addresses = self._config, self._metrics, self._workers, self._addresses
        self._watch(backend)
        scrape = WorkerScrape(links)
        metrics.watch(lambda: engine_metrics(scrape.mirrors()), of_host=True)
        memory = MemoryUse(lambda: {"gateway": [os.getpid()]})
        metrics.watch_memory(lambda: memory.latest, lambda: _shared_memory(self._store, scrape))

        health, is_stopping = self._health, self._stop.asked.is_set
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
                self._store.refresh(SCRAPE_TIMEOUT_S),
                group.refresh() if group is not None else memory.refresh(SCRAPE_TIMEOUT_S),
            )

        ask_others = no_others if group is None else group.ask_others

        async def reload(_parameters: Mapping[str, str]) -> bytes:
            """Read keys, certificates and the log's level again."""
            return await self._reloading.reload_all(ask_others)

        control = WorkerControl(links, ask_others=ask_others, index=str(addresses.gateway_index))
        if group is not None:
            group.answers.update({**control.answers, RELOAD: self._reloading.answer})
        actions: dict[str, Action] = {
            "GET /medialane/workers": control.listed,
            "POST /medialane/workers/{name:path}/drain": control.drain,
            "POST /medialane/reload": reload,
        }
        if config.media.allow_rdma:
            actions["POST /medialane/publish"] = backend.publish_images
        media = MediaEndpoints(
            self._store,
            self._settings,
            self._fairness,
            admit=backend.admit,
            num_tokens=backend.num_image_tokens,
            read=backend.read,
            sending=backend.sending,
        )
        operators = OperatorEndpoints(
            addresses.gateway_index,
            model=self._frontend.model_name,
            recent=self._recent,
            workers=links,
            router=self._router,
            store=self._store if self._frontend.takes_media else None,
            health=health,
            ask_others=ask_others,
        )
        actions["GET /medialane/decisions"] = operators.decisions
        endpoints: dict[str, Any] = dict(media.routes) if self._frontend.takes_media else {}
        if self._settings.page:
            endpoints |= operators.routes
            if group is not None:
                group.answers.update(operators.answers)
        app = await self._frontend.app(
            backend,
            outer=Middleware(
                ScopeMiddleware,
                logs_requests=config.logging.access,
                metrics=metrics,
                requests=self._requests,
                recent=self._recent,
                names_takers=config.store.debug_holds,
                tracing=self._tracing,
                recorder=self._recorder,
                model=self._frontend.model_name,
            ),
            access=lambda route_of: Middleware(AccessMiddleware, keys=self._keys, route_of=route_of, metrics=metrics),
            inner=[
                Middleware(ScrapeMiddleware, refresh=refresh, page=group.page if group is not None else None),
                Middleware(
                    IntakeMiddleware,
                    media=config.media,
                    config=self._settings,
                    fairness=self._fairness,
                    queues=backend.queues,
                    open_document=backend.open_document if self._frontend.takes_media else None,
                    keeps_bodies=self._recorder is not None,
                ),
            ],
            actions=actions,
            endpoints=endpoints,
            probes={
                "/health": lambda: health().response(),
                "/ready": lambda: health().readiness(is_stopping=is_stopping()),
                "/live": lambda: (200, b""),
            },
            tasks=model_tasks,
            render_only=self._settings.render_only,
            render_payload=self._settings.default_payload,
            token_cache_bytes=self._settings.token_cache_bytes,
            fairness=self._fairness,
        )
        self._siblings = group
        return app

    def _watch(self, backend: AppBackend) -> None:
        """Register the metrics of what the backend has, read on each scrape."""
        metrics = self._metrics
        metrics.watch(lambda: store_metrics(None if (now := self._store.status) is None else now.stats), of_host=True)
        metrics.watch(lambda: exit_metrics(exits_of_host()), of_host=True)
        metrics.watch_workers(self._workers.endpoints)
        metrics.watch(lambda: routing_metrics(backend.routes.stats()))
        metrics.watch(lambda: prediction_metrics(self._frontend.assembler.predicted))
        if (queues := backend.queues) is not None:
            metrics.watch(lambda: queue_metrics(queues.stats()))
        metrics.watch(lambda: wait_metrics(backend.waits()))
        metrics.watch(lambda: segment_metrics(self._frontend.segment_stats))


def _tracing(frontend: Frontend, vllm_args: Sequence[str], stack: AsyncExitStack) -> RequestTracing | None:
    """Return what traces requests, if vLLM's flag has an endpoint for that. Raises StartupFailed."""
    if (endpoint := flag_value(vllm_args, TRACES_ENDPOINT)) is None:
        return None
    tracing = RequestTracing(endpoint, process_environ(), model=frontend.model_name)
    stack.push_async_callback(tracing.close)
    return tracing


def _counts(addresses: GatewayAddresses) -> SharedCounts:
    """Return what the gateways of this port count together, in a file beside their sockets."""
    if not addresses.gateways:
        return SharedCounts()
    path = os.path.join(os.path.dirname(addresses.gateways[0]), "counts")
    return SharedCounts(path, index=addresses.gateway_index, num_gateways=len(addresses.gateways))


def fit_stage(config: GatewayConfig, frontend: Frontend) -> GatewayConfig:
    """Check that the configured stage suits the model, and log which one is used instead for some items: what cannot be
    processed one by one is processed by workers (`Assembler.unfit_stages`). A model of text alone gets stage `url`.
    Raises StartupFailed."""
    profile = frontend.profile
    if profile is None:
        return msgspec.structs.replace(config, stage=RAW_STAGE)
    stage = prepared_stage(config.stage)
    if stage.is_decoded:
        check_model_io(frontend.config.model_config)
    if not profile.unfit or not stage.is_processed:
        return config
    if config.stage != "auto" or stage.if_unsupported is None:
        others = " or ".join(each.name for each in STAGES.values() if not each.is_processed)
        raise StartupFailed(f"{profile.unfit_reason}: use --stage auto, {others}")
    which = "" if profile.is_unfit else f", for prompts with {' or '.join(profile.unfit)}"
    instead = " or ".join(sorted(set(profile.unfit_stages.values())))
    logger.warning("stage %s, not %s%s: %s", instead, stage.name, which, profile.unfit_reason)
    return config


def _shared_memory(store: StoreLink, workers: WorkerScrape) -> Iterator[Memory]:
    """Yield the memory of the processes that the gateways of this host have in common."""
    if store.status is not None:
        yield {}, store.status.stats.memory
    yield from workers.memory()
