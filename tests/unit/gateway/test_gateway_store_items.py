"""A gateway's side of finding an item: what it sends, writes, counts and rejects."""

from __future__ import annotations

import asyncio
import io
import sys

import msgspec
import pytest
from PIL import Image as PILImage

from medialane.gateway import StoreItems
from medialane.media import MediaConfig
from medialane.observability import RequestTimeline, TimelineReport
from medialane.prepare import Described
from medialane.store import (
    AliasResolved,
    ConnectionLost,
    DescribeItem,
    ImageSize,
    ItemDescribed,
    ItemFound,
    ResolveAlias,
    SendData,
)
from medialane.store.messages import CachedFound, FindCached
from medialane.types.errors import MediaTooLarge, PromptTooLong, ProtocolViolation
from medialane.types.feature import Feature, StagedItem
from medialane.types.hashing import content_hash, feature_key
from medialane.types.media import Alias, EncodedMedia, MediaRef, MediaSize
from medialane.types.tensor import ArenaRange

PARAM = "messages[0].content[0].image_url"
ENTRY = ArenaRange("a" * 32, 0, 4096, 1)
FEATURE = Feature("image", "key", b"", (), MediaSize(60, 40))
ENCODED = EncodedMedia("image", "hash", "image/png", ENTRY, 64, 10)


def picture(width=60, height=40):
    file = io.BytesIO()
    PILImage.new("RGB", (width, height)).save(file, "PNG")
    return file.getvalue()


DATA = picture()


def found(**changed):
    timeline = msgspec.convert(((("decode", 0.5, 0.6),), 1, 0, 100), TimelineReport)  # 0.5 s, begun 0.6 s ago
    fields = {"feature": FEATURE, "timeline": timeline} | changed
    return ItemFound(7, 1, ENTRY, "hash", True, **fields)


class Link:
    """Replaces `StoreLink`: asks `questions`, then answers `reply`."""

    def __init__(self):
        self.questions, self.reply = [], found()
        self.calls, self.released = [], []
        self.max_payload_bytes = 1 << 20
        self.memory = bytearray(8 << 20)
        self.num_pieces, self.lost_after = 0, sys.maxsize
        self.writing = asyncio.Event()
        self.arena, self.retainable_bytes = ENTRY.arena, 1 << 20

    def watch(self, listener):
        pass

    def watch_reclaim(self, listener):
        pass

    async def call(self, make, answer=None):
        self.calls.append(make(7))
        for question in self.questions:
            await answer(question)
        return self.reply

    def payload(self, entry):
        assert entry == ENTRY
        self.num_pieces += 1
        self.writing.set()
        if self.num_pieces > self.lost_after:
            raise ConnectionLost("the store is lost")
        return memoryview(self.memory)

    def release(self, hold_id, arena):
        self.released.append((hold_id, arena))


class Budget:
    """Counts images: five bytes a pixel as features. More pixels than `max_pixels` are too many."""

    def __init__(self, max_pixels=sys.maxsize):
        self.max_pixels = max_pixels
        self.counted = {}

    def has_counted(self, ref):
        return ref.param in self.counted

    def num_bytes(self, ref, form):
        return {"decoded": 3, "processed": 5}.get(form, 0) * self.counted.get(ref.param, 0)

    def missing(self):
        """Let every item be prepared."""

    async def add(self, ref, width, height):
        self.counted[ref.param] = width * height
        if width * height > self.max_pixels:
            raise PromptTooLong("too many tokens")


@pytest.fixture
def link():
    return Link()


@pytest.fixture
def features(link, fairness):
    return StoreItems(link, processor_digest="digest", fairness=fairness, media=MediaConfig())


def sent(data=DATA, **fields):
    return MediaRef("image", PARAM, data=data, **fields)


def by_url(**fields):
    return MediaRef("image", PARAM, url="http://host/a", **fields)


FORMS = ["processed", "decoded", "encoded"]


async def find(features, form, ref, *, budget=None, options=b"{}", timeline=None):
    given = (timeline or RequestTimeline(), budget or Budget())
    return await getattr(features, form)(ref, options, *given)


@pytest.fixture(params=FORMS)
def form(request, link):
    link.reply = found(feature=None, encoded=ENCODED) if request.param == "encoded" else found()
    return request.param


async def test_bytes_of_a_request_are_named_by_their_hash_and_not_sent(link, features, form):
    await find(features, form, sent())
    (call,) = link.calls
    assert (call.ref.data, call.ref.content, call.num_bytes, call.form) == (None, content_hash(DATA), len(DATA), form)
    assert link.num_pieces == 0


