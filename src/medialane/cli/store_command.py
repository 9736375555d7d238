"""`medialane store`: the command line of a media store; `store.py` implements it."""

from __future__ import annotations

import argparse

from medialane.cli import store
from medialane.cli.flags import PROTECTION, add_settings
from medialane.cli.reloading import Reloading, add_source
from medialane.cluster.placement import find_hardware
from medialane.cluster.preflight import check_start
from medialane.config import SectionName, enter_environ, process_environ
from medialane.observability.logging import configure
from medialane.runtime.linux import set_title
from medialane.wire.address import parse_unix
from medialane.wire.listener import check_listen

SECTIONS: tuple[SectionName, ...] = (
    "gateway",
    "store",
    "media",
    "prepare",
    "arena",
    "rpc",
    "environment",
    "logging",
    "stop",
)
_COMMON = (
    "allow-media-network", "allow-media-domain", "allowed-local-media-path", "drain-timeout", "preparers", "arena-size",
    "keep-arena", "stage", "peer-listen", *PROTECTION, "log-level", "log-format",
)  # fmt: skip

_EPILOG = """\
A store fetches, decodes and processes the media of one host, once for all gateways there, and keeps them in shared
memory. `medialane serve` starts one.

example:
  medialane store ./model --listen unix:/run/medialane/store.sock
  medialane worker ./model --listen unix:/run/medialane/worker.sock --store unix:/run/medialane/store.sock
  medialane gateway ./model --worker unix:/run/medialane/worker.sock --store unix:/run/medialane/store.sock"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = _EPILOG
    parser.add_argument(
        "model", metavar="MODEL", help="the model that the workers serve: a folder, or a name on a model hub"
    )
    parser.add_argument(
        "--listen", metavar="ADDRESS", required=True, help="unix socket to listen on: unix:/path (mode 0600)"
    )
    add_source(parser)
    add_settings(parser, SECTIONS, common=_COMMON)


def run(args: argparse.Namespace) -> int:
    """Serve until stopped. Raises StartupFailed."""
    set_title("store", args.argv)
    reloading = Reloading.of(args, SECTIONS)
    config = reloading.config
    log = configure(config.logging, component="store")
    parse_unix(args.listen, "--listen")
    check_listen(args.listen, "--listen", config.rpc)
    if config.store.peer_listen:
        check_listen(config.store.peer_listen, "--peer-listen", config.rpc)
    environ = process_environ()
    check_start(args.model, args.vllm_args, environ)
    # For the fork server of the preparers, which imports vllm.
    on_gpu = bool(find_hardware(environ).gpus)
    enter_environ(config, "store", args.model, args.vllm_args, on_gpu=on_gpu, own=log.environ())
    return store.run(reloading, args.model, args.vllm_args, args.listen)
