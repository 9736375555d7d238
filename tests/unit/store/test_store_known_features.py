"""Features by their hash: their clients get them, made again if they must be, and nobody else does."""

from __future__ import annotations

import pytest
from test_store_items import PLAIN, URL, World, by_url, picture, sent

from medialane.observability import RequestTimeline
from medialane.prepare import Described
from medialane.store import FeatureSource, ItemSource, KnownFeatures, Processing
from medialane.types.errors import UnknownMedia
from medialane.types.media import MediaRef, MediaSize
from medialane.types.tensor import TensorSpec

HASH = "f" * 64
FIELD = "features.kwargs_data.image[0]"
BYTES = (TensorSpec("uint8", (10,)),)


def named(mm_hash=HASH, **fields):
    return MediaRef("image", FIELD, content=mm_hash, is_feature=True, **fields)


@pytest.fixture
def world(arena):
    return World(arena)


async def put(world, ref):
    async def receive(reservation):
        reservation.buffer[:10] = b"0123456789"

    found = await world.items.put(ref, Described(b"", MediaSize(6, 4)), BYTES, receive=receive, writer=1)
    found.pin.release()
    return found.is_hit


async def test_feature_is_found_by_its_hash(world):
    made = (await world.find(by_url(owner="key")))[1]
    is_hit, found, timeline = await world.find(named(made.mm_hash, owner="key"))
    assert (is_hit, found, timeline.num_hits) == (True, made, 1)


@pytest.mark.parametrize("stranger", [{"owner": "another"}, {"salt": "salt"}, {"owner": ""}])
async def test_others_do_not_find_it(world, stranger):
    made = (await world.find(by_url(owner="key")))[1]
    fields = {"owner": "key", **stranger}
    with pytest.raises(UnknownMedia) as caught:
        await world.find(named(made.mm_hash, **fields))
    assert (caught.value.status, caught.value.param) == (404, FIELD)


@pytest.mark.parametrize("is_fetched", [True, False])
async def test_evicted_feature_is_made_again(world, is_fetched):
    ref = by_url(owner="key") if is_fetched else sent(owner="key")
    upload = None if is_fetched else world.uploading(ref)
    made = (await world.find(ref, "processed", Processing("digest", b'{"scale":2}'), upload=upload))[1]
    world.arena.evict(made.mm_hash)
    if is_fetched:  # with its encoded bytes
        world.arena.clear()
    is_hit, again, _ = await world.find(named(made.mm_hash, owner="key"), "processed", Processing("other", b"{}"))
    assert (is_hit, again.mm_hash) == (False, made.mm_hash)
    assert world.fetcher.num_fetches == (2 if is_fetched else 0)


async def test_evicted_feature_of_other_bytes_is_unknown(world):
    made = (await world.find(by_url(owner="key")))[1]
    world.arena.clear()
    world.fetcher.data = picture(61)
    with pytest.raises(UnknownMedia):
        await world.find(named(made.mm_hash, owner="key"))


async def test_evicted_feature_of_sent_bytes_that_are_evicted_too_is_unknown(world):
    made = (await world.find(sent(owner="key"), upload=world.uploading(sent())))[1]
    world.arena.clear()
    with pytest.raises(UnknownMedia):
        await world.find(named(made.mm_hash, owner="key"))


async def test_referred_item_is_not_processed_until_it_is_named(world):
    ref = sent(owner="key")
    source = ItemSource(ref, RequestTimeline(), world.uploading(ref))
    (await world.items.refer(source, PLAIN)).pin.release()
    assert not world.pool.prepared
    key = (await world.find(ref))[1].mm_hash
    world.arena.evict(key)
    assert (await world.find(named(key, owner="key")))[1].mm_hash == key


async def test_tensors_of_a_client_are_received_once_and_named_by_whoever_sent_them(world):
    assert [await put(world, named(owner=client)) for client in ("one", "one", "two")] == [False, True, True]
    for client in ("one", "two"):
        assert (await world.find(named(owner=client)))[1].header == b""
    with pytest.raises(UnknownMedia):
        await world.find(named(owner="three"))


def test_records_expire_after_their_last_use_and_are_bounded():
    now = [0.0]
    known = KnownFeatures(ttl_s=10.0, max_bytes=3000, clock=lambda: now[0])
    for number in range(5):
        known.remember(f"{number:064}", named(), FeatureSource(by_url(), b"{}", "digest"))
    assert known.find(named(f"{0:064}")) is None
    now[0] = 9.0
    assert known.find(named(f"{1:064}")).source.ref.url == URL
    now[0] = 18.0
    assert known.find(named(f"{1:064}")) is not None
    assert known.find(named(f"{2:064}")) is None


def test_tenant_at_its_share_replaces_its_own_features_only():
    known = KnownFeatures(max_bytes=6000, tenant_share=0.5)
    known.remember("0", named("0", owner="tenant:ben"))
    for number in range(1, 50):
        known.remember(f"{number}", named(f"{number}", owner="tenant:ann"))
    assert known.find(named("0", owner="tenant:ben")) is not None
    found = [known.find(named(f"{number}", owner="tenant:ann")) is not None for number in range(1, 50)]
    assert found == [False] * 44 + [True] * 5
