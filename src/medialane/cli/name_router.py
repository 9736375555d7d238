"""`medialane name-router`: the process in front of several models, started by `medialane serve`, never by hand."""

from __future__ import annotations

import argparse
import logging
import math
import socket
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import uvicorn
import uvloop

from medialane.cli.serving import EssentialTasks, http_listener, tune_process
from medialane.cli.settings import Reloading, add_settings, add_source, reloaded_by_hangup
from medialane.cluster.vllm_flags import TLS_FLAGS, flag_value
from medialane.config import Config, SectionName, process_environ
from medialane.gateway import (
    MAX_HEADERS,
    AccessKeys,
    BoundedServer,
    NameRouter,
    ServedModel,
    ServedModels,
    client_keys,
    http_bounds,
)
from medialane.observability.logging import configure
from medialane.runtime.linux import set_title
from medialane.runtime.phase import watched
from medialane.runtime.stop import GIVE_UP_S, serve_until_stopped, stopped_by_signals
from medialane.types.errors import StartupFailed

logger = logging.getLogger(__name__)

SECTIONS: tuple[SectionName, ...] = ("server", "gateway", "media", "logging", "stop")

#: vLLM's default.
_KEEP_ALIVE_S = 5

_decode_models = msgspec.json.Decoder(list[ServedModel]).decode


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("models", metavar="FILE", type=Path, help="the models, as JSON")
    parser.add_argument("--listen-fd", type=int, metavar="FD")
    add_source(parser)
    add_settings(parser, SECTIONS)


def run(args: argparse.Namespace) -> int:
    """Serve until stopped. Raises StartupFailed."""
    set_title("name router", args.argv)
    reloading = Reloading.of(args, SECTIONS)
    config = reloading.config
    configure(config.logging, component="name-router")
    tune_process()
    served = _decode_models(args.models.read_bytes())
    with http_listener(config.server, args.listen_fd) as sock:
        return uvloop.run(serve(reloading, served, sock, http_flags=args.vllm_args))


async def serve(
    reloading: Reloading, served: Sequence[ServedModel], sock: socket.socket, *, http_flags: Sequence[str]
) -> int:
    """Serve on a bound socket, with vLLM's flags for its HTTP server. Raises StartupFailed."""
    config, models = reloading.config, ServedModels(served)
    keys = AccessKeys.load(config.gateway, client_keys(config.gateway, process_environ()))
    reloading.files.append(partial(keys.read_again, config.gateway))
    with stopped_by_signals() as stop:
        tasks = EssentialTasks(stop.asked)
        async with tasks:
            if keys.tenants is not None:
                tasks.start(keys.tenants.watch(), "reading --keys")
            app = NameRouter(
                models,
                keys,
                config.gateway,
                max_body_bytes=config.media.max_body_bytes,
                root_path=flag_value(http_flags, "--root-path") or "",
            )
            max_headers = int(flag_value(http_flags, "--h11-max-header-count") or MAX_HEADERS)
            bounds = http_bounds(config.gateway, files_each=2)
            server = BoundedServer(_uvicorn(config, app, http_flags), bounds=bounds, max_headers=max_headers)
            reloading.files.append(server.read_certificate)
            drain_s = config.stop.drain_timeout_s
            try:
                async with watched(), reloaded_by_hangup(reloading.reload):
                    await serve_until_stopped(server, sock, stop, drain_timeout_s=drain_s, give_up=lambda: None)
            finally:
                await models.close()
            if not stop.asked.is_set():
                tasks.fail("the HTTP server")
    return 1 if tasks.failed else 0


def _uvicorn(config: Config, app: Any, flags: Sequence[str]) -> uvicorn.Config:
    """Return uvicorn's loaded configuration, with TLS by vLLM's flags. Raises StartupFailed."""
    tls: dict[str, Any] = {
        flag.removeprefix("--").replace("-", "_"): value
        for flag in TLS_FLAGS
        if (value := flag_value(flags, flag)) is not None
    }
    try:
        if "ssl_cert_reqs" in tls:
            tls["ssl_cert_reqs"] = int(tls["ssl_cert_reqs"])
        loaded = uvicorn.Config(
            app,
            loop="uvloop",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            date_header=False,
            proxy_headers=False,  # gateways decide whom they trust
            timeout_keep_alive=int(process_environ().get("VLLM_HTTP_TIMEOUT_KEEP_ALIVE") or _KEEP_ALIVE_S),
            timeout_graceful_shutdown=math.ceil(config.stop.drain_timeout_s + GIVE_UP_S),
            **tls,
        )
        loaded.load()
    except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
        raise StartupFailed(f"vLLM flags after `--`: TLS cannot be set up: {error}") from error
    return loaded
