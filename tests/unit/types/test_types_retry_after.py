import pytest

from medialane.types.errors import Outage, Permits, retry_after


@pytest.mark.parametrize(("seconds", "shown"), [(0, 1), (0.2, 1), (1.1, 2), (48, 48), (1000, 120), (float("inf"), 120)])
def test_header_has_whole_seconds_in_a_sane_range(seconds, shown):
    assert retry_after(seconds) == shown


def test_first_outage_is_expected_to_last_again_as_long(clock):
    outage = Outage(clock=clock)
    assert outage.retry_after_s == 1
    clock.now += 20
    assert outage.retry_after_s == 20


def test_later_outage_is_expected_to_be_as_long_as_the_last_one(clock):
    outage = Outage(clock=clock)
    clock.now += 40
    outage.end()
    assert (outage.left_s, outage.retry_after_s) == (0, 1)
    clock.now += 1000
    outage.begin()
    clock.now += 10
    outage.begin()
    assert outage.retry_after_s == 30
    clock.now += 35
    assert outage.retry_after_s == 5, "it has taken 5 s longer"


def test_refused_ones_come_back_one_after_the_other_as_places_become_free(clock):
    places = Permits(clock=clock)
    for key in range(4):
        places.take(key)
    clock.now += 48
    for key in range(4):
        places.free(key)
        places.take(key + 4)
    assert [places.promise() for _ in range(4)] == [12, 24, 36, 48]
    clock.now += 24
    assert places.promise() == 36, "two of them have come back"


def test_nobody_is_sent_away_for_longer_than_two_minutes(clock):
    places = Permits(clock=clock)
    places.take("a")
    clock.now += 3600
    assert {places.promise() for _ in range(1000)} == {120}
    clock.now += 60
    places.free("a")
    assert places.promise() <= 120


def test_places_that_are_freed_at_once_are_promised_at_once(clock):
    places = Permits(clock=clock)
    places.take("a")
    clock.now += 0.01
    places.free("a")
    places.free("a")
    places.take("b")
    assert places.promise() == 1


def test_place_that_is_withdrawn_says_nothing_about_how_long_places_are_taken(clock):
    places = Permits(clock=clock)
    for key in range(2):
        places.take(key)
    clock.now += 40
    places.free(0)
    for refused in range(20):
        places.take(("refused", refused))
        places.withdraw(("refused", refused))
    assert places.promise() == 40
