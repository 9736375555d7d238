"""What operators do to workers.

Administrative calls to the engines: each is sent to every worker, and complete when all workers have executed it. Some
also go to the encoders that are connected: a lost one has no state to be changed.

Single workers, to list and drain them. Which there are is decided elsewhere: by --worker, by themselves when they join,
by Ray or Kubernetes.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Literal

import msgspec

from medialane.gateway.http.metrics import AskOthers, decoded, no_others
from medialane.gateway.workers.link import WorkerLink
from medialane.gateway.workers.pool import WorkerPool
from medialane.runtime.tasks import gather_or_cancel
from medialane.types.admin import AddLora, AdminCall, AdminResult, UnloadLora, changes_encoder, concerns_encoders
from medialane.types.errors import AdminCallIncomplete, InvalidRequest, MedialaneError, NoWorkerReady
from medialane.types.request import WorkerRole, WorkerState

logger = logging.getLogger(__name__)

#: Workers that an error names; the others are in the log.
MAX_NAMED = 8


async def administer(workers: WorkerPool, call: AdminCall, *, timeout_s: float) -> list[AdminResult]:
    """Execute `call` at every worker and return their results, in the configured order of the workers. What it does to
    caches is reported by the workers, to all their gateways.

    Raises the workers' InvalidRequest if all reject the call with the same error, AdminCallIncomplete naming the
    workers that have not executed it (lost workers included), NoWorkerReady if no worker can load an adapter.
    """
    links = _links(workers, call)
    if changes_encoder(call):
        call = msgspec.structs.replace(call, salt=secrets.token_hex(16))
    results = await gather_or_cancel([_result(link, call, timeout_s) for link in links])
    failed = {link: error for link, error in zip(links, results, strict=True) if isinstance(error, MedialaneError)}
    if failed:
        for link, error in failed.items():
            logger.warning("%s at worker %s: %s", type(call).__name__, link.name, error.message)
        raise _error(failed, links)
    return [result for result in results if not isinstance(result, MedialaneError)]


def _links(workers: WorkerPool, call: AdminCall) -> Sequence[WorkerLink]:
    """Return all workers; for adapters, the connected ones: others have none, and load one with the first request that
    names it."""
    links = workers.of_role("worker")
    if isinstance(call, AddLora | UnloadLora):
        links = [link for link in links if link.client is not None]
    if not links:
        raise NoWorkerReady("no worker is ready", retry_after_s=5)
    if concerns_encoders(call):
        links += [link for link in workers.of_role("encoder") if link.client is not None]
    return links


async def _result(link: WorkerLink, call: AdminCall, timeout_s: float) -> AdminResult | MedialaneError:
    client = link.client
    if client is None:
        return NoWorkerReady("not connected")
    try:
        return await client.calls.administer(call, timeout_s)
    except MedialaneError as error:
        return error


def _error(failed: Mapping[WorkerLink, MedialaneError], called: Sequence[WorkerLink]) -> MedialaneError:
    first = next(iter(failed.values()))
    same = all(type(error) is type(first) and error.message == first.message for error in failed.values())
    if same and len(failed) == len(called) and isinstance(first, InvalidRequest):
        return first
    named = [f"{link.name} ({error.message})" for link, error in list(failed.items())[:MAX_NAMED]]
    more = f" and {len(failed) - MAX_NAMED} more" if len(failed) > MAX_NAMED else ""
    done = len(called) - len(failed)
    return AdminCallIncomplete(f"{done} of {len(called)} workers executed the call; failed: {'; '.join(named)}{more}")


#: What gateways of a port ask each other: the workers that one is connected to.
CONNECTED = "connected-workers"


class WorkerInfo(msgspec.Struct, frozen=True):
    """A worker as its operator sees it. `run` is different each time that it is started, and empty while it is not
    connected; `num_requests` counts all gateways' requests. `origin` is who has named it: --worker, or itself when it
    joined. `unreachable_from` are the gateways of the port that have no connection to it, or do not answer."""

    name: str
    role: WorkerRole
    state: WorkerState
    run: str
    num_requests: int
    address: str = ""
    origin: Literal["configured", "joined"] = "configured"
    unreachable_from: list[str] = []


class WorkerControl:
    """`index` is this gateway's among the gateways of its port; `ask_others` asks the others."""

    def __init__(self, workers: WorkerPool, *, ask_others: AskOthers = no_others, index: str = "0") -> None:
        self._workers = workers
        self._ask_others = ask_others
        self._index = index

    @property
    def answers(self) -> Mapping[str, Callable[[str], Awaitable[bytes]]]:
        """What other gateways of the port may ask."""
        return {CONNECTED: self._answer_connected}

    async def listed(self, _parameters: Mapping[str, str]) -> bytes:
        """Workers and encoders, with their states."""
        others = await self._ask_others(CONNECTED)
        connected = {index: decoded(answer, set[str]) or set() for index, answer in others.items()}
        connected[self._index] = self._connected()
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
        origin: Literal["configured", "joined"] = "configured" if link.address else "joined"
        num_requests = max(num_reported, endpoints[0].num_in_flight)
        return WorkerInfo(link.name, link.role, link.state, link.worker_id, num_requests, link.address, origin)
