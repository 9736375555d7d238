"""`medialane store`: the command line of a media store; `store.py` implements it."""

from __future__ import annotations

import argparse

from medialane.cli import store
from medialane.cli.flags import add_settings, given_settings
from medialane.cluster.placement import find_hardware
from medialane.cluster.preflight import check_start
from medialane.config import SectionName, enter_environ, load_config, process_environ
from medialane.core.errors import StartupFailed
from medialane.observability.logging import configure
from medialane.rpc.address import UnixAddress, parse_address

SECTIONS: tuple[SectionName, ...] = ("gateway", "store", "media", "prepare", "arena", "rpc", "logging")
_COMMON = ("preparers", "arena-size", "stage", "log-level")

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
    add_settings(parser, SECTIONS, common=_COMMON)


def run(args: argparse.Namespace) -> int:
    """Serve until stopped. Raises StartupFailed."""
    config = load_config(given_settings(args), file=args.config, sections=SECTIONS)
    configure(config.logging)
    check_store(args.listen, "--listen")
    environ = process_environ()
    check_start(args.model, args.vllm_args, environ)
    # For the fork server of the preparers, which imports vllm.
    enter_environ(config, args.model, args.vllm_args, on_gpu=bool(find_hardware(environ).gpus))
    return store.run(config, args.model, args.vllm_args, args.listen)


def check_store(address: str, flag: str) -> None:
    """Raise StartupFailed unless `address`, the value of `flag`, is that of a unix socket."""
    try:
        target = parse_address(address)
    except StartupFailed as error:
        raise StartupFailed(f"{flag}: {error.message}") from error
    if not isinstance(target, UnixAddress):
        raise StartupFailed(f"{flag}: a store shares its memory with processes of this host: unix:/path")
