"""The store's side of the nixl mover: it starts the mover process when it is first needed, and again after its end."""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Mapping, Sequence
from typing import Annotated, NamedTuple

import msgspec

from medialane.arena import ENTRY_HEADER_BYTES
from medialane.runtime.tasks import Backoff
from medialane.transfer.mover import Destination, OpenedEntry, StillWriting
from medialane.transfer.nixl.agent import MAX_READS, Descriptor, RdmaMetadata, pack_agent_metadata
from medialane.transfer.nixl.child import MoverChild, NixlRefused, environment
from medialane.types.errors import TransferFailed
from medialane.types.feature import MoverName
from medialane.types.tensor import ArenaRange, TensorDescriptor

logger = logging.getLogger(__name__)

FACTORY = "medialane.transfer.nixl.nixl_agent:NixlAgent"

#: A process is started at the earliest this long after the last one, if that has completed no read; doubled each time.
_MIN_RESTART_S, _MAX_RESTART_S = 0.5, 60.0
#: NIXL imports torch (1 s), creates its agent (0.5 s) and registers the arena; longer from a cold disk.
_START_TIMEOUT_S = 60.0
#: Reads that were given up and have not ended. If there are more, the process is killed, which ends all of its reads.
MAX_GIVEN_UP = MAX_READS // 2


class Offer(msgspec.Struct, frozen=True):
    """What others need to read from our arena: our agent, and the address of the arena's file in its process.

    The header before an entry's payload must have a valid address, too.
    """

    metadata: bytes
    base: Annotated[int, msgspec.Meta(ge=1)]


class Published(NamedTuple):
    """`metadata` may be read once. `completed` ends when it has been, or with TransferFailed; cancel it to stop
    waiting, which does not prevent a read."""

    metadata: RdmaMetadata
    completed: asyncio.Future[None]


class _TimedOutRead(NamedTuple):
    num_bytes: int
    deadline: float


