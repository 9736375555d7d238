"""The link to one worker or encoder, which connects and reconnects, or serves one that has joined.

Each link is supervised separately: exceptions of a connection are logged, the link reconnects with exponential backoff,
and no other link is affected.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping

from medialane.gateway.config import GatewayConfig
from medialane.gateway.workers.client import RemoteRequest, RpcClient
from medialane.observability.metrics import Metrics
from medialane.routing import Router
from medialane.runtime.tasks import Backoff
from medialane.types.errors import MedialaneError, NoWorkerReady, ProtocolViolation, StartupFailed, WorkerLost
from medialane.types.request import (
    ENCODER,
    PREFILL,
    EncoderCard,
    Endpoint,
    EngineRequest,
    WorkerLoad,
    WorkerRole,
    WorkerState,
)
from medialane.wire.config import RpcConfig
from medialane.wire.protocol import Hello

logger = logging.getLogger(__name__)


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
        #: The worker's connection until its loss has been handled, and the settings in which its processor differs:
        #: these do not change during a connection.
        self._client: RpcClient | None = None
        self._disagreements: Disagreements = {}
        #: As of the last connection.
        self.role: WorkerRole = "worker"
        #: Whether the last connection has ended as planned.
        self.has_drained = False
        #: Set when `run` has tried to connect, with or without success: the link is ready if it can be.
        self.was_tried = asyncio.Event()
        self._in_use = asyncio.Lock()
        #: Chooses the worker while it is connected, unless it is an encoder. Its caches count as empty until it has
        #: reported them.
        self.router: Router | None = None
        #: Called when `state` or `role` may have changed, and with each report of a worker that is stalled.
        self.on_change: Callable[[], None] = lambda: None
        self.refusal: MedialaneError | None = None
        self._failure: Exception | None = None

    @property
    def client(self) -> RpcClient | None:
        """The live connection, if any: None as soon as it is lost, even before `run` has handled the loss."""
        return self._client if self._client is not None and not self._client.closed.is_set() else None

    @property
    def state(self) -> WorkerState:
        client = self.client
        return "lost" if client is None else client.reports.state

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
        """Whether the worker has mapped the arena that this gateway's media are in."""
        arena = None if self._client is None else self._client.reports.arena
        return arena is not None and arena == self._own_arena()

    @property
    def can_pull(self) -> bool:
        """Whether the worker has a store on another host, which may copy from ours."""
        arena = None if self._client is None else self._client.reports.arena
        return arena is not None and not self.same_host and self._can_grant()

    @property
    def encoder(self) -> str:
        """The digest of the worker's encoder; empty if it does not load embeddings, or not from our host."""
        card = self.encoder_card
        return "" if card is None else card.digest

    @property
    def encoder_card(self) -> EncoderCard | None:
        """The worker's encoder, as `encoder`."""
        client = self.client
        if client is None or self._disagreements or not (self.same_host or self.can_pull):
            return None
        card = client.reports.encoder
        return card if card is not None and card.digest else None

    @property
    def worker_id(self) -> str:
        """The id of the worker's run; empty if it is not connected."""
        client = self.client
        return "" if client is None else client.welcome.worker_id

    @property
    def store_client(self) -> str:
        """The worker's name at the store of its host; empty without one."""
        return "" if self._client is None else self._client.welcome.store_client

    @property
    def same_processor(self) -> bool:
        return self._client is not None and not self._disagreements

    def reads_blocks_of(self, kv_group: str) -> bool:
        """Whether the worker generates, and can read KV blocks of workers of this group."""
        client = self.client
        return client is not None and self.role != PREFILL and client.welcome.card.kv_group == kv_group != ""

    def endpoint(self, rank: int = 0) -> Endpoint:
        """Return one of its data-parallel ranks, with its last reported load."""
        client = self.client
        if client is None:
            return Endpoint(
                self.name, self.name, ready=False, load=WorkerLoad(), num_in_flight=0, rank=rank, role=self.role
            )
        card, loads = client.welcome.card, client.reports.loads
        return Endpoint(
            self.name,
            self.name,
            ready=True,
            load=loads[rank] if loads else WorkerLoad(),
            num_in_flight=len(client.requests),
            rank=rank,
            num_ranks=max(1, card.data_parallel_size),
            same_host=self.same_host,
            card=card,
            can_pull=self.can_pull,
            role=card.role,
            stalled=client.reports.state == "stalled",
            draining=client.reports.state == "draining",
        )

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

    def fail(self, error: MedialaneError, *, only_movable: bool = False) -> None:
        """Abort this gateway's requests at the worker, or the ones that another worker can take over: they raise
        `error`."""
        if (client := self.client) is not None:
            client.requests.fail(error, only_movable=only_movable)

    def arena_changed(self) -> None:
        """Called when this gateway has another store."""
        if (client := self.client) is not None:
            client.reports.host_changed()

    async def run(self) -> None:
        """Stay connected until cancelled, whatever fails."""
        backoff = Backoff(initial_s=self._config.reconnect_initial_s, max_s=self._config.reconnect_max_s)
        loop = asyncio.get_running_loop()
        while True:
            started = loop.time()
            if await self._connect_once() and loop.time() - started >= self._config.reconnect_max_s:
                backoff.reset()  # the connection was stable: reconnect at once
            else:
                await asyncio.sleep(backoff.next())

    async def serve(self, client: RpcClient) -> None:
        """Use the connection of a worker that joins, until it is lost. Raises the reason for which it is not used."""
        await client.register(self._hello)
        if (earlier := self.client) is not None:
            if earlier.welcome.worker_id != client.welcome.worker_id:
                raise name_taken(self.name)
            await earlier.close()  # the worker has noticed its loss, or would have refused to register
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

    async def _connect_once(self) -> bool:
        """Connect, and wait until the connection is lost. False if there was none or this process failed at it."""
        try:
            if (client := await self._connect()) is None:
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
            self._client = None
            await client.close()

    async def _connect(self) -> RpcClient | None:
        try:
            client = await RpcClient.connect(self.address, self._hello, self._rpc)
        except NoWorkerReady:
            return None
        except (WorkerLost, ProtocolViolation) as error:
            logger.info("worker %s: %s", self.name, error.message)
            return None
        except MedialaneError as error:
            logger.error("worker %s refuses this gateway: %s", self.name, error.message)
            self.refusal = error
            return None
        finally:
            self.was_tried.set()  # whoever waits for it runs after `_use`
        self.refusal = None
        return client

    def _use(self, client: RpcClient) -> None:
        differing = disagreements(self._hello.processor, client.welcome.card.processor)
        for name, (ours, theirs) in differing.items():
            logger.warning("worker %s: processor setting %s is %s there and %s here", self.name, name, theirs, ours)
        self.role = client.welcome.card.role
        logger.info("%s %s is ready", self.role, self.name)
        self.has_drained = False
        self._client, self._disagreements = client, differing
        client.on_change = self.on_change
        if self.router is not None and self.role != ENCODER and not client.closed.is_set():
            client.reports.route(self.router, self.endpoints(), same_host=lambda: self.same_host)
        self.on_change()
        self._failure = None

    def _report_loss(self, *, has_drained: bool) -> None:
        self.has_drained = has_drained
        if has_drained:
            logger.info("worker %s has drained, and stops", self.name)
            return
        self._metrics.worker_losses.labels(self.name).inc()
        logger.warning("worker %s: connection lost", self.name)

    def forget(self) -> None:
        """Drop what is counted for this worker, which has left."""
        self._metrics.worker_losses.remove(self.name)

    def _report_failure(self, error: Exception) -> None:
        logger.error("worker %s: its link failed and is restarted", self.name, exc_info=error)
        self._failure = error


