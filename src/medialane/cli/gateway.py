"""`medialane gateway`: one gateway process, assembled from its components."""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import socket
from collections.abc import Sequence
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import uvicorn
import uvloop
from prometheus_client import CollectorRegistry

from medialane.cli.gateway_app import Components, GatewayAddresses, gateway_app, gateway_of
from medialane.cli.reloading import Reloading, reloaded_by_hangup
from medialane.cli.serving import EssentialTasks, tune_process, unless_set
from medialane.cluster.vllm_flags import TRACES_ENDPOINT, flag_value, untraced_flags
from medialane.config import Config, process_environ
from medialane.gateway import (
    AccessKeys,
    BoundedServer,
    GatewayConfig,
    GatewayMetrics,
    OpenRequests,
    RecentRequests,
    Recorder,
    RequestTracing,
    SharedCounts,
    WorkerLink,
    WorkerPool,
    http_bounds,
)
from medialane.gateway.intake import warm_up
from medialane.gateway.worker_link.join_server import JoinServer
from medialane.observability.metrics import Metrics
from medialane.observability.tracing import Tracing
from medialane.routing import Router
from medialane.runtime.loop_fairness import LoopFairness
from medialane.runtime.phase import enter_phase, show_ready, watched
from medialane.runtime.stop import Stop, stopped_by_signals
from medialane.store import StoreLink
from medialane.types.errors import StartupFailed
from medialane.types.stage import RAW_STAGE, STAGES, prepared_stage
from medialane.vllm_bridge.frontend import prebuilt
from medialane.vllm_bridge.frontend.app import Frontend
from medialane.wire.address import consecutive_ports, parse_named
from medialane.wire.listener import bind_http, bind_unix, inherited
from medialane.wire.protocol import Hello
from medialane.wire.security import is_loopback

logger = logging.getLogger(__name__)

#: Exit status of a gateway that cannot continue: EX_SOFTWARE of sysexits.h. It should be restarted.
EXIT_FAILED = 70

#: How long the first attempts to connect to workers may hold up the start. One that is ready answers in milliseconds.
_TRIED_S = 2.0


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
    with _bound(reloading.config, listen_fd, http_socket) as sock:
        return uvloop.run(serve(reloading, model, vllm_args, addresses=addresses, sock=sock))


def _bound(config: Config, listen_fd: int | None, http_socket: Path | None) -> socket.socket:
    """Raises StartupFailed."""
    if listen_fd is not None:
        return inherited(listen_fd)
    if http_socket is None:
        return bind_http(config.server.host, config.server.port)
    return bind_unix(str(http_socket))


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
        recorder=_recorder(config, stack),
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


def _recorder(config: Config, stack: AsyncExitStack) -> Recorder | None:
    """Return what records requests, if they are to be recorded. Raises StartupFailed."""
    if (recorder := Recorder.open(config.recording)) is not None:
        stack.push_async_callback(recorder.close)
    return recorder


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
        await _listen_for_workers(components, addresses, stack)
    # When a gateway is restarted, clients wait in the queue of its socket, and its workers are ready.
    await components.links.tried(_TRIED_S)


async def _listen_for_workers(components: Components, addresses: GatewayAddresses, stack: AsyncExitStack) -> None:
    server = JoinServer(components.config.rpc, components.links.serve_joined)
    stack.push_async_callback(server.close)
    join_at = _join_addresses(components.gateway_config, addresses)[addresses.gateway_index]
    logger.info("workers join at %s", await server.serve(join_at))


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
