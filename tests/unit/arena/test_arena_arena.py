"""The owner's facade: from a reservation to a reader in another mapping, and back to free bytes."""

import os
import threading

import numpy as np
import pytest

from builders import bytes_beside_payload
from medialane.arena import Arena, ArenaConfig, ArenaView, describe, layout
from medialane.types.errors import ArenaFull, HandoverFailed, MediaTooLarge
from medialane.types.feature import Embedding, Feature
from medialane.types.media import EncodedMedia, MediaSize
from medialane.types.tensor import TensorSpec

MIB = 1 << 20


@pytest.fixture
def arena(config):
    made = Arena.create(config)
    yield made
    made.close()


@pytest.fixture
def reader(arena, shm):
    view = ArenaView.open(arena.id, shm)
    yield view
    view.close()


def write(arena, key, fill, num_bytes=1000):
    """Cache a feature of one tensor full of `fill`; returns its pin."""
    specs = [TensorSpec("uint8", (num_bytes,))]
    reservation = arena.reserve(layout(specs)[1])
    reservation.buffer[:] = bytes([fill]) * num_bytes
    feature = Feature("image", key, b"", describe(reservation.range, specs), MediaSize())
    return arena.publish(reservation, key, feature)


def publish(arena, reservation):
    """Cache what was written, whatever it is."""
    return arena.publish(reservation, "key", EncodedMedia("image", "key", "", reservation.range, 64, 0))


def write_encoded(arena, key, data):
    reservation = arena.reserve(len(data), "encoded")
    reservation.buffer[:] = data
    return arena.publish(reservation, key, EncodedMedia("image", key, "image/png", reservation.range, 64, len(data)))


def read(view, feature):
    return set(np.frombuffer(view.tensor(feature.tensors[0]), np.uint8).tolist())


def test_reader_sees_what_was_published(arena, reader):
    assert reader.nonce == arena.nonce
    with write(arena, "a", 7) as pin:
        assert read(reader, pin.value) == {7}
        assert read(arena.view, pin.value) == {7}


def test_feature_outlives_its_request(arena, reader):
    write(arena, "a", 7).release()
    assert arena.contains("a")
    with arena.lookup("a") as pin:
        assert read(reader, pin.value) == {7}
    assert arena.lookup("b") is None
    assert (arena.stats().num_hits, arena.stats().num_misses) == (1, 1)


def test_descriptor_of_an_evicted_feature_is_stale_before_reuse(arena, reader):
    with write(arena, "a", 7) as pin:
        feature = pin.value
    assert arena.evict("a")
    with pytest.raises(HandoverFailed):
        reader.tensor(feature.tensors[0])
    with write(arena, "b", 8) as pin:
        assert pin.range.offset == feature.tensors[0].range.offset
        with pytest.raises(HandoverFailed):
            reader.tensor(feature.tensors[0])
        assert read(reader, pin.value) == {8}


def test_leased_feature_survives_a_full_arena(arena, reader):
    held = write(arena, "held", 1, 5 * MIB)
    for index in range(20):
        write(arena, f"{index}", 2, 5 * MIB).release()
    assert read(reader, held.value) == {1}
    assert arena.stats().num_evictions > 10
    held.release()


def test_arena_full_of_pins_rejects_until_they_end(arena):
    pins = [write(arena, f"{i}", i, 5 * MIB) for i in range(3)]
    with pytest.raises(ArenaFull) as caught:
        arena.reserve(5 * MIB)
    assert caught.value.status == 503
    for pin in pins:
        pin.release()
    arena.reserve(5 * MIB).abandon()


def test_payload_larger_than_the_arena_is_rejected_permanently(arena):
    held = write(arena, "held", 1)
    with pytest.raises(MediaTooLarge) as caught:
        arena.reserve(arena.max_payload_bytes + 1)
    assert caught.value.status == 413
    held.release()
    arena.reserve(arena.max_payload_bytes).abandon()


