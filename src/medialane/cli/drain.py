"""`medialane drain`: has workers stop one after the other, without a lost request, and waits until each is back."""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import quote

import aiohttp
import msgspec

from medialane.cli.gateway_state import read_state
from medialane.cli.gateway_url import add_insecure, base_url, default_url, endpoint
from medialane.config import load_config
from medialane.core.errors import StartupFailed
from medialane.core.http_failure import describe_failure
from medialane.gateway.access import admin_key
from medialane.gateway.administration import WorkerInfo

_POLL_S = 0.3
_REQUEST_TIMEOUT_S = 10.0
_DEFAULT_TIMEOUT_S = 900.0
_KEY_FILE = "admin-key-file"

_EPILOG = """\
A worker that drains takes no new requests. Answers that end within its --drain-timeout end there, the others go on at
another worker. Then it exits, and is started again by what supervises it: `medialane serve` (at once), systemd,
Kubernetes. So this restarts all workers of a gateway under load, and no request is lost:

  medialane drain --all

Workers are named as in `medialane status`. The next one is drained when the last one is ready again, at every gateway
of the port; if it is not within --timeout, the others are left as they are, and the exit status is 1. With --no-wait
the command ends when the worker has stopped: for one that is not to come back, and that nothing restarts. SIGTERM to
the worker's process does the same.

A gateway with --admin-key-file needs that key, from the same file or from MEDIALANE_ADMIN_KEY; one with only API keys
needs one of those (MEDIALANE_API_KEYS).

examples:
  medialane drain node1/0
  medialane drain node1/0 node1/1 --gateway https://10.0.0.1:8000 --admin-key-file /etc/medialane/admin-key
  medialane drain --all --timeout 1800
  medialane drain node2/3 --no-wait"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = _EPILOG
    url = default_url()
    parser.add_argument("workers", metavar="WORKER", nargs="*", help="name of a worker or encoder")
    parser.add_argument("--all", action="store_true", help="all workers and encoders that are connected")
    parser.add_argument(
        "--gateway",
        metavar="URL",
        default=url,
        help=f"base URL of a gateway (default {url}), of one of several models with ?model=NAME",
    )
    parser.add_argument(
        "--timeout",
        metavar="SECONDS",
        type=float,
        default=_DEFAULT_TIMEOUT_S,
        help=f"longest time for one worker to stop and to be ready again (default {_DEFAULT_TIMEOUT_S:g})",
    )
    parser.add_argument("--no-wait", action="store_true", help="do not wait until it is ready again (one worker only)")
    parser.add_argument(f"--{_KEY_FILE}", metavar="FILE", help="file with the admin key of the gateway")
    add_insecure(parser)


def run(args: argparse.Namespace) -> int:
    """Drain the workers; 0 if all of them are back, 1 if one is not in time. Raises StartupFailed."""
    if bool(args.workers) == args.all:
        raise StartupFailed("name the workers to drain (`medialane status` lists them), or use --all")
    if args.no_wait and len(args.workers) != 1:
        raise StartupFailed("--no-wait is for one worker: without waiting, several would be away at once")
    files = {_KEY_FILE: args.admin_key_file} if args.admin_key_file is not None else {}
    return asyncio.run(_drain(args, admin_key(load_config(files).gateway)))


async def _drain(args: argparse.Namespace, key: str) -> int:
    async with _Gateway.connected(args.gateway, key=key, verify=not args.insecure) as gateway:
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


async def _drain_one(gateway: _Gateway, name: str, *, returns: bool) -> None:
    """Drain one worker, and wait until it has stopped, and if it `returns`, until it is ready again."""
    started = time.monotonic()
    workers = await gateway.workers()
    run = (await gateway.drain(name)).run
    if not any(each.state == "ready" and each.name != name and each.role == "worker" for each in workers):
        print(f"{name} is the only worker that is ready: until it is back, requests wait or fail", flush=True)
    shown = ""
    while True:
        worker = next((each for each in await gateway.workers(is_patient=True) if each.name == name), None)
        has_stopped = worker is None or worker.run != run
        text = "stopped" if has_stopped else f"draining, {worker.num_requests} requests" if worker is not None else ""
        if text != shown:
            shown = text
            print(f"{name}: {text}", flush=True)
        if has_stopped and not returns:
            return
        if has_stopped and worker is not None and worker.state == "ready" and await gateway.all_reach(name):
            print(f"{name}: ready again after {time.monotonic() - started:.0f} s", flush=True)
            return
        await asyncio.sleep(_POLL_S)


class _Gateway:
    """The administrative interface of a gateway."""

    def __init__(self, session: aiohttp.ClientSession, url: str, *, key: str, verify: bool) -> None:
        self._session = session
        self._url = url
        self._key = key
        self._verify = verify

    @classmethod
    @asynccontextmanager
    async def connected(cls, url: str, *, key: str, verify: bool) -> AsyncIterator[_Gateway]:
        url = base_url(url)
        # One of several gateways that stops must not hold connections of ours: each request has one of its own.
        connector = aiohttp.TCPConnector(ssl=verify, force_close=True)
        timeout = aiohttp.ClientTimeout(total=_REQUEST_TIMEOUT_S)
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        async with aiohttp.ClientSession(timeout=timeout, connector=connector, headers=headers) as session:
            yield cls(session, url, key=key, verify=verify)

    async def workers(self, *, is_patient: bool = False) -> Sequence[WorkerInfo]:
        """Return the workers; if it `is_patient`, ask a gateway that does not answer again. Raises StartupFailed."""
        while True:
            try:
                return msgspec.json.decode(await self._ask("GET", "/medialane/workers"), type=list[WorkerInfo])
            except _NotAnswering:
                if not is_patient:
                    raise
                await asyncio.sleep(_POLL_S)
            except msgspec.DecodeError as error:
                raise StartupFailed(f"{self._url} is not a gateway of this release of medialane") from error

    async def drain(self, name: str) -> WorkerInfo:
        """Have a worker drain; return it as it was. Raises StartupFailed."""
        answer = await self._ask("POST", f"/medialane/workers/{quote(name, safe='')}/drain")
        return msgspec.json.decode(answer, type=WorkerInfo)

    async def all_reach(self, name: str) -> bool:
        """Return whether every gateway of the port is connected to a worker."""
        try:
            state = await read_state(self._url, key=self._key, verify=self._verify)
        except StartupFailed:
            return False
        return name in state.connected_workers()

    async def _ask(self, method: str, path: str) -> bytes:
        """Raises StartupFailed."""
        try:
            async with self._session.request(method, endpoint(self._url, path)) as response:
                body = await response.read()
        except aiohttp.InvalidURL as error:
            raise StartupFailed(f"--gateway {self._url}: not a URL such as http://127.0.0.1:8000") from error
        except (aiohttp.ClientError, TimeoutError) as error:
            raise _NotAnswering(f"no gateway answers at {self._url}: {describe_failure(error)}") from error
        match response.status:
            case 200:
                return body
            case 401 | 403:
                wrong = "does not accept this key" if self._key else "needs a key"
                what = f"the gateway at {self._url} {wrong} for administrative calls"
                raise StartupFailed(f"{what}: set MEDIALANE_ADMIN_KEY, or --{_KEY_FILE}")
            case 404:
                raise StartupFailed(f"{self._url} is not a gateway of this release of medialane")
            case status:
                raise StartupFailed(_message(body) or f"the gateway at {self._url} answers with status {status}")


class _NotAnswering(StartupFailed, code="gateway_not_answering"):
    """The gateway may be restarting."""


def _message(body: bytes) -> str:
    """Return the message of an error response; empty if it is none of ours."""
    try:
        document: Any = msgspec.json.decode(body)
        return str(document["error"]["message"])
    except (msgspec.DecodeError, KeyError, TypeError):
        return ""
