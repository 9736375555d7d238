"""Encoded media in the arena: received straight into it, and found again by their content (fills `media.Bodies`).

An entry is cached under its content hash, a tenant's with a salt among his own. It is described for the modality that
it came as; whoever wants it as another (the sound of a video) gets the same bytes, looked at again.
"""

from __future__ import annotations

import asyncio

import msgspec
from blake3 import blake3

from medialane.arena import ENTRY_HEADER_BYTES, Arena, Lease, Reservation
from medialane.core.embeds import EMBEDS_TYPE
from medialane.core.media import EncodedMedia, MediaRef, Modality
from medialane.media import MediaConfig, sniff

KIB = 1024
MIB = 1024 * KIB

#: How much memory a body gets, one after the other as it outgrows them; then its whole length, or the most that it may
#: have. What is too much goes back in the end. A declared length is a promise: if it were reserved at once, some slow
#: origins of videos could take the arena from everybody. So memory is given for what has arrived. What moves along is
#: 16 MiB at the most, 4 ms of the loop.
STEPS = (64 * KIB, MIB, 4 * MIB, 16 * MIB)


#: What is copied at a time, some 100 us.
_PIECE_BYTES = 512 * KIB


class EncodedStore:
    """Has no state of its own."""

    def __init__(self, arena: Arena, config: MediaConfig) -> None:
        self._arena = arena
        self._config = config

    def lookup(self, ref: MediaRef, content: str) -> Lease[EncodedMedia] | None:
        """The entry of this content, if there is one. The caller owns the lease. Raises what `sniff` raises."""
        lease = self._arena.lookup(_key(content, ref.salt), "encoded")
        if lease is not None and ref.is_embeds != (lease.value.media_type == EMBEDS_TYPE):
            lease.release()  # embeddings never pass as media, nor media as embeddings
            return None
        if lease is None or lease.value.modality == ref.modality:
            return lease
        try:
            media_type = sniff(self.bytes(lease.value), ref.modality, self._config)
        except BaseException:  # whatever ends it, nobody else has this lease
            lease.release()
            raise
        lease.value = msgspec.structs.replace(lease.value, modality=ref.modality, media_type=media_type)
        return lease

    async def put(self, ref: MediaRef, content: str, data: bytes | bytearray) -> Lease[EncodedMedia]:
        """A copy of `data`, whose hash is `content`. The caller owns the lease. Raises ArenaFull and as `sniff`.

        Copied a piece at a time on the event loop, where a cancellation comes between two of them: a thread could still
        write to a range that is another's by then.
        """
        media_type = EMBEDS_TYPE if ref.is_embeds else sniff(data, ref.modality, self._config)
        with self._arena.reserve(len(data), "encoded") as reservation:
            view = memoryview(data)
            for start in range(0, len(view), _PIECE_BYTES):
                await asyncio.sleep(0)
                reservation.buffer[start : start + _PIECE_BYTES] = view[start : start + _PIECE_BYTES]
            return self._publish(
                reservation, modality=ref.modality, salt=ref.salt, content=content, media_type=media_type
            )

    def forget(self, ref: MediaRef, content: str) -> None:
        """Drop the entry of this content, unless somebody holds it."""
        self._arena.evict(_key(content, ref.salt), "encoded")

    def open(self, modality: Modality, salt: str, max_bytes: int) -> ArenaBody:
        """A body that becomes an entry."""
        return ArenaBody(self, self._arena, modality=modality, salt=salt, max_bytes=max_bytes)

    def keep(self, reservation: Reservation, modality: Modality, salt: str, content: str) -> None:
        """Cache what was received. Raises what `sniff` raises; the reservation is the caller's then."""
        media_type = sniff(reservation.buffer, modality, self._config)
        self._publish(reservation, modality=modality, salt=salt, content=content, media_type=media_type).release()

    def bytes(self, encoded: EncodedMedia) -> memoryview:
        """The bytes of an entry that the caller has a lease on, read-only."""
        first = encoded.data_offset
        return self._arena.view.entry(encoded.range)[first : first + encoded.num_bytes]

    def _publish(
        self, reservation: Reservation, *, modality: Modality, salt: str, content: str, media_type: str
    ) -> Lease[EncodedMedia]:
        range_ = reservation.range
        num_bytes = range_.nbytes - ENTRY_HEADER_BYTES
        encoded = EncodedMedia(modality, content, media_type, range_, ENTRY_HEADER_BYTES, num_bytes)
        return self._arena.publish(reservation, _key(content, salt), encoded)


class ArenaBody:
    """A body in the making: one reservation from its first piece on, moved to a longer one where it is outgrown."""

    def __init__(self, store: EncodedStore, arena: Arena, *, modality: Modality, salt: str, max_bytes: int) -> None:
        self._store = store
        self._arena = arena
        self._modality = modality
        self._salt = salt
        self._max_bytes = max_bytes
        self._expected_bytes = 0
        self._num_bytes = 0
        self._reservation: Reservation | None = None

    def expect(self, num_bytes: int) -> None:
        self._expected_bytes = num_bytes

    def write(self, piece: bytes) -> None:
        end = self._num_bytes + len(piece)
        room = self._reserved(end)
        room.buffer[self._num_bytes : end] = piece
        self._num_bytes = end

    def finish(self, content_hash: str) -> None:
        room = self._reserved(self._num_bytes)
        room.trim(self._num_bytes)
        self._store.keep(room, self._modality, self._salt, content_hash)

    def abandon(self) -> None:
        if self._reservation is not None:
            self._reservation.abandon()

    def _reserved(self, num_bytes: int) -> Reservation:
        """The reservation, at least so long; what was written moves along where it grows."""
        old = self._reservation
        if old is not None and len(old.buffer) >= num_bytes:
            return old
        most = self._expected_bytes if self._expected_bytes >= num_bytes else self._max_bytes
        step = next((step for step in STEPS if step >= num_bytes), most)
        most = min(most, self._arena.max_payload_bytes)
        new = self._arena.reserve(max(num_bytes, min(step, most)), "encoded")
        if old is not None:
            new.buffer[: self._num_bytes] = old.buffer[: self._num_bytes]
            old.abandon()
        self._reservation = new
        return new


def _key(content: str, salt: str) -> str:
    return content if not salt else blake3(msgspec.msgpack.encode((content, salt))).hexdigest()
