"""The workers of this gateway: one link each, which connects, reconnects, and remembers what the worker still reads.

A lease that was handed over ends when the worker says so (`Released`). When the connection is lost first, the worker
may still be reading: its leases wait until it registers again (which it answers only after everything of the old
connection has been let go) or until nobody listens at its address any more (the process is gone).

Each link is supervised by itself: whatever a connection raises is logged, the link tries again after a growing pause,
and no other link is touched.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Protocol

import msgspec

from medialane.core.backoff import Backoff
from medialane.core.errors import GenerationFailed, MedialaneError, NoWorkerReady, ProtocolViolation, WorkerLost
from medialane.core.kv_events import KvChange
from medialane.core.request import Endpoint, EngineRequest, WorkerLoad
from medialane.gateway.config import GatewayConfig
from medialane.gateway.connected_worker import ConnectedWorker, disagreements, lost_endpoint
from medialane.gateway.handed_leases import HandedLeases
from medialane.gateway.scope import Releasable
from medialane.observability.metrics import Metrics
from medialane.rpc import Hello, RemoteRequest, RpcClient, RpcConfig

logger = logging.getLogger(__name__)


class WorkerListener(Protocol):
    """Who wants to know of the workers; the router's side. Everything is called on the loop, and returns at once.

    Between `joined` and `left` of a worker come its reports and changes; `left` ends everything that was known of it.
    It is called as soon as the connection is lost, in the same turn of the loop: nothing is chosen in between. Where
    `joined` raises, `left` follows.
    """

    def joined(self, link: WorkerLink) -> None:
        """The worker is ready; `link.endpoints()` are its ranks. It holds nothing until it has told."""
        ...

    def left(self, link: WorkerLink) -> None: ...

    def reported(self, link: WorkerLink, loads: Sequence[WorkerLoad]) -> None:
        """How busy each rank of the worker is."""
        ...

    def changed(self, link: WorkerLink, change: KvChange) -> None: ...


class WorkerLink:
    """One worker, by its address: the connection to it, which `run` makes again whenever it is lost."""

    def __init__(self, address: str, hello: Hello, *, rpc: RpcConfig, config: GatewayConfig, metrics: Metrics) -> None:
        self.address = address
        self._hello = hello
        self._rpc = rpc
        self._config = config
        self._metrics = metrics
        self._worker: ConnectedWorker | None = None
        self._leases = HandedLeases()
        self._joined = False
        self.listener: WorkerListener | None = None
        self.refusal: MedialaneError | None = None
        self._failure: str | None = None

    @property
    def client(self) -> RpcClient | None:
        """The live connection, if there is one: a lost one is none at once, not when `run` has noticed."""
        return self._live.client if self._live is not None else None

    @property
    def is_failing(self) -> bool:
        """Whether the worker refused us, or the link failed, when it was tried last."""
        return self.refusal is not None or self._failure is not None

    @property
    def num_held(self) -> int:
        """Requests whose leases this worker still holds."""
        return len(self._leases)

    @property
    def same_host(self) -> bool:
        return self._worker is not None and self._worker.client.welcome.shm

    @property
    def same_processor(self) -> bool:
        return self._worker is not None and not self._worker.disagreements

    def endpoint(self, rank: int = 0) -> Endpoint:
        worker = self._live
        return worker.endpoint(rank) if worker is not None else lost_endpoint(self.address, rank)

    def endpoints(self) -> list[Endpoint]:
        """One for each data-parallel rank."""
        first = self.endpoint()
        return [first, *(self.endpoint(rank) for rank in range(1, first.num_ranks))]

    def submit(
        self, request: EngineRequest, leases: Sequence[Releasable], until_sent: Sequence[Releasable] = ()
    ) -> RemoteRequest:
        """Send the request; the leases end when the worker has released it, those `until_sent` when its bytes are sent,
        or never will be. Raises WorkerLost, GenerationFailed."""
        request_id, client = request.request_id, self.client
        try:
            if client is None:
                raise WorkerLost("the worker's connection was lost before the request was sent")
            if request_id in self._leases:
                raise GenerationFailed("a request with this id is already running")
        except MedialaneError:
            for lease in (*leases, *until_sent):
                lease.release()
            raise
        self._leases.add(request_id, until_released=leases, until_sent=until_sent)
        try:
            return client.submit(request, on_released=self._leases.released, on_sent=self._leases.sent)
        except BaseException:  # what cannot be encoded was not sent
            self._leases.released(request_id)
            raise

    async def run(self) -> None:
        """Stay connected until cancelled, whatever fails meanwhile."""
        backoff = Backoff(initial_s=self._config.reconnect_initial_s, max_s=self._config.reconnect_max_s)
        loop = asyncio.get_running_loop()
        try:
            while True:
                started = loop.time()
                if await self._connect_once() and loop.time() - started >= self._config.reconnect_max_s:
                    backoff.reset()  # it lasted: connect again at once
                else:
                    await asyncio.sleep(backoff.next())
        finally:
            self._leases.release_all()

    @property
    def _live(self) -> ConnectedWorker | None:
        return self._worker if self._worker is not None and not self._worker.client.closed.is_set() else None

    async def _connect_once(self) -> bool:
        """One connection, from its making to its loss. False if there was none, or if this gateway failed at it."""
        try:
            client = await self._connect()
            if client is None:
                return False
            try:
                self._use(client)
                await client.wait_closed()
                self._report_loss()
            finally:
                await self._disconnect(client)
        except Exception as error:  # noqa: BLE001 - the supervisor of one link: the others must not end with it
            self._report_failure(error)
            return False
        return True

    async def _connect(self) -> RpcClient | None:
        try:
            client = await RpcClient.connect(self.address, self._hello, self._rpc)
        except NoWorkerReady:
            self._leases.release_all()  # nobody listens there: whoever read our memory is gone
            return None
        except (WorkerLost, ProtocolViolation) as error:
            logger.info("worker %s: %s", self.address, error.message)
            return None
        except MedialaneError as error:
            self._report_refusal(error)
            return None
        self._leases.release_all()  # Welcome: nothing of earlier connections is read any more
        self.refusal = None
        return client

    def _use(self, client: RpcClient) -> None:
        found = disagreements(self._hello.processor, client.welcome.card.processor)
        for name, (ours, theirs) in found.items():
            logger.warning("worker %s: processor setting %s is %s there and %s here", self.address, name, theirs, ours)
        logger.info("worker %s is ready (shared memory: %s)", self.address, "yes" if client.welcome.shm else "no")
        self._worker = ConnectedWorker(self.address, client, found)
        self._join(client)
        self._failure = None

    def _join(self, client: RpcClient) -> None:
        listener = self.listener
        if listener is None or client.closed.is_set():
            return
        self._joined = True
        listener.joined(self)
        client.watch(
            on_blocks=lambda change: listener.changed(self, change),
            on_loads=lambda loads: listener.reported(self, loads),
            on_lost=self._leave,
        )

    def _leave(self) -> None:
        if self._joined and self.listener is not None:
            self._joined = False
            self.listener.left(self)

    async def _disconnect(self, client: RpcClient) -> None:
        """End the connection. What the worker may still read stays held."""
        self._worker = None
        await client.close()
        self._leave()

    def _report_refusal(self, error: MedialaneError) -> None:
        if self.refusal is None or self.refusal.message != error.message:
            logger.error("worker %s refuses this gateway: %s", self.address, error.message)
        self.refusal = error

    def _report_loss(self) -> None:
        self._metrics.count_worker_lost(self.address)
        logger.warning("worker %s: connection lost with %d requests in flight", self.address, len(self._leases))

    def _report_failure(self, error: Exception) -> None:
        """With its trace, but once: the same again every few seconds tells nothing new."""
        if repr(error) != self._failure:
            logger.error("worker %s: its link failed and is restarted", self.address, exc_info=error)
        self._failure = repr(error)


def _total(ranks: Sequence[Endpoint]) -> WorkerLoad:
    loads = [endpoint.load for endpoint in ranks]
    usage = sum(load.kv_usage for load in loads) / len(loads)
    return WorkerLoad(sum(load.num_running for load in loads), sum(load.num_waiting for load in loads), usage)


class WorkerPool:
    """All links. `run` keeps them connected; everything else is looked up."""

    def __init__(self, links: Sequence[WorkerLink]) -> None:
        self.links = {link.address: link for link in links}

    def listen(self, listener: WorkerListener) -> None:
        """Tell `listener` of all workers. Called once, before `run`."""
        for link in self.links.values():
            link.listener = listener

    def endpoints(self) -> list[Endpoint]:
        """One for each worker, with the load of all its ranks."""
        ranks = [link.endpoints() for link in self.links.values()]
        return [msgspec.structs.replace(found[0], load=_total(found)) for found in ranks]

    @property
    def num_ready(self) -> int:
        return sum(link.client is not None for link in self.links.values())

    @property
    def num_failing(self) -> int:
        """Links that somebody has to look at: the log says why."""
        return sum(link.is_failing for link in self.links.values())

    async def run(self) -> None:
        """Keep every link connected until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            for link in self.links.values():
                tasks.create_task(link.run(), name=f"worker link {link.address}")
