"""Copies entries of other hosts' stores into our arena, each once, where they are cached like our own."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import TypeVar

import msgspec

from medialane.arena import ENTRY_HEADER_BYTES, Arena, Cached, Lease, Reservation
from medialane.core.errors import MediaTooLarge, TransferFailed, TransferTimeout
from medialane.core.feature import Embedding, Feature
from medialane.core.media import EncodedMedia
from medialane.core.remote_entry import EntryKind, MoverName, RemoteEntry
from medialane.core.single_flight import SingleFlight
from medialane.core.stats import PullStats
from medialane.core.tensor import ArenaRange, TensorDescriptor
from medialane.peers.mover import Destination, Mover, StillWriting
from medialane.peers.mover_health import MoverHealth
from medialane.peers.mover_speed import MoverSpeed
from medialane.peers.peers import PeerEntry, Peers
from medialane.peers.pull_time import longest_pull_s
from medialane.wire.security import Security

logger = logging.getLogger(__name__)

#: Pulls at the same time; others wait. A few saturate any link.
MAX_PULLS = 8

#: Copies, and other stores, whose mover is known.
MAX_REMEMBERED = 4096

K = TypeVar("K")


class Puller:
    """`movers` are in the order of preference; the last one, tcp, is always usable. The owner calls `close`, when no
    caller of `pull` is left."""

    def __init__(self, arena: Arena, security: Security, movers: Sequence[Mover], *, max_streams: int) -> None:
        self._arena = arena
        self._movers = {mover.name: mover for mover in movers}
        self._last = movers[-1].name
        self._health = MoverHealth(tuple(self._movers))
        self._speed = MoverSpeed()
        self._peers = Peers(arena.id, security, max_pulls=MAX_PULLS, max_streams=max_streams)
        self._pulling: SingleFlight[tuple[EntryKind, str], Lease[Cached]] = SingleFlight(
            share=Lease.duplicate, release=Lease.release
        )
        self._slots = asyncio.Semaphore(MAX_PULLS)
        self._quarantine: set[asyncio.Task[None]] = set()
        #: What has copied the entries at ranges of our arena, the latest last.
        self._copied_by: dict[ArenaRange, MoverName] = {}
        #: What has copied the last entry of a store, by its address.
        self._mover_of_peer: dict[str, MoverName] = {}
        self._num_pulls: Counter[str] = Counter()
        self._num_bytes: Counter[str] = Counter()
        self._num_failed: Counter[str] = Counter()

    @property
    def stats(self) -> PullStats:
        return PullStats(
            num_pulls=dict(self._num_pulls),
            num_bytes=dict(self._num_bytes),
            num_failed=dict(self._num_failed),
            num_quarantined=len(self._quarantine),
        )

    async def pull(self, entry: RemoteEntry) -> Lease[Cached]:
        """Return a lease on our copy of `entry`, which is copied unless an entry of its key is here, or on the way.

        The caller owns the lease. Raises TransferFailed, ArenaFull, MediaTooLarge.
        """
        if not ENTRY_HEADER_BYTES <= entry.range.nbytes <= ENTRY_HEADER_BYTES + self._arena.max_payload_bytes:
            raise MediaTooLarge("the entry is larger than this host's arena")
        if (found := self._arena.lease_cached(entry.key, entry.kind)) is None:
            found = await self._pulling.do((entry.kind, entry.key), lambda: self._pull(entry))
        if found.range.nbytes != entry.range.nbytes:
            found.release()
            raise TransferFailed("this host has another entry of the same key")
        return found

    def mover_of(self, copy: ArenaRange) -> MoverName | None:
        """Return what has copied the entry at this range; None if it was made here, or is not one of the latest."""
        return self._copied_by.get(copy)

    async def fill(self, reservation: Reservation, read: Callable[[], Awaitable[None]]) -> None:
        """Fill a range by `read`, which raises what `Mover.read` raises. The caller owns the reservation if it returns;
        otherwise it ends when nothing writes to the range any more. Raises TransferFailed."""
        with self._freed_on_errors(reservation):
            async with self._slots:
                await read()

    async def close(self) -> None:
        """End all reads. A range that may still be written stays allocated until this process exits."""
        for mover in self._movers.values():
            await mover.close()
        for task in self._quarantine:
            task.cancel()
        await asyncio.gather(*self._quarantine, return_exceptions=True)
        self._peers.close()

    async def _pull(self, entry: RemoteEntry) -> Lease[Cached]:
        async with self._slots:
            deadline = time.monotonic() + longest_pull_s(entry.range.nbytes)
            if entry.mover == "tcp" or (entry.mover == "auto" and len(self._movers) == 1):
                return await self._pull_by_tcp(entry, deadline)
            for mover in self._movers.values():
                mover.is_ready()  # if not, it starts while we connect, as it does at the source
            with ExitStack() as owned:
                async with self._peers.open(entry, deadline=deadline) as opened:
                    reservation = owned.enter_context(await self._copied(opened, deadline))
                    value = _moved(opened.value, entry, reservation.range)
                # The source has confirmed that it held the entry until the last byte was received.
                return self._arena.publish(reservation, entry.key, value)

    async def _pull_by_tcp(self, entry: RemoteEntry, deadline: float) -> Lease[Cached]:
        """Like `_pull`, without choosing a mover, in fewer steps."""
        with self._arena.reserve(entry.range.nbytes - ENTRY_HEADER_BYTES, entry.kind) as reservation:
            try:
                with reservation.buffer as payload:
                    value = await self._peers.fetch(entry, payload, deadline=deadline)
            except TransferFailed as failed:
                self._failed("tcp", entry.address, failed)
                raise
            self._note_copied("tcp", entry, reservation.range)
            return self._arena.publish(reservation, entry.key, _moved(value, entry, reservation.range))

    async def _copied(self, opened: PeerEntry, deadline: float) -> Reservation:
        """Return a range with the payload, copied by the first mover that works. The caller owns it."""
        error = TransferFailed(f"the other store does not offer --transport {opened.entry.mover}")
        usable = self._usable(opened)
        order = self._speed.order(opened.entry.address, usable, opened.entry.range.nbytes)
        for index, name in enumerate(order):
            mover, started = self._movers[name], time.monotonic()
            share_s = (deadline - started) / (len(order) - index)  # one that hangs leaves time for the next
            try:
                reservation = await self._read(mover, opened, max(0.0, share_s))
            except TransferFailed as failed:
                self._failed(mover.name, opened.entry.address, failed)
                error = failed
            else:
                entry, duration_s = opened.entry, time.monotonic() - started
                num_bytes = entry.range.nbytes
                self._speed.copied(entry.address, usable, name, num_bytes=num_bytes, duration_s=duration_s)
                return reservation
        raise error

    def _usable(self, opened: PeerEntry) -> list[MoverName]:
        """Return the movers that can copy the entry, in the order of preference."""
        entry = opened.entry
        names = self._health.order(entry.address, opened.offers)
        if entry.mover != "auto":
            return [name for name in names if name == entry.mover]
        return [name for name in names if self._movers[name].is_ready()]

    async def _read(self, mover: Mover, opened: PeerEntry, deadline_s: float) -> Reservation:
        """Reserve a range and have the mover fill it. The caller owns it. Raises TransferFailed, ArenaFull."""
        entry = opened.entry
        reservation = self._arena.reserve(entry.range.nbytes - ENTRY_HEADER_BYTES, entry.kind)
        with self._freed_on_errors(reservation), reservation.buffer as payload:
            destination = Destination(reservation.range, payload)
            await mover.read(opened, destination, deadline_s=deadline_s)
        self._health.succeeded(entry.address, mover.name)
        self._note_copied(mover.name, entry, reservation.range)
        return reservation

    def _note_copied(self, name: MoverName, entry: RemoteEntry, copy: ArenaRange) -> None:
        self._num_pulls[name] += 1
        self._num_bytes[name] += entry.range.nbytes
        _put(self._copied_by, copy, name)
        if self._mover_of_peer.get(entry.address) != name:
            logger.info("entries of %s are copied by %s", entry.address, name)
            _put(self._mover_of_peer, entry.address, name)

    def _failed(self, name: MoverName, peer: str, error: TransferFailed) -> None:
        self._num_failed[name] += 1
        logger.warning("pulling from %s by %s failed: %s", peer, name, error.message)
        if self._health.failed(peer, name) and name != self._last:
            logger.warning("entries of %s are not pulled by %s for a while", peer, name)

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


def _put(found: dict[K, MoverName], key: K, name: MoverName) -> None:
    """Remember the mover of one more key, in place of the oldest one if there are many."""
    found.pop(key, None)
    found[key] = name
    if len(found) > MAX_REMEMBERED:
        del found[next(iter(found))]


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
