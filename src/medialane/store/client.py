"""A client's side of the store of its host: one connection (`StoreClient`), and the link that keeps one (`StoreLink`):
it connects again, maps the arena, and knows what the client holds."""

from __future__ import annotations

import asyncio
import logging
import secrets
import sys
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from medialane.arena import ENTRY_HEADER_BYTES, ArenaView, ClientSlot
from medialane.runtime.tasks import TAKER, Backoff, call_site, first_of
from medialane.store.messages import (
    CachedFound,
    CallFailed,
    Cancel,
    EmbeddingFound,
    EntriesHeld,
    EntriesPulled,
    HeldEntry,
    HoldsPassed,
    ItemFound,
    PassedEmbedding,
    PassHolds,
    Proceed,
    Question,
    Reclaim,
    Reclaimed,
    Release,
    Reply,
    ScrapedAs,
    StoreCall,
    StoreHello,
    StorePing,
    StoreRefused,
    StoreStatus,
    StoreWelcome,
    TakenBy,
    decode_from_store,
)
from medialane.types.errors import (
    HandoverFailed,
    MedialaneError,
    MediaLost,
    NoWorkerReady,
    Outage,
    ProtocolViolation,
    StartupFailed,
    StoreUnavailable,
    from_report,
)
from medialane.types.tensor import ArenaOffer, ArenaRange, TensorDescriptor
from medialane.wire.config import RpcConfig
from medialane.wire.connection import Connection, Registration, dial

logger = logging.getLogger(__name__)

INITIAL_BACKOFF_S = 0.05

MAX_BACKOFF_S = 1.0

#: For this long after a loss, the next store is looked for at the shortest interval.
EAGER_S = 3.0

_UNAVAILABLE = "the media store of this host is not available"

_LOST = "the media store of these entries is lost"

#: Does what the store asks for, and returns the answer, None for Proceed alone. If it raises, the call is cancelled.
AnswerQuestion = Callable[[Question], Awaitable[Proceed | None]]


class ConnectionLost(Exception):
    """The connection was lost before the reply to a call."""