async def test_url_is_sent_without_content(link, features, form):
    await find(features, form, by_url(io=b'{"a":1}'))
    (call,) = link.calls
    assert (call.ref, call.num_bytes) == (by_url(io=b'{"a":1}'), None)


async def test_options_matter_for_processed_items_only(link, features, form):
    await find(features, form, by_url(), options=b'{"scale":2}')
    assert link.calls[0].options == (b'{"scale":2}' if form == "processed" else b"{}")


async def test_result_and_its_part_of_the_timeline_are_returned(features, form):
    timeline, ref = RequestTimeline(), by_url()
    item = await find(features, form, ref, timeline=timeline)
    if form == "processed":
        expected = StagedItem(ref, FEATURE, item.hold, is_hit=True, content_hash="hash")
    else:
        key = features.key(ref, b"{}", content="hash")
        decoded = msgspec.structs.replace(FEATURE, mm_hash=key)
        encoded = Feature("image", key, b"", item.feature.tensors, MediaSize())
        expected = {
            "decoded": StagedItem(ref, decoded, item.hold, is_hit=True, content_hash="hash"),
            "encoded": StagedItem(ref, encoded, item.hold, media_type=ENCODED.media_type, content_hash="hash"),
        }[form]
    assert item == expected
    assert (timeline.seconds["decode"], timeline.num_hits, timeline.copied_bytes) == (0.5, 1, 100)


async def test_hold_ends_at_the_store_once(link, features):
    item = await find(features, "processed", by_url())
    assert link.released == []
    item.hold.release()
    assert link.released == [(1, ENTRY.arena)]
    with pytest.raises(RuntimeError):
        item.hold.release()


async def test_item_in_another_form_is_a_violation_and_is_not_held(link, features):
    link.reply = found(feature=None, encoded=ENCODED)
    with pytest.raises(ProtocolViolation):
        await find(features, "processed", by_url())
    assert link.released == [(1, ENTRY.arena)]


async def test_missing_bytes_are_written_into_the_entry(link, features):
    data = DATA + bytes(range(256)) * 8000
    link.questions = [SendData(7, ENTRY)]
    timeline = RequestTimeline()
    await find(features, "processed", sent(data), timeline=timeline)
    assert bytes(link.memory[: len(data)]) == data
    assert not any(link.memory[len(data) :])
    assert timeline.copied_bytes == len(data) + 100
    assert timeline.seconds["fetch"] > 0


async def test_other_tasks_run_while_large_bytes_are_written(link, features):
    link.questions = [SendData(7, ENTRY)]
    finding = asyncio.create_task(find(features, "processed", sent(DATA + bytes(4 << 20))))
    await link.writing.wait()
    num_iterations = 0
    while not finding.done():
        num_iterations += 1
        await asyncio.sleep(0)
    await finding
    assert num_iterations > 4


async def test_cancelled_write_stops_between_two_pieces(link, features):
    """The range may be reused as soon as the call is cancelled."""
    link.questions = [SendData(7, ENTRY)]
    data = b"\1" * (8 << 20)
    finding = asyncio.create_task(find(features, "processed", sent(data)))
    await link.writing.wait()
    finding.cancel()
    await asyncio.wait([finding])
    written = link.memory.count(1)
    assert finding.cancelled()
    assert 0 < written < len(data)


async def test_write_stops_when_the_store_is_lost(link, features):
    link.questions, link.lost_after = [SendData(7, ENTRY)], 2
    with pytest.raises(ConnectionLost):  # the link makes the call again
        await find(features, "processed", sent(b"\1" * (8 << 20)))
    assert link.memory.count(1) == 2 * 512 * 1024


async def test_image_of_a_url_is_counted_when_its_size_is_known(link, features, form):
    link.questions, budget = [ImageSize(7, 60, 40)], Budget()
    await find(features, form, by_url(), budget=budget)
    assert budget.counted == {PARAM: 2400}


async def test_image_that_makes_the_prompt_too_long_is_rejected_by_name(link, features, form):
    link.questions = [ImageSize(7, 60, 40)]
    with pytest.raises(PromptTooLong) as raised:
        await find(features, form, by_url(), budget=Budget(max_pixels=1000))
    assert raised.value.param == PARAM


@pytest.mark.parametrize(("form", "bytes_per_pixel"), [("processed", 5), ("decoded", 3)])
async def test_image_that_cannot_be_stored_is_rejected_before_it_is_decoded(link, features, form, bytes_per_pixel):
    link.questions = [ImageSize(7, 60, 40)]
    link.max_payload_bytes = 2400 * bytes_per_pixel
    await find(features, form, by_url())
    link.max_payload_bytes -= 1
    with pytest.raises(MediaTooLarge) as raised:
        await find(features, form, by_url())
    assert raised.value.param == PARAM


