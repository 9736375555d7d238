"""Reservations and pins: each ends exactly once, with a warning if it did not."""

import gc
import warnings

import pytest

from medialane.arena import Arena
from medialane.types.feature import Feature
from medialane.types.media import MediaSize


@pytest.fixture
def arena(config):
    made = Arena.create(config)
    yield made
    made.close()


@pytest.fixture
def reservation(arena):
    made = arena.reserve(10)
    yield made
    made.abandon()


def pinned(arena, reservation):
    return arena.publish(reservation, "key", Feature("image", "key", b"", (), MediaSize()))


def test_buffer_is_the_payload_and_is_released_with_the_reservation(reservation):
    buffer = reservation.buffer
    assert (buffer.nbytes, buffer.readonly) == (10, False)
    reservation.abandon()
    with pytest.raises(ValueError, match="released"):
        reservation.buffer  # noqa: B018 - the access is what is tested


def test_abandoning_a_reservation_is_idempotent(arena, reservation):
    reservation.abandon()
    reservation.abandon()
    assert arena.stats().num_reservations == 0
    assert arena.stats().free_bytes == arena.stats().size_bytes


def test_with_block_abandons_an_unpublished_reservation(arena, reservation):
    with pytest.raises(KeyError), reservation:
        raise KeyError
    assert arena.stats().num_reservations == 0


def test_with_block_leaves_a_taken_over_reservation_alone(arena, reservation):
    with reservation:
        pin = pinned(arena, reservation)
    assert arena.stats().num_leases == 1
    pin.release()


def test_reservation_is_taken_over_once(arena, reservation):
    pin = pinned(arena, reservation)
    with pytest.raises(RuntimeError, match="has ended"):
        pinned(arena, reservation)
    pin.release()


def test_abandoned_reservation_cannot_be_taken_over(arena, reservation):
    reservation.abandon()
    with pytest.raises(RuntimeError, match="has ended"):
        pinned(arena, reservation)


def test_second_release_is_an_error_and_frees_nothing(arena, reservation):
    pin = pinned(arena, reservation)
    other = pin.duplicate()
    pin.release()
    assert "released" in repr(pin)
    with pytest.raises(RuntimeError, match="already released"):
        pin.release()
    assert arena.stats().num_leases == 1
    other.release()


def test_duplicate_pin_pins_the_entry_independently(arena, reservation):
    first = pinned(arena, reservation)
    second = first.duplicate()
    assert (second.value, second.range) == (first.value, first.range)
    first.release()
    assert arena.stats().pinned_bytes > 0
    second.release()
    assert arena.stats().pinned_bytes == 0
    with pytest.raises(RuntimeError, match="already released"):
        second.duplicate()


def test_pin_ends_with_its_with_block_even_on_error(arena, reservation):
    pin = pinned(arena, reservation)
    with pytest.raises(KeyError), pin:
        raise KeyError
    assert "released" in repr(pin)


def test_dropped_pin_warns_and_still_counts(arena, reservation):
    pin = pinned(arena, reservation)
    with pytest.warns(ResourceWarning, match="dropped unreleased"):
        del pin
    assert arena.stats().num_leases == 1


def test_dropped_reservation_warns_and_keeps_its_range(arena):
    with pytest.warns(ResourceWarning, match="was dropped"):
        arena.reserve(64)
    assert arena.stats().num_reservations == 1


def test_ended_pin_is_dropped_without_warning(arena, reservation):
    pin = pinned(arena, reservation)
    pin.release()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        del pin
        gc.collect()
