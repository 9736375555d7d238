"""The workers and encoders of this gateway, one link each (`WorkerPool`); the socket on which they join (`JoinServer`),
and the gateway's health, as far as they decide it (`health_of`).

The link of a worker that has joined exists from its first Join until some time after its loss, in which it is reported
as lost. If such a worker reconnects, it replaces a connection whose loss this side has not noticed yet.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Literal

import msgspec

from medialane.gateway.config import GatewayConfig
from medialane.gateway.workers.client import RpcClient
from medialane.gateway.workers.link import WorkerLink, check_same_model, name_taken
from medialane.routing import Router
from medialane.types.errors import (
    AlreadyJoined,
    MedialaneError,
    NoWorkerReady,
    Outage,
    StartupFailed,
    WorkerLost,
    WorkerStalled,
    report_of,
)
from medialane.types.request import ENCODER, Endpoint, ModelCard, WorkerLoad
from medialane.wire.authentication import Role
from medialane.wire.config import RpcConfig
from medialane.wire.connection import check_version
from medialane.wire.listener import END_TIMEOUT_S, Listener, PendingConnections
from medialane.wire.protocol import PROTOCOL_VERSION, Join
from medialane.wire.security import Authentication, Security

logger = logging.getLogger(__name__)

#: Names of workers appear in logs and as values of metric labels.
_NAME = re.compile(r"[\w.:/@+-]{1,200}", re.ASCII)


def _total(ranks: Sequence[Endpoint]) -> WorkerLoad:
    loads = [endpoint.load for endpoint in ranks]
    usage = sum(load.kv_usage for load in loads) / len(loads)
    return WorkerLoad(sum(load.num_running for load in loads), sum(load.num_waiting for load in loads), usage)


class WorkerPool:
    """All links, by name. `run` keeps links with an address connected. `new_link` makes the link of a worker that joins
    (its address is empty), whose `processor` settings must be compatible with the gateway's."""

    def __init__(
        self,
        links: Sequence[WorkerLink],
        *,
        new_link: Callable[[str, str], WorkerLink] | None = None,
        processor: Mapping[str, str] | None = None,
        config: GatewayConfig | None = None,
    ) -> None:
        self.links = {link.name: link for link in links}
        self._new_link = new_link
        self._processor = processor or {}
        self._config = config or GatewayConfig()
        self._router: Router | None = None
        #: The names of workers that have joined, and when lost ones are forgotten.
        self._joined: set[str] = set()
        self._forgetting: dict[str, asyncio.TimerHandle] = {}
        self._card: ModelCard | None = None
        self._outage = Outage()
        self._changes = asyncio.Event()
        #: The workers that accept requests, and workers whose engine is stalled: counted when a link reports a change,
        #: since both are read for each request.
        self._ready: set[WorkerLink] = set()
        self._stalled: set[WorkerLink] = set()
        #: The encoder that embeddings may be of, None if it must be found again; and of each link what it was then.
        self._encoder: str | None = None
        self._digests: dict[WorkerLink, str] = {}
        for link in links:
            self._watch(link)

    async def first_card(self) -> ModelCard:
        """Return the card of the first worker that has become ready; wait for it."""
        while self._card is None:
            await self._changes.wait()
        return self._card

    async def tried(self, timeout_s: float) -> None:
        """Wait until `run` has tried to connect to each address, with or without success; no longer than this."""
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                for link in self.links.values():
                    await link.was_tried.wait()

    def _watch(self, link: WorkerLink) -> None:
        link.on_change = partial(self._changed, link)

    def _changed(self, link: WorkerLink) -> None:
        """Have the requests of stalled workers moved to another one, if any is ready. If none is, they wait: the engine
        may continue, and if it does not, its worker exits. So do answers that cannot go on elsewhere."""
        for links, state in ((self._ready, "ready"), (self._stalled, "stalled")):
            (links.add if link.role != ENCODER and link.state == state else links.discard)(link)
        if self._digests.get(link) != (digest := link.encoder):
            self._digests[link], self._encoder = digest, None
        if self._card is None and link.role != ENCODER and (client := link.client) is not None:
            self._card = client.welcome.card
        self._wake()
        if not self._ready:
            self._outage.begin()
            return
        self._outage.end()
        for stalled in self._stalled:
            stalled.fail(WorkerStalled("the worker's engine is stalled"), only_movable=True)

    def _wake(self) -> None:
        changes, self._changes = self._changes, asyncio.Event()
        changes.set()

    def fail(self, error: MedialaneError) -> None:
        """Abort all requests of this gateway: they raise `error`."""
        for link in self.links.values():
            link.fail(error)

    def route_by(self, router: Router) -> None:
        """Have `router` choose among the workers of all links. Called once, before `run`."""
        self._router = router
        for link in self.links.values():
            link.router = router

    def arena_changed(self) -> None:
        """Called when this gateway has another store."""
        for link in self.links.values():
            link.arena_changed()
        self._encoder = None
        self._wake()

    def endpoints(self) -> list[Endpoint]:
        """Return one endpoint per worker, with the total load of its ranks."""
        of_links = [link.endpoints() for link in self.links.values()]
        return [msgspec.structs.replace(ranks[0], load=_total(ranks)) for ranks in of_links]

    def of_role(self, role: Literal["worker", "encoder"]) -> list[WorkerLink]:
        """Return the links of all workers, also of those that only prefill or decode, or of all encoders. One that has
        never been connected counts as a worker."""
        return [link for link in self.links.values() if (link.role == ENCODER) == (role == ENCODER)]

    @property
    def num_ready(self) -> int:
        """Number of workers that take requests, encoders not counted."""
        return len(self._ready)

    @property
    def encoder(self) -> str:
        """The digest of the encoder of all workers that load embeddings from our arena; empty if there is none, or if
        they have different ones."""
        if self._encoder is None:
            digests = {link.encoder for link in self.of_role("worker")} - {""}
            self._encoder = digests.pop() if len(digests) == 1 else ""
        return self._encoder

    def check_ready(self) -> None:
        """Raise NoWorkerReady if no worker takes requests."""
        if not self._ready:
            raise NoWorkerReady("no worker is ready to take requests", retry_after_s=self.retry_after_s)

    async def changed_before(self, give_up_at: float) -> bool:
        """Wait until a worker may have become ready, or reachable by another path; False if none has by then
        (time.monotonic)."""
        with suppress(TimeoutError):
            async with asyncio.timeout(give_up_at - time.monotonic()):
                return await self._changes.wait()
        return False

    @property
    def retry_after_s(self) -> int:
        """When a worker is expected to be ready, if none is."""
        return self._outage.retry_after_s

    @property
    def num_failing(self) -> int:
        """Number of links, also of encoders, that need an operator's attention; the log has the reasons."""
        return sum(link.is_failing for link in self.links.values())

    async def run(self) -> None:
        """Keep every link with an address connected until cancelled."""
        async with asyncio.TaskGroup() as group:
            for link in self.links.values():
                group.create_task(link.run(), name=f"worker link {link.name}")
            group.create_task(asyncio.Event().wait(), name="workers that join")  # there may be no links yet

    async def serve_joined(self, join: Join, client: RpcClient) -> None:
        """Use a worker that has connected, until it is lost. Raises the reason to refuse it."""
        link = self._link_of(join)
        try:
            check_same_model(self._processor, join.card.processor)
            await link.serve(client)
        except AlreadyJoined:
            logger.debug("worker %s has joined already, through another of our addresses", join.name)
            raise
        except WorkerLost as error:
            logger.info("worker %s: %s", join.name, error.message)
            raise
        except MedialaneError as error:
            link.refuse(error)
            raise
        finally:
            self._forget_later(link)

    def _link_of(self, join: Join) -> WorkerLink:
        """Return the link of the worker's name. Raises WorkerLost if another worker has it, or there are too many."""
        link = self.links.get(join.name)
        if link is not None:
            client = link.client
            if join.name not in self._joined or (client is not None and client.welcome.worker_id != join.worker_id):
                raise name_taken(join.name)
        elif self._new_link is None or len(self._joined) >= self._config.max_joined_workers:
            raise WorkerLost("the gateway has reached its limit of workers")
        else:
            link = self.links[join.name] = self._new_link(join.name, "")
            link.router = self._router
            self._watch(link)
            self._joined.add(join.name)
        self._keep(join.name)
        return link

    def _forget_later(self, link: WorkerLink) -> None:
        """Remove the link of a worker that has joined, unless it returns in time; at once if it has left as planned."""
        self._keep(link.name)
        forget_s = 0.0 if link.has_drained else self._config.forget_worker_s
        loop = asyncio.get_running_loop()
        self._forgetting[link.name] = loop.call_later(forget_s, self._forget, link)

    def _keep(self, name: str) -> None:
        timer = self._forgetting.pop(name, None)
        if timer is not None:
            timer.cancel()

    def _forget(self, link: WorkerLink) -> None:
        del self._forgetting[link.name]
        if link.client is None:
            del self.links[link.name]
            self._joined.discard(link.name)
            link.forget()
            self._changed(link)
            del self._digests[link]


