"""The administrative interface of a gateway, as the commands for operators use it."""

from __future__ import annotations

import argparse
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import aiohttp
import msgspec

from medialane.cli.gateway_url import add_insecure, base_url, default_url, endpoint
from medialane.config import load_config
from medialane.gateway import admin_key
from medialane.tools.http_failure import describe_failure
from medialane.types.errors import StartupFailed

_REQUEST_TIMEOUT_S = 30.0
_KEY_FILE = "admin-key-file"
_NOT_OURS = "is not a gateway of this release of medialane"

T = TypeVar("T")

KEY_HELP = """\
A gateway with --admin-key-file needs that key, from the same file or from MEDIALANE_ADMIN_KEY. One with only API keys
needs one of those (MEDIALANE_API_KEYS) for `workers`; `reload` is then only for programs on the gateway's machine, if
it listens on 127.0.0.1."""


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