def test_second_publication_of_a_key_returns_the_first(arena, reader):
    first = write(arena, "a", 1)
    second = write(arena, "a", 2)
    assert second.range == first.range
    assert second.value is first.value
    assert read(reader, second.value) == {1}
    assert arena.stats().num_entries == 1
    first.release()
    second.release()


def test_preparer_writes_into_its_assigned_range(arena, shm, reader):
    preparer = ArenaView.open(arena.id, shm, writable=True)
    reservation = arena.reserve(8, "encoded")
    preparer.entry(reservation.range, writable=True)[64:] = b"12345678"
    with publish(arena, reservation) as pin:
        assert bytes(reader.entry(pin.range)[64:]) == b"12345678"
    preparer.close()


def test_range_of_an_abandoned_reservation_is_stale_immediately(arena, shm):
    preparer = ArenaView.open(arena.id, shm, writable=True)
    with arena.reserve(8) as reservation:
        preparer.entry(reservation.range)
    with pytest.raises(HandoverFailed):
        preparer.entry(reservation.range, writable=True)
    preparer.close()


def test_empty_payload_is_a_valid_entry(arena, reader):
    with publish(arena, arena.reserve(0, "encoded")) as pin:
        assert pin.range.nbytes == 64 == len(reader.entry(pin.range))
    with pytest.raises(ValueError, match="-1"):
        arena.reserve(-1)


def test_stats_account_for_every_byte(arena):
    used = 1024 + bytes_beside_payload(arena)
    writing = arena.reserve(1000)
    pinned = write(arena, "a", 1, 1000)
    write(arena, "b", 2, 1000).release()
    stats = arena.stats()
    assert (stats.writing_bytes, stats.pinned_bytes, stats.published_bytes) == (used, used, 2 * used)
    assert stats.free_bytes == stats.size_bytes - 3 * used == arena.size_bytes - 4096 - 3 * used
    assert (stats.num_reservations, stats.num_entries, stats.num_leases) == (1, 2, 1)
    writing.abandon()
    pinned.release()
    assert arena.clear() == 2
    assert arena.stats().free_bytes == stats.size_bytes


def test_thousand_requests_leak_nothing(arena):
    descriptors = len(os.listdir("/proc/self/fd"))
    for index in range(1000):
        with write(arena, f"{index % 7}", 1, 100_000 * (index % 5 + 1)) as pin, pin.duplicate():
            pass
    arena.clear()
    stats = arena.stats()
    assert (stats.num_leases, stats.num_entries, stats.num_reservations) == (0, 0, 0)
    assert stats.largest_hole_bytes == stats.size_bytes
    assert len(os.listdir("/proc/self/fd")) == descriptors


def test_closed_arena_allows_releases_but_no_new_entries(arena, shm, reader):
    pin = write(arena, "a", 7)
    reservation = arena.reserve(10)
    arena.close()
    arena.close()
    assert os.listdir(shm) == []
    assert read(reader, pin.value) == {7}
    with pytest.raises(RuntimeError, match="closed"):
        arena.reserve(10)
    with pytest.raises(RuntimeError, match="closed"):
        publish(arena, reservation)
    reservation.abandon()
    pin.release()
    assert arena.clear() == 1
    assert arena.stats().free_bytes == arena.stats().size_bytes


def test_entries_written_during_prefault_are_untouched_by_it(arena, reader):
    thread = threading.Thread(target=arena.prefault, args=(threading.Event(),))
    thread.start()
    pins = [write(arena, f"{i}", i, MIB) for i in range(1, 15)]
    thread.join()
    for fill, pin in enumerate(pins, start=1):
        assert read(reader, pin.value) == {fill}
        pin.release()


