"""`medialane worker`: the command line of a worker alone; `worker.py` is what it runs."""

from __future__ import annotations

import argparse

from medialane.cli.flags import add_settings, given_settings
from medialane.cluster.placement import find_hardware
from medialane.config import RoomName, enter_environ, load_config, process_environ
from medialane.observability.logging import configure
from medialane.rpc.address import parse_address

ROOMS: tuple[RoomName, ...] = ("worker", "rpc", "logging")
_COMMON = ("rpc-token", "log-level", "arena-directory")

_EPILOG = """\
examples:
  medialane worker ./model --listen unix:/run/medialane/worker-0.sock
  CUDA_VISIBLE_DEVICES=0,1 medialane worker ./model --listen tcp://0.0.0.0:7000 -- --tensor-parallel-size 2"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = _EPILOG
    parser.add_argument("model", metavar="MODEL", help="a folder, or a name on a model hub")
    parser.add_argument(
        "--listen", metavar="ADDRESS", required=True, help="where gateways connect: unix:/path or tcp://host:port"
    )
    add_settings(parser, (*ROOMS, "arena"), common=_COMMON)


def run(args: argparse.Namespace) -> int:
    """Serve until stopped. Raises StartupFailed."""
    # The arena's size is the gateway's affair, and this may be another host: that room is not validated here.
    config = load_config(given_settings(args), file=args.config, rooms=ROOMS)
    configure(config.logging)
    parse_address(args.listen)
    enter_environ(config, args.model, args.vllm_args, on_gpu=bool(find_hardware(process_environ()).gpus))
    from medialane.cli import worker  # vllm reads its environment when it is imported

    return worker.run(config, args.model, args.vllm_args, args.listen)
