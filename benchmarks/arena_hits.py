"""For `medialane bench encode_sim`: what the arena holds of the media of sessions, with and without embeddings.

The real table of entries (`arena.entries`), with the real order of eviction, and sizes of Qwen2.5-VL 7B. A request
finds an item if its embeddings or its processed pixels are in the arena; else it is prepared anew. With embeddings, an
item is encoded by the first request that has it; then its pixels are the first to be evicted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from medialane.arena.entries import EntryTable
from medialane.types.feature import EntryKind, MediaSpan
from traces import SessionTrace, Turn, session_turns

_GIB = 1 << 30
#: Bytes for each embedding of an item: 4 patches of 14x14 pixels in 3 colours and 2 frames, as float32 or uint8
#: (normalised on the device); 3584 columns of bfloat16; and, encoded as JPEG, about 0.4 bytes a pixel.
FLOAT32, UINT8 = 4 * 1176 * 4, 4 * 1176
EMBEDDING, ENCODED = 3584 * 2, 313
#: What is saved for each embedding of an item that is found: preparing it (11.5 ms of CPU for an image of 1024x768,
#: `bench prepare`), and encoding it, as in `bench_encode_sim`.
PREPARE_MS, ENCODE_MS = 0.011, 0.04
ARENA_GIB = (2, 4, 8)
#: Embeddings of an image of 1024x768.
_EMBEDS = 1036
NUM_TURNS = 8000
#: Requests before the arena is in a steady state are not counted.
_WARM_UP = 0.4


def arena_rows(num_turns: int = NUM_TURNS) -> list[dict[str, object]]:
    turns = list(session_turns(SessionTrace(num_turns=num_turns)))
    return [
        _row(turns, gib, name, pixel_bytes)
        for name, pixel_bytes in (("float32", FLOAT32), ("uint8", UINT8))
        for gib in ARENA_GIB
    ]


def _row(turns: Sequence[Turn], gib: int, pixels: str, pixel_bytes: int) -> dict[str, object]:
    found = {keeps: Arena(gib * _GIB, pixel_bytes, keeps_embeddings=keeps) for keeps in (False, True)}
    for arena in found.values():
        for number, turn in enumerate(turns):
            arena.request(turn.media, is_counted=number >= len(turns) * _WARM_UP)
    without, kept = found[False], found[True]
    return {
        "pixels": pixels,
        "arena GiB": gib,
        "MB/item encoded": _mb(ENCODED),
        "MB/item processed": _mb(pixel_bytes),
        "MB/item embedded": _mb(EMBEDDING),
        "hit ratio without embeddings": without.hit_ratio,
        "hit ratio": kept.hit_ratio,
        "of which need no encoder": kept.num_embedded / max(1, kept.num_hits),
        "saved ms/item without embeddings": without.saved_ms,
        "saved ms/item": kept.saved_ms,
        "embedded / without": kept.num_embedded / max(1, kept.num_items) / without.hit_ratio,
    }


def _mb(bytes_of_one: int) -> float:
    """Return the size of an item of 1024x768."""
    return _EMBEDS * bytes_of_one / 1e6


@dataclass
class Arena:
    """The entries of one arena. `num_embedded` of the hits found the item's embeddings."""

    size_bytes: int
    pixel_bytes: int
    keeps_embeddings: bool
    num_items: int = 0
    num_hits: int = 0
    num_embedded: int = 0

    def __post_init__(self) -> None:
        self._table: EntryTable[None] = EntryTable("a" * 32, 0, self.size_bytes, lambda _range: None)

    @property
    def hit_ratio(self) -> float:
        return self.num_hits / self.num_items

    @property
    def saved_ms(self) -> float:
        """What hits save, for each item of 1024x768."""
        return _EMBEDS * (self.num_hits * PREPARE_MS + self.num_embedded * ENCODE_MS) / self.num_items

    def request(self, media: Sequence[MediaSpan], *, is_counted: bool) -> None:
        for span in {span.mm_hash: span for span in media}.values():
            is_embedded = self._find(span, "embedded")
            is_hit = is_embedded or self._find(span, "processed")
            if is_counted:
                self.num_items += 1
                self.num_hits += is_hit
                self.num_embedded += is_embedded
            if not is_hit:
                if not self._find(span, "encoded"):
                    self._add(span, "encoded", ENCODED)
                self._add(span, "processed", self.pixel_bytes)
            if self.keeps_embeddings and not is_embedded:
                self._add(span, "embedded", EMBEDDING)
                self._table.demote(span.mm_hash)

    def _find(self, span: MediaSpan, kind: EntryKind) -> bool:
        found = self._table.lookup(span.mm_hash, kind)
        if found is not None:
            self._table.unpin(found[0])
        return found is not None

    def _add(self, span: MediaSpan, kind: EntryKind, bytes_of_one: int) -> None:
        entry = self._table.reserve(span.num_embeds * bytes_of_one, kind)
        self._table.unpin(self._table.publish(entry, span.mm_hash, None)[0])
