"""The store's side of the nixl mover: it starts the mover process (`MoverChild`) when it is first needed, and again
after its end."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import signal
import socket
import time
import uuid
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, NamedTuple, Self, cast

import msgspec
from blake3 import blake3

from medialane.arena import ENTRY_HEADER_BYTES
from medialane.runtime.stop import PidfdProcess, end_process
from medialane.runtime.tasks import Backoff
from medialane.transfer.mover import Destination, OpenedEntry, StillWriting
from medialane.transfer.nixl.agent import (
    MAX_PACKET_BYTES,
    MAX_READS,
    AddPeer,
    Descriptor,
    Expect,
    Forget,
    FromMover,
    Notified,
    RdmaMetadata,
    Read,
    ReadDone,
    ReadFailed,
    ReadRefused,
    RemovePeer,
    Start,
    Started,
    ToMover,
    decode_from_mover,
    pack_agent_metadata,
)
from medialane.types.errors import TransferFailed
from medialane.types.feature import MoverName
from medialane.types.tensor import ArenaRange, TensorDescriptor
from medialane.wire.child_channel import ChannelToChild, spawn

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
        #: The process that was started last; None before the first.
        self.child: MoverChild | None = None
        self._starting: asyncio.Task[MoverChild] | None = None
        self._backoff = Backoff(initial_s=_MIN_RESTART_S, max_s=_MAX_RESTART_S)
        self._next_start = 0.0
        self._refusal: NixlRefused | None = None

    @property
    def pid(self) -> int | None:
        """Process id of the mover process, if it runs."""
        return None if self.child is None or self.child.ended.is_set() else self.child.pid

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
        if self.child is not None:
            await self.child.close()

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
        if self.child is not None and not self.child.ended.is_set():
            return self.child
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
            self.child = task.result()


# Its process

#: Other hosts' agents that the process knows. Agents of processes that have exited are among them.
MAX_PEERS = 256


class NixlRefused(TransferFailed, code="nixl_refused"):
    """NIXL is not installed, or cannot be used on this host: another attempt would fail in the same way."""


class MoverChild:
    """Owns the process and its channel until `close`. When `ended` is set, the process has exited: it writes nothing
    any more. Its pending reads fail then, and not before."""

    def __init__(self, process: PidfdProcess, control: socket.socket) -> None:
        self._process = process
        self._wait, process.on_exit = process.on_exit, self._reap
        self.ended, self.pid = process.exited, process.pid
        self._loop = asyncio.get_running_loop()
        self._started: asyncio.Future[Started] = self._loop.create_future()
        self._reads: dict[int, tuple[str, asyncio.Future[None]]] = {}
        self._slots = asyncio.Semaphore(MAX_READS)
        self._peers: dict[str, None] = {}  # least recently used first
        self._expected: dict[str, asyncio.Future[None]] = {}
        self._num_reads = 0
        self._is_lost = self._is_refused = False
        self._channel = ChannelToChild(control, decode_from_mover, self._handle, self._lose, max_bytes=MAX_PACKET_BYTES)

    @property
    def num_reads(self) -> int:
        """Reads that have not ended."""
        return len(self._reads)

    @property
    def num_peers(self) -> int:
        """Other hosts' agents that the process knows."""
        return len(self._peers)

    @classmethod
    async def start(
        cls, arena: str, directory: str, slot: int, *, factory: str, variables: Mapping[str, str], timeout_s: float
    ) -> Self:
        """Start a process for the arena, in which it has the lock of `slot`, and wait until its agent is ready.

        Raises NixlRefused, or TransferFailed; then no process is left running.
        """
        agent = f"medialane-{secrets.token_hex(8)}"
        self = cls(*spawn("medialane.transfer.nixl.process", factory, environ=variables))
        try:
            self._send(Start(arena, directory, slot, agent))
            async with asyncio.timeout(timeout_s):
                await self._started
        except BaseException as error:  # cancelled or failed: leave no process running
            await self.close()
            if isinstance(error, TimeoutError):
                raise TransferFailed(f"the NIXL mover process was not ready within {timeout_s:g} s") from error
            raise
        return self

    @property
    def started(self) -> Started:
        return self._started.result()

    def know(self, metadata: bytes) -> str:
        """Return how reads refer to the agent of `metadata`. Raises TransferFailed."""
        peer = blake3(metadata).hexdigest()
        if peer in self._peers:
            del self._peers[peer]
        else:
            self._send(AddPeer(peer, metadata))
        self._peers[peer] = None
        if len(self._peers) > MAX_PEERS:
            in_use = {peer, *(other for other, _ in self._reads.values())}
            if (oldest := next((other for other in self._peers if other not in in_use), None)) is not None:
                del self._peers[oldest]
                self._send(RemovePeer(oldest))
        return peer

    async def read(
        self,
        peer: str,
        sources: Sequence[Descriptor],
        offsets: Sequence[int],
        *,
        entry: ArenaRange | None = None,
        notification: str = "",
    ) -> asyncio.Future[None]:
        """Start a read (see `agent.Read`), as soon as fewer than MAX_READS are pending. The future ends,
        successfully or with TransferFailed, when nothing is written to the destinations any more; it must not be
        cancelled. Raises TransferFailed: no read was started."""
        await self._slots.acquire()
        done: asyncio.Future[None] = self._loop.create_future()
        done.add_done_callback(self._read_ended)
        self._num_reads += 1
        self._reads[self._num_reads] = peer, done
        try:
            self._send(Read(self._num_reads, peer, list(sources), list(offsets), entry, notification))
        except TransferFailed as error:
            del self._reads[self._num_reads]
            done.set_exception(error)
        return done

    def expect(self, notification: str) -> asyncio.Future[None]:
        """Return a future that ends when another agent has sent the notification, or with TransferFailed; when it is
        cancelled, the notification is no longer expected."""
        self._send(Expect(notification))
        arrival = self._expected[notification] = self._loop.create_future()
        arrival.add_done_callback(lambda future: self._forget(notification, future))
        return arrival

    def kill(self) -> None:
        """Terminate the process; `ended` is set soon."""
        self._process.kill()

    async def close(self) -> None:
        """Kill the process and wait for its end. Idempotent."""
        if not self._is_lost and not self.ended.is_set():
            self._lose("")
        if not await end_process(self._process, 0.0):
            logger.error("the NIXL mover process (pid %d) could not be killed", self.pid)

    def _reap(self) -> None:
        """Called when the process, with all its threads, has exited."""
        status = cast("int", self._wait())
        self._channel.close()
        if status not in (0, -signal.SIGKILL) and not self._is_refused:
            logger.error("the NIXL mover process (pid %d) has exited with status %d", self.pid, status)
        error = TransferFailed(f"the NIXL mover process has exited with status {status}")
        pending: list[asyncio.Future[Any]] = [self._started, *self._expected.values()]
        pending += [done for _, done in self._reads.values()]
        self._reads.clear()
        for future in pending:
            if not future.done():
                future.set_exception(error)
        if not self._started.cancelled():
            self._started.exception()  # marks it as retrieved

    def _send(self, message: ToMover) -> None:
        try:
            is_sent = self._channel.send(message)
        except ValueError as error:
            raise TransferFailed(str(error)) from error
        if not is_sent:
            raise TransferFailed("the NIXL mover process has exited")

    def _handle(self, report: FromMover, _descriptors: list[int]) -> None:
        match report:
            case Started():
                self._started.set_result(report)
            case ReadRefused(message):
                self._started.set_exception(NixlRefused(message))
                self._is_refused = True
                self._lose("")
            case ReadDone(read_id):
                self._reads.pop(read_id)[1].set_result(None)
            case ReadFailed(read_id, message):
                self._reads.pop(read_id)[1].set_exception(TransferFailed(message))
            case Notified(notification):
                if (arrival := self._expected.get(notification)) is not None and not arrival.done():
                    arrival.set_result(None)

    def _read_ended(self, done: asyncio.Future[None]) -> None:
        self._slots.release()
        done.exception()  # marks it as retrieved: the read may have been given up

    def _forget(self, notification: str, arrival: asyncio.Future[None]) -> None:
        self._expected.pop(notification, None)
        if not arrival.cancelled():
            arrival.exception()  # marks it as retrieved
        elif not self.ended.is_set():
            with contextlib.suppress(TransferFailed):
                self._send(Forget(notification))

    def _lose(self, reason: str) -> None:
        """Stop using the process: it has exited, or is made to."""
        self._is_lost = True
        self._channel.close()
        if reason:
            logger.error("NIXL mover process (pid %d): %s", self.pid, reason)
        self.kill()


def environment(inherited: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a mover process.

    UCX cannot detect the failure of a peer without tcp, and NIXL then refuses to start. Over tcp, a segment larger than
    the peer receives corrupts the peer's heap: we receive large ones, but send UCX's default, as not all peers are ours
    (Dynamo's). Sending 512k, too, would halve the time of a read.
    """
    variables = {"NIXL_LOG_LEVEL": "WARN", "UCX_TCP_RX_SEG_SIZE": "512k", **inherited}
    if "UCX_TLS" in variables:
        variables["UCX_TLS"] = with_tcp(variables["UCX_TLS"])
    return variables


def with_tcp(transports: str) -> str:
    """Return a value of UCX_TLS that includes tcp: a list of what is used, or, after ^, of what is not."""
    names = [name for name in transports.removeprefix("^").split(",") if name]
    if transports.startswith("^"):
        names = [name for name in names if name != "tcp"]
        return f"^{','.join(names)}" if names else "all"
    return ",".join(names) if {"all", "tcp"} & set(names) else ",".join([*names, "tcp"])
