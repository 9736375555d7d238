"""`medialane status`: what gateways are connected to, as tables or JSON."""

from __future__ import annotations

import argparse
import asyncio
import secrets
from collections.abc import Sequence

import msgspec
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from medialane.cli.gateway_client import GatewayState, add_gateways, gateway_urls, read_state
from medialane.config import load_config
from medialane.gateway import metrics_key
from medialane.store.client import StoreClient
from medialane.store.messages import StoreHello, StoreStatus
from medialane.types.errors import MedialaneError, StartupFailed
from medialane.types.setting import format_bytes
from medialane.wire.address import parse_unix
from medialane.wire.config import RpcConfig

_STORE_TIMEOUT_S = 3.0
_KEY_FILES = ("metrics-key-file", "admin-key-file")

_EPILOG = """\
One line per host with workers says where they get media from: the gateway's store (shared memory), a store of their own
(which copies from the gateway's), or none (media travel in messages).

The exit status is 0 if all gateways of the port respond, each is connected to every worker, and the gateway reports
no problem; 1 if not; 2 if a gateway does not answer. With --store it is 0 if the store of this host answers, has
loaded its model's processor and reports no problem; 1 if not; 2 if it does not answer: a probe for containers.

A gateway with --metrics-key-file needs that key here, too: from the same file, or from MEDIALANE_METRICS_KEY. The admin
key (--admin-key-file, MEDIALANE_ADMIN_KEY) is accepted as well. A key is sent to every --gateway.

examples:
  medialane status
  medialane status --gateway http://10.0.0.1:8000 --gateway http://10.0.0.2:8000    # of two hosts
  medialane status --json
  medialane status --store unix:/run/medialane/store.sock"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = _EPILOG
    add_gateways(parser)
    parser.add_argument("--store", metavar="ADDRESS", help="of this host's store instead: its unix socket, unix:/path")
    for name in _KEY_FILES:
        parser.add_argument(f"--{name}", metavar="FILE", help="file with the key that the gateway's /metrics need")
    parser.add_argument("--json", action="store_true", help="print JSON: an object, or a list if --gateway is repeated")


def run(args: argparse.Namespace) -> int:
    """Print the states; 0 if all is well, 1 if not, 2 if one of several gateways does not answer. Raises StartupFailed
    if the only one, or the store, does not."""
    if args.store is not None:
        parse_unix(args.store, "--store")
        return asyncio.run(_store(args.store))
    urls = gateway_urls(args)
    files = {name: file for name in _KEY_FILES if (file := vars(args)[name.replace("-", "_")]) is not None}
    key = metrics_key(load_config(files).gateway)
    states = asyncio.run(_read(urls, key=key, verify=not args.insecure))
    if len(states) == 1 and isinstance(states[0], StartupFailed):
        raise states[0]
    if args.json:
        documents = [_document(url, state) for url, state in zip(urls, states, strict=True)]
        encoded = msgspec.json.encode(documents if len(documents) > 1 else documents[0])
        print(msgspec.json.format(encoded).decode())
    else:
        console = Console(highlight=False)
        for state in states:
            _show(console, state) if isinstance(state, GatewayState) else console.print(state.message, markup=False)
    return max(2 if isinstance(state, StartupFailed) else int(not state.is_well) for state in states)


async def _store(address: str) -> int:
    status = await _read_store(address)
    text = status.problem or ("ready" if status.has_started else "loading the model's processor")
    print(f"store: {text}")
    if (leases := status.stats.leases).num_bytes:
        sizes = f"{format_bytes(leases.num_bytes)} of {format_bytes(leases.max_bytes)}"
        print(f"media kept for clients: {leases.num_leases}, {sizes}")
    for hold in status.stats.holds:
        print(f"  held for {hold}")
    return int(text != "ready")


async def _read_store(address: str) -> StoreStatus:
    """Ask the store at a unix socket. Raises StartupFailed if it does not answer, or is of another release."""
    hello = StoreHello(client_id=secrets.token_hex(16))
    try:
        async with asyncio.timeout(_STORE_TIMEOUT_S):
            client = await StoreClient.connect(
                address, hello, RpcConfig(), holds={}, on_passed=_ignore, on_reclaim=_ignore
            )
            try:
                await client.refresh(_STORE_TIMEOUT_S)
            finally:
                await client.close()
    except MedialaneError as error:
        raise StartupFailed(f"{address}: {error.message}") from error
    except TimeoutError as error:
        raise StartupFailed(f"{address}: the media store did not respond within {_STORE_TIMEOUT_S:g} s") from error
    if client.status is None:
        raise StartupFailed(f"{address}: the media store closed the connection")
    return client.status


def _ignore(*_: object) -> None:
    """This client has no holds."""


async def _read(urls: Sequence[str], *, key: str, verify: bool) -> list[GatewayState | StartupFailed]:
    return await asyncio.gather(*(_read_one(url, key=key, verify=verify) for url in urls))


async def _read_one(url: str, *, key: str, verify: bool) -> GatewayState | StartupFailed:
    try:
        return await read_state(url, key=key, verify=verify)
    except StartupFailed as error:
        return error


def _document(url: str, state: GatewayState | StartupFailed) -> dict[str, object]:
    if isinstance(state, StartupFailed):
        return {"url": url, "ok": False, "problems": [state.message]}
    return {**msgspec.structs.asdict(state), "hosts": state.hosts(), "ok": state.is_well}


def _show(console: Console, state: GatewayState) -> None:
    colour = {"ok": "green", "degraded": "yellow"}.get(state.health, "red")
    console.print(f"{escape(state.url)}: [{colour}]{escape(state.health)}[/]", soft_wrap=True)
    for problem in state.problems:
        console.print(f"  {problem}", markup=False, soft_wrap=True)
    hosts = Table("host", "workers ready", "store")
    for host in state.hosts():
        name = escape(host.name or "of the gateway")
        hosts.add_row(name, f"{host.num_ready} of {host.num_workers}", host.store)
    gateways = Table("gateway", "state", "workers connected", "requests in flight")
    for gateway in state.gateways:
        links = [link for link in state.links if link.gateway == gateway.index]
        connected = f"{sum(link.connected for link in links)} of {len(links)}"
        in_flight = str(sum(link.num_in_flight for link in links))
        gateways.add_row(escape(gateway.index), _up(gateway.up, "does not respond"), connected, in_flight)
    workers = Table("worker", "role", "state", "running", "waiting", "KV cache")
    for worker in state.workers:
        load = (str(worker.num_running), str(worker.num_waiting), f"{worker.kv_usage:.0%}")
        workers.add_row(escape(worker.name), worker.role, _up(worker.ready, worker.state), *load)
    for table in (hosts, gateways, workers):
        if table.row_count:
            console.print(table)
    _show_store(console, state)
    if state.memory:
        sizes = ", ".join(f"{kind} {format_bytes(size)}" for kind, size in sorted(state.memory.items()))
        console.print(f"memory (proportional share, without the arena): {sizes}", soft_wrap=True)


def _show_store(console: Console, state: GatewayState) -> None:
    store = state.store
    if store is None:
        console.print("store: not connected, or not needed by this model")
        return
    preparers = f"{store.num_preparers} preparers, {store.num_busy} busy, {store.num_queued} items queued"
    size, free = format_bytes(store.size_bytes), f"{store.free_bytes / store.size_bytes:.0%} free"
    console.print(f"store: {size}, {free}, {store.num_entries} entries; {preparers}")
    counts = f"{store.num_filled} stored and {store.num_found} found since the store's start"
    console.print(f"embeddings: {format_bytes(store.embedded_bytes)}; {counts}", soft_wrap=True)


def _up(is_up: bool, otherwise: str) -> str:
    return "[green]ready[/]" if is_up else f"[red]{otherwise}[/]"
