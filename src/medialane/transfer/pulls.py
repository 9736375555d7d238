"""Pulls in both directions: other hosts' stores copy our entries, and we copy theirs, each once, into our arena, where
they are cached like our own. A mover that failed lately for a peer is avoided there for a while."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import NamedTuple, cast

import msgspec
from cachetools import LRUCache

from medialane.arena import ENTRY_HEADER_BYTES, Arena, Cached, Pin, Reservation
from medialane.runtime.tasks import SingleFlight
from medialane.transfer.mover import Destination, Mover, OpenedEntry, StillWriting
from medialane.transfer.peer_connection import PROTOCOL, longest_pull_s
from medialane.transfer.peer_server import PeerServer
from medialane.transfer.peers import MIN_PART_BYTES, Peers
from medialane.types.errors import HandoverFailed, MediaTooLarge, TransferFailed, TransferTimeout
from medialane.types.feature import Embedding, EntryKind, Feature, MoverName, RemoteEntry
from medialane.types.media import EncodedMedia
from medialane.types.stats import PullStats
from medialane.types.tensor import ArenaRange, TensorDescriptor
from medialane.wire.authentication import Role
from medialane.wire.config import RpcConfig
from medialane.wire.security import Authentication, Security

logger = logging.getLogger(__name__)

#: Pulls at the same time; others wait. A few saturate any link.
MAX_PULLS = 8
#: Copies and other stores with a known mover, and other stores for which the mover has failed.
MAX_REMEMBERED = 4096
#: Of the header of a feature, which is not known when memory is reserved: most are smaller.
_HEADER_BYTES = 4096

#: Consecutive failures after which the mover is avoided. One may be the end of the peer's process.
MAX_FAILURES = 2
#: How long it is avoided at first; each further failure doubles it.
INITIAL_PAUSE_S = 10.0
MAX_PAUSE_S = 600.0


class _Failures(NamedTuple):
    number: int
    until: float


class MoverHealth:
    """For which peers a mover is avoided because it failed lately, by their addresses. The clock is injected."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._failures: LRUCache[str, _Failures] = LRUCache(MAX_REMEMBERED)

    def is_avoided(self, peer: str) -> bool:
        failures = self._failures.get(peer)
        return failures is not None and failures.number >= MAX_FAILURES and self._clock() < failures.until

    def failed(self, peer: str) -> bool:
        """Count a failure. Return True if the mover is avoided from now on, which is worth a warning."""
        was_avoided = self.is_avoided(peer)
        earlier = self._failures.get(peer)
        number = 1 if earlier is None else earlier.number + 1
        pause_s = min(MAX_PAUSE_S, INITIAL_PAUSE_S * 2.0 ** max(0, min(number, 32) - MAX_FAILURES))
        self._failures[peer] = _Failures(number, self._clock() + pause_s)
        return not was_avoided and self.is_avoided(peer)

    def succeeded(self, peer: str) -> None:
        self._failures.pop(peer, None)


