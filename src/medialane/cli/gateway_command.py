"""`medialane gateway`: the command line of a standalone gateway; `gateway.py` implements it."""

from __future__ import annotations

import argparse
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path

from medialane.cli.serving import enter_role
from medialane.cli.settings import PROTECTION, Reloading, add_settings, add_source
from medialane.cluster.local import check_join_listen
from medialane.config import Config, SectionName, process_environ
from medialane.gateway import AccessKeys, client_keys
from medialane.media import installed_kinds
from medialane.observability.logging import configure
from medialane.runtime.linux import set_title
from medialane.runtime.phase import enter_phase
from medialane.types.errors import StartupFailed
from medialane.vllm_bridge.seams import probe
from medialane.wire.address import parse_named, parse_unix
from medialane.wire.listener import bind_http, check_listen
from medialane.wire.security import check_address

logger = logging.getLogger(__name__)

SECTIONS: tuple[SectionName, ...] = (
    "server", "gateway", "store", "media", "handover", "routing", "rpc", "environment", "logging", "recording", "stop",
)  # fmt: skip
_COMMON = (
    "host", "port", "keys", "require-api-key", "admin-key-file", "drain-timeout", "join-listen", "stage", "transport",
    "router", *PROTECTION, "log-level", "log-format", "access-log", "record",
)  # fmt: skip

#: vLLM's app resolves every URL with the media connector of this name: ours, which leaves fetching to the gateway.
_OWN = {"VLLM_MEDIA_CONNECTOR": "medialane"}

#: Value of --store: the model takes no media. Only vLLM would know, which takes long to import.
NO_STORE = "none"

_EPILOG = """\
example:
  medialane worker ./model --listen tcp://10.0.0.2:7000        # on 10.0.0.2, with --rpc-secret-file FILE
  medialane store ./model --listen unix:/run/medialane/store.sock    # on this host
  medialane gateway ./model --worker tcp://10.0.0.2:7000 --store unix:/run/medialane/store.sock \\
      --rpc-secret-file FILE    # the same secret"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = _EPILOG
    parser.add_argument(
        "model", metavar="MODEL", help="the model that the workers serve: a folder, or a name on a model hub"
    )
    parser.add_argument(
        "--worker",
        metavar="[NAME=]ADDRESS",
        action="append",
        default=[],
        dest="workers",
        help="address of a worker: unix:/path or HOST:PORT, and its name in metrics, status and logs (default: the"
        " address); repeatable; others join with --join-listen",
    )
    parser.add_argument(
        "--store",
        metavar="ADDRESS",
        help="unix socket of this host's media store (medialane store): unix:/path; none: the model takes no media",
    )
    # Set by `medialane serve`, for several gateways on one port.
    parser.add_argument("--listen-fd", type=int, metavar="FD", help=argparse.SUPPRESS)
    parser.add_argument("--gateway-socket", action="append", dest="gateway_sockets", help=argparse.SUPPRESS)
    parser.add_argument("--gateway-index", type=int, help=argparse.SUPPRESS)
    add_source(parser)
    # Set by it for several models: the socket that the name router sends requests to, instead of a port.
    parser.add_argument("--http-socket", type=Path, metavar="PATH", help=argparse.SUPPRESS)
    add_settings(parser, (*SECTIONS, "arena"), common=_COMMON)


def run(args: argparse.Namespace) -> int:
    """Serve until stopped. Raises StartupFailed."""
    set_title("gateway" if args.gateway_index is None else f"gateway {args.gateway_index}", args.argv)
    # The arena is the store's, which has filled it: that there is room for another is not asked.
    reloading = Reloading.of(args, SECTIONS)
    config = reloading.config
    log = configure(
        config.logging, component=f"gateway{'' if args.gateway_index is None else f'-{args.gateway_index}'}"
    )
    _check_addresses(config, args)
    AccessKeys.load(config.gateway)
    check_api_key(config, process_environ())
    logger.info("%s", installed_kinds().line())
    enter_role(config, "gateway", args, _OWN | log.environ())
    enter_phase("importing vLLM")
    probe.check("gateway")
    from medialane.cli import gateway  # vllm reads its environment when it is imported

    addresses = gateway.GatewayAddresses(
        args.workers, _store(args.store), args.gateway_sockets or (), args.gateway_index or 0
    )
    return gateway.run(
        reloading, args.model, args.vllm_args, addresses, listen_fd=args.listen_fd, http_socket=args.http_socket
    )


def _check_addresses(config: Config, args: argparse.Namespace) -> None:
    """Raise StartupFailed for addresses that are missing, malformed, or cannot be used."""
    gateway = config.gateway
    if not (args.workers or gateway.join_listen or gateway.render_only):
        raise StartupFailed("a gateway needs workers: --worker ADDRESS, or --join-listen for workers that join")
    if args.store is None:
        raise StartupFailed(
            f"a gateway needs --store unix:/path, the media store of its host (medialane store), or --store {NO_STORE} "
            "if the model takes no media"
        )
    if _store(args.store) is not None:
        parse_unix(args.store, "--store")
    _check_workers(args.workers, config)
    if args.gateway_sockets:  # of `medialane serve`, which has checked the others
        check_listen(f"unix:{args.gateway_sockets[args.gateway_index or 0]}", "--gateway-socket", config.rpc)
        return
    if args.listen_fd is None and args.http_socket is None:
        bind_http(config.server.host, config.server.port).close()
    if config.gateway.join_listen:
        check_join_listen(config)


def _check_workers(given: Sequence[str], config: Config) -> None:
    """Raise StartupFailed for a worker that cannot be connected to, or whose name another one has."""
    names = set()
    for name, address in (parse_named(each, "--worker") for each in given):
        check_address(address, "--worker", config.rpc)
        if name in names:
            raise StartupFailed(f"--worker: two workers are named {name}")
        names.add(name)


def _store(given: str) -> str | None:
    return None if given == NO_STORE else given


def check_api_key(config: Config, environ: Mapping[str, str]) -> None:
    """Raise StartupFailed if clients must have a key, and there is none."""
    if config.gateway.require_api_key and not has_api_key(config, environ):
        raise StartupFailed("--require-api-key: there is none; set MEDIALANE_API_KEYS, VLLM_API_KEY or --keys")


def has_api_key(config: Config, environ: Mapping[str, str]) -> bool:
    """Return whether a gateway with this environment asks clients for a key."""
    return bool(config.gateway.keys or client_keys(config.gateway, environ))
