"""The store's listening socket, and one session for each client's connection: registration, then its calls, each in a
task."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from contextvars import copy_context
from functools import partial
from typing import TypeVar

import msgspec

from medialane.arena import Arena, Pin, Reservation, new_slot
from medialane.observability.logging import request_id
from medialane.observability.timeline import RequestTimeline
from medialane.runtime.tasks import TAKER
from medialane.store.client_use import AbsentClients, ClientUse, UnknownEntry
from medialane.store.encoded_store import EncodedStore
from medialane.store.items import Items, ItemSource, PinnedItem, Processing
from medialane.store.messages import (
    PROTOCOL_VERSION,
    AliasResolved,
    AskLease,
    CachedFound,
    CallFailed,
    Cancel,
    DescribeItem,
    DocumentOpened,
    EmbeddingFound,
    EntriesHeld,
    EntriesPulled,
    FindCached,
    FindEmbedding,
    FindFeature,
    FindItem,
    GrantPulls,
    HoldEntries,
    HoldsPassed,
    ImagePublished,
    ImageSize,
    ItemDescribed,
    ItemFound,
    LongCall,
    MediaLeased,
    NoEmbedding,
    OpenDocument,
    PassedEmbedding,
    PassHolds,
    Proceed,
    PublishImage,
    PullEntries,
    PullsGranted,
    PutFeature,
    PutMedia,
    Question,
    Reclaim,
    Reclaimed,
    Release,
    Reply,
    ResolveAlias,
    SendData,
    StoreCall,
    StoreHello,
    StorePing,
    StoreRefused,
    StoreStatus,
    StoreWelcome,
    TakenBy,
    ToStore,
    decode_to_store,
)
from medialane.transfer.pulls import Pulls
from medialane.types.errors import (
    ArenaFull,
    HandoverFailed,
    MedialaneError,
    ProtocolViolation,
    StartupFailed,
    StoreUnavailable,
    to_report,
)
from medialane.types.feature import Feature, Hold, LocalCopy
from medialane.types.hashing import digest
from medialane.types.media import EncodedMedia, MediaRef
from medialane.types.media_lease import LeasedMedia
from medialane.types.tensor import EMBEDS_TYPE, ArenaOffer, ArenaRange
from medialane.wire.config import RpcConfig
from medialane.wire.connection import Connection, check_version
from medialane.wire.listener import Listener

logger = logging.getLogger(__name__)

#: Longest time in which clients release what they do not use; a client whose event loop is healthy takes milliseconds.
RECLAIM_TIMEOUT_S = 0.5

#: Longest time in which a client must write the bytes of an item (200 MB take a tenth of a second), or count an image.
ANSWER_TIMEOUT_S = 30.0

#: How long a call waits for memory that is being prefaulted, 10 GB at most, and between two attempts.
GROWTH_TIMEOUT_S = 10.0
GROWTH_INTERVAL_S = 0.05

#: Of a client that has not sent one yet.
_NO_HELLO = StoreHello(client_id="")

T = TypeVar("T")


class StoreServer:
    """Serves `items` to the gateways and workers of this host. Call `serve` once, and `close` in any case.

    `processor` returns the settings with which media are processed, empty if they are not or if that is not known yet;
    `status` returns what is reported to clients at each heartbeat. `on_damaged` is called if a client holds an entry
    that the table of an adopted arena does not have: its file has been set aside, and the process is to end.
    """

    def __init__(
        self,
        items: Items,
        arena: Arena,
        config: RpcConfig,
        *,
        pulls: Pulls,
        max_connections: int,
        processor: Callable[[], Mapping[str, str]],
        status: Callable[[], StoreStatus],
        on_damaged: Callable[[], object] = lambda: None,
    ) -> None:
        self.items, self.arena, self.config, self.pulls = items, arena, config, pulls
        self._max_connections = max_connections
        self._processor = processor
        self._status = status
        self._sessions: dict[StoreSession, None] = {}
        #: Registered clients by their id, in the order in which they have connected.
        self._clients: dict[str, StoreSession] = {}
        self.absent = AbsentClients(arena)
        self._on_damaged = on_damaged
        self._listener: Listener | None = None

    async def serve(self, address: str) -> None:
        """Start listening. Raises StartupFailed."""
        self.absent.take_over(self.items.embeddings)
        self._listener = await Listener.listen(address, self._open)

    def loaded(self) -> None:
        """The processor's settings are known: refuse clients that want features of others."""
        for session in list(self._clients.values()):
            try:
                self._check_processor(session.hello)
            except StartupFailed as error:
                session.refuse(error)

    def started(self) -> None:
        """Report the status to all clients now."""
        for session in self._clients.values():
            session.beat()

    async def drain(self) -> None:
        """Wait until the calls that are being answered now have ended. Clients make later ones again at the next store,
        if this one is closed before."""
        if tasks := [task for session in self._sessions for task in session.tasks]:
            logger.info("draining: %d calls are being answered", len(tasks))
            await asyncio.wait(tasks)

    async def close(self) -> None:
        """Stop listening and close all connections. Idempotent."""
        if self._listener is not None:
            listener, self._listener = self._listener, None
            await listener.close()
        for session in list(self._sessions):
            session.connection.end(StoreUnavailable("the store is shutting down"))
        for session in list(self._sessions):
            await session.connection.closed.wait()
        self.absent.close()
        self.items.embeddings.close()

    def _open(self) -> Connection:
        return StoreSession(self).connection

    # The methods below are called by sessions.

    def opened(self, session: StoreSession) -> None:
        self._sessions[session] = None
        if len(self._sessions) > self._max_connections:
            logger.warning("more than %d connections (--store-max-connections)", self._max_connections)
            session.connection.end(StoreUnavailable("the store has reached its limit of connections"))

    def status(self) -> StoreStatus:
        return msgspec.structs.replace(self._status(), exposed_by=self._exposer())

    def register(self, session: StoreSession, hello: StoreHello) -> StoreWelcome:
        """Check a Hello; when this returns, the client's earlier session has ended.

        Raises StartupFailed for a client of another release, or with other processor settings; StoreUnavailable if what
        it holds shows that the arena cannot be used.
        """
        check_version(hello.version, PROTOCOL_VERSION, ("client", "store"))
        self._check_processor(hello)
        session.slot, session.use = self._earlier_use(hello)
        try:
            session.use.keep_only(hello.holds if hello.arena == self.arena.id else {}, self.arena.claim)
        except UnknownEntry as error:
            logger.error("the arena of an earlier store cannot be used: %s", error)
            self.arena.set_aside()
            self._on_damaged()
            raise StoreUnavailable("the store begins with a new arena") from error
        self.absent.settle(session.slot)
        self._clients[hello.client_id] = session
        offer = ArenaOffer(self.arena.id, self.arena.nonce)
        return StoreWelcome(pid=os.getpid(), arena=offer, slot=session.slot, can_grant=self.pulls.can_grant)

    def pass_holds(self, passed: PassHolds) -> None:
        """Have the client that is named hold entries, if it is connected: otherwise it asks itself."""
        if (session := self._clients.get(passed.to)) is not None:
            session.receive_holds(passed)

    async def reclaim(self) -> bool:
        """Have clients release what they hold without using it. Return whether any hold has ended meanwhile."""
        before = self.arena.stats().pinned_bytes
        with suppress(TimeoutError):
            async with asyncio.timeout(RECLAIM_TIMEOUT_S):
                await asyncio.gather(*(session.reclaim() for session in self._clients.values()))
        return self.arena.stats().pinned_bytes < before

    def lost(self, session: StoreSession) -> None:
        """Called once. What the client may still be using is kept."""
        self._sessions.pop(session, None)
        use, session.use = session.use, ClientUse()
        if self._clients.get(session.hello.client_id) is session:
            del self._clients[session.hello.client_id]
        if session.is_registered and len(use):
            self.absent.add(session.slot, use)
        else:
            use.end()

    def _exposer(self) -> str:
        """Return the id of the worker that has been connected for longest among the scraped ones; empty if there
        are gateways, which all have the series of their host."""
        scraped = [session.hello for session in self._clients.values() if session.hello.scraped]
        if not scraped or any(hello.scraped == "gateway" for hello in scraped):
            return ""
        return scraped[0].client_id

    def _check_processor(self, hello: StoreHello) -> None:
        """Raise StartupFailed if features made here would be others than the client wants."""
        ours, theirs = self._processor(), hello.processor
        if ours and theirs and ours != theirs:
            name = min(name for name in ours.keys() | theirs.keys() if ours.get(name) != theirs.get(name))
            here, there = ours.get(name), theirs.get(name)
            raise StartupFailed(f"processor setting {name} is {here} in the media store and {there} in this gateway")

    def _earlier_use(self, hello: StoreHello) -> tuple[int, ClientUse]:
        """Return the slot of the client, and what it used on its earlier connection, which is closed if it still
        exists. In another arena than ours, it has neither."""
        if (other := self._clients.pop(hello.client_id, None)) is not None:
            return other.slot, other.replace()
        if hello.arena == self.arena.id and hello.slot not in {0, *(other.slot for other in self._clients.values())}:
            return hello.slot, self.absent.take(hello.slot) or ClientUse()
        return new_slot(), ClientUse()