class Pulls:
    """Owns `mover`, which is used instead of tcp for entries of hosts that have it, too: for hosts that demand it and,
    if it is preferred, for all while it is healthy. tcp takes at most `max_streams` connections for an
    entry, each of them for `min_part_bytes` or more.

    Entries can be granted after `serve`. `close` in any case, after the sessions of the store's clients.
    """

    def __init__(
        self,
        arena: Arena,
        rpc: RpcConfig,
        mover: Mover | None = None,
        *,
        prefers_mover: bool = True,
        max_streams: int = 4,
        min_part_bytes: int = MIN_PART_BYTES,
        max_pull_s: Callable[[int], float] | None = None,
    ) -> None:
        """A pull may take `max_pull_s` of its bytes, by default `longest_pull_s`. Raises StartupFailed for
        unusable files of the settings."""
        authentication = Authentication(Security.load(rpc), PROTOCOL, Role.STORE, Role.STORE)
        self._arena = arena
        self._mover = mover
        self._prefers_mover = prefers_mover
        self._max_pull_s = max_pull_s
        self._health = MoverHealth()
        self._peers = Peers(arena.id, authentication, max_streams=max_streams, min_part_bytes=min_part_bytes)
        self._server = PeerServer(arena, authentication, mover, prefers_mover=prefers_mover)
        self._pulling: SingleFlight[tuple[EntryKind, str], Pin[Cached]] = SingleFlight(
            share=Pin.duplicate, release=Pin.release
        )
        self._slots = asyncio.Semaphore(MAX_PULLS)
        self._quarantine: set[asyncio.Task[None]] = set()
        #: What has copied the entries at ranges of our arena.
        self._copied_by: LRUCache[ArenaRange, MoverName] = LRUCache(MAX_REMEMBERED)
        #: What has copied the last entry of a store, by its address.
        self._mover_of_peer: LRUCache[str, MoverName] = LRUCache(MAX_REMEMBERED)
        self._num_pulls: Counter[str] = Counter()
        self._num_bytes: Counter[str] = Counter()
        self._num_failed: Counter[str] = Counter()

    async def serve(self, address: str) -> str:
        """Let other hosts' stores connect. Returns the address, with the port that was chosen for port 0. Raises
        StartupFailed."""
        return await self._server.serve(address)

    async def close(self) -> None:
        """End all reads. A range that may still be written stays allocated until this process exits. Idempotent."""
        if self._mover is not None:
            await self._mover.close()
        for task in self._quarantine:
            task.cancel()
        await asyncio.gather(*self._quarantine, return_exceptions=True)
        self._peers.close()
        await self._server.close()

    @property
    def can_grant(self) -> bool:
        return self._server.capabilities is not None

    @property
    def num_connections(self) -> int:
        """Pulls of other hosts' stores from this one."""
        return self._server.num_connections

    @property
    def stats(self) -> PullStats:
        return PullStats(
            num_pulls=dict(self._num_pulls),
            num_bytes=dict(self._num_bytes),
            num_failed=dict(self._num_failed),
            num_quarantined=len(self._quarantine),
        )

    def grant(self, ranges: Sequence[ArenaRange]) -> list[RemoteEntry]:
        """Return the right to copy entries that a client holds. Raises HandoverFailed."""
        return [self._grant(held) for held in ranges]

    async def pull(self, entries: Sequence[RemoteEntry]) -> list[Pin[Cached]]:
        """Return pins on our copies of the entries, all or none. An entry is copied unless one of its key is here, or
        on the way. The caller owns the pins. Raises TransferFailed, ArenaFull, MediaTooLarge."""
        pulling = [asyncio.ensure_future(self._pull_once(entry)) for entry in entries]
        try:
            return await asyncio.gather(*pulling)
        except BaseException:  # cancellation included: the pins have no other owner
            for task in pulling:
                task.cancel()
            for result in await asyncio.gather(*pulling, return_exceptions=True):
                if isinstance(result, Pin):
                    result.release()
            raise

    def mover_of(self, copy: ArenaRange) -> MoverName | None:
        """Return what has copied the entry at this range; None if it was made here, or is not one of the latest."""
        return self._copied_by.get(copy)

    async def fill(self, reservation: Reservation, read: Callable[[], Awaitable[None]]) -> None:
        """Fill a range by `read`, which raises what `Mover.read` raises. The caller owns the reservation if it returns;
        otherwise it ends when nothing writes to the range any more. Raises TransferFailed."""
        with self._freed_on_errors(reservation):
            async with self._slots:
                await read()

    def _grant(self, held: ArenaRange) -> RemoteEntry:
        capabilities, key = self._server.capabilities, self._arena.key_of(held)
        if capabilities is None:
            raise HandoverFailed("other hosts' stores cannot connect to this one (--peer-listen)")
        if key is None:
            raise HandoverFailed("the request's media are no longer held")
        return capabilities.give(held, *key)

    async def _pull_once(self, entry: RemoteEntry) -> Pin[Cached]:
        if not ENTRY_HEADER_BYTES <= entry.range.nbytes <= ENTRY_HEADER_BYTES + self._arena.max_payload_bytes:
            raise MediaTooLarge("the entry is larger than this host's arena")
        pin = cast("Pin[Cached] | None", self._arena.lookup(entry.key, entry.kind))
        if pin is None:
            pin = await self._pulling.do((entry.kind, entry.key), lambda: self._pull(entry))
        if pin.range.nbytes != entry.range.nbytes:
            pin.release()
            raise TransferFailed("this host has another entry of the same key")
        return pin

    async def _pull(self, entry: RemoteEntry) -> Pin[Cached]:
        mover, is_demanded = self._mover, entry.mover not in ("auto", "tcp")
        async with self._slots:
            deadline = time.monotonic() + (self._max_pull_s or longest_pull_s)(entry.range.nbytes)
            if mover is not None and (is_demanded or (entry.mover == "auto" and self._prefers_mover)):
                if (copy := await self._pull_by(mover, entry, deadline, is_demanded=is_demanded)) is not None:
                    return copy
            elif is_demanded:
                raise TransferFailed(f"this store cannot be used with --transport {entry.mover}")
            return await self._pull_by_tcp(entry, deadline)

    async def _pull_by(
        self, mover: Mover, entry: RemoteEntry, deadline: float, *, is_demanded: bool
    ) -> Pin[Cached] | None:
        """Return the copy; None if the mover is not usable at present or has failed, and tcp is to be used instead."""
        is_ready = mover.is_ready()  # if not, it starts while we connect, as it does at the source
        with ExitStack() as owned:
            async with self._peers.open(entry, deadline=deadline) as (opened, value):
                if mover.name not in opened.offers and is_demanded:
                    raise TransferFailed(f"the other store does not offer --transport {mover.name}")
                if not is_demanded and not (
                    is_ready and mover.name in opened.offers and not self._health.is_avoided(entry.address)
                ):
                    return None
                left_s = max(0.0, deadline - time.monotonic())
                try:
                    read = self._read(mover, opened, left_s if is_demanded else left_s / 2)
                    reservation = owned.enter_context(await read)
                except TransferFailed:
                    if is_demanded:
                        raise
                    return None
                value = _moved(value, entry, reservation.range)
            # The source has confirmed that it held the entry until the last byte was received.
            return self._arena.publish(reservation, entry.key, value)

    async def _pull_by_tcp(self, entry: RemoteEntry, deadline: float) -> Pin[Cached]:
        with self._reserve(entry) as reservation:
            try:
                with reservation.buffer as payload:
                    value = await self._peers.fetch(entry, payload, deadline=deadline)
            except TransferFailed as error:
                self._failed("tcp", entry.address, error)
                raise
            self._note_copied("tcp", entry, reservation.range)
            return self._arena.publish(reservation, entry.key, _moved(value, entry, reservation.range))

    def _reserve(self, entry: RemoteEntry) -> Reservation:
        """Reserve a range for a copy. The caller owns it. Raises ArenaFull."""
        num_bytes = entry.range.nbytes - ENTRY_HEADER_BYTES
        return self._arena.reserve(num_bytes, entry.kind, header_bytes=_HEADER_BYTES)

    async def _read(self, mover: Mover, opened: OpenedEntry, deadline_s: float) -> Reservation:
        """Reserve a range and have the mover fill it. The caller owns it. Raises TransferFailed, ArenaFull."""
        entry = opened.entry
        reservation = self._reserve(entry)
        try:
            with self._freed_on_errors(reservation), reservation.buffer as payload:
                await mover.read(opened, Destination(reservation.range, payload), deadline_s=deadline_s)
        except TransferFailed as error:
            self._failed(mover.name, entry.address, error)
            if self._health.failed(entry.address):
                logger.warning("entries of %s are not pulled by %s for a while", entry.address, mover.name)
            raise
        self._health.succeeded(entry.address)
        self._note_copied(mover.name, entry, reservation.range)
        return reservation

    def _note_copied(self, name: MoverName, entry: RemoteEntry, copy: ArenaRange) -> None:
        self._num_pulls[name] += 1
        self._num_bytes[name] += entry.range.nbytes
        self._copied_by[copy] = name
        if self._mover_of_peer.get(entry.address) != name:
            logger.info("entries of %s are copied by %s", entry.address, name)
            self._mover_of_peer[entry.address] = name

    def _failed(self, name: MoverName, peer: str, error: TransferFailed) -> None:
        self._num_failed[name] += 1
        logger.warning("pulling from %s by %s failed: %s", peer, name, error.message)

    @contextmanager
    def _freed_on_errors(self, reservation: Reservation) -> Iterator[None]:
        """Free the range after an error, once nothing writes to it any more. StillWriting becomes TransferTimeout."""
        try:
            yield
        except StillWriting as error:
            self._set_aside(reservation, error)
            raise TransferTimeout(str(error)) from error
        except BaseException:  # cancellation included: the range has no other owner, and nothing writes to it
            reservation.abandon()
            raise

    def _set_aside(self, reservation: Reservation, error: StillWriting) -> None:
        """Free the range when no write can follow."""

        async def free() -> None:
            await error.ended
            reservation.abandon()

        task = asyncio.get_running_loop().create_task(free(), name="quarantine")
        self._quarantine.add(task)
        task.add_done_callback(self._quarantine.discard)


