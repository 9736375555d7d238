"""Gateways that run, as commands ask them: the flags that name them, their administrative interface, and the state of
their cluster (gateways of the port, store, workers and links), from `/health` and `/metrics`.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import aiohttp
import msgspec
from prometheus_client.parser import text_string_to_metric_families

from medialane.config import ServerConfig, load_config
from medialane.gateway import admin_key, worker_host
from medialane.tools.http_failure import describe_failure
from medialane.types.errors import StartupFailed

_TIMEOUT_S = 10.0
#: The gateway of a port without others, whose metrics have no such label.
_ONLY_GATEWAY = "0"
#: What the transport to a worker says about the store of its host.
_STORES = {"shm": "gateway's", "pull": "own", "inline": "none"}

_Samples = Mapping[str, list[tuple[Mapping[str, str], float]]]
_REQUEST_TIMEOUT_S = 30.0
_KEY_FILE = "admin-key-file"
_NOT_OURS = "is not a gateway of this release of medialane"

T = TypeVar("T")

KEY_HELP = """\
A gateway with --admin-key-file needs that key, from the same file or from MEDIALANE_ADMIN_KEY. One with only API keys
needs one of those (MEDIALANE_API_KEYS) for `workers`; `reload` is then only for programs on the gateway's machine, if
it listens on 127.0.0.1."""


def default_url() -> str:
    """Return the base URL of a gateway with default settings."""
    server = ServerConfig()
    return f"http://{server.host}:{server.port}"


def add_gateways(parser: argparse.ArgumentParser) -> None:
    """Add --gateway, which may be given for each of several hosts, and --insecure; `gateway_urls` reads the former."""
    parser.add_argument(
        "--gateway",
        metavar="URL",
        action="append",
        dest="gateways",
        help=f"base URL of a gateway (default {default_url()}), of one of several models with ?model=NAME; repeatable,"
        " for gateways of several hosts",
    )
    add_insecure(parser)


def add_insecure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--insecure", action="store_true", help="do not verify the gateway's certificate")


def gateway_urls(args: argparse.Namespace) -> list[str]:
    return args.gateways or [default_url()]


def base_url(url: str) -> str:
    """Return the URL of a gateway's root, of that or of its /v1 or /medialane, with its query. Raises StartupFailed."""
    root, question, query = url.partition("?")
    root = root.rstrip("/").removesuffix("/v1").removesuffix("/medialane")
    if not root.startswith(("http://", "https://")):
        raise StartupFailed(f"--gateway {url}: not a URL such as http://127.0.0.1:8000")
    return f"{root}{question}{query}"


def endpoint(url: str, path: str) -> str:
    """Return the URL of a path of the gateway at a base URL, whose query names one of its models."""
    root, question, query = url.partition("?")
    return f"{root}{path}{question}{query}"


def several_models(url: str, names: Iterable[str]) -> StartupFailed:
    """Return the error if the base URL is that of several models."""
    first, *_ = named = list(names)
    return StartupFailed(f"{url} has several models ({', '.join(named)}): add one to its URL: {url}?model={first}")


class GatewayNotAnswering(StartupFailed, code="gateway_not_answering"):
    """The gateway may be restarting."""


def add_gateway(parser: argparse.ArgumentParser) -> None:
    """Add the flags that `connected` reads."""
    url = default_url()
    text = f"base URL of a gateway (default {url}), of one of several models with ?model=NAME"
    parser.add_argument("--gateway", metavar="URL", default=url, help=text)
    parser.add_argument(f"--{_KEY_FILE}", metavar="FILE", help="file with the admin key of the gateway")
    add_insecure(parser)


class GatewayAdmin:
    """`url` is the base URL."""

    def __init__(self, session: aiohttp.ClientSession, url: str, *, has_key: bool) -> None:
        self._session = session
        self.url = url
        self._has_key = has_key

    async def ask(self, kind: type[T], method: str, path: str) -> T:
        """Return the response, decoded. Raises StartupFailed: GatewayNotAnswering if there is none."""
        try:
            async with self._session.request(method, endpoint(self.url, path)) as response:
                body = await response.read()
        except aiohttp.InvalidURL as error:
            raise StartupFailed(f"--gateway {self.url}: not a URL such as http://127.0.0.1:8000") from error
        except (aiohttp.ClientError, TimeoutError) as error:
            raise GatewayNotAnswering(f"no gateway answers at {self.url}: {describe_failure(error)}") from error
        if response.status != 200:
            raise StartupFailed(self._reason(response.status, body))
        try:
            return msgspec.json.decode(body, type=kind)
        except msgspec.DecodeError as error:
            raise StartupFailed(f"{self.url} {_NOT_OURS}") from error

    def _reason(self, status: int, body: bytes) -> str:
        if status in (401, 403):
            wrong = "does not accept this key" if self._has_key else "needs a key"
            what = f"the gateway at {self.url} {wrong} for administrative calls"
            return f"{what}: set MEDIALANE_ADMIN_KEY (that of a client if the server has no other), or --{_KEY_FILE}"
        if message := _message(body):
            return message
        if status in (404, 405):
            return f"{self.url} {_NOT_OURS}"
        return f"the gateway at {self.url} answers with status {status}"


