"""`medialane status`: the state of gateways and of what they are connected to (gateways of the port, store, workers and
links), from `/health` and `/metrics`, as tables or JSON; with --store, a store's."""

from __future__ import annotations

import argparse
import asyncio
import re
import secrets
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec
from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from medialane.cli.workers import add_insecure, default_url, gateway_at
from medialane.config import load_config
from medialane.gateway import metrics_key
from medialane.store.client import StoreClient
from medialane.store.messages import StoreHello, StoreStatus
from medialane.types.errors import MedialaneError, StartupFailed
from medialane.types.setting import format_bytes
from medialane.wire.address import parse_unix
from medialane.wire.config import RpcConfig

_TIMEOUT_S = 10.0
_STORE_TIMEOUT_S = 3.0
_KEY_FILES = ("metrics-key-file", "admin-key-file")
#: The gateway of a port without others, whose metrics have no such label.
_ONLY_GATEWAY = "0"
#: What the transport to a worker says about the store of its host.
_STORES = {"shm": "gateway's", "pull": "own", "inline": "none"}
#: Names of workers: HOST/NUMBER, HOST/encoder-NUMBER, HOST:PORT and HOST:PID, or the address that they listen at.
_HOST = re.compile(r"(?:tcp://)?\[?(?P<host>.+?)\]?(?::\d+)?(?:/(?:encoder-)?\d+)?", re.ASCII)
_Samples = Mapping[str, list[tuple[Mapping[str, str], float]]]

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
    parser.add_argument(
        "--gateway",
        metavar="URL",
        action="append",
        dest="gateways",
        help=f"base URL of a gateway (default {default_url()}), of one of several models with ?model=NAME; repeatable,"
        " for gateways of several hosts",
    )
    add_insecure(parser)
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
    urls = args.gateways or [default_url()]
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
            client = StoreClient(RpcConfig())
            await client.connect(address, hello)
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


def worker_host(name: str) -> str:
    """Return the host of a worker, as far as its name has it; empty for a worker of the gateway's host."""
    if name.startswith("unix:"):
        return ""
    match = _HOST.fullmatch(name)
    return match["host"] if match else name


class GatewayUp(msgspec.Struct, frozen=True):
    index: str
    up: bool


class WorkerUse(msgspec.Struct, frozen=True):
    """`state` is `ready`, `stalled` (its engine hangs) or `lost`; `ready` is whether it is the first."""

    name: str
    host: str
    ready: bool
    num_running: int
    num_waiting: int
    kv_usage: float
    role: str = "worker"
    state: str = "ready"


class Link(msgspec.Struct, frozen=True):
    """`transport` is how media reach the worker: shm, pull (by the store of its host), inline; empty if unknown."""

    gateway: str
    worker: str
    connected: bool
    num_in_flight: int
    transport: str = ""


class Host(msgspec.Struct, frozen=True):
    """A host of workers, encoders not counted. `store` is where they get media from: the `gateway's` store, one of
    their `own`, which copies from it, or `none`; empty if no worker is connected."""

    name: str
    num_ready: int
    num_workers: int
    store: str


class Store(msgspec.Struct, frozen=True):
    """The store of the gateway's host. Embeddings are outputs of encoders: `num_filled` were stored, `num_found` were
    used instead of an encoder, since the store was started."""

    size_bytes: int
    free_bytes: int
    num_entries: int
    num_preparers: int
    num_busy: int
    num_queued: int
    embedded_bytes: int = 0
    num_filled: int = 0
    num_found: int = 0


class GatewayState(msgspec.Struct, frozen=True):
    """`health` is `ok`, `degraded` or `unavailable`; `store` is None if the gateway is not connected to one. `memory`
    is the bytes of all processes that report to the gateway, by kind."""

    url: str
    health: str
    problems: tuple[str, ...]
    gateways: tuple[GatewayUp, ...]
    store: Store | None
    workers: tuple[WorkerUse, ...]
    links: tuple[Link, ...]
    memory: Mapping[str, int] = {}

    @property
    def is_well(self) -> bool:
        return self.health == "ok" and all(g.up for g in self.gateways) and all(link.connected for link in self.links)

    def connected_workers(self) -> set[str]:
        """Return the names of the workers that all gateways are connected to."""
        return {link.worker for link in self.links} - {link.worker for link in self.links if not link.connected}

    def hosts(self) -> list[Host]:
        """Return the hosts that have workers."""
        return [self._host(name) for name in dict.fromkeys(worker.host for worker in self.workers)]

    def _host(self, name: str) -> Host:
        of_host = (worker for worker in self.workers if worker.host == name and worker.role != "encoder")
        workers = {worker.name: worker.ready for worker in of_host}
        transports = {link.transport for link in self.links if link.worker in workers and link.transport}
        store = " or ".join(sorted(_STORES[transport] for transport in transports))
        return Host(name, sum(workers.values()), len(workers), store)


class _Health(msgspec.Struct):
    status: str = "ok"
    problems: tuple[str, ...] = ()


