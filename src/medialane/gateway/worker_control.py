"""What an operator does with single workers: list, add, drain and remove them, at all gateways of a port.

Theory of operation. The gateway that is asked validates and changes its own pool, writes the change to the file of all
(`ChangedWorkersFile`), and asks the others to follow it. One that does not answer, or starts later, reads the file when
it starts. Workers that join by themselves are in no list: they are drained, not removed.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import Literal

import msgspec

from medialane.core.errors import InvalidRequest, MedialaneError, NoWorkerReady, StartupFailed, WorkerInUse
from medialane.core.request import WorkerRole, WorkerState
from medialane.gateway.changed_workers import ChangedWorkers, ChangedWorkersFile
from medialane.gateway.gateway_metrics import AskOthers, no_others
from medialane.gateway.worker_link.client import RpcClient
from medialane.gateway.worker_link.link import WorkerLink
from medialane.gateway.worker_pool import WorkerPool
from medialane.wire.address import parse_named
from medialane.wire.config import RpcConfig
from medialane.wire.security import check_address

logger = logging.getLogger(__name__)

#: What gateways of a port ask each other: the workers that one is connected to, and to follow the file.
CONNECTED, FOLLOW = "connected-workers", "follow-workers"


class WorkerInfo(msgspec.Struct, frozen=True):
    """A worker as its operator sees it. `run` is different each time that it is started, and empty while it is not
    connected; `num_requests` are those of all gateways. `origin` is who has named it: `configured` (--worker), `added`
    (by an operator), or `joined` (itself). `unreachable_from` are the gateways of the port that have no connection to
    it, or do not answer."""

    name: str
    role: WorkerRole
    state: WorkerState
    run: str
    num_requests: int
    address: str = ""
    origin: Literal["configured", "added", "joined"] = "configured"
    unreachable_from: list[str] = []


class WorkerControl:
    """`configured` are the addresses of --worker by name, `index` is that of this gateway among those that `ask_others`
    asks."""

    def __init__(
        self,
        workers: WorkerPool,
        *,
        configured: Mapping[str, str] | None = None,
        file: ChangedWorkersFile | None = None,
        rpc: RpcConfig | None = None,
        ask_others: AskOthers = no_others,
        index: str = "0",
    ) -> None:
        self._workers = workers
        self._configured = configured or {}
        self._file = file or ChangedWorkersFile()
        self._rpc = rpc or RpcConfig()
        self._ask_others = ask_others
        self._index = index
        self._changing = asyncio.Lock()
        #: A lock of its own: two gateways that change workers ask each other to follow.
        self._following = asyncio.Lock()

    @property
    def answers(self) -> Mapping[str, Callable[[str], Awaitable[bytes]]]:
        """What other gateways of the port may ask."""
        return {CONNECTED: self._answer_connected, FOLLOW: self._follow}

    async def listed(self, _parameters: Mapping[str, str]) -> bytes:
        """Workers and encoders, with their states."""
        others = await self._ask_others(CONNECTED)
        connected = {self._index: self._connected(), **{index: _names(answer) for index, answer in others.items()}}
        infos = []
        for link in self._workers.links.values():
            missing = sorted((index for index, names in connected.items() if link.name not in names), key=int)
            infos.append(msgspec.structs.replace(self._info(link), unreachable_from=missing))
        return msgspec.json.encode(infos)

    async def drain(self, parameters: Mapping[str, str]) -> bytes:
        """Have one worker take no new requests, and stop when its requests have ended or moved to others."""
        link = self._link(parameters["name"])
        if not link.drain():
            raise NoWorkerReady(f"worker {link.name} is not connected", retry_after_s=5)
        return msgspec.json.encode(self._info(link))

    async def add(self, parameters: Mapping[str, str]) -> bytes:
        """Connect to a further worker, which must be of the same model and release, and send it requests."""
        given = parameters.get("address", "")
        try:
            name, address = parse_named(f"{parameters['name']}={given}", "address")
            await asyncio.to_thread(check_address, address, "address", self._rpc)
        except StartupFailed as error:
            raise InvalidRequest(error.message, param="address") from error
        async with self._changing:
            if name in self._workers.links:
                raise InvalidRequest(f"there is a worker named {name} already", param="name")
            try:
                client = await self._workers.connect(name, address)
            except MedialaneError as error:
                reason = f"worker {name} is not added: {address}: {error.message}"
                raise InvalidRequest(reason, param="address") from error
            clients = {name: client}
            try:
                await self._change(lambda changed: changed.with_added(name, address, self._configured), clients)
            finally:
                for unused in clients.values():
                    unused.leave()
            logger.warning("an operator has added worker %s at %s", name, address)
            return msgspec.json.encode(self._info(self._workers.links[name]))

    async def remove(self, parameters: Mapping[str, str]) -> bytes:
        """Forget a worker; one that has requests only if it drains, when it has stopped, or by `force`."""
        async with self._changing:
            link, is_forced = self._link(parameters["name"]), _truth(parameters.get("force", "false"))
            if self._workers.is_joined(link.name):
                raise InvalidRequest(f"worker {link.name} has joined by itself: drain or stop it", param="name")
            info = self._info(link)
            if info.num_requests and info.state not in ("draining", "lost") and not is_forced:
                raise WorkerInUse(
                    f"worker {link.name} has {info.num_requests} requests: drain it first, or use force, which moves "
                    "them to other workers",
                    param="name",
                )
            await self._change(lambda changed: changed.with_removed(link.name, self._configured), {})
            logger.warning("an operator has removed worker %s", link.name)
            return msgspec.json.encode(info)

    async def _change(self, change: Callable[[ChangedWorkers], ChangedWorkers], clients: dict[str, RpcClient]) -> None:
        """Change the file, and have all gateways follow it. Raises StartupFailed if it cannot be written."""
        await asyncio.to_thread(self._file.change, change)
        await self._have_workers_of_file(clients)
        for index, answer in (await self._ask_others(FOLLOW)).items():
            if answer is None:
                logger.warning("gateway %s has not followed a change of workers: it does when it starts again", index)

    async def _follow(self, _path: str) -> bytes:
        """Another gateway has written the file."""
        await self._have_workers_of_file({})
        return b"true"

    async def _have_workers_of_file(self, clients: dict[str, RpcClient]) -> None:
        """Have the workers of the file and no others, but those that join; `clients` are connections to new ones, of
        which those that are used are taken out."""
        async with self._following:
            wanted = (await asyncio.to_thread(self._file.read)).applied_to(self._configured)
            links = self._workers.links
            for name in [name for name, link in links.items() if link.address and link.address != wanted.get(name)]:
                self._workers.remove(name)
            for name, address in wanted.items():
                if name not in links or links[name].is_leaving:
                    self._workers.add(name, address, clients.pop(name, None))

    async def _answer_connected(self, _path: str) -> bytes:
        return msgspec.json.encode(sorted(self._connected()))

    def _connected(self) -> set[str]:
        return {link.name for link in self._workers.links.values() if link.client is not None}

    def _link(self, name: str) -> WorkerLink:
        if (link := self._workers.links.get(name)) is None:
            known = ", ".join(self._workers.links) or "none"
            raise InvalidRequest(f"there is no worker named {name[:200]}; the workers are: {known}", param="name")
        return link

    def _info(self, link: WorkerLink) -> WorkerInfo:
        endpoints = link.endpoints()
        num_reported = sum(endpoint.load.num_running + endpoint.load.num_waiting for endpoint in endpoints)
        origin: Literal["configured", "added", "joined"] = (
            "joined"
            if self._workers.is_joined(link.name)
            else "configured"
            if self._configured.get(link.name) == link.address
            else "added"
        )
        num_requests = max(num_reported, endpoints[0].num_in_flight)
        return WorkerInfo(link.name, link.role, link.state, link.worker_id, num_requests, link.address, origin)


def _names(answer: bytes | None) -> set[str]:
    """Return the names that another gateway has answered; none if it does not answer, or is of another version."""
    try:
        return set() if answer is None else msgspec.json.decode(answer, type=set[str])
    except msgspec.DecodeError:
        return set()


def _truth(text: str) -> bool:
    if text not in ("true", "false"):
        raise InvalidRequest("force must be true or false", param="force")
    return text == "true"