@asynccontextmanager
async def connected(args: argparse.Namespace) -> AsyncIterator[GatewayAdmin]:
    """Connect to the gateway of the flags of `add_gateway`. Raises StartupFailed."""
    files = {_KEY_FILE: args.admin_key_file} if args.admin_key_file is not None else {}
    key = admin_key(load_config(files).gateway)
    url = base_url(args.gateway)
    # One of several gateways that stops must not hold connections of ours: each request has one of its own.
    connector = aiohttp.TCPConnector(ssl=not args.insecure, force_close=True)
    timeout = aiohttp.ClientTimeout(total=_REQUEST_TIMEOUT_S)
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    async with aiohttp.ClientSession(timeout=timeout, connector=connector, headers=headers) as session:
        yield GatewayAdmin(session, url, has_key=bool(key))


def _message(body: bytes) -> str:
    """Return the message of an error response; empty if it is none of ours."""
    try:
        document: Any = msgspec.json.decode(body)
        return str(document["error"]["message"])
    except (msgspec.DecodeError, KeyError, TypeError):
        return ""


class Gateway(msgspec.Struct, frozen=True):
    index: str
    up: bool


class Worker(msgspec.Struct, frozen=True):
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
    gateways: tuple[Gateway, ...]
    store: Store | None
    workers: tuple[Worker, ...]
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
        of_host = (worker for worker in self.workers if worker.host == name and worker.role == "worker")
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
    url = base_url(url)
    timeout = aiohttp.ClientTimeout(total=timeout_s)
    connector = aiohttp.TCPConnector(ssl=verify)
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    try:
        async with aiohttp.ClientSession(timeout=timeout, connector=connector, headers=headers) as session:
            health_status, health = await _get(session, endpoint(url, "/health"))
            status, metrics = await _get(session, endpoint(url, "/metrics"))
    except aiohttp.InvalidURL as error:
        raise StartupFailed(f"--gateway {url}: not a URL such as http://127.0.0.1:8000") from error
    except TimeoutError as error:
        raise StartupFailed(f"the gateway at {url} has not answered within {timeout_s:g} s") from error
    except aiohttp.ClientError as error:
        raise StartupFailed(f"no gateway answers at {url}: {describe_failure(error)}") from error
    if status in {401, 403}:
        wrong = "does not accept this key" if key else "needs a key"
        raise StartupFailed(f"/metrics of {url} {wrong}: set MEDIALANE_METRICS_KEY, or --metrics-key-file")
    if health_status not in {200, 503} or status != 200:
        raise StartupFailed(f"{url} is not a gateway: /health has status {health_status}, /metrics {status}")
    return parse_state(url, health, metrics)


async def _get(session: aiohttp.ClientSession, url: str) -> tuple[int, bytes]:
    async with session.get(url) as response:
        return response.status, await response.read()


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
        raise several_models(url, [labels["model_name"] for labels, _ in models])
    if "medialane_request_seconds_count" not in samples:
        raise StartupFailed(f"{url} is not a gateway of medialane: its /metrics have no medialane_... series")
    return GatewayState(
        url,
        reported.status,
        reported.problems,
        _gateways(samples),
        _store(samples),
        _workers(samples),
        _links(samples),
        _memory(samples),
    )


def _gateways(samples: _Samples) -> tuple[Gateway, ...]:
    up = samples.get("medialane_gateway_up", [({"gateway": _ONLY_GATEWAY}, 1.0)])
    return tuple(Gateway(labels["gateway"], value == 1) for labels, value in up)


def _store(samples: _Samples) -> Store | None:
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


def _workers(samples: _Samples) -> tuple[Worker, ...]:
    running, waiting, usage = (
        _by_label(samples, f"medialane_worker_{name}", "worker") for name in ("running", "waiting", "kv_usage_ratio")
    )
    roles = {labels["worker"]: labels["role"] for labels, _ in samples.get("medialane_worker_role", [])}
    states = {  # one for all ranks
        labels["worker"]: labels["state"] for labels, value in samples.get("medialane_worker_state", []) if value == 1
    }
    return tuple(
        Worker(
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
