"""The workers and encoders of this gateway: one link each, which connects and reconnects, or serves one that has
joined.

Each link is supervised separately: exceptions of a connection are logged, the link reconnects with exponential backoff,
and no other link is affected.

The link of a worker that has joined exists from its first Join until some time after its loss: so long it is reported
as lost. If such a worker reconnects, it replaces a connection whose loss this side has not noticed yet.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from contextvars import copy_context

import msgspec

from medialane.core.backoff import Backoff
from medialane.core.errors import (
    AlreadyJoined,
    MedialaneError,
    NoWorkerReady,
    ProtocolViolation,
    StartupFailed,
    WorkerLost,
    WorkerStalled,
)
from medialane.core.request import EncoderCard, Endpoint, EngineRequest, ModelCard, WorkerLoad, WorkerRole, WorkerState
from medialane.core.retry_after import Outage
from medialane.gateway.config import GatewayConfig
from medialane.gateway.connected_worker import ConnectedWorker, check_same_model, disagreements, lost_endpoint
from medialane.gateway.worker_link.client import RpcClient
from medialane.gateway.worker_link.client_reports import ReportListener
from medialane.gateway.worker_link.remote_request import RemoteRequest
from medialane.observability.metrics import Metrics
from medialane.wire.config import RpcConfig
from medialane.wire.protocol import Hello, Join

logger = logging.getLogger(__name__)

#: Called when a worker is ready: `endpoints()` of its link are its ranks. Its caches count as empty until it reports
#: them to the result. If this raises, the connection is closed. Not called for encoders, to which no request is routed.
JoinListener = Callable[["WorkerLink"], ReportListener]


class WorkerLink:
    """The link to one worker, whose `name` operators see. `run` connects to its `address`, by default the name, and
    restores the connection whenever it is lost; `serve` uses the connections of a worker that joins."""

    def __init__(
        self,
        name: str,
        hello: Hello,
        *,
        address: str | None = None,
        rpc: RpcConfig,
        config: GatewayConfig,
        metrics: Metrics,
        own_arena: Callable[[], str | None] = lambda: None,
        can_grant: Callable[[], bool] = bool,
    ) -> None:
        """`own_arena` returns the arena that this gateway's media are in, `can_grant` whether other hosts' stores can
        copy from it."""
        self.name = name
        self.address = name if address is None else address
        self._own_arena = own_arena
        self._can_grant = can_grant
        self._hello = hello
        self._rpc = rpc
        self._config = config
        self._metrics = metrics
        self._worker: ConnectedWorker | None = None
        #: As of the last connection.
        self.role: WorkerRole = "worker"
        #: Whether the last connection has ended as planned.
        self.has_drained = False
        #: Whether it is not to connect again.
        self.is_leaving = False
        self._reports: ReportListener | None = None  # of the worker that is connected, or was last
        self._in_use = asyncio.Lock()
        self.listener: JoinListener | None = None
        #: Called with the card of a worker or encoder that has become ready.
        self.on_ready: Callable[[ModelCard], None] = lambda _card: None
        #: Called when `is_ready` may have changed, and with each report of a worker that is stalled.
        self.on_change: Callable[[], None] = lambda: None
        self.refusal: MedialaneError | None = None
        self._failure: Exception | None = None

    @property
    def client(self) -> RpcClient | None:
        """The live connection, if any: None as soon as it is lost, even before `run` has handled the loss."""
        return self._live.client if self._live is not None else None

    @property
    def state(self) -> WorkerState:
        client = self.client
        return "lost" if client is None else client.reports.state

    @property
    def has_unknown_blocks(self) -> bool:
        """Whether the worker is connected, and requests are routed to it without regard to its KV cache."""
        client = self.client
        return client is not None and client.reports.has_unknown_blocks

    @property
    def has_failing_tasks(self) -> bool:
        """Whether the worker is connected, and background tasks of it have ended lately."""
        client = self.client
        return client is not None and client.reports.has_failing_tasks

    @property
    def is_ready(self) -> bool:
        """Whether the worker is connected, and takes requests."""
        return self.state == "ready"

    @property
    def is_failing(self) -> bool:
        """Whether the last attempt to connect was refused by the worker or failed."""
        return self.refusal is not None or self._failure is not None

    @property
    def same_host(self) -> bool:
        return self._worker is not None and self._worker.same_host

    @property
    def can_pull(self) -> bool:
        return self._worker is not None and self._worker.can_pull

    @property
    def encoder(self) -> str:
        """The digest of the worker's encoder; empty if it does not load embeddings, or not from our host."""
        worker = self._live
        if worker is None or worker.disagreements or not (worker.same_host or worker.can_pull):
            return ""
        card = worker.client.reports.encoder
        return "" if card is None else card.digest

    @property
    def encoder_card(self) -> EncoderCard | None:
        """As `encoder`."""
        client = self.client
        return client.reports.encoder if client is not None and self.encoder else None

    @property
    def worker_id(self) -> str:
        """That of the worker's run; empty if it is not connected."""
        client = self.client
        return "" if client is None else client.welcome.worker_id

    @property
    def store_client(self) -> str:
        """The worker's name at the store of its host; empty without one."""
        return "" if self._worker is None else self._worker.client.welcome.store_client

    @property
    def same_processor(self) -> bool:
        return self._worker is not None and not self._worker.disagreements

    def endpoint(self, rank: int = 0) -> Endpoint:
        worker = self._live
        return worker.endpoint(rank) if worker is not None else lost_endpoint(self.name, rank, self.role)

    def endpoints(self) -> list[Endpoint]:
        """Return one endpoint per data-parallel rank."""
        first = self.endpoint()
        return [first, *(self.endpoint(rank) for rank in range(1, first.num_ranks))]

    def submit(self, request: EngineRequest) -> RemoteRequest:
        """Send the request. Raises WorkerLost, GenerationFailed."""
        client = self.client
        if client is None:
            raise WorkerLost("the worker's connection was lost before the request was sent")
        return client.requests.submit(request)

    def drain(self) -> bool:
        """Have the worker stop when its requests have ended. Return False if it is not connected."""
        if (client := self.client) is None:
            return False
        client.drain()
        return True

    def fail(self, error: MedialaneError) -> None:
        """Abort this gateway's requests at the worker: they raise `error`."""
        if (client := self.client) is not None:
            client.requests.fail(error)

    def fail_movable(self) -> None:
        """Abort the requests that another worker can take over: they raise WorkerStalled."""
        if (client := self.client) is not None:
            client.requests.fail_movable(WorkerStalled("the worker's engine is stalled"))

    def arena_changed(self) -> None:
        """Called when this gateway has another store."""
        if self._live is not None and self._reports is not None:
            self._reports.host_changed()

    async def connect(self) -> RpcClient:
        """Connect once, for `run`. Raises like `RpcClient.connect`."""
        return await RpcClient.connect(self.address, self._hello, self._rpc)

    async def run(self, client: RpcClient | None = None) -> None:
        """Stay connected until cancelled, whatever fails, at first by `client`; if it is leaving, until the connection
        is lost."""
        backoff = Backoff(initial_s=self._config.reconnect_initial_s, max_s=self._config.reconnect_max_s)
        loop = asyncio.get_running_loop()
        while not self.is_leaving:
            started = loop.time()
            given, client = client, None
            if await self._connect_once(given) and loop.time() - started >= self._config.reconnect_max_s:
                backoff.reset()  # the connection was stable: reconnect at once
            elif not self.is_leaving:
                await asyncio.sleep(backoff.next())

    async def serve(self, client: RpcClient) -> None:
        """Use the connection of a worker that joins, until it is lost. Raises the reason for which it is not used."""
        await client.register(self._hello)
        if self._live is not None:
            if self._live.client.welcome.worker_id != client.welcome.worker_id:
                raise _taken(self.name)
            await self._live.client.close()  # the worker has noticed its loss, or would have refused to register
        self.refusal = None
        try:
            async with self._in_use:
                await self._serve(client)
        except Exception as error:  # noqa: BLE001 - the supervisor of one link: its failure must not stop the others
            self._report_failure(error)

    def refuse(self, error: MedialaneError) -> None:
        """Report that the worker is refused; it will try again."""
        logger.error("worker %s is refused: %s", self.name, error.message)
        self.refusal = error

    @property
    def _live(self) -> ConnectedWorker | None:
        return self._worker if self._worker is not None and not self._worker.client.closed.is_set() else None

    async def _connect_once(self, client: RpcClient | None) -> bool:
        """Connect, and wait until the connection is lost. False if there was none or this process failed at it."""
        try:
            client = client or await self._connect()
            if client is None:
                return False
            await self._serve(client)
        except Exception as error:  # noqa: BLE001 - the supervisor of one link: its failure must not stop the others
            self._report_failure(error)
            return False
        return True

    async def _serve(self, client: RpcClient) -> None:
        try:
            self._use(client)
            await client.closed.wait()
            self._report_loss(has_drained=client.reports.state == "draining")
        finally:
            await self._disconnect(client)

    async def _connect(self) -> RpcClient | None:
        try:
            client = await self.connect()
        except NoWorkerReady:
            return None
        except (WorkerLost, ProtocolViolation) as error:
            logger.info("worker %s: %s", self.name, error.message)
            return None
        except MedialaneError as error:
            self._report_refusal(error)
            return None
        self.refusal = None
        return client

    def _use(self, client: RpcClient) -> None:
        differing = disagreements(self._hello.processor, client.welcome.card.processor)
        for name, (ours, theirs) in differing.items():
            logger.warning("worker %s: processor setting %s is %s there and %s here", self.name, name, theirs, ours)
        self.role = client.welcome.card.role
        logger.info("%s %s is ready", self.role, self.name)
        self.has_drained = False
        self._worker = ConnectedWorker(self.name, client, differing, self._own_arena, self._can_grant)
        self._join(client)
        self.on_ready(client.welcome.card)
        self.on_change()
        self._failure = None

    def _join(self, client: RpcClient) -> None:
        if self.listener is None or client.closed.is_set() or self.role == "encoder":
            return
        self._reports = self.listener(self)
        client.reports.watch(self._reports)
        client.on_change = self.on_change

    async def _disconnect(self, client: RpcClient) -> None:
        self._worker = self._reports = None
        await client.close()

    def _report_refusal(self, error: MedialaneError) -> None:
        logger.error("worker %s refuses this gateway: %s", self.name, error.message)
        self.refusal = error

    def _report_loss(self, *, has_drained: bool) -> None:
        self.has_drained = has_drained
        if has_drained:
            logger.info("worker %s has drained, and stops", self.name)
            return
        self._metrics.count_worker_lost(self.name)
        logger.warning("worker %s: connection lost", self.name)

    def forget(self) -> None:
        """Drop what is counted for this worker, which has left."""
        self._metrics.forget_worker(self.name)

    def _report_failure(self, error: Exception) -> None:
        logger.error("worker %s: its link failed and is restarted", self.name, exc_info=error)
        self._failure = error


