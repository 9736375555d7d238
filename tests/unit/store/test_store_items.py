"""Finding and making items, over a real arena and scripted fetches and preparers."""

from __future__ import annotations

import asyncio
import io

import msgspec
import pytest
from PIL import Image as PILImage

from builders import bytes_beside_payload
from medialane.arena import FillWriter
from medialane.media import MediaConfig
from medialane.observability import RequestTimeline
from medialane.prepare import Described
from medialane.store import (
    Aliases,
    EncodedStore,
    FindEmbedding,
    Items,
    ItemSource,
    MediaLeases,
    Processing,
    StoreConfig,
)
from medialane.types.errors import (
    ArenaFull,
    InvalidImage,
    MediaFetchFailed,
    MediaTooLarge,
    PromptTooLong,
    UnknownMediaUuid,
    UuidConflict,
)
from medialane.types.feature import Feature
from medialane.types.hashing import content_hash, embedding_key
from medialane.types.media import Alias, MediaRef, MediaSize
from medialane.types.tensor import TensorSpec
from waiting import eventually, iterations

PARAM = "messages[0].content[0].image_url"
PLAIN = Processing("digest", b"{}")
URL = "http://host/a"
BY_CONTENT = b'{"by_content":true}'


def picture(width=60, height=40, file_format="BMP"):
    file = io.BytesIO()
    PILImage.new("RGB", (width, height), (1, 2, 3)).save(file, file_format)
    return file.getvalue()


DATA = picture()

#: Its header says little: a preparer must open it before a worker decodes it.
AVIF = picture(file_format="AVIF")


def by_url(**fields):
    return MediaRef("image", PARAM, url=URL, **fields)


def sent(data=DATA, **fields):
    return MediaRef("image", PARAM, content=content_hash(data), **fields)


class Fetcher:
    """Fetches `data`. With `is_fresh` the content of the URL is known without a download."""

    def __init__(self):
        self.data, self.is_fresh, self.keeps = DATA, False, True
        self.num_fetches = 0
        self.arena = self.store = None

    async def fetch(self, ref, *, need_data=False):
        found = content_hash(self.data)
        if self.is_fresh and not need_data:
            return found
        self.num_fetches += 1
        if self.keeps:
            with self.arena.reserve(len(self.data), "encoded") as reservation:
                reservation.buffer[:] = self.data
                self.store.publish(reservation, ref.source, salt=ref.salt, content=found).release()
        return found


class Pool:
    """Preparers: features of ten bytes. `gate` delays them, `error` fails them."""

    def __init__(self, arena):
        self._arena = arena
        self.gate, self.error = None, None
        self.prepared, self.num_probes = [], 0
        self.measured, self.blanks = [], []

    async def prepare_item(self, encoded, options, mm_hash, timeline, *, io, as_file):
        self.prepared.append((bytes(io), options))
        await self._work()
        feature = Feature("image", mm_hash, b"", (), MediaSize(60, 40))
        kind = "decoded" if options is None else "processed"
        return self._arena.publish(self._arena.reserve(10, kind), mm_hash, feature)

    async def probe_item(self, encoded):
        self.num_probes += 1
        await self._work()

    async def measure(self, encoded, io):
        self.measured.append(encoded.value.content_hash)
        await self._work()
        return MediaSize(60, 40)

    async def describe_blank(self, modality, size, options):
        self.blanks.append((size, options))
        await self._work()
        return Described(b"header", size) if options != BY_CONTENT else None

    async def _work(self):
        if self.gate is not None:
            await self.gate.wait()
        if self.error is not None:
            raise self.error