def on_hosts_of(lost: Iterable[str], addresses: Mapping[str, str]) -> frozenset[str]:
    """Return the names `lost`, and the names of workers at the same TCP hosts, by the `addresses` of all. That
    of a worker that has joined is unknown."""
    lost = frozenset(lost)
    hosts = {_tcp_host(addresses.get(name, "")) for name in lost} - {""}
    return lost.union(name for name, address in addresses.items() if _tcp_host(address) in hosts)


def _tcp_host(address: str) -> str:
    return address.rpartition(":")[0] if address.startswith("tcp://") else ""


class JoinServer:
    """The gateway's listening socket for workers that join: accepts connections and reads Join.

    `serve_worker` is called, in a task per connection, with the Join of a worker whose version matches and with its
    connection, and returns when that is closed; it raises MedialaneError to refuse the worker. Call `serve` once, and
    `close` in any case.
    """

    def __init__(self, config: RpcConfig, serve_worker: Callable[[Join, RpcClient], Awaitable[None]]) -> None:
        self._config = config
        self._serve_worker = serve_worker
        self._listener: Listener | None = None
        self._unidentified: PendingConnections[RpcClient] = PendingConnections(
            lambda client: client.connection.end(WorkerLost("too many unidentified connections"))
        )
        self._tasks: set[asyncio.Task[None]] = set()

    async def serve(self, address: str) -> str:
        """Start listening; return the address to connect to. Raises StartupFailed if it cannot."""
        authentication = Authentication(Security.load(self._config), "rpc", Role.GATEWAY, Role.WORKER)
        self._listener = await Listener.listen(
            address, lambda: RpcClient(self._config, on_open=self._admit).connection, authentication
        )
        return self._listener.address

    async def close(self) -> None:
        """Stop listening, and close all connections. Idempotent."""
        if self._listener is not None:
            listener, self._listener = self._listener, None
            await listener.close()
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=END_TIMEOUT_S)

    def _admit(self, client: RpcClient) -> None:
        task = asyncio.get_running_loop().create_task(self._serve(client), name="joining worker")
        self._tasks.add(task)
        task.add_done_callback(lambda _: self._ended(client, task))  # a task may be cancelled before its first step
        self._unidentified.add(client, "a process that has not sent Join")

    async def _serve(self, client: RpcClient) -> None:
        try:
            async with asyncio.timeout(self._config.heartbeat_timeout_s):
                join = await self._join(client)
            if join is not None:
                await self._serve_worker(join, client)
        except TimeoutError:
            logger.info("a connection without a Join is closed")
        except MedialaneError as error:
            client.refuse(error)
        except Exception as error:  # noqa: BLE001 - the supervisor: the failure of one worker must not affect others
            report_of(error, "joining worker")

    def _ended(self, client: RpcClient, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        self._unidentified.discard(client)
        client.leave()

    async def _join(self, client: RpcClient) -> Join | None:
        """Return the Join of a connection; None if it was closed before. Raises StartupFailed."""
        await asyncio.wait([client.join])
        self._unidentified.discard(client)
        if client.join.cancelled():
            return None
        join = client.join.result()
        check_version(join.version, PROTOCOL_VERSION, ("worker", "gateway"))
        if not _NAME.fullmatch(join.name):
            raise StartupFailed("the worker's name must have 1 to 200 letters, digits or characters of _.:/@+-")
        return join


class Health(msgspec.Struct, frozen=True):
    """`ok`, `degraded` (requests are served, but something is missing), or `unavailable`; and why.

    `/health` answers 200 with an empty body if all is well, like vLLM; 200 with a JSON body if requests are served with
    reduced capacity or features; 503 if no worker is ready. `/ready` is whether to send requests here: it also answers
    503 while the gateway stops. (`/live` answers 200 as long as the event loop runs.) The endpoints are
    unauthenticated, so they have counts, not addresses: those are in the log.
    """

    status: Literal["ok", "degraded", "unavailable"]
    problems: tuple[str, ...] = ()

    def __str__(self) -> str:
        return "; ".join([self.status, *self.problems])

    def response(self) -> tuple[int, bytes]:
        """Return HTTP status and body."""
        body = b"" if self.status == "ok" else msgspec.json.encode(self)
        return 503 if self.status == "unavailable" else 200, body

    def readiness(self, *, is_stopping: bool) -> tuple[int, bytes]:
        """Return HTTP status and body of `/ready`."""
        if is_stopping:
            return Health("unavailable", ("this gateway is stopping",)).response()
        return (200, b"") if self.status != "unavailable" else self.response()


def health_of(workers: WorkerPool | None, problems: Iterable[str | None] = ()) -> Health:
    """Return the gateway's current health. `problems` are what other components report; None entries are ignored.
    `workers` is None if it needs none."""
    own = () if workers is None else _worker_problems(workers)
    all_problems = tuple(problem for problem in (*own, *problems) if problem is not None)
    if workers is not None and not workers.num_ready:
        return Health("unavailable", all_problems)
    return Health("degraded" if all_problems else "ok", all_problems)


def _worker_problems(workers: WorkerPool) -> Iterable[str]:
    total, encoders = len(workers.of_role("worker")), workers.of_role("encoder")
    if not total:
        yield "no worker has joined"
    if total > workers.num_ready:
        yield f"{workers.num_ready} of {total} workers are ready"
    num_encoders_ready = sum(link.is_ready for link in encoders)
    if len(encoders) > num_encoders_ready:
        yield f"{num_encoders_ready} of {len(encoders)} encoders are ready"
    states = Counter(link.state for link in workers.links.values())
    for state in ("stalled", "draining"):
        if num := states[state]:
            verb, log = "is" if num == 1 else "are", " (see its log)" if state == "stalled" else ""
            yield f"{num} of {len(workers.links)} workers {verb} {state}{log}"
    reports = [link.client.reports for link in workers.links.values() if link.client is not None]
    if num_unknown := sum(each.has_unknown_blocks for each in reports):
        what = "get requests without regard to their KV caches (see its log)"
        yield f"{num_unknown} of {len(workers.links)} workers {what}"
    if num_restarting := sum(each.has_failing_tasks for each in reports):
        yield f"{num_restarting} of {len(workers.links)} workers had to restart background tasks (see its log)"
    if workers.num_failing:
        what = "refuse this gateway, are refused, or cannot be connected to (see its log)"
        yield f"{workers.num_failing} of {len(workers.links)} workers {what}"
