"""The workers of this gateway: one link each, which connects, reconnects, and holds the leases of its requests.

A lease on transferred media ends when the worker reports it (`Released`). If the connection is lost first, the worker
may still be reading: the leases are held until it accepts a new registration (which it does only after it has released
everything of the old connection) or until its address has no listener (the process has exited).

Each link is supervised separately: exceptions of a connection are logged, the link reconnects with exponential backoff,
and no other link is affected.
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
    """Callbacks about workers, implemented by the router's side. Called on the event loop; must not block.

    `reported` and `changed` are called only between `joined` and `left`; `left` discards the worker's state. It is
    called in the same iteration of the event loop in which the connection is lost, so no request is routed in between.
    If `joined` raises, `left` follows.
    """

    def joined(self, link: WorkerLink) -> None:
        """The worker is ready; `link.endpoints()` are its ranks. Its caches count as empty until it reports them."""
        ...

    def left(self, link: WorkerLink) -> None: ...

    def reported(self, link: WorkerLink, loads: Sequence[WorkerLoad]) -> None:
        """The worker has reported the load of each of its ranks."""
        ...

    def changed(self, link: WorkerLink, change: KvChange) -> None: ...


class WorkerLink:
    """The link to one worker address; `run` restores the connection whenever it is lost."""

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
        """The live connection, if any: None as soon as it is lost, even before `run` has handled the loss."""
        return self._live.client if self._live is not None else None

    @property
    def is_failing(self) -> bool:
        """Whether the last attempt to connect was refused by the worker or failed."""
        return self.refusal is not None or self._failure is not None

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
        """Return one endpoint per data-parallel rank."""
        first = self.endpoint()
        return [first, *(self.endpoint(rank) for rank in range(1, first.num_ranks))]

    def submit(
        self, request: EngineRequest, leases: Sequence[Releasable], until_sent: Sequence[Releasable] = ()
    ) -> RemoteRequest:
        """Send the request and own its leases: `leases` end when the worker has released it, `until_sent` when its
        bytes have been sent or never will be. Raises WorkerLost, GenerationFailed."""
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
        except BaseException:  # it could not be encoded, so it was not sent
            self._leases.released(request_id)
            raise

    async def run(self) -> None:
        """Stay connected until cancelled, whatever fails."""
        backoff = Backoff(initial_s=self._config.reconnect_initial_s, max_s=self._config.reconnect_max_s)
        loop = asyncio.get_running_loop()
        try:
            while True:
                started = loop.time()
                if await self._connect_once() and loop.time() - started >= self._config.reconnect_max_s:
                    backoff.reset()  # the connection was stable: reconnect at once
                else:
                    await asyncio.sleep(backoff.next())
        finally:
            self._leases.release_all()

    @property
    def _live(self) -> ConnectedWorker | None:
        return self._worker if self._worker is not None and not self._worker.client.closed.is_set() else None

    async def _connect_once(self) -> bool:
        """Connect, and wait until the connection is lost. False if there was none or this process failed at it."""
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
        except Exception as error:  # noqa: BLE001 - the supervisor of one link: its failure must not stop the others
            self._report_failure(error)
            return False
        return True

    async def _connect(self) -> RpcClient | None:
        try:
            client = await RpcClient.connect(self.address, self._hello, self._rpc)
        except NoWorkerReady:
            self._leases.release_all()  # no listener: the process that read our memory has exited
            return None
        except (WorkerLost, ProtocolViolation) as error:
            logger.info("worker %s: %s", self.address, error.message)
            return None
        except MedialaneError as error:
            self._report_refusal(error)
            return None
        self._leases.release_all()  # registration accepted: it no longer reads anything of earlier connections
        self.refusal = None
        return client

    def _use(self, client: RpcClient) -> None:
        differing = disagreements(self._hello.processor, client.welcome.card.processor)
        for name, (ours, theirs) in differing.items():
            logger.warning("worker %s: processor setting %s is %s there and %s here", self.address, name, theirs, ours)
        logger.info("worker %s is ready (shared memory: %s)", self.address, "yes" if client.welcome.shm else "no")
        self._worker = ConnectedWorker(self.address, client, differing)
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
        """Close the connection. Leases on what the worker may still read are kept."""
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
        """Log the traceback, but only once per distinct error: the link retries every few seconds."""
        if repr(error) != self._failure:
            logger.error("worker %s: its link failed and is restarted", self.address, exc_info=error)
        self._failure = repr(error)


def _total(ranks: Sequence[Endpoint]) -> WorkerLoad:
    loads = [endpoint.load for endpoint in ranks]
    usage = sum(load.kv_usage for load in loads) / len(loads)
    return WorkerLoad(sum(load.num_running for load in loads), sum(load.num_waiting for load in loads), usage)


class WorkerPool:
    """All links, by address. `run` keeps them connected."""

    def __init__(self, links: Sequence[WorkerLink]) -> None:
        self.links = {link.address: link for link in links}

    def listen(self, listener: WorkerListener) -> None:
        """Register `listener` with all links. Called once, before `run`."""
        for link in self.links.values():
            link.listener = listener

    def endpoints(self) -> list[Endpoint]:
        """Return one endpoint per worker, with the total load of its ranks."""
        ranks = [link.endpoints() for link in self.links.values()]
        return [msgspec.structs.replace(found[0], load=_total(found)) for found in ranks]

    @property
    def num_ready(self) -> int:
        return sum(link.client is not None for link in self.links.values())

    @property
    def num_failing(self) -> int:
        """Number of links that need an operator's attention; the log has the reasons."""
        return sum(link.is_failing for link in self.links.values())

    async def run(self) -> None:
        """Keep every link connected until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            for link in self.links.values():
                tasks.create_task(link.run(), name=f"worker link {link.address}")
