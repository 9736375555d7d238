"""`medialane workers`: lists and drains the workers of a gateway, and of all gateways of its port. Other commands reach
a gateway that runs as this one does: by its URL, and its administrative interface (`GatewayAdmin`)."""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any, NamedTuple, TypeVar
from urllib.parse import quote

import aiohttp
import msgspec
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from medialane.config import ServerConfig, load_config
from medialane.gateway import WorkerInfo, admin_key
from medialane.tools.http_failure import describe_failure
from medialane.types.errors import StartupFailed

T = TypeVar("T")

_POLL_S = 0.3
_DEFAULT_TIMEOUT_S = 900.0
_PATH = "/medialane/workers"
_REQUEST_TIMEOUT_S = 30.0
_KEY_FILE = "admin-key-file"
_NOT_OURS = "is not a gateway of this release of medialane"

KEY_HELP = """\
A gateway with --admin-key-file needs that key, from the same file or from MEDIALANE_ADMIN_KEY. One with only API keys
needs a client's key (MEDIALANE_API_KEYS) for `workers`; `reload` is then only for programs on the gateway's machine, if
it listens on 127.0.0.1."""

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
    return asyncio.run(_run(args))


async def _run(args: argparse.Namespace) -> int:
    if args.action == "drain":
        _check_drain(args)
    async with connected(args) as gateway:
        return await (_drain if args.action == "drain" else _list)(gateway, args)


async def _list(gateway: GatewayAdmin, args: argparse.Namespace) -> int:
    workers = await gateway.workers()
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


async def _drain(gateway: GatewayAdmin, args: argparse.Namespace) -> int:
    before = {worker.name: worker for worker in await gateway.workers()}
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


async def _drain_one(gateway: GatewayAdmin, name: str, *, returns: bool) -> None:
    """Drain one worker, and wait until it has stopped, and if it `returns`, until it is ready again."""
    started = time.monotonic()
    workers = await gateway.workers()
    run = (await gateway.drain(name)).run
    if not any(each.state == "ready" and each.name != name and each.role != "encoder" for each in workers):
        print(f"{name} is the only worker that is ready: until it is back, requests wait or fail", flush=True)
    shown = ""
    while True:
        worker = await gateway.worker(name)
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


def default_url() -> str:
    """Return the base URL of a gateway with default settings."""
    server = ServerConfig()
    return f"http://{server.host}:{server.port}"


def add_insecure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--insecure", action="store_true", help="do not verify the gateway's certificate")


def base_url(url: str) -> str:
    """Return the URL of a gateway's root, of that or of its /v1 or /medialane, with its query. Raises StartupFailed."""
    root, question, query = url.partition("?")
    root = root.rstrip("/").removesuffix("/v1").removesuffix("/medialane")
    if not root.startswith(("http://", "https://")):
        raise StartupFailed(f"{url}: not a URL such as http://127.0.0.1:8000")
    return f"{root}{question}{query}"


def endpoint(url: str, path: str) -> str:
    """Return the URL of a path of the gateway at a base URL, whose query names one of its models."""
    root, question, query = url.partition("?")
    return f"{root}{path}{question}{query}"


class GatewayNotAnswering(StartupFailed, code="gateway_not_answering"):
    """The gateway may be restarting."""


def add_gateway(parser: argparse.ArgumentParser) -> None:
    """Add the flags that `connected` reads."""
    url = default_url()
    text = f"base URL of a gateway (default {url}), of one of several models with ?model=NAME"
    parser.add_argument("--gateway", metavar="URL", default=url, help=text)
    parser.add_argument(f"--{_KEY_FILE}", metavar="FILE", help="file with the admin key of the gateway")
    add_insecure(parser)


class Fetched(NamedTuple):
    """A response."""

    status: int
    body: bytes
    server_timing: str


