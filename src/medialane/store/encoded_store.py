"""Encoded media in the arena: received directly into it (`open`), and looked up by content.

An entry is cached under its content hash, or under content hash and salt for a tenant. It is described for the modality
in which it was received; a lookup for another modality (the audio of a video) gets the same bytes, sniffed again. A
document is described as images, which its pages are.
"""

from __future__ import annotations

import msgspec
from blake3 import blake3

from medialane.arena import ENTRY_HEADER_BYTES, Arena, Pin, Reservation
from medialane.media import MediaConfig, sniff
from medialane.types.media import EncodedMedia, MediaRef, MediaSource, modality_of, source_of
from medialane.types.tensor import EMBEDS_TYPE

KIB = 1024
MIB = 1024 * KIB

#: Sizes reserved for a body, in turn as it outgrows them; then its declared length, or the most that it may have. The
#: excess is returned at the end. Memory is reserved for bytes that have arrived: if declared lengths were reserved at
#: once, a few slow origins of videos could exhaust the arena. Growing copies at most 16 MiB, 4 ms of the event loop.
STEPS = (64 * KIB, MIB, 4 * MIB, 16 * MIB)


class EncodedStore:
    """Stateless: all state is in the arena."""

    def __init__(self, arena: Arena, config: MediaConfig) -> None:
        self._arena = arena
        self._config = config

    def lookup(self, ref: MediaRef, content: str) -> Pin[EncodedMedia] | None:
        """Return a pin on the entry of this content, or None. The caller owns it. Raises what `sniff` raises."""
        return self.described(self._arena.lookup(self.key(content, ref.salt), "encoded"), ref)

    def described(self, pin: Pin[EncodedMedia] | None, ref: MediaRef) -> Pin[EncodedMedia] | None:
        """Return a pin on an entry, which this owns, for the modality of `ref`; None if it is not of its kind. Raises
        what `sniff` raises."""
        if pin is not None and ref.is_embeds != (pin.value.media_type == EMBEDS_TYPE):
            pin.release()  # embeddings must not be used as media, nor media as embeddings
            return None
        if pin is None or source_of(pin.value) == ref.source:
            return pin
        try:
            media_type = sniff(self.bytes(pin.value), ref.source, self._config)
        except BaseException:  # cancellation included: the pin has no other owner
            pin.release()
            raise
        pin.value = msgspec.structs.replace(pin.value, modality=ref.modality, media_type=media_type)
        return pin

    def publish(
        self, reservation: Reservation, source: MediaSource, *, salt: str, content: str, media_type: str = ""
    ) -> Pin[EncodedMedia]:
        """Cache written bytes, whose hash is `content`; their type is found out unless it is given. The caller owns the
        pin, and, if `sniff` raises, still the reservation."""
        media_type = media_type or sniff(reservation.buffer, source, self._config)
        range_, modality = reservation.range, modality_of(source)
        num_bytes = range_.nbytes - ENTRY_HEADER_BYTES
        encoded = EncodedMedia(modality, content, media_type, range_, ENTRY_HEADER_BYTES, num_bytes)
        pin = self._arena.publish(reservation, self.key(content, salt), encoded)
        if pin.value.modality != modality:  # the same bytes are cached as another
            pin.value = msgspec.structs.replace(pin.value, modality=modality, media_type=media_type)
        return pin

    def forget(self, content: str, salt: str) -> None:
        """Evict the entry of this content, unless it is pinned."""
        self._arena.evict(self.key(content, salt), "encoded")

    def open(self, source: MediaSource, salt: str, max_bytes: int) -> ArenaBody:
        """Return a body that is received into a new entry."""
        return ArenaBody(self, self._arena, source=source, salt=salt, max_bytes=max_bytes)

    def bytes(self, encoded: EncodedMedia) -> memoryview:
        """Return the bytes of an entry, read-only. The caller holds a pin on it."""
        first = encoded.data_offset
        return self._arena.view.entry(encoded.range)[first : first + encoded.num_bytes]

    def key(self, content: str, salt: str) -> str:
        """Return the key of an entry."""
        return content if not salt else blake3(msgspec.msgpack.encode((content, salt))).hexdigest()


class ArenaBody:
    """A body being received: one reservation from the first chunk on, moved to a larger one when it is outgrown."""

    def __init__(self, store: EncodedStore, arena: Arena, *, source: MediaSource, salt: str, max_bytes: int) -> None:
        self._store = store
        self._arena = arena
        self._source = source
        self._salt = salt
        self._max_bytes = max_bytes
        self._expected_bytes = 0
        self._num_bytes = 0
        self._reservation: Reservation | None = None

    def expect(self, num_bytes: int) -> None:
        self._expected_bytes = num_bytes

    def write(self, piece: bytes) -> None:
        end = self._num_bytes + len(piece)
        reservation = self._reserved(end)
        reservation.buffer[self._num_bytes : end] = piece
        self._num_bytes = end

    def finish(self, content_hash: str) -> None:
        reservation = self._reserved(self._num_bytes)
        reservation.trim(self._num_bytes)
        self._store.publish(reservation, self._source, salt=self._salt, content=content_hash).release()

    def abandon(self) -> None:
        if self._reservation is not None:
            self._reservation.abandon()

    def _reserved(self, num_bytes: int) -> Reservation:
        """Return a reservation of at least `num_bytes`; what has been written is copied if it grows."""
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