async def read_state(url: str, *, key: str = "", verify: bool = True, timeout_s: float = _TIMEOUT_S) -> GatewayState:
    """Ask the gateway at a base URL, with the `key` of its metrics; `verify` its certificate, if it has one. Raises
    StartupFailed."""
    async with gateway_at(url, key, verify=verify, timeout_s=timeout_s) as gateway:
        health_status, health, _ = await gateway.fetch("GET", "/health")
        status, metrics, _ = await gateway.fetch("GET", "/metrics")
    url = gateway.url
    if status in {401, 403}:
        wrong = "does not accept this key" if key else "needs a key"
        raise StartupFailed(f"/metrics of {url} {wrong}: set MEDIALANE_METRICS_KEY, or --metrics-key-file")
    if health_status not in {200, 503} or status != 200:
        raise StartupFailed(f"{url} is not a gateway: /health has status {health_status}, /metrics {status}")
    return parse_state(url, health, metrics)


def parse_state(url: str, health: bytes, metrics: bytes) -> GatewayState:
    """Return the state from the bodies of `/health` and `/metrics`. Raises StartupFailed if it is no gateway."""
    try:
        reported = msgspec.json.decode(health, type=_Health) if health else _Health()
        families = text_string_to_metric_families(metrics.decode())
        samples: dict[str, list[tuple[Mapping[str, str], float]]] = {}
        for family in families:
            if family.name.startswith("medialane_"):
                for sample in family.samples:
                    samples.setdefault(sample.name, []).append((sample.labels, sample.value))
    except (msgspec.DecodeError, UnicodeDecodeError, ValueError) as error:
        raise StartupFailed(f"{url} is not a gateway of medialane: its /health or /metrics cannot be parsed") from error
    if models := samples.get("medialane_model_up"):
        first, *_ = named = [labels["model_name"] for labels, _ in models]
        several = f"{url} has several models ({', '.join(named)}): add one to its URL: {url}?model={first}"
        raise StartupFailed(several)
    if "medialane_request_seconds_count" not in samples:
        raise StartupFailed(f"{url} is not a gateway of medialane: its /metrics have no medialane_... series")
    return GatewayState(
        url,
        reported.status,
        reported.problems,
        _gateways(samples),
        _store_of(samples),
        _workers(samples),
        _links(samples),
        _memory(samples),
    )


def _gateways(samples: _Samples) -> tuple[GatewayUp, ...]:
    up = samples.get("medialane_gateway_up", [({"gateway": _ONLY_GATEWAY}, 1.0)])
    return tuple(GatewayUp(labels["gateway"], value == 1) for labels, value in up)


def _store_of(samples: _Samples) -> Store | None:
    arena = _by_label(samples, "medialane_arena_bytes", "kind")
    if not arena:
        return None
    preparers = _by_label(samples, "medialane_preparers", "state")
    embeddings = _by_label(samples, "medialane_store_embeddings_total", "outcome")
    return Store(
        int(arena["size"]),
        int(arena["free"]),
        int(_value(samples, "medialane_arena_entries")),
        int(preparers.get("alive", 0)),
        int(preparers.get("busy", 0)),
        int(_value(samples, "medialane_preparer_queue")),
        int(_by_label(samples, "medialane_arena_media_bytes", "kind").get("embedded", 0)),
        int(embeddings.get("filled", 0)),
        int(embeddings.get("found", 0)),
    )


def _workers(samples: _Samples) -> tuple[WorkerUse, ...]:
    running, waiting, usage = (
        _by_label(samples, f"medialane_worker_{name}", "worker") for name in ("running", "waiting", "kv_usage_ratio")
    )
    roles = {labels["worker"]: labels["role"] for labels, _ in samples.get("medialane_worker_role", [])}
    states = {  # one for all ranks
        labels["worker"]: labels["state"] for labels, value in samples.get("medialane_worker_state", []) if value == 1
    }
    return tuple(
        WorkerUse(
            name,
            worker_host(name),
            state == "ready",
            int(running.get(name, 0)),
            int(waiting.get(name, 0)),
            round(usage.get(name, 0.0), 4),
            roles.get(name, "worker"),
            state,
        )
        for name, state in sorted(states.items())
    )


def _links(samples: _Samples) -> tuple[Link, ...]:
    in_flight = {_ends(labels): value for labels, value in samples.get("medialane_worker_in_flight", [])}
    links = ((_ends(labels), value) for labels, value in samples.get("medialane_worker_connected", []))
    transports = {_ends(labels): labels["transport"] for labels, _ in samples.get("medialane_worker_transport", [])}
    return tuple(
        Link(*ends, value == 1, int(in_flight.get(ends, 0)), transports.get(ends, "")) for ends, value in sorted(links)
    )


def _memory(samples: _Samples) -> dict[str, int]:
    sizes = Counter[str]()
    for labels, value in samples.get("medialane_process_memory_bytes", []):
        sizes[labels["kind"]] += int(value)
    return dict(sizes)


def _ends(labels: Mapping[str, str]) -> tuple[str, str]:
    return labels.get("gateway", _ONLY_GATEWAY), labels["worker"]


def _by_label(samples: _Samples, name: str, label: str) -> dict[str, float]:
    return {labels[label]: value for labels, value in samples.get(name, [])}


def _value(samples: _Samples, name: str) -> float:
    series: Iterable[Any] = samples.get(name, [])
    return next((value for _, value in series), 0.0)