class World:
    def __init__(self, arena):
        self.arena, self.fetcher, self.pool = arena, Fetcher(), Pool(arena)
        aliases = Aliases(max_aliases=8, ttl_s=60)
        self.items = Items(
            arena=arena,
            pool=self.pool,
            fetcher=self.fetcher,
            media=MediaConfig(),
            aliases=aliases,
            leases=MediaLeases(arena, StoreConfig(), MediaConfig(), aliases=aliases, pool=self.pool),
        )
        self.fetcher.arena, self.fetcher.store = arena, EncodedStore(arena, MediaConfig())  # stateless
        self.uploads, self.admitted = 0, []

    def uploading(self, ref, data=DATA):
        async def upload(store):
            self.uploads += 1
            with self.arena.reserve(len(data), "encoded") as reservation:
                reservation.buffer[:] = data
                return store.publish(reservation, ref.source, salt=ref.salt, content=content_hash(data))

        return upload

    async def admit(self, width, height):
        self.admitted.append((width, height))

    async def find(self, ref, form="processed", processing=PLAIN, **given):
        """Find an item and release it; return whether it was cached, its value and the timeline."""
        timeline = RequestTimeline()
        found = await self.items.find(ItemSource(ref, timeline, **given), form, processing)
        value = found.pin.value
        found.pin.release()
        return found.is_hit, value, timeline

    async def describe(self, ref, options=b"{}", size=None, **given):
        return await self.items.describe(ItemSource(ref, RequestTimeline(), **given), options, size)

    async def keep_embedding(self, mm_hash, encoder):
        """Cache the embedding of an item, as a worker does."""
        key = embedding_key(mm_hash=mm_hash, encoder=encoder)
        feature = Feature("image", mm_hash, b"header", (), MediaSize(60, 40))
        fill = await self.items.embeddings.find(FindEmbedding(1, key, feature, TensorSpec("float32", (2, 4))), 1)
        with FillWriter.open(fill.embedding.tensor.range, "/dev/shm"):
            pass
        fill.hold.release()
        return fill.embedding


@pytest.fixture
def world(arena):
    return World(arena)


@pytest.mark.parametrize("form", ["encoded", "decoded", "processed"])
async def test_sent_bytes_are_received_once(world, form):
    for _ in range(2):
        await world.find(sent(), form, upload=world.uploading(sent()))
    assert (world.uploads, world.fetcher.num_fetches) == (1, 0)
    assert len(world.pool.prepared) == (form != "encoded")


@pytest.mark.parametrize("form", ["decoded", "processed"])
async def test_found_item_says_whether_it_was_cached(world, form):
    is_hit, value, timeline = await world.find(by_url(), form)
    assert (is_hit, timeline.num_hits, timeline.num_misses) == (False, 0, 1)
    again, same, timeline = await world.find(by_url(), form)
    assert (again, timeline.num_hits, timeline.num_misses) == (True, 1, 0)
    assert value.mm_hash == same.mm_hash


async def test_forms_and_options_are_distinct_items_of_one_download(world):
    world.fetcher.is_fresh = True
    keys = set()
    for ref, form, processing in (
        (by_url(), "processed", PLAIN),
        (by_url(), "processed", Processing("other settings", b"{}")),
        (by_url(), "processed", Processing("digest", b'{"scale":2}')),
        (by_url(io=b'{"image_mode":"L"}'), "processed", PLAIN),
        (by_url(), "decoded", PLAIN),
    ):
        keys.add((await world.find(ref, form, processing))[1].mm_hash)
    assert (len(keys), world.fetcher.num_fetches) == (5, 1)
    assert world.pool.prepared[-1] == (b"{}", None), "decoding takes no processor options"


async def test_tenants_share_no_item(world):
    await world.find(by_url(salt="one"))
    assert not (await world.find(by_url(salt="two")))[0]
    assert len(world.pool.prepared) == 2


async def test_concurrent_requests_share_one_preparation(world):
    world.pool.gate = asyncio.Event()
    finding = [asyncio.create_task(world.find(by_url())) for _ in range(4)]
    await eventually(lambda: world.pool.prepared)
    finding[0].cancel()
    await iterations(3)
    world.pool.gate.set()
    results = await asyncio.gather(*finding, return_exceptions=True)
    assert isinstance(results[0], asyncio.CancelledError)
    assert len({value.mm_hash for _, value, _ in results[1:]}) == 1
    assert len(world.pool.prepared) == 1


