"""`medialane gateway`: the command line of a standalone gateway; `gateway.py` implements it."""

from __future__ import annotations

import argparse

from medialane.cli.flags import add_settings, given_settings
from medialane.cli.store_command import check_store
from medialane.cluster.placement import find_hardware
from medialane.cluster.preflight import check_start
from medialane.config import Config, SectionName, enter_environ, load_config, process_environ
from medialane.core.errors import StartupFailed
from medialane.media.kinds import installed_kinds
from medialane.observability.logging import configure
from medialane.rpc.address import TcpAddress, parse_address
from medialane.rpc.security import check_address
from medialane.vllm_bridge.seams import probe

SECTIONS: tuple[SectionName, ...] = (
    "server", "gateway", "store", "media", "arena", "transfer", "routing", "rpc", "logging",
)  # fmt: skip
_COMMON = ("host", "port", "stage", "transport", "router", "rpc-secret-file", "log-level")

#: vLLM's app resolves every URL with the media connector of this name: ours, which leaves fetching to the gateway.
_OWN = {"VLLM_MEDIA_CONNECTOR": "medialane"}

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
        metavar="ADDRESS",
        action="append",
        required=True,
        dest="workers",
        help="address of a worker: unix:/path or tcp://host:port; repeatable",
    )
    parser.add_argument(
        "--store",
        metavar="ADDRESS",
        help="unix socket of this host's media store (medialane store): unix:/path; needed by models that take media",
    )
    # Set by `medialane serve`, for several gateways on one port.
    parser.add_argument("--listen-fd", type=int, metavar="FD", help=argparse.SUPPRESS)
    parser.add_argument("--gateway-socket", action="append", dest="gateway_sockets", help=argparse.SUPPRESS)
    parser.add_argument("--gateway-index", type=int, help=argparse.SUPPRESS)
    add_settings(parser, SECTIONS, common=_COMMON)


def run(args: argparse.Namespace) -> int:
    """Serve until stopped. Raises StartupFailed."""
    config = load_config(given_settings(args), file=args.config, sections=SECTIONS)
    configure(config.logging)
    for address in args.workers:
        _check_worker(address, config)
    if args.store is not None:
        check_store(args.store, "--store")
    environ = process_environ()
    check_start(args.model, args.vllm_args, environ)
    print(installed_kinds().line(), flush=True)
    on_gpu = bool(find_hardware(environ).gpus)
    enter_environ(config, args.model, args.vllm_args, on_gpu=on_gpu, own=_OWN)
    probe.check("gateway")
    from medialane.cli import gateway  # vllm reads its environment when it is imported

    peers = gateway.Peers(args.workers, args.store, args.gateway_sockets or (), args.gateway_index or 0)
    return gateway.run(config, args.model, args.vllm_args, peers, listen_fd=args.listen_fd)


def _check_worker(address: str, config: Config) -> None:
    """Raise StartupFailed for an address that cannot be connected to."""
    try:
        target = parse_address(address)
        if isinstance(target, TcpAddress) and not target.port:
            raise StartupFailed(f"worker address {address!r} needs the port that the worker listens on, not 0")
        check_address(address, config.rpc)
    except StartupFailed as error:
        raise StartupFailed(f"--worker: {error.message}") from error