def test_growing_arena_uses_prefaulted_memory_only(config):
    """Writing to any other page would kill the writer if the file system is full."""
    arena = Arena.create(config, grows=True)
    with pytest.raises(ArenaFull):
        arena.reserve(1)
    reports = []
    arena.prefault(threading.Event(), reports.append)
    assert reports[-1] == arena.size_bytes
    arena.prefaulted(2 * MIB)
    with arena.reserve(MIB) as reservation:
        assert reservation.range.offset + reservation.range.nbytes <= 2 * MIB
        with pytest.raises(ArenaFull) as full:
            arena.reserve(MIB)
        assert full.value.retry_after_s == 1
    arena.prefaulted(reports[-1])
    arena.reserve(arena.max_payload_bytes).abandon()
    arena.close()


def test_encoded_bytes_and_a_feature_of_one_key_are_two_entries(arena, reader):
    write(arena, "a", 7).release()
    write_encoded(arena, "a", b"bytes").release()
    with arena.lookup("a") as feature, arena.lookup("a", "encoded") as encoded:
        assert read(reader, feature.value) == {7}
        assert bytes(reader.entry(encoded.value.range)[64:]) == b"bytes"
    assert arena.evict("a", "encoded")
    assert arena.lookup("a", "encoded") is None
    assert arena.contains("a")


def test_entry_has_the_metadata_of_its_kind(arena):
    feature = Feature("image", "a", b"", (), MediaSize())
    with arena.reserve(8, "encoded") as reservation, pytest.raises(TypeError, match="Feature"):
        arena.publish(reservation, "a", feature)
    with arena.reserve(8, "embedded") as reservation, pytest.raises(TypeError, match="kind embedded"):
        arena.publish(reservation, "a", feature)
    with arena.reserve(8) as reservation, pytest.raises(TypeError, match="kind processed"):
        arena.publish(reservation, "a", embedded("a", reservation.range))
    assert arena.stats().num_reservations == 0


def embedded(mm_hash, entry):
    """A feature whose embedding are the eight bytes of `entry`."""
    (tensor,) = describe(entry, [TensorSpec("uint8", (2, 4))])
    return Feature("image", mm_hash, b"header", (), MediaSize(), Embedding("key", tensor))


def test_features_whose_embedding_is_cached_are_evicted_first(arena):
    for key in "abc":
        write(arena, key, 7, 4 * MIB).release()
    reservation = arena.reserve(8, "embedded")
    value = embedded("c", reservation.range)
    with arena.publish(reservation, "key", value) as pin:
        assert pin.value == value
    write(arena, "d", 7, 4 * MIB).release()
    assert [arena.contains(key) for key in "abcd"] == [True, True, False, True]
    with arena.lookup("key", "embedded") as found:
        assert found.value == value
    assert arena.stats().embedded_bytes == 64 + bytes_beside_payload(arena)


def test_trimmed_reservation_keeps_its_bytes_and_its_old_range_is_stale(arena, reader):
    reservation = arena.reserve(1000, "encoded")
    reservation.buffer[:5] = b"bytes"
    before = reservation.range
    reservation.trim(5)
    assert bytes(reservation.buffer) == b"bytes"
    with pytest.raises(HandoverFailed):
        reader.entry(before)
    with publish(arena, reservation) as pin:
        assert bytes(reader.entry(pin.range)[64:]) == b"bytes"
    with pytest.raises(ValueError, match="released"):
        reservation.trim(1)
    assert arena.clear() == 1
    assert arena.stats().free_bytes == arena.stats().size_bytes


def test_configured_shares_are_enforced(shm):
    arena = Arena.create(ArenaConfig(size_bytes=16 * MIB, directory=shm, encoded_share=0.25))
    write(arena, "old", 1, 5 * MIB).release()
    for key in "abc":
        write_encoded(arena, key, bytes(3 * MIB)).release()
    write(arena, "new", 1, 5 * MIB).release()
    assert arena.contains("old")
    assert arena.stats().encoded_bytes < 4 * MIB
    arena.close()