class GatewayAdmin:
    """The gateway at the base URL `url`, and its administrative interface."""

    def __init__(self, session: aiohttp.ClientSession, url: str, *, has_key: bool) -> None:
        self._session = session
        self.url = url
        self._has_key = has_key

    async def fetch(self, method: str, path: str, document: object = None) -> Fetched:
        """Return the response to a request with this JSON, if it is not None. Raises StartupFailed: GatewayNotAnswering
        if there is none."""
        try:
            async with self._session.request(method, endpoint(self.url, path), json=document) as response:
                timing = response.headers.get("server-timing", "")
                return Fetched(response.status, await response.read(), timing)
        except aiohttp.InvalidURL as error:
            raise StartupFailed(f"{self.url}: not a URL such as http://127.0.0.1:8000") from error
        except TimeoutError as error:
            late = f"has not answered within {self._session.timeout.total:g} s"
            raise GatewayNotAnswering(f"the gateway at {self.url} {late}") from error
        except aiohttp.ClientError as error:
            raise GatewayNotAnswering(f"no gateway answers at {self.url}: {describe_failure(error)}") from error

    async def ask(self, kind: type[T], method: str, path: str) -> T:
        """Return the response, decoded. Raises StartupFailed: GatewayNotAnswering if there is none."""
        status, body, _ = await self.fetch(method, path)
        if status != 200:
            raise StartupFailed(self._reason(status, body))
        try:
            return msgspec.json.decode(body, type=kind)
        except msgspec.DecodeError as error:
            raise StartupFailed(f"{self.url} {_NOT_OURS}") from error

    def _reason(self, status: int, body: bytes) -> str:
        if status in (401, 403):
            wrong = "does not accept this key" if self._has_key else "needs a key"
            what = f"the gateway at {self.url} {wrong} for administrative calls"
            return f"{what}: set MEDIALANE_ADMIN_KEY (that of a client if the server has no other), or --{_KEY_FILE}"
        if message := error_message(body):
            return message
        if status in (404, 405):
            return f"{self.url} {_NOT_OURS}"
        return f"the gateway at {self.url} answers with status {status}"

    async def workers(self, *, is_patient: bool = False) -> Sequence[WorkerInfo]:
        """Return the workers; if it `is_patient`, ask a gateway that does not answer again. Raises StartupFailed."""
        while True:
            try:
                return await self.ask(list[WorkerInfo], "GET", _PATH)
            except GatewayNotAnswering:
                if not is_patient:
                    raise
                await asyncio.sleep(_POLL_S)

    async def worker(self, name: str) -> WorkerInfo | None:
        """Return a worker, whatever gateway of the port restarts meanwhile. Raises StartupFailed."""
        return next((each for each in await self.workers(is_patient=True) if each.name == name), None)

    async def drain(self, name: str) -> WorkerInfo:
        """Have a worker drain; return it as it was. Raises StartupFailed."""
        return await self.ask(WorkerInfo, "POST", f"{_PATH}/{quote(name, safe='')}/drain")


@asynccontextmanager
async def connected(args: argparse.Namespace) -> AsyncIterator[GatewayAdmin]:
    """Connect to the gateway of the flags of `add_gateway`. Raises StartupFailed."""
    files = {_KEY_FILE: args.admin_key_file} if args.admin_key_file is not None else {}
    async with gateway_at(args.gateway, admin_key(load_config(files).gateway), verify=not args.insecure) as gateway:
        yield gateway


@asynccontextmanager
async def gateway_at(
    url: str, key: str, *, verify: bool, timeout_s: float = _REQUEST_TIMEOUT_S
) -> AsyncIterator[GatewayAdmin]:
    """Connect to the gateway at a URL, which gets the key if it is not empty; `verify` its certificate, if it has one.
    Raises StartupFailed."""
    url = base_url(url)
    # One of several gateways that stops must not hold connections of ours: each request has one of its own.
    connector = aiohttp.TCPConnector(ssl=verify, force_close=True)
    timeout = aiohttp.ClientTimeout(total=timeout_s)
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    async with aiohttp.ClientSession(timeout=timeout, connector=connector, headers=headers) as session:
        yield GatewayAdmin(session, url, has_key=bool(key))


def error_message(body: bytes) -> str:
    """Return the message of an error response; empty if it is not one of ours."""
    try:
        document: Any = msgspec.json.decode(body)
        return str(document["error"]["message"])
    except (msgspec.DecodeError, KeyError, TypeError):
        return ""