async def test_large_image_is_forwarded_undecoded(link, features):
    link.questions, link.max_payload_bytes = [ImageSize(7, 60, 40)], 10
    link.reply = found(feature=None, encoded=ENCODED)
    await find(features, "encoded", by_url())


@pytest.mark.parametrize("form", ["processed", "decoded"])
async def test_image_known_to_be_too_large_is_not_asked_for(link, features, form):
    link.max_payload_bytes, budget = 10, Budget()
    await features.count_sent(sent(), budget)
    with pytest.raises(MediaTooLarge):
        await find(features, form, sent(), budget=budget)
    assert link.calls == []


async def test_image_that_came_with_the_request_is_counted_once_by_its_header(features):
    budget = Budget()
    for _ in range(2):
        await features.count_sent(sent(), budget)
        budget.max_pixels = 0
    assert budget.counted == {PARAM: 2400}


@pytest.mark.parametrize(
    "ref",
    [
        by_url(),
        sent(b"no image at all"),
        sent(is_embeds=True),
        MediaRef("audio", PARAM, data=DATA),
        MediaRef("image", PARAM, alias=Alias("u", "image")),
    ],
    ids=["url", "unreadable", "embeddings", "audio", "alias"],
)
async def test_nothing_else_is_counted(features, ref):
    budget = Budget()
    await features.count_sent(ref, budget)
    assert budget.counted == {}


async def test_sent_image_that_makes_the_prompt_too_long_is_rejected_by_name(features):
    with pytest.raises(PromptTooLong) as raised:
        await features.count_sent(sent(), Budget(max_pixels=10))
    assert raised.value.param == PARAM


async def test_only_an_alias_alone_is_resolved_at_the_store(link, features):
    for ref in (sent(alias=Alias("u", "image")), by_url()):
        assert await features.resolve(ref) is ref
    assert link.calls == []
    alone = MediaRef("image", PARAM, alias=Alias("u", "image"))
    link.reply = AliasResolved(7, msgspec.structs.replace(alone, content="hash"))
    assert (await features.resolve(alone)).content == "hash"
    assert link.calls == [ResolveAlias(7, alone)]


def test_key_is_the_one_under_which_the_store_publishes(features):
    ref = by_url(io=b'{"a":1}', options=b'{"scale":2}', salt="tenant")
    expected = feature_key(processor="digest", content="hash", io=ref.io, options=b'{"scale":2}', salt="tenant")
    assert features.key(ref, b"{}", content="hash") == expected
    assert features.key(ref, b'{"other":1}', content="hash") != expected


async def retaining(link, fairness):
    return StoreItems(link, processor_digest="digest", fairness=fairness, media=MediaConfig(), retention_s=60)


async def find_twice(features, first, second, options=(b"{}", b"{}")):
    found = []
    for ref, its_options in zip((first, second), options, strict=True):
        found.append(await features.processed(ref, its_options, RequestTimeline(), Budget()))
        found[-1].hold.release()
    return found


async def test_item_that_is_sent_again_is_not_asked_for_again(link, fairness):
    features, timeline = await retaining(link, fairness), RequestTimeline()
    link.reply = msgspec.structs.replace(found(), is_hit=False)
    ref = MediaRef("image", PARAM, data=DATA)
    (await features.processed(ref, b"{}", RequestTimeline(), Budget())).hold.release()
    again = await features.processed(msgspec.structs.replace(ref, param="other"), b"{}", timeline, Budget())
    assert len(link.calls) == 1
    assert (again.is_hit, again.feature, timeline.num_hits, timeline.num_misses) == (True, FEATURE, 1, 0)
    assert not link.released


@pytest.mark.parametrize(
    "other",
    [
        {"data": picture(61)},
        {"io": b'{"a":1}'},
        {"options": b'{"a":1}'},
        {"salt": "tenant"},
        {"modality": "video"},
        {"is_embeds": True},
    ],
    ids=lambda changed: next(iter(changed)),
)
async def test_another_item_is_asked_for(link, fairness, other):
    ref = MediaRef("image", PARAM, data=DATA)
    await find_twice(await retaining(link, fairness), ref, msgspec.structs.replace(ref, **other))
    assert len(link.calls) == 2


async def test_other_options_and_another_form_are_asked_for(link, fairness):
    features, ref = await retaining(link, fairness), MediaRef("image", PARAM, data=DATA)
    await find_twice(features, ref, ref, (b"{}", b'{"a":1}'))
    (await features.decoded(ref, b"{}", RequestTimeline(), Budget())).hold.release()
    assert len(link.calls) == 3