class StoreClient:
    """One connection, registered by `connect`. It does not reconnect.

    `holds` are the holds that this process has, on any connection, by id: one is added when its call's result
    arrives, and removed by `release`. `on_passed` owns holds that another client has passed to this one; `on_reclaim`
    releases holds that are not in use. With `names_takers` each call names for whom it is made.
    """

    welcome: StoreWelcome

    def __init__(
        self,
        config: RpcConfig,
        *,
        holds: dict[int, HeldEntry] | None = None,
        on_passed: Callable[[HoldsPassed], object] = lambda _: None,
        on_reclaim: Callable[[], object] = lambda: None,
        names_takers: bool = False,
    ) -> None:
        self._config = config
        self._holds = {} if holds is None else holds
        self._names_takers = names_takers
        self._on_passed = on_passed
        self._on_reclaim = on_reclaim
        self._connection = Connection(self, config, max_frame_bytes=config.max_frame_bytes)
        self._registration: Registration[StoreWelcome] = Registration(
            self._connection,
            closed=StoreUnavailable("registration was cancelled"),
            too_late=StoreUnavailable("the media store did not respond in time"),
        )
        self._calls: dict[int, asyncio.Future[Reply | Question]] = {}
        self.num_calls = 0
        self._refreshed: asyncio.Event | None = None
        self.status: StoreStatus | None = None
        #: Set when the store has reported that it has started.
        self.started = asyncio.Event()
        #: Why the store has refused this client.
        self.refusal: MedialaneError | None = None

    async def connect(self, address: str, hello: StoreHello) -> None:
        """Connect and register, once. Raises StoreUnavailable, StartupFailed (another release), ProtocolViolation.

        Cancellation and errors leave no connection behind.
        """
        dialling = dial(address, self._connection)
        self.welcome = await self._registration.run(
            hello, timeout_s=self._config.connect_timeout_s, connecting=dialling
        )

    @property
    def closed(self) -> asyncio.Event:
        """Set when the connection is closed, by either side."""
        return self._connection.closed

    async def call(self, make: Callable[[int], StoreCall], answer: AnswerQuestion | None = None) -> Reply:
        """Make a call and return its result; `make` builds the message with the call's id.

        `answer` answers the store's questions. Raises the error that the store reports, and
        ConnectionLost. A cancelled call is cancelled at the store.
        """
        self.num_calls += 1
        call_id = self.num_calls
        reply = self._expect(call_id)
        try:
            if self._names_takers:
                self._connection.send(TakenBy(call_id, f"{TAKER.get()} ({call_site(1)})"), at_once=True)
            self._connection.send(make(call_id), at_once=True)
            while isinstance(message := await reply, Question):
                if answer is None:
                    raise ProtocolViolation(f"unexpected {type(message).__name__}")
                reply = self._expect(call_id)
                answered = await _while_connected(answer(message), reply)
                self._connection.send(answered or Proceed(call_id), at_once=True)
        except BaseException:  # cancellation included: the store is to end the call
            self._abandon(call_id, reply)
            raise
        finally:
            self._calls.pop(call_id, None)
        if isinstance(message, CallFailed):
            raise from_report(message.error)
        return message

    def notify(self, message: PassHolds) -> None:
        """Send a message without a reply."""
        self._connection.send(message, at_once=True)

    async def refresh(self, timeout_s: float) -> None:
        """Have the store report its status, and wait for that, at most `timeout_s` seconds."""
        self._refreshed = self._refreshed or asyncio.Event()
        self._refreshed.clear()
        self._connection.send(StorePing(), at_once=True)
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._refreshed.wait()

    def release(self, hold_id: int) -> None:
        self._holds.pop(hold_id, None)
        self._connection.send(Release([hold_id]))

    async def close(self) -> None:
        """Idempotent."""
        self._connection.end(StoreUnavailable("the connection was closed"))
        await self.closed.wait()

    # The methods below are called by the connection; see connection.Peer.

    def opened(self, connection: Connection) -> None:
        pass

    def received(self, frame: memoryview) -> None:
        message = decode_from_store(frame)
        match message:
            case StoreStatus():
                self.status = message
                if message.has_started:
                    self.started.set()
                if self._refreshed is not None:
                    self._refreshed.set()
            case StoreWelcome():
                self._registration.welcome(message)
            case HoldsPassed():
                self._holds.update(zip(message.hold_ids, map(HeldEntry, message.ranges), strict=True))
                self._holds.update((one.hold_id, _held_embedding(one)) for one in message.embeddings)
                self._on_passed(message)
            case Reclaim():
                self._on_reclaim()
                self._connection.send(Reclaimed(), at_once=True)
            case StoreRefused(report):
                self.refusal = from_report(report)
                self._connection.end(self.refusal)
            case _:
                self._reply(message)

    def beat(self) -> None:
        self._connection.send(StorePing())

    def lost(self, error: MedialaneError) -> None:
        self._registration.lost(error)
        for reply in self._calls.values():
            if not reply.done():
                reply.set_exception(ConnectionLost(error.message))

    def _expect(self, call_id: int) -> asyncio.Future[Reply | Question]:
        reply: asyncio.Future[Reply | Question] = asyncio.get_running_loop().create_future()
        self._calls[call_id] = reply
        if self.closed.is_set():
            reply.set_exception(ConnectionLost("the connection is closed"))
        return reply

    def _reply(self, message: Reply | Question) -> None:
        self._holds.update(_granted(message))
        reply = self._calls.get(message.call_id)
        if reply is not None and not reply.done():
            reply.set_result(message)
        else:
            self._release_unused(message)

    def _abandon(self, call_id: int, reply: asyncio.Future[Reply | Question]) -> None:
        """Cancel a call, or release its result if that has arrived."""
        if reply.done() and not reply.cancelled() and reply.exception() is None:
            self._release_unused(reply.result())
        reply.cancel()
        self._connection.send(Cancel(call_id))

    def _release_unused(self, message: Reply | Question) -> None:
        """Release the result of a call that was cancelled in the meantime."""
        for hold_id in _granted(message):
            self.release(hold_id)


async def _while_connected(answering: Awaitable[Proceed | None], reply: asyncio.Future[Any]) -> Proceed | None:
    """Return the answer, or stop when the connection is lost, by which `reply` fails: the next store may reuse the
    range that is being written as soon as this process has connected there."""
    loop, is_answering = asyncio.get_running_loop(), True

    def end(_: object) -> None:
        if is_answering and not reply.cancelled() and reply.exception() is not None:
            until.reschedule(loop.time())

    try:
        async with asyncio.timeout(None) as until:
            reply.add_done_callback(end)
            return await answering
    except TimeoutError:
        if until.expired() and (lost := reply.exception()) is not None:
            raise lost from None
        raise
    finally:
        is_answering = False