async def test_content_that_is_neither_cached_nor_sent_is_unknown(world):
    for form in ("encoded", "decoded", "processed"):
        with pytest.raises(UnknownMediaUuid) as raised:
            await world.find(sent(), form)
        assert raised.value.param == PARAM


async def test_changed_content_is_the_one_that_is_returned(world):
    world.fetcher.is_fresh = True
    first = (await world.find(by_url()))[1]
    world.arena.clear()  # the bytes, too
    fetch = world.fetcher.fetch

    async def changing(ref, *, need_data=False):
        if need_data:
            world.fetcher.data = picture(width=61)
        return await fetch(ref, need_data=need_data)

    world.fetcher.fetch = changing
    assert (await world.find(by_url()))[1].mm_hash != first.mm_hash


@pytest.mark.parametrize("form", ["encoded", "processed"])
async def test_bytes_that_are_evicted_at_once_are_fetched_a_few_times_only(world, form):
    world.fetcher.keeps = False
    with pytest.raises(ArenaFull):
        await world.find(by_url(), form)
    assert 2 <= world.fetcher.num_fetches <= 4


async def test_item_that_is_found_at_the_second_attempt_is_one_miss(world):
    """The store tries again when its clients have released what they do not use."""
    timeline = RequestTimeline()
    world.pool.error = ArenaFull("full")
    with pytest.raises(ArenaFull):
        await world.items.find(ItemSource(by_url(), timeline), "processed", PLAIN)
    world.pool.error = None
    (await world.items.find(ItemSource(by_url(), timeline), "processed", PLAIN)).pin.release()
    assert (timeline.num_hits, timeline.num_misses, timeline.cache) == (0, 1, "miss")


async def test_feature_that_can_never_fit_is_prepared_once(world):
    world.pool.error = MediaTooLarge("larger than the arena")
    for _ in range(3):
        with pytest.raises(MediaTooLarge, match="larger than the arena") as raised:
            await world.find(by_url())
        assert raised.value.param == PARAM
    assert len(world.pool.prepared) == 1
    world.pool.error = None
    await world.find(by_url(), processing=Processing("digest", b'{"scale":0.1}'))


async def test_failed_fetch_names_the_field(world):
    async def failing(ref, *, need_data=False):
        raise MediaFetchFailed("404")

    world.fetcher.fetch = failing
    with pytest.raises(MediaFetchFailed) as raised:
        await world.find(by_url())
    assert raised.value.param == PARAM


@pytest.mark.parametrize("form", ["encoded", "decoded", "processed"])
async def test_size_of_a_fetched_image_is_asked_for_before_it_is_decoded(world, form):
    async def refuse(width, height):
        world.admitted.append((width, height))
        raise PromptTooLong("too many tokens")

    with pytest.raises(PromptTooLong):
        await world.find(by_url(), form, admit=refuse)
    assert (world.admitted, world.pool.prepared, world.pool.num_probes) == ([(60, 40)], [], 0)
    await world.find(by_url(), form, admit=world.admit)
    assert world.admitted == [(60, 40)] * 2


async def test_cancelled_question_leaves_no_hold(world):
    asked = asyncio.Event()

    async def never(width, height):
        asked.set()
        await asyncio.Event().wait()

    finding = asyncio.create_task(world.find(by_url(), "encoded", admit=never))
    await asked.wait()
    assert world.arena.stats().num_leases == 1
    finding.cancel()
    await asyncio.wait([finding])
    assert world.arena.stats().num_leases == 0


async def test_size_is_not_asked_for_where_the_client_knows_it(world):
    await world.find(sent(), upload=world.uploading(sent()), admit=world.admit)
    await world.find(by_url(), admit=world.admit)  # a hit: its size comes with it
    assert world.admitted == []


