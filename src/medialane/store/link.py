"""A client's link to the store of its host: connects, reconnects, maps the arena, and knows what the client holds."""

from __future__ import annotations

import asyncio
import logging
import secrets
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from types import MappingProxyType

from medialane.arena import ENTRY_HEADER_BYTES, ArenaView
from medialane.core.backoff import Backoff
from medialane.core.errors import (
    HandoverFailed,
    MedialaneError,
    MediaLost,
    NoWorkerReady,
    StartupFailed,
    StoreUnavailable,
)
from medialane.core.retry_after import Outage
from medialane.core.tasks import first_of
from medialane.core.tensor import ArenaOffer, ArenaRange, TensorDescriptor
from medialane.store.client import AnswerQuestion, ConnectionLost, StoreClient
from medialane.store.messages import (
    Call,
    HoldsPassed,
    PassHolds,
    Reply,
    ScrapedAs,
    StoreHello,
    StoreStatus,
    StoreWelcome,
)
from medialane.wire.config import RpcConfig

logger = logging.getLogger(__name__)

INITIAL_BACKOFF_S = 0.05
MAX_BACKOFF_S = 1.0

_UNAVAILABLE = "the media store of this host is not available"


class StoreLink:
    """One per process. `run` keeps it connected; calls wait for a connection for `wait_timeout_s`.

    The arena is mapped while the store is connected; `writable` for clients that send bytes. `processor` are the
    settings for which this client wants features: a store with others refuses it. `scraped` is as in `StoreHello`.
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
    ) -> None:
        self.address = address
        self._rpc = rpc
        self._arena_directory = arena_directory
        self._wait_timeout_s = wait_timeout_s
        #: Names this process at the store.
        self.client_id = secrets.token_hex(16)
        self._processor = dict(processor)
        self._writable = writable
        self._scraped = scraped
        self._client: StoreClient | None = None
        self._connected = asyncio.Event()
        self._view: ArenaView | None = None
        self._holds: set[int] = set()
        self._holds_arena = ""  # the entries that are held are in this arena
        self._outage = Outage()
        self._refusal: StartupFailed | None = None
        self._refused = asyncio.Event()
        self._listeners: list[Callable[[ArenaOffer | None], None]] = []
        self._reclaimers: list[Callable[[], None]] = []
        self._on_passed: Callable[[HoldsPassed], None] | None = None

    @property
    def arena(self) -> str | None:
        """The id of the arena that is mapped here; None without a store."""
        return None if self._view is None else self._view.id

    @property
    def can_grant(self) -> bool:
        """Whether other hosts' stores can copy the store's entries."""
        return self._client is not None and self._client.welcome.can_grant

    @property
    def max_payload_bytes(self) -> int:
        """The largest item that fits into the arena; unlimited while it is unknown."""
        return sys.maxsize if self._view is None else self._view.max_payload_bytes

    @property
    def retainable_bytes(self) -> int:
        """Bytes of entries that this client may hold without using them; 0 while memory is short or unknown."""
        if self.status is None:
            return 0
        arena = self.status.stats.arena
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
    def num_held(self) -> int:
        return len(self._holds)

    def watch(self, listener: Callable[[ArenaOffer | None], None]) -> None:
        """Call `listener` with the store's arena whenever the store is connected, and with None when it is lost. Called
        on the event loop; must not block."""
        self._listeners.append(listener)
        if self._client is not None:
            listener(self._client.welcome.arena)

    def watch_passed(self, listener: Callable[[HoldsPassed], None]) -> None:
        """Give `listener` the holds that other clients pass to this one: it owns them. Must not block."""
        self._on_passed = listener

    def watch_reclaim(self, listener: Callable[[], None]) -> None:
        """Call `listener` when the store needs memory: it releases the holds that are not in use. Must not block."""
        self._reclaimers.append(listener)

    async def run(self) -> None:
        """Stay connected until cancelled."""
        backoff = Backoff(initial_s=INITIAL_BACKOFF_S, max_s=MAX_BACKOFF_S)
        try:
            while True:
                if await self._connect_once():
                    backoff.reset()
                await asyncio.sleep(backoff.next())
        finally:
            if self._client is not None:
                await self._client.close()
            self._unmap()

    async def ready(self) -> None:
        """Wait until a store is connected and has started, without a deadline: loading the model's processor takes its
        time. Raises StartupFailed if a store refuses this client."""
        while True:
            await first_of(self._connected.wait(), self._refused.wait())
            if self._refusal is not None:
                raise self._refusal
            if (client := self._client) is not None:
                await first_of(client.started.wait(), client.closed.wait())
                if client.started.is_set():
                    return

    async def call_at(self, arena: str, make: Callable[[int], Call]) -> Reply:
        """Make a call about entries of `arena`, which another store does not have. Raises like `call`, and
        StoreUnavailable at once if their store is not connected."""
        client = self._client
        if client is not None and client.welcome.arena.id == arena:
            with suppress(ConnectionLost):
                return await client.call(make)
        raise self.unavailable("the media store of these entries is lost")

    def notify(self, arena: str, message: PassHolds) -> bool:
        """Send a message without a reply about entries of `arena`. Return False if their store is not connected."""
        client = self._client
        if client is None or client.closed.is_set() or client.welcome.arena.id != arena:
            return False
        client.notify(message)
        return True

    async def call(self, make: Callable[[int], Call], answer: AnswerQuestion | None = None) -> Reply:
        """Make a call, again if the store is lost meanwhile. The caller owns a hold that is returned, and ends it with
        `release`. Raises the error that the store reports; StoreUnavailable if it does not come back in time."""
        loop, remaining_s = asyncio.get_running_loop(), self._wait_timeout_s  # waits only: a call may take longer
        while True:
            started = loop.time()
            client = await self._client_before(started + remaining_s)
            remaining_s -= loop.time() - started
            try:
                return await client.call(make, answer)
            except ConnectionLost:
                continue

    def release(self, hold_id: int, arena: str) -> None:
        """End a hold on entries of `arena`. Those of an earlier store have ended with it."""
        if arena != self._holds_arena:
            return
        if self._client is not None:
            self._client.release(hold_id)
        else:
            self._holds.discard(hold_id)

    def release_passed(self, passed: HoldsPassed) -> None:
        """End holds that nobody uses."""
        for entry, hold_id in zip(passed.ranges, passed.hold_ids, strict=True):
            self.release(hold_id, entry.arena)
        for embedding in passed.embeddings:
            self.release(embedding.hold_id, embedding.tensor.range.arena)

    def payload(self, entry: ArenaRange) -> memoryview:
        """Return the payload of an entry that this client writes. Raises ConnectionLost if its store is lost."""
        if self._view is None:
            raise ConnectionLost("the store is lost")
        try:
            return self._view.entry(entry, writable=True)[ENTRY_HEADER_BYTES:]
        except HandoverFailed as error:
            raise ConnectionLost(error.message) from error

    def tensor(self, descriptor: TensorDescriptor) -> memoryview:
        """Return the bytes of a tensor of an entry that is held. Raises MediaLost if its store is lost."""
        if self._view is None or self._view.id != descriptor.range.arena:
            raise MediaLost("the media store of these entries is lost")
        return self._view.tensor(descriptor)

    async def _client_before(self, deadline: float) -> StoreClient:
        try:
            async with asyncio.timeout_at(deadline):
                while (client := self._client) is None or client.closed.is_set():
                    self._connected.clear()  # `run` may not have handled the loss yet
                    await self._connected.wait()
        except TimeoutError:
            raise self.unavailable(_UNAVAILABLE) from None
        return client

    async def _connect_once(self) -> bool:
        """Connect, and wait until the connection is lost. False if there was none."""
        try:
            await self._connect()
        except MedialaneError as error:
            self._report(error)
            return False
        except Exception:  # the supervisor: whatever fails, the next attempt may succeed
            logger.exception("connecting to the media store failed")
            return False
        self._refusal = None
        self._refused.clear()
        if (client := self._client) is not None:
            await client.closed.wait()
            if client.refusal is not None:
                self._report(client.refusal)
            else:
                logger.warning("the media store is lost")
        self._disconnect()
        return True

    async def _connect(self) -> None:
        sent = list(self._holds)
        hello = StoreHello(
            client_id=self.client_id,
            processor=self._processor,
            arena=self._holds_arena,
            holds=sent,
            scraped=self._scraped,
        )
        client = await StoreClient.connect(
            self.address, hello, self._rpc, holds=self._holds, on_passed=self._passed, on_reclaim=self._reclaim
        )
        welcome = client.welcome
        try:
            self._view = self._map(welcome)
        except MedialaneError:
            await client.close()
            raise
        if welcome.arena.id != self._holds_arena:
            self._holds.clear()
            self._holds_arena = welcome.arena.id
        else:
            for hold_id in sent:
                if hold_id not in self._holds:  # released in the meantime
                    client.release(hold_id)
        self._client = client
        self._outage.end()
        self._connected.set()
        self._tell(welcome.arena)
        logger.info("the media store is connected: %s", self.address)

    def _map(self, welcome: StoreWelcome) -> ArenaView:
        """Map the store's arena. Raises HandoverFailed if this process has another /dev/shm."""
        view = ArenaView.open(welcome.arena.id, self._arena_directory, writable=self._writable)
        if view.nonce != welcome.arena.nonce:
            view.close()
            raise HandoverFailed("the store's arena is not in our shared memory (--arena-directory)")
        return view

    def _disconnect(self) -> None:
        self._client = None
        self._outage.begin()
        self._connected.clear()
        self._unmap()
        self._tell(None)

    def _tell(self, arena: ArenaOffer | None) -> None:
        for listener in self._listeners:
            listener(arena)

    def _passed(self, passed: HoldsPassed) -> None:
        if self._on_passed is not None:
            self._on_passed(passed)
            return
        self.release_passed(passed)

    def _reclaim(self) -> None:
        for listener in self._reclaimers:
            listener()

    def _unmap(self) -> None:
        """Close the mapping. Entries that are being read stay mapped until their readers have finished."""
        view, self._view = self._view, None
        if view is not None:
            view.close()

    def _report(self, error: MedialaneError) -> None:
        if isinstance(error, StartupFailed):
            self._refusal = error
            self._refused.set()
        level = logging.INFO if isinstance(error, NoWorkerReady) else logging.ERROR
        logger.log(level, "media store %s: %s", self.address, error.message)