class StoreSession:
    """A `connection.Peer`."""

    def __init__(self, server: StoreServer) -> None:
        self._server = server
        self._items, self._arena, self._pulls = server.items, server.arena, server.pulls
        self._reclaimed = asyncio.Event()
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._questions: dict[int, asyncio.Future[Proceed]] = {}
        self._last_call_id = 0
        self._taker = TakenBy(0, "")
        self.hello = _NO_HELLO
        self._processor = ""  # the digest of its settings
        #: What the client may still read or write, and the slot whose lock shows that it lives.
        self.use = ClientUse()
        self.slot = 0
        self.connection = Connection(self, server.config, max_frame_bytes=server.config.max_frame_bytes)

    @property
    def is_registered(self) -> bool:
        return self.hello is not _NO_HELLO

    def refuse(self, error: MedialaneError) -> None:
        self.connection.send(StoreRefused(to_report(error)))
        self.connection.close()

    def replace(self) -> ClientUse:
        """End this session: the client has connected again. Returns what it holds; the caller owns that."""
        use, self.use = self.use, ClientUse()
        self._cancel()
        self.connection.end(StoreUnavailable("the client has connected again"))
        return use

    def receive_holds(self, passed: PassHolds) -> None:
        """Have this client hold entries, if they are still held: otherwise it requests the hold itself and gets the
        error."""
        if TAKER.get():
            TAKER.set(f"{self._name}: passed with request {passed.request_id}")
        with suppress(HandoverFailed):
            hold_ids = [self.use.hold(pin) for pin in self._share(passed.ranges)]
            embeddings = list(self._passed_embeddings(passed.embeddings))
            self.connection.send(HoldsPassed(passed.request_id, passed.ranges, hold_ids, embeddings), at_once=True)

    @property
    def tasks(self) -> list[asyncio.Task[None]]:
        """The tasks of the calls that are being answered."""
        return list(self._tasks.values())

    async def reclaim(self) -> None:
        """Have the client release what it does not use, and wait until it has, or is lost."""
        self._reclaimed.clear()
        self.connection.send(Reclaim(), at_once=True)
        await self._reclaimed.wait()

    # The methods below are called by the connection; see connection.Peer.

    def opened(self, connection: Connection) -> None:
        self._server.opened(self)

    def received(self, frame: memoryview) -> None:
        message = decode_to_store(frame)
        if isinstance(message, StoreHello):
            self._welcome(message)
            return
        if not self.is_registered:
            raise ProtocolViolation(f"unexpected {type(message).__name__}")
        if isinstance(message, StoreCall):
            self._start(message)
        else:
            self._act(message)

    def beat(self) -> None:
        self.connection.send(self._server.status())

    def lost(self, error: MedialaneError) -> None:
        self._cancel()
        self._reclaimed.set()
        if self.is_registered:
            logger.info("client %s disconnected: %s", self.hello.client_id, error.message)
        self._server.lost(self)

    def _act(self, message: ToStore) -> None:
        match message:
            case PassHolds():
                self._server.pass_holds(message)
            case TakenBy():
                self._taker = message
            case Proceed():
                self._proceed(message)
            case Cancel(call_id):
                if (task := self._tasks.get(call_id)) is not None:
                    task.cancel()
            case Release(hold_ids):
                for hold_id in hold_ids:
                    self.use.release(hold_id)
            case Reclaimed():
                self._reclaimed.set()
            case StorePing():
                self.connection.send(self._server.status())

    @property
    def _name(self) -> str:
        """Of this client, for the record of holds."""
        return f"{self.hello.scraped or 'client'} {self.hello.client_id[:8]}"

    def _proceed(self, answer: Proceed) -> None:
        question = self._questions.pop(answer.call_id, None)
        if question is not None and not question.done():  # its task may just have been cancelled
            question.set_result(answer)

    def _cancel(self) -> None:
        for task in self._tasks.values():
            task.cancel()

    def _welcome(self, hello: StoreHello) -> None:
        if self.is_registered:
            raise ProtocolViolation("a second StoreHello")
        try:
            welcome = self._server.register(self, hello)
        except MedialaneError as error:
            self.refuse(error)
            return
        self.hello, self._processor = hello, digest(hello.processor)
        self.connection.send(welcome)
        self.connection.send(self._server.status())
        self.connection.start_heartbeat()

    def _start(self, call: StoreCall) -> None:
        if call.call_id <= self._last_call_id:
            raise ProtocolViolation(f"call {call.call_id} after call {self._last_call_id}")
        self._last_call_id = call.call_id
        if self._taker.call_id == call.call_id:
            TAKER.set(f"{self._name}: {type(call).__name__} for {self._taker.taker}")
        if isinstance(call, LongCall):
            context = copy_context()
            if isinstance(call, FindItem | DescribeItem | OpenDocument | PutFeature):
                context.run(request_id.set, call.request_id)  # for the log
            task = asyncio.get_running_loop().create_task(self._answer(call), context=context)
            self._tasks[call.call_id] = task
            task.add_done_callback(lambda _: self._tasks.pop(call.call_id, None))
            return
        try:
            reply = self._reply_at_once(call)
        except MedialaneError as error:
            reply = CallFailed(call.call_id, to_report(error))
        self.connection.send(reply, at_once=True)

    def _reply_at_once(self, call: FindCached | HoldEntries | GrantPulls | ResolveAlias | AskLease) -> Reply:
        match call:
            case FindCached(call_id, refs, form, options, encoder):
                processing = Processing(self._processor, options, encoder)
                cached = (self._items.cached(ref, form, processing) for ref in refs)
                found = (None if item is None else self._found(call_id, item, RequestTimeline()) for item in cached)
                return CachedFound(call_id, list(found))
            case HoldEntries(call_id, ranges):
                return EntriesHeld(call_id, [self.use.hold(pin) for pin in self._share(ranges)], ranges)
            case GrantPulls(call_id, ranges):
                return PullsGranted(call_id, self._pulls.grant(ranges))
            case ResolveAlias(call_id, ref):
                return AliasResolved(call_id, self._items.resolve(ref))
            case AskLease():
                return MediaLeased(call.call_id, self._items.leases.ask(call))

    async def _answer(self, call: LongCall) -> None:
        reply: Reply
        try:
            reply = await self._reply(call)
        except MedialaneError as error:
            reply = CallFailed(call.call_id, to_report(error))
        except Exception:  # the supervisor of one call: it fails, and no other
            logger.exception("a call has failed")
            reply = CallFailed(call.call_id, to_report(MedialaneError("internal error of the media store")))
        self.connection.send(reply, at_once=True)

    async def _reply(self, call: LongCall) -> Reply:
        match call:
            case FindItem():
                return await self._find(call)
            case DescribeItem():
                return await self._describe(call)
            case OpenDocument(call_id, _, options):
                opening = partial(self._items.open_document, self._source(call), options)
                return DocumentOpened(call_id, await self._with_memory(opening))
            case PutFeature():
                return await self._put(call)
            case FindFeature(call_id, mm_hash):
                item = await self._with_memory(partial(self._items.feature, mm_hash))
                return self._found(call_id, item, RequestTimeline())
            case FindEmbedding():
                return await self._find_embedding(call)
            case PullEntries():
                return await self._pull(call)
            case PublishImage(call_id, entry):
                return ImagePublished(call_id, await self._items.publish(entry))
            case PutMedia():
                return MediaLeased(call.call_id, [await self._put_media(call)])

    async def _find(self, call: FindItem) -> Reply:
        source, processing = self._source(call), Processing(self._processor, call.options, call.encoder)
        if call.refers:
            refer = partial(self._items.refer, source._replace(admit=None), processing)
            return self._found(call.call_id, await self._with_memory(refer), RequestTimeline())
        find = partial(self._items.find, source, call.form, processing)
        return self._found(call.call_id, await self._with_memory(find), source.timeline)

    async def _put(self, call: PutFeature) -> Reply:
        receive = partial(self._written, call.call_id)
        put = partial(self._items.put, call.ref, call.described, call.specs, receive=receive, writer=self.slot)
        return self._found(call.call_id, await self._with_memory(put), RequestTimeline())

    def _found(self, call_id: int, item: PinnedItem, timeline: RequestTimeline) -> ItemFound:
        value = item.pin.value
        return ItemFound(
            call_id,
            self.use.hold(item.pin),
            item.pin.range,
            item.content_hash,
            item.is_hit,
            timeline.report(),
            feature=value if isinstance(value, Feature) else None,
            encoded=value if isinstance(value, EncodedMedia) else None,
        )

    async def _describe(self, call: DescribeItem) -> Reply:
        describe = partial(self._items.describe, self._source(call), call.options, call.size)
        return ItemDescribed(call.call_id, *await self._with_memory(describe))

    def _source(self, call: FindItem | DescribeItem | OpenDocument) -> ItemSource:
        upload = None if call.num_bytes is None else partial(self._receive, call.call_id, call.ref, call.num_bytes)
        return ItemSource(call.ref, RequestTimeline(), upload, partial(self._admit, call.call_id))

    async def _admit(self, call_id: int, width: int, height: int) -> None:
        await self._ask(ImageSize(call_id, width, height))

    async def _find_embedding(self, call: FindEmbedding) -> Reply:
        held = None
        with suppress(ArenaFull):
            held = await self._with_memory(partial(self._items.embeddings.find, call, self.slot), may_wait=False)
        if held is None:
            return NoEmbedding(call.call_id)
        hold_id = self.use.hold(held.hold)
        return EmbeddingFound(call.call_id, hold_id, held.embedding.tensor, held.is_filled)

    def _passed_embeddings(self, wanted: Sequence[FindEmbedding]) -> Iterator[PassedEmbedding]:
        """Have the client hold those embeddings for which it need not wait."""
        for one in wanted:
            with suppress(ArenaFull):
                if (held := self._items.embeddings.find_now(one, self.slot)) is not None:
                    hold_id = self.use.hold(held.hold)
                    yield PassedEmbedding(one.key, hold_id, held.embedding.tensor, held.is_filled)

    def _share(self, ranges: Sequence[ArenaRange]) -> list[Hold]:
        """Pin entries that their gateway holds. All or none: raises HandoverFailed."""
        pins: list[Hold] = []
        for entry in ranges:
            pin: Hold | None = self._arena.share(entry)
            if pin is None and self._server.absent.is_taking_over:  # the gateway may connect after this client
                pin = self._arena.claim(entry)
            if pin is None:
                for taken in pins:
                    taken.release()
                raise HandoverFailed("the request's media are no longer held")
            pins.append(pin)
        return pins

    async def _pull(self, call: PullEntries) -> Reply:
        """Hold copies of the entries. All or none."""
        pins = await self._with_memory(partial(self._pulls.pull, call.entries))
        copies = [LocalCopy(pin.range, self._pulls.mover_of(pin.range)) for pin in pins]
        return EntriesPulled(call.call_id, [self.use.hold(pin) for pin in pins], copies)

    async def _with_memory(self, find: Callable[[], Awaitable[T]], *, may_wait: bool = True) -> T:
        """Return what `find` does, called again if memory is short and more is to come: none is reserved at first in an
        arena that was taken over, one that is being prefaulted grows for a while, and clients release what they hold
        without using it. Raises ArenaFull."""
        loop = asyncio.get_running_loop()
        deadline, has_reclaimed = loop.time() + (GROWTH_TIMEOUT_S if may_wait else 0.0), False
        while True:
            # As it is now: it may change between the failure, of a fetch that others share, and its arrival here.
            may_reserve, is_growing = self._server.absent.may_reserve.is_set(), self._arena.is_growing
            try:
                return await find()
            except ArenaFull:
                if may_wait and not may_reserve:
                    await self._server.absent.may_reserve.wait()
                elif is_growing and loop.time() < deadline:
                    await asyncio.sleep(GROWTH_INTERVAL_S)
                elif has_reclaimed or not await self._server.reclaim():
                    raise
                else:
                    has_reclaimed = True

    async def _receive(self, call_id: int, ref: MediaRef, num_bytes: int, store: EncodedStore) -> Pin[EncodedMedia]:
        """Have the client write the bytes of `ref` into the arena."""
        reservation = self._arena.reserve(num_bytes, "encoded", writer=self.slot)
        await self._written(call_id, reservation)
        media_type = EMBEDS_TYPE if ref.is_embeds else ""
        with reservation:
            return store.publish(
                reservation, ref.source, salt=ref.salt, content=ref.content or "", media_type=media_type
            )

    async def _put_media(self, call: PutMedia) -> LeasedMedia:
        """Have the client write media into the arena, which are leased."""

        async def reserve(num_bytes: int) -> Reservation:
            return self._arena.reserve(num_bytes, "encoded", writer=self.slot)

        async def write(num_bytes: int) -> tuple[Reservation, Proceed]:
            reservation = await self._with_memory(partial(reserve, num_bytes))
            answer = await self._written(call.call_id, reservation, timeout_s=call.timeout_s)
            if (answer.num_bytes or 0) > len(reservation.buffer):
                reservation.abandon()
                self.connection.end(ProtocolViolation("media of another size than was agreed"))
                raise StoreUnavailable("the request's media were not received")
            return reservation, answer

        return await self._items.leases.receive(call, write)

    async def _written(self, call_id: int, reservation: Reservation, *, timeout_s: float = ANSWER_TIMEOUT_S) -> Proceed:
        """Have the client write to the range; the caller owns it then, and nobody if this raises."""
        self.use.start_writing(reservation)
        try:
            answer = await self._ask(SendData(call_id, reservation.range), timeout_s=timeout_s)
        except asyncio.CancelledError:
            if not self.connection.closed.is_set() and self.use.stop_writing(reservation):
                reservation.abandon()
            raise
        if not self.use.stop_writing(reservation):
            raise StoreUnavailable("the client has disconnected")
        return answer

    async def _ask(self, question: Question, *, timeout_s: float = ANSWER_TIMEOUT_S) -> Proceed:
        """Wait until the client proceeds, and return its answer; it cancels the call if it does not.

        After a timeout the connection is closed: the client may still be writing, so that its range is freed only when
        its process has exited. Raises StoreUnavailable then.
        """
        answered: asyncio.Future[Proceed] = asyncio.get_running_loop().create_future()
        self._questions[question.call_id] = answered
        try:
            self.connection.send(question, at_once=True)
            async with asyncio.timeout(timeout_s):
                return await answered
        except TimeoutError:
            self.connection.end(ProtocolViolation("a client did not answer in time"))
            raise StoreUnavailable("the request's media were not received in time") from None
        finally:
            self._questions.pop(question.call_id, None)
