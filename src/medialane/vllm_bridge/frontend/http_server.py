"""The HTTP server, configured from vLLM's flags like vLLM's own server.

vLLM's start (`entrypoints/launchers/api_server/entry.py:build_and_serve`, `launcher.py:serve_http`) also creates the
socket, handles signals and watches the engine. The gateway does that itself, so only the components are used.
"""

from __future__ import annotations

import logging
import math
import socket
from argparse import Namespace
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

import uvicorn
from vllm import envs

from medialane.runtime.stop import GIVE_UP_S, Stop, serve_until_stopped
from medialane.types.errors import StartupFailed
from medialane.vllm_bridge.engine.plugin import show_vllm_lines
from medialane.vllm_bridge.seams.api_server import (
    SSLCertRefresher,
    configure_logging_from_args,
    get_uvicorn_log_config,
)

Scope = MutableMapping[str, Any]
App = Callable[[Scope, Any, Any], Awaitable[None]]
ServerFactory = Callable[[uvicorn.Config], uvicorn.Server]


#: Client, method, path, HTTP version, status.
_NUM_ACCESS_ARGS = 5


def uvicorn_config(
    app: App, args: Namespace, *, drain_timeout_s: float = 0.0, logs_requests: bool = True
) -> uvicorn.Config:
    """Return uvicorn's loaded configuration, and configure the logging of this process. Raises StartupFailed."""
    if args.enable_ssl_refresh and not (args.ssl_keyfile and args.ssl_certfile):
        raise StartupFailed("--enable-ssl-refresh needs --ssl-keyfile and --ssl-certfile")
    try:
        vllm_logging = configure_logging_from_args(args)
        show_vllm_lines(vllm_logging.log_level)
        log_config = get_uvicorn_log_config(args)
        if not vllm_logging.configure_logging:
            log_config = _through_ours(log_config)
        config = uvicorn.Config(
            app,
            loop="uvloop",
            log_level=args.uvicorn_log_level,
            access_log=logs_requests and not args.disable_uvicorn_access_log,
            timeout_keep_alive=envs.VLLM_HTTP_TIMEOUT_KEEP_ALIVE,
            ssl_keyfile=args.ssl_keyfile,
            ssl_certfile=args.ssl_certfile,
            ssl_ca_certs=args.ssl_ca_certs,
            ssl_cert_reqs=args.ssl_cert_reqs,
            ssl_ciphers=args.ssl_ciphers,
            timeout_graceful_shutdown=math.ceil(drain_timeout_s + GIVE_UP_S),
            h11_max_incomplete_event_size=args.h11_max_incomplete_event_size,
            **({} if log_config is None else {"log_config": log_config}),
        )
        logging.getLogger("uvicorn.access").addFilter(_without_query)
        config.load()
    except (OSError, RuntimeError, TypeError, ValueError) as error:  # ssl.SSLError is an OSError
        raise StartupFailed(f"vLLM flags after `--`: TLS or logging cannot be set up: {error}") from error
    return config


def _through_ours(config: dict[str, Any] | None) -> dict[str, Any]:
    """Return vLLM's configuration of uvicorn's loggers without handlers and formats: only what it leaves out."""
    filters = {} if config is None else config["filters"]
    levels = {name: {"propagate": True} for name in ("uvicorn", "uvicorn.error")}
    access = {"uvicorn.access": {"propagate": True, "filters": list(filters)}}
    return {"version": 1, "disable_existing_loggers": False, "filters": filters, "loggers": levels | access}


def _without_query(record: logging.LogRecord) -> bool:
    """Remove the query from a line of uvicorn's access log: it may have a key."""
    if isinstance(record.args, tuple) and len(record.args) == _NUM_ACCESS_ARGS:
        client, method, path, *rest = record.args
        record.args = (client, method, str(path).partition("?")[0], *rest)
    return True


def check_http(args: Namespace) -> None:
    """Raise StartupFailed for flags of the HTTP server that would otherwise fail only at the end of the start."""

    async def nothing(_scope: Scope, _receive: Any, _send: Any) -> None: ...

    uvicorn_config(nothing, args)


async def serve_http(
    app: Any,
    args: Namespace,
    sock: socket.socket,
    stop: Stop,
    *,
    drain_timeout_s: float,
    give_up: Callable[[], None],
    server_of: ServerFactory,
    logs_requests: bool = True,
) -> None:
    """Serve HTTP on `sock` until `stop`; requests in flight get `drain_timeout_s` to finish, then `give_up` is called,
    which ends them with an error. The server must install no signal handlers, and enforce the header limits of vLLM's
    flags, since uvicorn's own protocols have none. Without `logs_requests` it writes no line for each request.
    """
    config = uvicorn_config(app, args, drain_timeout_s=drain_timeout_s, logs_requests=logs_requests)
    server = server_of(config)
    app.state.server = server  # vLLM's error handlers use it
    refresher = None
    if args.enable_ssl_refresh:
        refresher = SSLCertRefresher(
            ssl_context=config.ssl,
            key_path=config.ssl_keyfile,
            cert_path=config.ssl_certfile,
            ca_path=config.ssl_ca_certs,
        )
    try:
        await serve_until_stopped(server, sock, stop, drain_timeout_s=drain_timeout_s, give_up=give_up)
    finally:
        if refresher is not None:
            refresher.stop()
