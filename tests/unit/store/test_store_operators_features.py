"""Features by their hash for the operator on this host, whoever has sent their media."""

from __future__ import annotations

import pytest
from test_store_items import World, by_url

from medialane.store import FeatureSource, KnownFeatures
from medialane.types.errors import UnknownMedia
from medialane.types.media import MediaRef


@pytest.fixture
def world(arena):
    return World(arena)


async def made(world, **fields):
    return (await world.find(by_url(**fields)))[1]


async def read(world, mm_hash):
    pinned = await world.items.feature(mm_hash)
    pinned.pin.release()
    return pinned.is_hit, pinned.pin.value


async def test_feature_of_any_client_is_found(world):
    for fields in ({"owner": "one"}, {"owner": "two", "salt": "salt"}):
        feature = await made(world, **fields)
        assert await read(world, feature.mm_hash) == (True, feature)


async def test_evicted_feature_is_made_again(world):
    feature = await made(world, owner="one", salt="salt")
    world.arena.clear()
    is_hit, again = await read(world, feature.mm_hash)
    assert (is_hit, again.mm_hash, again.header) == (False, feature.mm_hash, feature.header)


async def test_unknown_feature_is_refused(world):
    with pytest.raises(UnknownMedia):
        await world.items.feature("0" * 64)


def test_the_last_client_of_a_feature_is_the_one_that_counts():
    known, mm_hash = KnownFeatures(), "a" * 64
    assert known.find_any(mm_hash) is None
    known.remember(mm_hash, MediaRef("image", "p", content=mm_hash, is_feature=True, owner="sent its tensors"))
    assert known.find_any(mm_hash).source is None
    source = FeatureSource(by_url(), b"{}", "digest")
    known.remember(mm_hash, by_url(owner="sent its media"), source)
    assert known.find_any(mm_hash).source == source