class NixlMover:
    """A `Mover` over a mover process. `arena` is the id of our arena in `directory`, `slot` the store's there.

    A destination whose read was given up cannot be reused until the read ends, which may take for ever. If there are
    more than `max_given_up_bytes` of them, the process is killed.
    """

    name: MoverName = "nixl"

    def __init__(
        self,
        arena: str,
        directory: str,
        *,
        slot: int,
        max_given_up_bytes: int,
        max_given_up: int = MAX_GIVEN_UP,
        environ: Mapping[str, str],
        factory: str = FACTORY,
    ) -> None:
        """`environ` is what the mover process inherits: it can be attacked from the network."""
        self._arena = arena
        self._directory = directory
        self._slot = slot
        self._environ = environ
        self._factory = factory
        self._max_given_up_bytes, self._max_given_up = max_given_up_bytes, max_given_up
        self._given_up: dict[asyncio.Future[None], _TimedOutRead] = {}
        self._child: MoverChild | None = None
        self._starting: asyncio.Task[MoverChild] | None = None
        self._backoff = Backoff(initial_s=_MIN_RESTART_S, max_s=_MAX_RESTART_S)
        self._next_start = 0.0
        self._refusal: NixlRefused | None = None

    @property
    def pid(self) -> int | None:
        """Process id of the mover process, if it runs."""
        return None if self._child is None or self._child.ended.is_set() else self._child.pid

    @property
    def num_reads(self) -> int:
        """Reads that have not ended."""
        return 0 if self._child is None else self._child.num_reads

    @property
    def num_peers(self) -> int:
        """Other hosts' agents that are connected."""
        return 0 if self._child is None else self._child.num_peers

    def is_ready(self) -> bool:
        if self.pid is None:
            self._begin_start()
        return self.pid is not None

    async def offer(self, *, wait: bool) -> bytes | None:
        if not wait and not self.is_ready():
            return None
        try:
            child = await self._running()
        except TransferFailed:
            return None
        return msgspec.msgpack.encode(Offer(child.started.metadata, child.started.base))

    async def read(self, source: OpenedEntry, destination: Destination, *, deadline_s: float) -> None:
        num_bytes, entry = len(destination.payload), source.entry.range
        if not num_bytes:
            return
        try:
            offer = msgspec.msgpack.decode(source.offers[self.name], type=Offer)
            payload = Descriptor("cpu", offer.base + entry.offset + ENTRY_HEADER_BYTES, num_bytes)
        except (KeyError, msgspec.DecodeError, ValueError) as error:
            raise TransferFailed(f"the source's offer of nixl is invalid: {error!r}") from error
        offset = destination.range.offset + ENTRY_HEADER_BYTES
        await self._read(offer.metadata, [payload], [offset], deadline_s=deadline_s, entry=entry)

    async def publish(self, tensors: Sequence[TensorDescriptor]) -> Published:
        """Describe tensors of our arena for a reader that uses Dynamo's `nixl_connect`, or `read_published`.

        The caller holds the entries until `completed`. Raises TransferFailed.
        """
        child = await self._running()
        key = str(uuid.uuid4())
        descriptors = [
            Descriptor("cpu", child.started.base + t.range.offset + t.offset, t.spec.nbytes) for t in tensors
        ]
        metadata = RdmaMetadata(descriptors, pack_agent_metadata(child.started.metadata), key)
        return Published(metadata, child.expect(key))

    async def read_published(
        self, metadata: RdmaMetadata, destinations: Sequence[TensorDescriptor], *, deadline_s: float
    ) -> None:
        """Copy what another process has published (`publish`, or `create_readable` of `nixl_connect`) to reserved
        ranges of our arena, and notify it. Raises like `read`.

        The start of the process does not count towards `deadline_s`: there is no other way to read these."""
        sizes = [tensor.spec.nbytes for tensor in destinations]
        if sizes != [source.size for source in metadata.descriptors]:
            raise TransferFailed(f"the published descriptors do not have the sizes {sizes}")
        offsets = [tensor.range.offset + tensor.offset for tensor in destinations]
        agent, key = metadata.agent_metadata(), metadata.notification_key
        await self._running()
        await self._read(agent, metadata.descriptors, offsets, deadline_s=deadline_s, notification=key)

    async def close(self) -> None:
        """Kill the process. Idempotent. All reads end, abandoned ones included; no process is started."""
        self._refusal = NixlRefused("the store is stopping")
        if self._starting is not None:
            self._starting.cancel()
            await asyncio.wait([self._starting])
        if self._child is not None:
            await self._child.close()

    async def _read(
        self,
        metadata: bytes,
        sources: Sequence[Descriptor],
        offsets: Sequence[int],
        *,
        deadline_s: float,
        entry: ArenaRange | None = None,
        notification: str = "",
    ) -> None:
        """Read from the agent of `metadata`; the rest is as in `agent.Read`. Raises like `read`."""
        deadline = asyncio.get_running_loop().time() + deadline_s
        try:
            async with asyncio.timeout_at(deadline):
                child = await self._running()
                peer = child.know(metadata)
                done = await child.read(peer, sources, offsets, entry=entry, notification=notification)
        except TimeoutError as error:
            raise TransferFailed("the NIXL mover process was not ready in time") from error
        try:
            async with asyncio.timeout_at(deadline):
                await asyncio.shield(done)
        except (TimeoutError, asyncio.CancelledError) as error:
            if not done.done():
                num_bytes = sum(source.size for source in sources)
                ended = self._give_up(child, done, num_bytes, deadline=deadline)
                raise StillWriting(ended) from error
            if isinstance(error, asyncio.CancelledError):
                raise
            done.result()
        self._backoff.reset()
        self._next_start = 0.0

    def _give_up(
        self, child: MoverChild, done: asyncio.Future[None], num_bytes: int, *, deadline: float
    ) -> asyncio.Future[None]:
        """Return a future that ends with the read."""
        loop = asyncio.get_running_loop()
        ended: asyncio.Future[None] = loop.create_future()
        self._given_up[done] = _TimedOutRead(num_bytes, deadline)

        def end(_: object) -> None:
            del self._given_up[done]
            if not ended.done():
                ended.set_result(None)

        done.add_done_callback(end)
        loop.call_at(deadline, self._kill_if_too_many, child)
        return ended

    def _kill_if_too_many(self, child: MoverChild) -> None:
        """Count the abandoned reads that have exceeded their deadline; cancelled ones may end."""
        now = asyncio.get_running_loop().time()
        overdue = [given_up.num_bytes for given_up in self._given_up.values() if given_up.deadline <= now]
        if len(overdue) > self._max_given_up or sum(overdue) > self._max_given_up_bytes:
            logger.warning(
                "restarting the NIXL mover process: %d reads of %d bytes have not ended", len(overdue), sum(overdue)
            )
            child.kill()

    async def _running(self) -> MoverChild:
        """Return the process; start it, once for all callers, if there is none. Raises TransferFailed."""
        if self._child is not None and not self._child.ended.is_set():
            return self._child
        return await asyncio.shield(self._begin_start())

    def _begin_start(self) -> asyncio.Task[MoverChild]:
        if self._starting is None:
            self._starting = asyncio.get_running_loop().create_task(self._start())
            self._starting.add_done_callback(self._has_started)
        return self._starting

    async def _start(self) -> MoverChild:
        if self._refusal is not None:
            raise TransferFailed(self._refusal.message)
        if time.monotonic() < self._next_start:
            raise TransferFailed("the NIXL mover process has failed, and is restarted later")
        self._next_start = time.monotonic() + self._backoff.next()
        return await MoverChild.start(
            self._arena,
            self._directory,
            self._slot,
            factory=self._factory,
            variables=environment(self._environ),
            timeout_s=_START_TIMEOUT_S,
        )

    def _has_started(self, task: asyncio.Task[MoverChild]) -> None:
        self._starting = None
        if task.cancelled():
            return
        error = task.exception()
        if isinstance(error, NixlRefused):
            self._refusal = error
            logger.warning("NIXL cannot be used on this host, tcp is used instead: %s", error.message)
        elif error is None:
            self._child = task.result()
