"""What commands have in common that start plain vLLM and medialane to compare them."""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys
import tempfile
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from medialane.cli.flags import given_settings
from medialane.cluster.placement import find_hardware
from medialane.cluster.vllm_flags import has_flag
from medialane.config import Config, as_environ, foreign_environ, process_environ, vllm_defaults
from medialane.types.errors import StartupFailed

EXIT_INTERRUPTED = 130

T = TypeVar("T")


def check_launch(args: argparse.Namespace, config: Config) -> None:
    """Raise StartupFailed for arguments with which the servers would start in vain."""
    if has_flag(args.vllm_args, "--ssl-keyfile", "--ssl-certfile", "--uds", "--root-path"):
        raise StartupFailed("both servers are asked by HTTP: leave out --ssl-..., --uds and --root-path")
    if not given_settings(args).keys().isdisjoint(("host", "port")):
        raise StartupFailed("both servers get free ports of 127.0.0.1: leave out --host and --port")
    if config.cluster.ray or config.cluster.num_workers == 0:
        raise StartupFailed("both servers run on this host: leave out --ray and --workers 0")


def launch_environs(
    args: argparse.Namespace, config: Config, *, num_workers: int = 1
) -> tuple[dict[str, str], dict[str, str]]:
    """Return the environments of plain vLLM and of medialane. `num_workers` is how many engines share the machine."""
    environ = process_environ()
    on_gpu = bool(find_hardware(environ).gpus)
    defaults = vllm_defaults(args.model, args.vllm_args, on_gpu=on_gpu, num_workers=num_workers)
    # One key, which the client sends to both.
    key = {"VLLM_API_KEY": config.gateway.api_keys[0]} if config.gateway.api_keys else {}
    # What the flags and the file of settings say wins in the server as it does here. What is compared is no traffic.
    return defaults | foreign_environ(environ) | key, defaults | environ | as_environ(config) | {"MEDIALANE_RECORD": ""}


@contextmanager
def logs_folder(chosen: Path | None) -> Iterator[Path]:
    """Yield the folder for the logs: the user's, or one that is removed. Raises StartupFailed."""
    if chosen is not None:
        try:
            chosen.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise StartupFailed(f"--logs {chosen}: {error.strerror}") from error
        yield chosen
        return
    with tempfile.TemporaryDirectory(prefix="medialane-logs-") as folder:
        yield Path(folder)


def until_signal(work: Coroutine[Any, Any, T]) -> T | None:
    """Run `work`; None if a signal ends it. Its servers are stopped then, by a second signal killed."""

    async def run() -> T | None:
        task = asyncio.create_task(work)

        def stop() -> None:
            is_first = not task.cancelling()
            task.cancel()
            if is_first:
                print("stopping the servers; a second signal kills them", file=sys.stderr, flush=True)

        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            asyncio.get_running_loop().add_signal_handler(number, stop)
        await asyncio.wait((task,))
        return None if task.cancelled() else task.result()

    return asyncio.run(run())