async def test_unknown_alias_names_the_field(world):
    ref = MediaRef("image", PARAM, alias=Alias("u", "image"))
    with pytest.raises(UnknownMediaUuid) as raised:
        world.items.resolve(ref)
    assert raised.value.param == PARAM


@pytest.mark.parametrize("form", ["encoded", "processed"])
async def test_alias_stands_for_the_content_and_options_it_was_sent_with(world, form):
    alias = Alias("u", "image", io=b'{"image_mode":"L"}', options=b'{"scale":2}')
    await world.find(sent(alias=alias), form, upload=world.uploading(sent()))
    alone = MediaRef("image", PARAM, alias=Alias("u", "image"))
    found = world.items.resolve(alone)
    assert (found.content, found.io, found.options) == (content_hash(DATA), alias.io, alias.options)
    world.fetcher.data = picture(width=61)
    with pytest.raises(UuidConflict) as raised:
        await world.find(by_url(alias=alias), form)
    assert raised.value.param == PARAM
    assert world.items.resolve(alone).content == content_hash(DATA)
    with pytest.raises(UnknownMediaUuid):
        world.items.resolve(msgspec.structs.replace(alone, salt="tenant"))


async def test_unusable_content_gets_no_alias(world):
    world.pool.error = InvalidImage("broken")
    alias = Alias("u", "image")
    with pytest.raises(InvalidImage):
        await world.find(by_url(alias=alias))
    with pytest.raises(UnknownMediaUuid):
        world.items.resolve(MediaRef("image", PARAM, alias=alias))


async def test_bytes_for_a_worker_are_opened_once_by_a_preparer_and_after_decoding_never(world):
    world.fetcher.data = AVIF
    for _ in range(2):
        await world.find(by_url(), "encoded")
    assert world.pool.num_probes == 1
    decoded = World(world.arena)
    decoded.fetcher.data = AVIF
    await decoded.find(by_url(), "decoded")
    await decoded.find(by_url(), "encoded")
    assert decoded.pool.num_probes == 0


async def test_bytes_that_a_preparer_rejects_are_dropped(world):
    world.fetcher.data, world.pool.error = AVIF, InvalidImage("broken")
    with pytest.raises(InvalidImage):
        await world.find(by_url(), "encoded")
    assert world.arena.stats().num_entries == 0
    world.pool.error = None
    await world.find(by_url(), "encoded")
    assert world.pool.num_probes == 2, "a rejection is not remembered for later content"


WITH_ENCODER = Processing("digest", b"{}", "an encoder")


@pytest.mark.parametrize("is_processed", [True, False])
async def test_item_whose_embedding_is_cached_is_a_feature_without_tensors(world, arena, is_processed):
    _, feature, _ = await world.find(by_url(), processing=WITH_ENCODER)
    assert (feature.embedding, len(world.pool.prepared)) == (None, 1)
    embedding = await world.keep_embedding(feature.mm_hash, WITH_ENCODER.encoder)
    if not is_processed:
        assert arena.evict(feature.mm_hash)
    timeline = RequestTimeline()
    found = await world.items.find(ItemSource(by_url(), timeline), "processed", WITH_ENCODER)
    assert (found.is_hit, found.pin.range) == (True, embedding.tensor.range)
    assert found.pin.value.embedding == embedding
    assert (found.pin.value.mm_hash, found.pin.value.tensors) == (feature.mm_hash, ())
    assert (timeline.num_hits, len(world.pool.prepared)) == (1, 1)
    found.pin.release()
    assert world.items.embeddings.stats.num_found == 1


