"""`medialane worker`: the command line of a worker alone; `worker.py` and `simulated_worker.py` are what it runs."""

from __future__ import annotations

import argparse

from medialane.cli.flags import add_settings, given_settings
from medialane.cluster.placement import find_hardware
from medialane.cluster.preflight import check_start
from medialane.config import Config, RoomName, enter_environ, load_config, process_environ
from medialane.core.errors import StartupFailed
from medialane.observability.logging import configure
from medialane.rpc.address import parse_address

ROOMS: tuple[RoomName, ...] = ("worker", "simulated", "rpc", "logging")
_COMMON = ("rpc-token", "log-level", "arena-directory", "simulated-workers", "speedup")

_EPILOG = """\
examples:
  medialane worker ./model --listen unix:/run/medialane/worker-0.sock
  CUDA_VISIBLE_DEVICES=0,1 medialane worker ./model --listen tcp://0.0.0.0:7000 -- --tensor-parallel-size 2
  medialane worker ./model --engine simulated --simulated-workers 64 --listen unix:/tmp/worker-{}.sock --speedup 4"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = _EPILOG
    parser.add_argument("model", metavar="MODEL", help="a folder, or a name on a model hub")
    parser.add_argument(
        "--listen", metavar="ADDRESS", required=True, help="where gateways connect: unix:/path or tcp://host:port"
    )
    parser.add_argument(
        "--engine",
        choices=("vllm", "simulated"),
        default="vllm",
        help="simulated: no model is loaded, answers mean nothing; caches, queues and times are like a real worker's"
        " (default vllm)",
    )
    add_settings(parser, (*ROOMS, "arena"), common=_COMMON)


def run(args: argparse.Namespace) -> int:
    """Serve until stopped. Raises StartupFailed."""
    # The arena's size is the gateway's affair, and this may be another host: that room is not validated here.
    config = load_config(given_settings(args), file=args.config, rooms=ROOMS)
    configure(config.logging)
    if args.engine == "simulated":
        return _run_simulated(config, args)
    _check_listen(args.listen)
    environ = process_environ()
    check_start(args.model, args.vllm_args, environ)
    enter_environ(config, args.model, args.vllm_args, on_gpu=bool(find_hardware(environ).gpus))
    from medialane.cli import worker  # vllm reads its environment when it is imported

    return worker.run(config, args.model, args.vllm_args, args.listen)


def _run_simulated(config: Config, args: argparse.Namespace) -> int:
    if args.vllm_args:
        raise StartupFailed("a simulated worker takes no flags of vLLM: its settings begin with --simulated")
    from medialane.cli import simulated_worker

    return simulated_worker.run(config, args.model, args.listen)


def _check_listen(address: str) -> None:
    try:
        parse_address(address)
    except StartupFailed as error:
        raise StartupFailed(f"--listen: {error.message}") from error
