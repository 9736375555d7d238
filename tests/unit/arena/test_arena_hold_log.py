"""The record of who has taken pins and reservations."""

import pytest

from medialane.arena import Arena
from medialane.runtime.tasks import TAKER
from medialane.types.feature import Feature
from medialane.types.media import MediaSize


@pytest.fixture
def arena(config):
    arena = Arena.create(config)
    yield arena
    arena.close()


def test_each_hold_is_recorded_with_its_taker_and_place_until_it_ends(arena):
    holds = arena.record_holds()
    token = TAKER.set("request 1")
    reservation = arena.reserve(1000)
    TAKER.reset(token)
    (writing,) = holds.records(10)
    assert (writing.state, writing.taker, writing.kind) == ("writing", "request 1", "processed")
    pin = arena.publish(reservation, "key", Feature("image", "key", b"", (), MediaSize()))
    second = pin.duplicate()
    assert [record.state for record in holds.records(10)] == ["published", "published"]
    assert {record.offset for record in holds.records(10)} == {pin.range.offset}
    assert len(holds.records(1)) == 1
    pin.release()
    second.release()
    assert holds.records(10) == ()


def test_abandoned_reservation_is_no_longer_recorded(arena):
    holds = arena.record_holds()
    arena.reserve(1000).abandon()
    assert holds.records(10) == ()
