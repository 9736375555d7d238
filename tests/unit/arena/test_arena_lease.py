"""Reservations and leases: each ends exactly once, with a warning if it did not."""

import gc
import warnings

import pytest

from medialane.arena import Lease, Reservation
from medialane.arena.entries import EntryTable
from medialane.arena.file import ArenaFile
from medialane.arena.layout import PAGE_BYTES, stamp


@pytest.fixture
def file(config):
    made = ArenaFile.create(config)
    yield made
    made.close()


@pytest.fixture
def table(file):
    return EntryTable(file.view.id, PAGE_BYTES, file.view.size_bytes - PAGE_BYTES, lambda _: None)


@pytest.fixture
def reservation(table, file):
    entry = table.reserve(64 + 10)
    stamp(file.view.words, entry.range)
    made = Reservation(table, entry, file.view)
    yield made
    made.abandon()


def leased(table, reservation):
    entry = reservation.take()
    table.keep(entry)
    return Lease(table, entry, "value")


def test_buffer_is_the_payload_and_is_released_with_the_reservation(reservation):
    buffer = reservation.buffer
    assert (buffer.nbytes, buffer.readonly) == (10, False)
    reservation.abandon()
    with pytest.raises(ValueError, match="released"):
        reservation.buffer  # noqa: B018 - the access is what is tested


def test_abandoning_a_reservation_is_idempotent(table, reservation):
    reservation.abandon()
    reservation.abandon()
    assert table.stats().num_reservations == 0
    assert table.stats().free_bytes == table.stats().size_bytes


def test_with_block_abandons_an_unpublished_reservation(table, reservation):
    with pytest.raises(KeyError), reservation:
        raise KeyError
    assert table.stats().num_reservations == 0


def test_with_block_leaves_a_taken_over_reservation_alone(table, reservation):
    with reservation:
        lease = leased(table, reservation)
    assert table.stats().num_leases == 1
    lease.release()


def test_reservation_is_taken_over_once(table, reservation):
    lease = leased(table, reservation)
    with pytest.raises(RuntimeError, match="has ended"):
        reservation.take()
    lease.release()


def test_abandoned_reservation_cannot_be_taken_over(reservation):
    reservation.abandon()
    with pytest.raises(RuntimeError, match="has ended"):
        reservation.take()


def test_second_release_is_an_error_and_frees_nothing(table, reservation):
    lease = leased(table, reservation)
    other = lease.duplicate()
    lease.release()
    assert "released" in repr(lease)
    with pytest.raises(RuntimeError, match="already released"):
        lease.release()
    assert table.stats().num_leases == 1
    other.release()


def test_duplicate_lease_pins_the_entry_independently(table, reservation):
    first = leased(table, reservation)
    second = first.duplicate()
    assert (second.value, second.range) == (first.value, first.range)
    first.release()
    assert table.stats().pinned_bytes > 0
    second.release()
    assert table.stats().pinned_bytes == 0
    with pytest.raises(RuntimeError, match="already released"):
        second.duplicate()


def test_lease_ends_with_its_with_block_even_on_error(table, reservation):
    lease = leased(table, reservation)
    with pytest.raises(KeyError), lease:
        raise KeyError
    assert "released" in repr(lease)


def test_dropped_lease_warns_and_keeps_its_pin(table, reservation):
    lease = leased(table, reservation)
    with pytest.warns(ResourceWarning, match="dropped unreleased"):
        del lease
    assert table.stats().num_leases == 1


def test_dropped_reservation_warns_and_keeps_its_range(table, file):
    entry = table.reserve(64)
    stamp(file.view.words, entry.range)
    with pytest.warns(ResourceWarning, match="was dropped"):
        Reservation(table, entry, file.view)
    assert table.stats().num_reservations == 1


def test_ended_lease_is_dropped_without_warning(table, reservation):
    lease = leased(table, reservation)
    lease.release()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        del lease
        gc.collect()