def _total(ranks: Sequence[Endpoint]) -> WorkerLoad:
    loads = [endpoint.load for endpoint in ranks]
    usage = sum(load.kv_usage for load in loads) / len(loads)
    return WorkerLoad(sum(load.num_running for load in loads), sum(load.num_waiting for load in loads), usage)


class WorkerPool:
    """All links, by name. `run` keeps those with an address connected. `new_link` makes the link of a worker that joins
    (its address is empty) or is added; its `processor` settings must be compatible with those of the gateway."""

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
        self._listener: JoinListener | None = None
        #: The names of workers that have joined, and when lost ones are forgotten.
        self._joined: set[str] = set()
        self._forgetting: dict[str, asyncio.TimerHandle] = {}
        self._card: ModelCard | None = None
        self._has_card = asyncio.Event()
        self._outage = Outage()
        self._changes = asyncio.Event()
        #: While `run` runs: the tasks of the links with an address.
        self._group: asyncio.TaskGroup | None = None
        #: Of what outlives the request by which an operator adds a worker.
        self._context = copy_context()
        self._running: dict[WorkerLink, asyncio.Task[None]] = {}
        for link in links:
            self._watch(link)

    async def first_card(self) -> ModelCard:
        """Return the card of the first worker that has become ready; wait for it."""
        while self._card is None:
            await self._has_card.wait()
        return self._card

    def _watch(self, link: WorkerLink) -> None:
        link.on_ready, link.on_change = self._on_ready, self._changed

    def _changed(self) -> None:
        """Have the requests of stalled workers moved to another one, if any is ready. If none is, they wait: the engine
        may continue, and if it does not, its worker exits. So do answers that cannot go on elsewhere."""
        changes, self._changes = self._changes, asyncio.Event()
        changes.set()
        if not self.num_ready:
            self._outage.begin()
            return
        self._outage.end()
        for link in self.of_role("worker"):
            if link.state == "stalled":
                link.fail_movable()

    def _on_ready(self, card: ModelCard) -> None:
        if self._card is None and card.role == "worker":
            self._card = card
            self._has_card.set()

    def fail(self, error: MedialaneError) -> None:
        """Abort all requests of this gateway: they raise `error`."""
        for link in self.links.values():
            link.fail(error)

    def listen(self, listener: JoinListener) -> None:
        """Register `listener` with all links. Called once, before `run`."""
        self._listener = listener
        for link in self.links.values():
            link.listener = listener

    def arena_changed(self) -> None:
        """Called when this gateway has another store."""
        for link in self.links.values():
            link.arena_changed()

    def endpoints(self) -> list[Endpoint]:
        """Return one endpoint per worker, with the total load of its ranks."""
        of_links = [link.endpoints() for link in self.links.values()]
        return [msgspec.structs.replace(ranks[0], load=_total(ranks)) for ranks in of_links]

    def of_role(self, role: WorkerRole) -> list[WorkerLink]:
        """Return the links of all workers or of all encoders. One that has never been connected counts as a worker."""
        return [link for link in self.links.values() if link.role == role]

    @property
    def num_ready(self) -> int:
        """Number of workers that take requests, encoders not counted."""
        return sum(link.is_ready for link in self.of_role("worker"))

    @property
    def num_gateways(self) -> int:
        """Most gateways that any worker is connected to, this one included."""
        return max((link.client.reports.num_gateways for link in self.links.values() if link.client), default=1)

    def check_ready(self) -> None:
        """Raise NoWorkerReady if no worker takes requests."""
        if not self.num_ready:
            raise NoWorkerReady("no worker is ready to take requests", retry_after_s=self.retry_after_s)

    async def changed_before(self, give_up_at: float) -> bool:
        """Wait until a worker may have become ready, or has reported; False if none has by then (time.monotonic)."""
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
        async with asyncio.TaskGroup() as self._group:
            for link in self.links.values():
                self._run(link)
            self._group.create_task(asyncio.Event().wait(), name="workers that join")  # there may be no links yet

    async def connect(self, name: str, address: str) -> RpcClient:
        """Connect to a worker that is to be added: `add` or `leave` it. Raises the reason why it cannot be."""
        connecting = self._link(name, address).connect()
        client = await asyncio.create_task(connecting, name=f"adding {name}", context=self._context.copy())
        try:
            check_same_model(self._processor, client.welcome.card.processor)
            if self._card is not None and client.welcome.card.model != self._card.model:
                raise StartupFailed(f"it serves {client.welcome.card.model}, and the others {self._card.model}")
        except StartupFailed:
            client.leave()
            raise
        return client

    def add(self, name: str, address: str, client: RpcClient | None = None) -> None:
        """Stay connected to a further worker, at first by `client`."""
        link = self._link(name, address)
        link.listener = self._listener
        self._watch(link)
        self.links[name] = link
        self._run(link, client)

    def remove(self, name: str) -> None:
        """Forget a worker with an address; one that drains, when it has stopped. Its requests go on at others."""
        link = self.links[name]
        link.is_leaving = True
        if link.state != "draining":
            self._drop(link)

    def is_joined(self, name: str) -> bool:
        """Return whether this is the name of a worker that has joined."""
        return name in self._joined

    def _link(self, name: str, address: str) -> WorkerLink:
        """Raises StartupFailed."""
        if self._new_link is None:
            raise StartupFailed("this gateway has no further workers")
        return self._new_link(name, address)

    def _run(self, link: WorkerLink, client: RpcClient | None = None) -> None:
        if self._group is None:
            return
        running, name = link.run(client), f"worker link {link.name}"
        task = self._running[link] = self._group.create_task(running, name=name, context=self._context.copy())

        def ended(_task: object) -> None:
            if client is not None:
                client.leave()  # the task may have been cancelled before its first step
            if link.is_leaving:
                self._drop(link)

        task.add_done_callback(ended)

    def _drop(self, link: WorkerLink) -> None:
        """Forget a link, and end its task. Idempotent."""
        if (running := self._running.pop(link, None)) is not None:
            running.cancel()
        if self.links.get(link.name) is link:  # it may have a successor
            del self.links[link.name]
            link.forget()
            self._changed()

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
                raise _taken(join.name)
        elif self._new_link is None or len(self._joined) >= self._config.max_joined_workers:
            raise WorkerLost("the gateway has reached its limit of workers")
        else:
            link = self.links[join.name] = self._new_link(join.name, "")
            link.listener = self._listener
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


def _taken(name: str) -> WorkerLost:
    return WorkerLost(f"another worker named {name} is connected: choose another --worker-name")


def on_hosts_of(lost: Iterable[str], addresses: Mapping[str, str]) -> frozenset[str]:
    """Return the names `lost`, and those of the workers that are at the same TCP hosts, by the `addresses` of all. That
    of a worker that has joined is unknown."""
    lost = frozenset(lost)
    hosts = {_tcp_host(addresses.get(name, "")) for name in lost} - {""}
    return lost.union(name for name, address in addresses.items() if _tcp_host(address) in hosts)


def _tcp_host(address: str) -> str:
    return address.rpartition(":")[0] if address.startswith("tcp://") else ""
