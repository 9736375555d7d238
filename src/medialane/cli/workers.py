"""`medialane workers`: lists and drains the workers of a gateway, and of all gateways of its port."""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from urllib.parse import quote

import msgspec
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from medialane.cli.gateway_client import KEY_HELP, GatewayAdmin, GatewayNotAnswering, add_gateway, connected
from medialane.gateway.worker_control import WorkerInfo
from medialane.types.errors import StartupFailed

_POLL_S = 0.3
_DEFAULT_TIMEOUT_S = 900.0
_PATH = "/medialane/workers"

_EPILOG = f"""\
A worker that drains takes no new requests. Answers that end within its --drain-timeout end there, the others go on at
another worker. Then it exits, and is started again by what supervises it: `medialane serve` (at once), systemd,
Kubernetes. So this restarts all workers of a gateway under load, and no request is lost:

  medialane workers drain --all

Workers are named as in `medialane workers list`. The next one is drained when the last one is ready again, at every
gateway of the port; if it is not within --timeout, the others are left as they are, and the exit status is 1. With
--no-wait the command ends when the worker has stopped. SIGTERM to the worker's process does the same.

{KEY_HELP}

examples:
  medialane workers list
  medialane workers drain node1/0 node1/1 --gateway https://10.0.0.1:8000
  medialane workers drain --all --timeout 1800 --admin-key-file /etc/medialane/admin-key"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = _EPILOG
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", dest="action", required=True)

    def command(name: str, text: str) -> argparse.ArgumentParser:
        added = commands.add_parser(name, help=text, description=f"{text[0].upper()}{text[1:]}.")
        add_gateway(added)
        return added

    listing = command("list", "the workers and encoders, with their states")
    listing.add_argument("--json", action="store_true", help="print JSON")
    draining = command("drain", "have workers end what they do and stop, one after the other, as for a restart")
    draining.add_argument("workers", metavar="WORKER", nargs="*", help="name of a worker or encoder")
    draining.add_argument("--all", action="store_true", help="all workers and encoders that are connected")
    text = f"longest time for one worker to stop and to be ready again (default {_DEFAULT_TIMEOUT_S:g})"
    draining.add_argument("--timeout", metavar="SECONDS", type=float, default=_DEFAULT_TIMEOUT_S, help=text)
    draining.add_argument(
        "--no-wait", action="store_true", help="do not wait until it is ready again (one worker only)"
    )


def run(args: argparse.Namespace) -> int:
    """0 if it is done, 1 if a worker is not as it should be in time. Raises StartupFailed."""
    return asyncio.run(_run(args, _ACTIONS[args.action]))


async def _run(args: argparse.Namespace, action: Callable[[_Workers, argparse.Namespace], Awaitable[int]]) -> int:
    if args.action == "drain":
        _check_drain(args)
    async with connected(args) as gateway:
        return await action(_Workers(gateway), args)


async def _list(gateway: _Workers, args: argparse.Namespace) -> int:
    workers = await gateway.all()
    if args.json:
        print(msgspec.json.format(msgspec.json.encode(workers)).decode())
        return 0
    table = Table("worker", "role", "state", "requests", "address", "origin", "not reached by gateways")
    for each in workers:
        missing = ", ".join(each.unreachable_from)
        words = (each.name, each.role, each.state, str(each.num_requests), each.address, each.origin, missing)
        table.add_row(*map(escape, words))
    Console(highlight=False).print(table if workers else "no workers")
    return 0


def _check_drain(args: argparse.Namespace) -> None:
    if bool(args.workers) == args.all:
        raise StartupFailed("name the workers to drain (`medialane workers list`), or use --all")
    if args.no_wait and len(args.workers) != 1:
        raise StartupFailed("--no-wait is for one worker: without waiting, several would be away at once")


async def _drain(gateway: _Workers, args: argparse.Namespace) -> int:
    before = {worker.name: worker for worker in await gateway.all()}
    names = [name for name in before if before[name].state != "lost"] if args.all else args.workers
    if unknown := [name for name in names if name not in before]:
        known = ", ".join(before) or "none"
        raise StartupFailed(f"there is no worker named {unknown[0]}; the workers of this gateway are: {known}")
    if not names:
        raise StartupFailed("no worker is connected to this gateway")
    for name in names:
        try:
            async with asyncio.timeout(args.timeout):
                await _drain_one(gateway, name, returns=not args.no_wait)
        except TimeoutError:
            left = names[names.index(name) + 1 :]
            also = f"; not drained: {', '.join(left)}" if left else ""
            print(f"{name}: not back after {args.timeout:g} s (does anything restart it?){also}", flush=True)
            return 1
    return 0


async def _drain_one(gateway: _Workers, name: str, *, returns: bool) -> None:
    """Drain one worker, and wait until it has stopped, and if it `returns`, until it is ready again."""
    started = time.monotonic()
    workers = await gateway.all()
    run = (await gateway.drain(name)).run
    if not any(each.state == "ready" and each.name != name and each.role == "worker" for each in workers):
        print(f"{name} is the only worker that is ready: until it is back, requests wait or fail", flush=True)
    shown = ""
    while True:
        worker = await gateway.find(name)
        has_stopped = worker is None or worker.run != run
        text = "stopped" if has_stopped else f"draining, {worker.num_requests} requests" if worker is not None else ""
        if text != shown:
            shown = text
            print(f"{name}: {text}", flush=True)
        if has_stopped and not returns:
            return
        if has_stopped and worker is not None and worker.state == "ready" and not worker.unreachable_from:
            print(f"{name}: ready again after {time.monotonic() - started:.0f} s", flush=True)
            return
        await asyncio.sleep(_POLL_S)


class _Workers:
    """The workers of a gateway, by its administrative interface. Its methods raise StartupFailed."""

    def __init__(self, gateway: GatewayAdmin) -> None:
        self._gateway = gateway

    async def all(self, *, is_patient: bool = False) -> Sequence[WorkerInfo]:
        """Return the workers; if it `is_patient`, ask a gateway that does not answer again."""
        while True:
            try:
                return await self._gateway.ask(list[WorkerInfo], "GET", _PATH)
            except GatewayNotAnswering:
                if not is_patient:
                    raise
                await asyncio.sleep(_POLL_S)

    async def find(self, name: str) -> WorkerInfo | None:
        """Return a worker, whatever gateway of the port restarts meanwhile."""
        return next((each for each in await self.all(is_patient=True) if each.name == name), None)

    async def drain(self, name: str) -> WorkerInfo:
        """Have a worker drain; return it as it was."""
        return await self._gateway.ask(WorkerInfo, "POST", f"{_PATH}/{quote(name, safe='')}/drain")


_ACTIONS = {"list": _list, "drain": _drain}