def name_taken(name: str) -> WorkerLost:
    """Return the error of a worker whose name another one has."""
    return WorkerLost(f"another worker named {name} is connected: choose another --worker-name")


#: Processor settings that differ: name -> (ours, the worker's).
Disagreements = Mapping[str, tuple[str | None, str | None]]


def disagreements(ours: Mapping[str, str], theirs: Mapping[str, str]) -> Disagreements:
    """Return the settings in which two processors differ, by name."""
    names = sorted(ours.keys() | theirs.keys())
    return {name: (ours.get(name), theirs.get(name)) for name in names if ours.get(name) != theirs.get(name)}


#: Settings in which a worker may differ: it then processes media itself (stage `decoded`). With another model or
#: processor its answers would be different ones.
_MAY_DIFFER = frozenset({"dtype", "vllm", "transformers", "torch", "torchvision"})


def check_same_model(ours: Mapping[str, str], theirs: Mapping[str, str]) -> None:
    """Raise StartupFailed, with one line for both sides, if a worker that joins has another model or processor. A
    simulated worker has no processor settings."""
    for name, (here, there) in disagreements(ours, theirs).items() if theirs else ():
        if name not in _MAY_DIFFER:
            what = "model" if name == "model" else f"processor setting {name}"
            raise StartupFailed(f"{what} is {there} at the worker and {here} at the gateway")