@pytest.mark.parametrize(
    ("form", "processing"),
    [
        ("processed", PLAIN),
        ("processed", Processing("digest", b"{}", "another encoder")),
        ("processed", Processing("digest", b'{"scale":2}', "an encoder")),
        ("decoded", WITH_ENCODER),
    ],
)
async def test_embedding_is_found_for_its_encoder_and_its_feature_only(world, form, processing):
    _, feature, _ = await world.find(by_url(), processing=PLAIN)
    await world.keep_embedding(feature.mm_hash, WITH_ENCODER.encoder)
    _, found, _ = await world.find(by_url(), form, processing)
    assert found.embedding is None
    assert world.items.embeddings.stats.num_found == 0


async def test_embedding_of_one_tenant_is_not_found_by_another(world):
    _, feature, _ = await world.find(by_url(salt="a"), processing=WITH_ENCODER)
    await world.keep_embedding(feature.mm_hash, WITH_ENCODER.encoder)
    assert (await world.find(by_url(salt="b"), processing=WITH_ENCODER))[1].embedding is None
    assert (await world.find(by_url(salt="a"), processing=WITH_ENCODER))[1].embedding is not None


async def test_item_with_an_embedding_does_not_count_as_a_use_of_its_feature(world, arena):
    """The pixels are evicted first, however often the embedding is used."""
    _, feature, _ = await world.find(by_url(), processing=WITH_ENCODER)
    await world.find(by_url(io=b'{"image_mode":"L"}'))
    await world.keep_embedding(feature.mm_hash, WITH_ENCODER.encoder)
    await world.find(by_url(), processing=WITH_ENCODER)
    with arena.reserve(arena.stats().largest_hole_bytes - bytes_beside_payload(arena)), arena.reserve(10):
        assert not arena.contains(feature.mm_hash)
    assert (arena.stats().num_evictions, arena.stats().num_entries) == (1, 3)


async def test_item_of_a_known_size_is_described_without_its_bytes(world):
    size = MediaSize(80, 30)
    for _ in range(2):
        assert await world.describe(sent(), size=size) == (content_hash(DATA), Described(b"header", size))
    assert (world.uploads, world.pool.measured, world.pool.blanks) == (0, [], [(size, b"{}")])


async def test_item_of_an_unknown_size_is_measured_once_and_not_processed(world):
    for _ in range(2):
        found = await world.describe(sent(), upload=world.uploading(sent()))
    assert found == (content_hash(DATA), Described(b"header", MediaSize(60, 40)))
    assert (world.uploads, len(world.pool.measured), len(world.pool.blanks)) == (1, 1, 1)
    assert not world.pool.prepared
    assert world.arena.stats().num_leases == 0


async def test_image_of_a_url_is_counted_before_it_is_measured(world):
    await world.describe(by_url(), admit=world.admit)
    assert world.admitted == [(60, 40)]
    assert len(world.pool.measured) == 1


async def test_item_is_not_described_if_its_header_has_content_or_its_blank_is_refused(world):
    assert (await world.describe(sent(), BY_CONTENT, MediaSize(60, 40)))[1] is None
    world.pool.error = InvalidImage("too small for the processor")
    assert (await world.describe(sent(), size=MediaSize(1, 1)))[1] is None


async def test_concurrent_items_of_one_size_share_a_blank(world):
    world.pool.gate = asyncio.Event()
    describing = [asyncio.create_task(world.describe(sent(), size=MediaSize(60, 40))) for _ in range(3)]
    await eventually(lambda: world.pool.blanks)
    describing[0].cancel()
    world.pool.gate.set()
    results = await asyncio.gather(*describing, return_exceptions=True)
    assert isinstance(results[0], asyncio.CancelledError)
    assert results[1] == results[2]
    assert len(world.pool.blanks) == 1


async def test_error_of_measuring_names_the_field(world):
    world.pool.error = InvalidImage("damaged")
    with pytest.raises(InvalidImage) as caught:
        await world.describe(sent(), upload=world.uploading(sent()))
    assert caught.value.param == PARAM
    assert world.arena.stats().num_leases == 0
