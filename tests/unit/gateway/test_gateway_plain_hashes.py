"""The hashes of plain vLLM: what they are computed from, and what has to be fetched or decoded for them."""

from __future__ import annotations

import asyncio

import msgspec
import pytest
from request_media import request_media

from medialane.arena import describe
from medialane.gateway import PlainHashes, open_scope
from medialane.media import MediaConfig
from medialane.testing.sample_media import sample_jpeg
from medialane.types.errors import InvalidRequest
from medialane.types.feature import (
    Feature,
    MediaPrompt,
    PlacedFeature,
    PlaceholderRange,
    PreparedPrompt,
    StagedItem,
)
from medialane.types.hashing import DecodedItem
from medialane.types.media import Alias, EncodedMedia, Image, MediaRef, MediaSize
from medialane.types.tensor import TensorSpec

FILE = sample_jpeg(1, 6, 4)
OF_URL = b"the content of the URL"
INLINE = MediaRef("image", "a", data=FILE)
LINKED = MediaRef("video", "b", url="https://example.org/clip.mp4")
NAMED = MediaRef("image", "c", alias=Alias("the client's name", "image"))


class Features:
    """Stands for `StoreItems`, with the encoded content of URLs and decoded images in an arena."""

    def __init__(self, arena):
        self.arena = arena
        self.asked = []

    async def count_sent(self, ref, budget):
        """Not counted here."""

    async def hold_cached(self, refs, form, options, *, encoder):
        return []

    async def encoded(self, ref, options, timeline, budget):
        self.asked.append(("encoded", ref.param))
        pin = self._entry("encoded", ref, lambda found: EncodedMedia(ref.modality, "c", "video/mp4", found, 64, 22))
        feature = Feature(ref.modality, "our key", b"", (), MediaSize())
        return StagedItem(ref, feature, pin, media_type="video/mp4", content_hash="c")

    async def decoded(self, ref, options, timeline, budget):
        self.asked.append(("decoded", ref.param))
        specs = (TensorSpec("uint8", (2, 3, 3)),)
        pin = self._entry(
            "decoded", ref, lambda found: Feature("image", "our key", b"", describe(found, specs), MediaSize(3, 2))
        )
        return StagedItem(ref, pin.value, pin, is_hit=False, content_hash="c")

    def tensors(self, feature):
        return [
            memoryview(bytes(range(18)) if feature.mm_hash == "our key" and "image" in feature.modality else OF_URL)
        ]

    def _entry(self, kind, ref, make):
        reservation = self.arena.reserve(64, kind)
        return self.arena.publish(reservation, f"{kind} {ref.param}", make(reservation.range))


class Hasher:
    """Names what it was given."""

    def __init__(self, *, decodes=False):
        self.decodes = decodes
        self.items = []

    def needs_decoding(self, item):
        return self.decodes

    def hashes(self, prompt, items):
        self.items = list(items)
        return [f"hash {number}" for number, _ in enumerate(items)]


class Hashed:
    """What became of a prompt."""

    def __init__(self, arena, hasher, fairness):
        self.features = Features(arena)
        self.plain = PlainHashes(hasher, self.features, fairness=fairness, media=MediaConfig())

    async def of(self, *refs):
        with open_scope() as scope:
            media = request_media(MediaPrompt([1], refs), self.features, scope)
            prompt, fetched = await self.plain.fetched(media)
            placed = tuple(
                PlacedFeature(
                    Feature(ref.modality, "our key", b"", (), MediaSize(6, 4, num_frames=2, metadata=b"{}")),
                    PlaceholderRange(number, 1),
                )
                for number, ref in enumerate(refs)
            )
            hashes = tuple("our key" for _ in refs)
            prepared = PreparedPrompt([1], placed, hashes, prompt, media, is_predicted=True)
            return await self.plain.named(prepared, media, fetched)


@pytest.fixture
def hashed(arena, fairness):
    made = []

    def make(hasher):
        made.append(Hashed(arena, hasher, fairness))
        return made[-1]

    yield make
    for each in made:
        each.plain.close()


async def test_encoded_bytes_are_hashed_where_they_are(hashed):
    hasher = Hasher()
    server = hashed(hasher)
    prepared = await server.of(INLINE, LINKED, NAMED)
    assert prepared.mm_hashes == ("hash 0", "hash 1", "hash 2")
    inline, linked, named = hasher.items
    assert (bytes(inline.data), inline.is_rgb) == (FILE, True)
    assert bytes(linked.data) == OF_URL
    assert (linked.size.num_frames, linked.size.metadata) == (2, b"{}")
    assert named == NAMED
    assert server.features.asked == [("encoded", "b")]
    assert prepared.is_predicted


async def test_features_keep_our_keys_and_a_url_becomes_its_content(hashed):
    prepared = await hashed(Hasher()).of(LINKED)
    assert [placed.feature.mm_hash for placed in prepared.features] == ["our key"]
    (ref,) = prepared.source.items
    assert (ref.url, ref.content, ref.param) == (None, "c", "b")


async def test_item_that_is_hashed_as_decoded_is_decoded_and_the_prompt_says_so(hashed):
    hasher = Hasher(decodes=True)
    server = hashed(hasher)
    prepared = await server.of(INLINE)
    (item,) = hasher.items
    assert isinstance(item, DecodedItem)
    assert isinstance(item.media, Image)
    assert item.media.pixels.tobytes() == bytes(range(18))
    assert server.features.asked == [("decoded", "a")]
    assert not prepared.is_predicted


async def test_embeddings_are_refused(hashed):
    with pytest.raises(InvalidRequest, match="embeddings"):
        await hashed(Hasher()).of(msgspec.structs.replace(INLINE, is_embeds=True))


async def test_loop_runs_while_decoded_media_are_hashed(hashed):
    class Slow(Hasher):
        def hashes(self, prompt, items):
            asyncio.run_coroutine_threadsafe(self.ticked.wait(), self.loop).result(5)
            return super().hashes(prompt, items)

    hasher = Slow(decodes=True)
    hasher.ticked, hasher.loop = asyncio.Event(), asyncio.get_running_loop()
    hasher.loop.call_later(0.01, hasher.ticked.set)
    assert (await hashed(hasher).of(INLINE)).mm_hashes == ("hash 0",)
