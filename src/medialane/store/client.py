"""A client's side of one connection to the store of its host."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

from medialane.runtime.tasks import TAKER, call_site
from medialane.store.messages import (
    Call,
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
    StoreHello,
    StorePing,
    StoreRefused,
    StoreStatus,
    StoreWelcome,
    TakenBy,
    decode_from_store,
)
from medialane.types.errors import MedialaneError, ProtocolViolation, StoreUnavailable, from_report
from medialane.wire.config import RpcConfig
from medialane.wire.connection import Connection
from medialane.wire.dial import dial
from medialane.wire.registration import Registration

#: Does what the store asks for, and returns the answer, None for Proceed alone. If it raises, the call is cancelled.
AnswerQuestion = Callable[[Question], Awaitable[Proceed | None]]


class ConnectionLost(Exception):
    """The connection was lost before the reply to a call."""


class StoreClient:
    """A registered connection. It does not reconnect: call `connect` again after `closed`.

    `holds` are the holds that this process has, on any connection, by id: one is added when its call's result
    arrives, and removed by `release`. `on_passed` owns those that another client has passed to this one; `on_reclaim`
    releases those that are not in use. With `names_takers` the store is told for whom each call is made.
    """

    welcome: StoreWelcome

    def __init__(
        self,
        config: RpcConfig,
        holds: dict[int, HeldEntry],
        on_passed: Callable[[HoldsPassed], None],
        on_reclaim: Callable[[], None],
        *,
        names_takers: bool,
    ) -> None:
        self._holds = holds
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
        self._num_calls = 0
        self._refreshed: asyncio.Event | None = None
        self.status: StoreStatus | None = None
        #: Set when the store has reported that it has started.
        self.started = asyncio.Event()
        #: Why the store has refused this client.
        self.refusal: MedialaneError | None = None

    @classmethod
    async def connect(
        cls,
        address: str,
        hello: StoreHello,
        config: RpcConfig,
        *,
        holds: dict[int, HeldEntry],
        on_passed: Callable[[HoldsPassed], None],
        on_reclaim: Callable[[], None],
        names_takers: bool = False,
    ) -> StoreClient:
        """Connect and register. Raises StoreUnavailable, StartupFailed (another release), ProtocolViolation.

        Cancellation and errors leave no connection behind.
        """
        client = cls(config, holds, on_passed, on_reclaim, names_takers=names_takers)
        client.welcome = await client._registration.run(
            hello, timeout_s=config.connect_timeout_s, connecting=dial(address, client._connection)
        )
        return client

    @property
    def closed(self) -> asyncio.Event:
        """Set when the connection is closed, by either side."""
        return self._connection.closed

    async def call(self, make: Callable[[int], Call], answer: AnswerQuestion | None = None) -> Reply:
        """Make a call and return its result; `make` builds the message with the call's id.

        `answer` answers the store's questions. Raises the error that the store reports, and
        ConnectionLost. A cancelled call is cancelled at the store.
        """
        self._num_calls += 1
        call_id = self._num_calls
        reply = self._expect(call_id)
        try:
            if self._names_takers:
                self._connection.send(TakenBy(call_id, f"{TAKER.get()} ({call_site(2)})"), at_once=True)
            self._connection.send(make(call_id), at_once=True)
            while isinstance(message := await reply, Question):
                if answer is None:
                    raise ProtocolViolation(f"unexpected {type(message).__name__}")
                reply = self._expect(call_id)
                answered = await _while_connected(answer(message), reply)
                self._connection.send(answered or Proceed(call_id), at_once=True)
        except BaseException:
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
    """Return the answer; it ends with the connection, by which `reply` fails: the next store gives the range that it
    writes to others, as soon as this process has connected there."""
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