def _granted(message: Reply | Question) -> dict[int, HeldEntry]:
    """Return the holds that a reply grants, by id."""
    match message:
        case ItemFound():
            return {message.hold_id: HeldEntry(message.range)}
        case CachedFound():
            return {item.hold_id: HeldEntry(item.range) for item in message.items if item is not None}
        case EmbeddingFound():
            return {message.hold_id: _held_embedding(message)}
        case EntriesHeld():
            return dict(zip(message.hold_ids, map(HeldEntry, message.ranges), strict=True))
        case EntriesPulled():
            ranges = (copy.range for copy in message.copies)
            return dict(zip(message.hold_ids, map(HeldEntry, ranges), strict=True))
        case _:
            return {}


def _held_embedding(embedding: EmbeddingFound | PassedEmbedding) -> HeldEntry:
    return HeldEntry(embedding.tensor.range, not embedding.is_filled)


@dataclass
class _MappedArena:
    """A store's arena in this process. It stays mapped while its store is away: the next one may take it over."""

    offer: ArenaOffer
    view: ArenaView
    slot: ClientSlot


class StoreLink:
    """One per process. `run` keeps it connected; calls wait for a connection for `wait_timeout_s`.

    The arena of the store stays mapped, and what is held in it stays held, until its file has been removed or a store
    with another arena is connected; `writable` for clients that send bytes. `processor` are the settings for which this
    client wants features: a store with others refuses it. `scraped` is as in `StoreHello`, `names_takers`
    as in `StoreClient`.
    """

    def __init__(
        self,
        address: str,
        *,
        rpc: RpcConfig,
        arena_directory: str,
        wait_timeout_s: float,
        processor: Mapping[str, str] = MappingProxyType({}),
        writable: bool = False,
        scraped: ScrapedAs | None = None,
        names_takers: bool = False,
    ) -> None:
        self.address = address
        self._names_takers = names_takers
        self._rpc = rpc
        self._arena_directory = arena_directory
        self._wait_timeout_s = wait_timeout_s
        #: Names this process at the store.
        self.client_id = secrets.token_hex(16)
        self._processor = dict(processor)
        self._writable = writable
        self._scraped = scraped
        self._client: StoreClient | None = None
        self._changed = asyncio.Event()  # set when there is a connection, no arena any more, or a refusal
        self._arena: _MappedArena | None = None
        self._holds: dict[int, HeldEntry] = {}  # by id, in that arena
        self._last_status: StoreStatus | None = None  # of the store of that arena, before it was lost
        self._outage = Outage()
        self._lost_at = float("-inf")
        self._last_report = ""
        self._refusal: StartupFailed | None = None
        self._listeners: list[Callable[[ArenaOffer | None], None]] = []
        self._reclaimers: list[Callable[[], None]] = []
        self._on_passed: Callable[[HoldsPassed], None] = self.release_passed

    @property
    def arena(self) -> str | None:
        """The id of the arena that is mapped here; None without one."""
        return None if self._arena is None else self._arena.offer.id

    @property
    def can_grant(self) -> bool:
        """Whether other hosts' stores can copy the store's entries."""
        return self._client is not None and self._client.welcome.can_grant

    @property
    def max_payload_bytes(self) -> int:
        """The largest item that fits into the arena; unlimited while it is unknown."""
        return sys.maxsize if self._arena is None else self._arena.view.max_payload_bytes

    @property
    def retainable_bytes(self) -> int:
        """Bytes of entries that this client may hold without using them, by what the store has reported last; 0 while
        memory is short or unknown."""
        if (status := self.status or self._last_status) is None:
            return 0
        arena = status.stats.arena
        return 0 if arena.pinned_bytes > arena.size_bytes // 2 else arena.size_bytes // 8

    @property
    def status(self) -> StoreStatus | None:
        """What the store reported last; None while it is not connected."""
        return None if self._client is None else self._client.status

    @property
    def problem(self) -> str | None:
        """What is wrong with the store, for /health; None if nothing is."""
        if self._client is None:
            return "the media store is not connected"
        return None if self._client.status is None else self._client.status.problem

    def unavailable(self, message: str) -> StoreUnavailable:
        """Return the error of a request that needs the store; clients are to try again when it is expected back."""
        return StoreUnavailable(message, retry_after_s=self._outage.retry_after_s)

    async def refresh(self, timeout_s: float) -> None:
        """Update `status`, if the store responds before the timeout."""
        if self._client is not None:
            await self._client.refresh(timeout_s)

    @property
    def num_calls(self) -> int:
        """Calls to the store on this connection."""
        return 0 if self._client is None else self._client.num_calls

    @property
    def num_held(self) -> int:
        return len(self._holds)

    def watch(self, listener: Callable[[ArenaOffer | None], None]) -> None:
        """Call `listener` with the store's arena when it is mapped, and with None when it is unmapped. Not called when
        another store has taken over the same arena. Called on the event loop; must not block."""
        self._listeners.append(listener)
        if self._arena is not None:
            listener(self._arena.offer)

    def watch_passed(self, listener: Callable[[HoldsPassed], None]) -> None:
        """Give `listener` the holds that other clients pass to this one: it owns them. Must not block."""
        self._on_passed = listener

    def watch_reclaim(self, listener: Callable[[], None]) -> None:
        """Call `listener` when the store needs memory: it releases the holds that are not in use. Must not block."""
        self._reclaimers.append(listener)

    async def run(self) -> None:
        """Stay connected until cancelled. `connect` may have connected before."""
        backoff = Backoff(initial_s=INITIAL_BACKOFF_S, max_s=MAX_BACKOFF_S)
        try:
            while True:
                if await self._connect_once():
                    backoff.reset()
                is_eager = time.monotonic() - self._lost_at < EAGER_S
                await asyncio.sleep(INITIAL_BACKOFF_S if is_eager else backoff.next())
                self._drop_removed()
        finally:
            if self._client is not None:
                await self._client.close()
            self._unmap()

    async def ready(self) -> None:
        """Wait until a store is connected and has started, without a deadline: loading the model's processor takes its
        time. Raises StartupFailed if a store refuses this client."""
        while self._refusal is None:
            if (client := self._client) is None or client.closed.is_set():
                await self._change()
                continue
            await first_of(client.started.wait(), client.closed.wait())
            if client.started.is_set():
                return
        raise self._refusal

    def notify(self, arena: str, message: PassHolds) -> bool:
        """Send a message without a reply about entries of `arena`. Return False if their store is not connected."""
        client = self._client
        if client is None or client.closed.is_set() or client.welcome.arena.id != arena:
            return False
        client.notify(message)
        return True

    async def call(
        self,
        make: Callable[[int], StoreCall],
        answer: AnswerQuestion | None = None,
        *,
        arena: str | None = None,
        waits: bool = True,
    ) -> Reply:
        """Make a call, again if the store is lost meanwhile; one about entries of `arena` only at their store. The
        caller owns a hold that is returned, and ends it with `release`.

        Raises the error that the store reports; StoreUnavailable if it does not come back in time, and at once if no
        store can have these entries any more, or, unless the call `waits`, if none is connected.
        """
        loop = asyncio.get_running_loop()
        remaining_s = self._wait_timeout_s if waits else 0.0  # of waits only: a call may take longer
        while True:
            started = loop.time()
            client = await self._client_before(started + remaining_s, arena)
            remaining_s -= loop.time() - started
            try:
                return await client.call(make, answer)
            except ConnectionLost:
                continue

    def release(self, hold_id: int, arena: str) -> None:
        """End a hold on entries of `arena`. Holds of an earlier arena have ended with it."""
        if arena != self.arena:
            return
        if self._client is not None:
            self._client.release(hold_id)
        else:
            self._holds.pop(hold_id, None)  # the next connection does not list it

    def release_passed(self, passed: HoldsPassed) -> None:
        """End holds that nobody uses."""
        for entry, hold_id in zip(passed.ranges, passed.hold_ids, strict=True):
            self.release(hold_id, entry.arena)
        for embedding in passed.embeddings:
            self.release(embedding.hold_id, embedding.tensor.range.arena)

    def payload(self, entry: ArenaRange) -> memoryview:
        """Return the payload of an entry that this client writes. Raises ConnectionLost if its connection is lost: at
        the next one, the client has stopped writing."""
        if self._arena is None or self._client is None:
            raise ConnectionLost("the store is lost")
        try:
            return self._arena.view.entry(entry, writable=True)[ENTRY_HEADER_BYTES:]
        except HandoverFailed as error:
            raise ConnectionLost(error.message) from error

    def tensor(self, descriptor: TensorDescriptor) -> memoryview:
        """Return the bytes of a tensor of an entry that is held. Raises MediaLost if its arena is lost."""
        if self._arena is None or self._arena.offer.id != descriptor.range.arena:
            raise MediaLost(_LOST)
        return self._arena.view.tensor(descriptor)

    async def _client_before(self, deadline: float, arena: str | None) -> StoreClient:
        """Wait for a connection; if the entries of a call are in `arena`, to a store that has it."""
        try:
            async with asyncio.timeout_at(deadline):
                while True:
                    if arena not in (None, self.arena):
                        raise self.unavailable(_LOST)
                    if (client := self._client) is not None and not client.closed.is_set():
                        return client
                    await self._change()
        except TimeoutError:
            raise self.unavailable(_UNAVAILABLE) from None

    async def _change(self) -> None:
        self._changed.clear()
        await self._changed.wait()

    async def _connect_once(self) -> bool:
        """Connect, and wait until the connection is lost. False if there was none."""
        try:
            if self._client is None:
                await self.connect()
        except MedialaneError as error:
            self._report(error)
            return False
        except Exception:  # the supervisor: whatever fails, the next attempt may succeed
            logger.exception("connecting to the media store failed")
            return False
        self._refusal = None
        if (client := self._client) is not None:
            await client.closed.wait()
            if client.refusal is not None:
                self._report(client.refusal)
            else:
                logger.warning("the media store is lost")
        self._disconnect()
        return True

    async def connect(self) -> None:
        """Connect once. Raises NoWorkerReady (no process listens there), WorkerLost (the socket cannot be opened),
        HandoverFailed (this process has another /dev/shm), StartupFailed (another release), StoreUnavailable,
        ProtocolViolation."""
        arena, sent = self._arena, dict(self._holds)
        hello = StoreHello(
            client_id=self.client_id,
            processor=self._processor,
            arena="" if arena is None else arena.offer.id,
            slot=0 if arena is None else arena.slot.number,
            holds=sent,
            scraped=self._scraped,
        )
        client = StoreClient(
            self._rpc,
            holds=self._holds,
            on_passed=lambda passed: self._on_passed(passed),  # there may be a listener later
            on_reclaim=self._reclaim,
            names_takers=self._names_takers,
        )
        await client.connect(self.address, hello)
        try:
            self._use_arena(client.welcome)
        except MedialaneError:
            await client.close()
            raise
        for hold_id in sent:
            if hold_id not in self._holds:  # released in the meantime, or of an earlier arena
                client.release(hold_id)
        self._client = client
        self._outage.end()
        self._last_report = ""
        self._changed.set()
        logger.info("the media store is connected: %s", self.address)

    def _use_arena(self, welcome: StoreWelcome) -> None:
        """Take the slot's lock, and map the store's arena, as far as that is not done. Raises HandoverFailed, also if
        this process has another /dev/shm."""
        offer, mapped = welcome.arena, self._arena
        if mapped is not None and (mapped.offer, mapped.slot.number) == (offer, welcome.slot):
            return
        slot = ClientSlot.take(offer.id, self._arena_directory, welcome.slot)
        if mapped is not None and mapped.offer == offer:
            mapped.slot.release()
            mapped.slot = slot
            return
        try:
            view = ArenaView.open(offer.id, self._arena_directory, nonce=offer.nonce, writable=self._writable)
        except HandoverFailed:
            slot.release()
            raise
        self._unmap()
        self._arena = _MappedArena(offer, view, slot)
        self._tell(offer)

    def _disconnect(self) -> None:
        self._last_status = self.status
        self._client = None
        self._lost_at = time.monotonic()
        self._outage.begin()

    def _drop_removed(self) -> None:
        """Unmap the arena if no store can take it over any more: its file has been removed."""
        if self._arena is not None and self._arena.slot.is_removed:
            self._unmap()

    def _tell(self, arena: ArenaOffer | None) -> None:
        for listener in self._listeners:
            listener(arena)

    def _reclaim(self) -> None:
        for listener in self._reclaimers:
            listener()

    def _unmap(self) -> None:
        arena, self._arena = self._arena, None
        if arena is None:
            return
        for hold_id in [hold_id for hold_id, held in self._holds.items() if held.range.arena == arena.offer.id]:
            del self._holds[hold_id]
        self._last_status = None
        self._tell(None)
        arena.view.close()  # entries that are being read stay mapped until their readers have finished
        arena.slot.release()
        self._changed.set()

    def _report(self, error: MedialaneError) -> None:
        """Log why there is no connection, once: connecting is tried many times in a second."""
        if isinstance(error, StartupFailed):
            self._refusal = error
            self._changed.set()
        if error.message != self._last_report:
            self._last_report = error.message
            level = logging.INFO if isinstance(error, NoWorkerReady) else logging.ERROR
            logger.log(level, "media store %s: %s", self.address, error.message)
