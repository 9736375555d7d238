"""`medialane status`: what a gateway is connected to, as tables or JSON."""

from __future__ import annotations

import argparse
import asyncio

import msgspec
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from medialane.cli.gateway_state import GatewayState, read_state
from medialane.config import ServerConfig, format_size

_EPILOG = """\
The exit status is 0 if all gateways of the port respond, each is connected to every worker, and the gateway reports
no problem; 1 if not; 2 if the gateway does not answer.

examples:
  medialane status
  medialane status --gateway http://10.0.0.1:8000 --json"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = _EPILOG
    server = ServerConfig()
    url = f"http://{server.host}:{server.port}"
    parser.add_argument("--gateway", metavar="URL", default=url, help=f"base URL of a gateway (default {url})")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--insecure", action="store_true", help="do not verify the gateway's certificate")


def run(args: argparse.Namespace) -> int:
    """Print the state; 0 if all is well, 1 if not. Raises StartupFailed if the gateway does not answer."""
    state = asyncio.run(read_state(args.gateway, verify=not args.insecure))
    if args.json:
        document = {**msgspec.structs.asdict(state), "ok": state.is_well}
        print(msgspec.json.format(msgspec.json.encode(document)).decode())
    else:
        _show(Console(highlight=False), state)
    return 0 if state.is_well else 1


def _show(console: Console, state: GatewayState) -> None:
    colour = {"ok": "green", "degraded": "yellow"}.get(state.health, "red")
    console.print(f"{escape(state.url)}: [{colour}]{escape(state.health)}[/]", soft_wrap=True)
    for problem in state.problems:
        console.print(f"  {problem}", markup=False, soft_wrap=True)
    hosts = Table("host", "workers ready")
    for host, (num_ready, num) in state.hosts().items():
        hosts.add_row(escape(host or "of the gateway"), f"{num_ready} of {num}")
    gateways = Table("gateway", "state", "workers connected", "requests in flight")
    for gateway in state.gateways:
        links = [link for link in state.links if link.gateway == gateway.index]
        connected = f"{sum(link.connected for link in links)} of {len(links)}"
        in_flight = str(sum(link.num_in_flight for link in links))
        gateways.add_row(escape(gateway.index), _up(gateway.up, "does not respond"), connected, in_flight)
    workers = Table("worker", "state", "running", "waiting", "KV cache")
    for worker in state.workers:
        load = (str(worker.num_running), str(worker.num_waiting), f"{worker.kv_usage:.0%}")
        workers.add_row(escape(worker.name), _up(worker.ready, "lost"), *load)
    for table in (hosts, gateways, workers):
        if table.row_count:
            console.print(table)
    _show_store(console, state)


def _show_store(console: Console, state: GatewayState) -> None:
    store = state.store
    if store is None:
        console.print("store: not connected, or not needed by this model")
        return
    preparers = f"{store.num_preparers} preparers, {store.num_busy} busy, {store.num_queued} items queued"
    size, free = format_size(store.size_bytes), f"{store.free_bytes / store.size_bytes:.0%} free"
    console.print(f"store: {size}, {free}, {store.num_entries} entries; {preparers}")


def _up(is_up: bool, otherwise: str) -> str:
    return "[green]ready[/]" if is_up else f"[red]{otherwise}[/]"