@pytest.mark.parametrize(
    "ref",
    [MediaRef("image", PARAM, url="http://x/y.png"), MediaRef("image", PARAM, data=DATA, alias=Alias("u", "image"))],
    ids=["a URL's content may have changed", "the store binds the alias"],
)
async def test_store_is_always_asked(link, fairness, ref):
    await find_twice(await retaining(link, fairness), ref, ref)
    assert len(link.calls) == 2


async def test_item_is_asked_for_with_its_encoder_and_found_again_for_the_same_one(link, fairness):
    features, ref = await retaining(link, fairness), MediaRef("image", PARAM, data=DATA)
    for encoder in ("", "d" * 64, "d" * 64, "e" * 64):
        (await features.processed(ref, b"{}", RequestTimeline(), Budget(), encoder=encoder)).hold.release()
    assert [call.encoder for call in link.calls] == ["", "d" * 64, "e" * 64]


async def test_forgotten_item_is_asked_for_again_and_ends_with_its_last_user(link, fairness):
    features, ref = await retaining(link, fairness), MediaRef("image", PARAM, data=DATA)
    first = await features.processed(ref, b"{}", RequestTimeline(), Budget())
    second = await features.processed(ref, b"{}", RequestTimeline(), Budget())
    features.forget(first.hold)
    features.forget(second.hold)
    again = await features.processed(ref, b"{}", RequestTimeline(), Budget())
    assert len(link.calls) == 2
    first.hold.release()
    assert not link.released
    second.hold.release()
    assert len(link.released) == 1
    again.hold.release()
    assert len(link.released) == 1, "the other one is retained"


async def describe(features, ref):
    return await features.described(ref, b"{}", RequestTimeline(), Budget())


async def test_image_is_described_by_its_header_without_its_bytes(link, features):
    size = MediaSize(60, 40)
    link.reply = ItemDescribed(7, content_hash(DATA), Described(b"header", size))
    feature = (await describe(features, sent())).feature
    (call,) = link.calls
    assert (type(call), call.size, call.num_bytes, call.ref.data) == (DescribeItem, size, len(DATA), None)
    assert (feature.header, feature.tensors, feature.size) == (b"header", (), size)
    assert feature.mm_hash == features.key(sent(), b"{}", content=content_hash(DATA))
    assert link.num_pieces == 0


async def test_image_whose_header_leaves_its_size_open_is_written_for_the_store_to_measure(link, features):
    file = io.BytesIO()
    PILImage.new("P", (60, 40)).save(file, "GIF")
    link.reply = ItemDescribed(7, content_hash(file.getvalue()), Described(b"header", MediaSize(60, 40)))
    link.questions = [SendData(7, ENTRY)]
    content = (await describe(features, sent(file.getvalue()))).content_hash
    assert link.calls[0].size is None
    assert content == content_hash(file.getvalue())
    assert bytes(link.memory[: len(file.getvalue())]) == file.getvalue()


async def test_content_of_a_url_is_what_the_store_says(link, features):
    link.reply = ItemDescribed(7, "of the url", Described(b"header", MediaSize(60, 40)))
    item = await describe(features, by_url())
    content, feature = item.content_hash, item.feature
    assert content == "of the url"
    assert feature.mm_hash == features.key(by_url(), b"{}", content="of the url")


async def test_item_whose_header_has_content_is_not_described(link, features):
    link.reply = ItemDescribed(7, "hash", None)
    assert await describe(features, sent()) is None


async def test_cached_items_are_found_by_one_message_and_used_without_another(link, fairness):
    features, timeline = await retaining(link, fairness), RequestTimeline()
    known = [MediaRef("image", f"{PARAM}{n}", content=f"{n}" * 64) for n in range(3)]
    named = MediaRef("image", PARAM, content="f" * 64, is_feature=True)
    link.reply = CachedFound(7, [found(), None, found()])
    held = await features.hold_cached([*known, sent(), named], "processed", b"{}", encoder="e")
    (call,) = link.calls
    assert (call, len(held)) == (FindCached(7, known, "processed", b"{}", "e"), 2)
    link.reply = found()
    items = [await features.processed(ref, b"{}", timeline, Budget(), encoder="e") for ref in known]
    assert [type(call).__name__ for call in link.calls] == ["FindCached", "FindItem"]
    assert [item.is_hit for item in items] == [True] * 3
    assert await features.hold_cached(known, "processed", b"{}", encoder="e") == []
    assert await features.hold_cached(known[:1], "decoded", b"{}", encoder="") == []
    assert len(link.calls) == 2