def _moved(value: Cached, entry: RemoteEntry, local: ArenaRange) -> Cached:
    """Return the description of our copy. Raises TransferFailed if it does not describe `entry`."""
    if isinstance(value, EncodedMedia):
        end = value.data_offset + value.num_bytes
        if entry.kind == "encoded" and ENTRY_HEADER_BYTES <= value.data_offset <= end <= local.nbytes:
            return msgspec.structs.replace(value, range=local)
    elif _describes(value, entry):
        return _with_range(value, local)
    raise TransferFailed("the other store has described another entry")


def _describes(feature: Feature, entry: RemoteEntry) -> bool:
    embedding, tensors = feature.embedding, feature.tensors
    if embedding is not None:
        is_it = entry.kind == "embedded" and embedding.key == entry.key
        return is_it and not tensors and embedding.tensor.range == entry.range
    return entry.kind in ("decoded", "processed") and all(tensor.range == entry.range for tensor in tensors)


def _with_range(feature: Feature, local: ArenaRange) -> Feature:
    def moved(tensor: TensorDescriptor) -> TensorDescriptor:
        return TensorDescriptor(tensor.spec, local, tensor.offset)

    embedding = feature.embedding
    if embedding is not None:
        embedding = Embedding(embedding.key, moved(embedding.tensor))
    return msgspec.structs.replace(feature, tensors=tuple(map(moved, feature.tensors)), embedding=embedding)
