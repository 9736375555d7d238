"""A request's media by stage: each found once, all holds owned by the scope."""

import msgspec
import pytest
from request_media import request_media

from medialane.arena import describe
from medialane.gateway import open_scope
from medialane.types.errors import InvalidImage
from medialane.types.feature import Embedding, Feature, MediaPrompt, StagedItem
from medialane.types.media import STAGES, Alias, EncodedMedia, MediaRef, MediaSize
from medialane.types.tensor import ArenaRange, TensorSpec

REFS = tuple(MediaRef("image", f"messages[0].content[{n}]", data=b"x") for n in range(3))
PROMPT = MediaPrompt([1, 7, 7, 7], REFS)


class Source:
    """Holds on entries of an arena, as a `FeatureSource` returns them; what is asked for is recorded."""

    def __init__(self, arena):
        self.arena = arena
        self.asked = []
        self.refused = None

    async def count_sent(self, ref, budget):
        """These images have no header."""

    async def hold_cached(self, refs, form, options, *, encoder):
        return []

    async def resolve(self, ref):
        return ref

    async def processed(self, ref, options, timeline, budget, *, encoder):
        return self._found("processed", ref, is_hit=False)

    async def decoded(self, ref, options, timeline, budget):
        return self._found("decoded", ref, is_hit=True)

    async def encoded(self, ref, options, timeline, budget):
        return self._found("encoded", ref, media_type="image/png")

    def _ask(self, kind, ref):
        self.asked.append((kind, ref.param))
        if ref.param == self.refused:
            raise InvalidImage("no", param=ref.param)

    def _found(self, kind, ref, **fields):
        self._ask(kind, ref)
        feature, reservation = Feature("image", f"{kind} entry", b"", (), MediaSize(2, 1)), self.arena.reserve(10, kind)
        encoded = EncodedMedia("image", "content", "image/png", reservation.range, 64, 10)
        pin = self.arena.publish(reservation, ref.param, encoded if kind == "encoded" else feature)
        return StagedItem(ref, feature, pin, content_hash="content", **fields)


@pytest.fixture
def source(arena):
    return Source(arena)


@pytest.mark.parametrize(
    ("stage", "mm_hash", "media_type", "is_hit"),
    [
        ("features", "processed entry", None, False),
        ("decoded", "decoded entry", None, True),
        ("url", "encoded entry", "image/png", None),
    ],
)
async def test_items_are_found_once_per_stage(source, stage, mm_hash, media_type, is_hit):
    with open_scope() as scope:
        media = request_media(PROMPT, source, scope)
        items = await media.in_stage(stage)
        assert await media.in_stage(stage) is items
        assert source.asked == [(STAGES[stage].sends, ref.param) for ref in REFS]
        assert [item.ref for item in items] == list(REFS)
        assert {(i.feature.mm_hash, i.media_type, i.is_hit) for i in items} == {(mm_hash, media_type, is_hit)}
        assert source.arena.stats().num_leases == 3
    assert source.arena.stats().num_leases == 0


async def test_stages_are_found_separately_and_holds_end_with_the_scope(source):
    with open_scope() as scope:
        media = request_media(PROMPT, source, scope)
        for stage in STAGES:
            await media.in_stage(stage)
        assert source.arena.stats().num_leases == 3 * len(STAGES)


async def test_items_accompanying_a_rejected_one_belong_to_the_scope(source):
    source.refused = REFS[1].param
    with open_scope() as scope:
        with pytest.raises(InvalidImage):
            await request_media(PROMPT, source, scope).in_stage("features")
        assert source.arena.stats().num_leases > 0


async def test_media_found_after_the_request_ended_are_released_immediately(source):
    with open_scope() as scope:
        media = request_media(PROMPT, source, scope)
    await media.in_stage("url")
    assert source.arena.stats().num_leases == 0


EMBEDDING = Embedding("key", describe(ArenaRange("a", 0, 128, 1), (TensorSpec("uint8", (4, 2)),))[0])


class Encoded(Source):
    """A source whose items have hashes of their own; of some an embedding is found the second time."""

    def __init__(self, arena, encoded):
        super().__init__(arena)
        self.encoded_items = encoded
        self.forgotten = 0
        self.refs = []

    def forget(self, hold):
        self.forgotten += 1

    async def processed(self, ref, options, timeline, budget, *, encoder):
        self.refs.append(ref)
        self._ask(encoder, ref)
        is_encoded = ref.content is not None and ref.param in self.encoded_items
        feature = Feature("image", ref.param, b"", (), MediaSize(2, 1))
        pin = self.arena.publish(self.arena.reserve(10, "processed"), f"{ref.param} {len(self.asked)}", feature)
        found = msgspec.structs.replace(feature, embedding=EMBEDDING if is_encoded else None)
        return StagedItem(ref, found, pin, is_hit=False, content_hash=f"content of {ref.param}")


async def test_items_that_were_encoded_meanwhile_are_found_by_content(source):
    first, second, third = (ref.param for ref in REFS)
    source = Encoded(source.arena, encoded={first, third})
    prompt = MediaPrompt(
        [1, 7, 7, 7], (*REFS[:2], MediaRef("image", third, url="http://a/b", alias=Alias("u", "image")))
    )
    with open_scope() as scope:
        media = request_media(prompt, source, scope, encoder="digest")
        before = await media.in_stage("features")
        features = await media.with_embeddings({second, third})
        assert [feature.embedding for feature in features] == [None, None, EMBEDDING]
        items = await media.in_stage("features")
        assert tuple(item.feature for item in items) == features
        assert items[:2] == before[:2]
        asked = source.refs[3:]
        assert [(ref.param, ref.content, ref.data, ref.url, ref.alias) for ref in asked] == [
            (param, f"content of {param}", None, None, None) for param in (second, third)
        ]
        assert source.forgotten == 2  # a retained hold on the tensors would be found again
        assert scope.timeline.num_misses == scope.timeline.num_hits == 0
    assert source.arena.stats().num_leases == 0


async def test_item_whose_embedding_cannot_be_looked_up_keeps_its_tensors(source):
    source = Encoded(source.arena, encoded={REFS[0].param})
    with open_scope() as scope:
        media = request_media(PROMPT, source, scope, encoder="digest")
        before = await media.in_stage("features")
        source.refused = REFS[0].param
        features = await media.with_embeddings({REFS[0].param})
        assert features == tuple(item.feature for item in before)
