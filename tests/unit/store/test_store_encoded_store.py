"""Encoded media in the arena: one copy, found by content hash, with its description."""

import io

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image as PILImage

from builders import bytes_beside_payload
from medialane.arena import Arena, ArenaConfig
from medialane.media import MediaConfig
from medialane.store import EncodedStore
from medialane.types.errors import ArenaFull, InvalidImage, MediaTooLarge, UnsupportedMediaType
from medialane.types.hashing import content_hash
from medialane.types.media import MediaRef
from medialane.types.tensor import EMBEDS_TYPE

MIB = 1 << 20


def bmp(width=300, height=300):
    """A picture of some size in bytes."""
    file = io.BytesIO()
    PILImage.new("RGB", (width, height), (1, 2, 3)).save(file, "BMP")
    return file.getvalue()


BMP = bmp()


def image(salt=""):
    return MediaRef("image", "messages[0].content[0].image_url", url="http://host/", salt=salt)


@pytest.fixture
def store(arena):
    return EncodedStore(arena, MediaConfig())


def receive(store, data, *, piece=100_000, declared=True, salt=""):
    body = store.open("image", salt, 8 * MIB)
    body.expect(len(data) if declared else 0)
    for at in range(0, len(data), piece):
        body.write(data[at : at + piece])
    return body


@pytest.mark.parametrize("declared", [True, False])
def test_received_body_is_found_by_its_content(arena, store, declared):
    body = receive(store, BMP, declared=declared)
    assert body.finish(content_hash(BMP)) is None
    body.abandon()  # nothing any more
    with store.lookup(image(), content_hash(BMP)) as pin:
        assert store.bytes(pin.value) == BMP
        assert (pin.value.media_type, pin.value.num_bytes) == ("image/bmp", len(BMP))
        assert pin.range.nbytes == 64 + len(BMP), "what was too much was given back"


def test_body_reserves_memory_for_received_not_declared_bytes(arena, store):
    body = store.open("image", "", 8 * MIB)
    body.expect(5 * MIB)
    assert arena.stats().num_reservations == 0
    taken, beside = [], bytes_beside_payload(arena)
    for _ in range(5):
        for _ in range(8):
            body.write(bytes(MIB // 8))
        taken.append(arena.stats().writing_bytes - beside)
    assert taken == [MIB, 4 * MIB, 4 * MIB, 4 * MIB, 5 * MIB]
    assert arena.stats().num_reservations == 1
    body.abandon()
    assert arena.stats().writing_bytes == 0


def test_body_longer_than_declared_is_received(store):
    body = store.open("image", "", 8 * MIB)
    body.expect(100)
    body.write(BMP)
    body.finish(content_hash(BMP))
    store.lookup(image(), content_hash(BMP)).release()


def test_body_of_unknown_length_is_bounded(arena, store):
    most = 100_000 + 64 + bytes_beside_payload(arena)
    body = store.open("image", "", 100_000)
    body.write(bytes(64 << 10))
    body.write(bytes(1))
    assert arena.stats().writing_bytes <= most
    body.abandon()


def test_body_without_space_can_be_abandoned(arena, store):
    held = arena.reserve(14 * MIB)
    body = store.open("image", "", 8 * MIB)
    body.write(bytes(MIB))
    with pytest.raises(ArenaFull):
        body.write(bytes(MIB))
    body.abandon()
    held.abandon()


def test_non_image_content_is_not_stored(arena, store):
    body = receive(store, b"no image at all")
    with pytest.raises(InvalidImage):
        body.finish(content_hash(b"no image at all"))
    body.abandon()
    assert store.lookup(image(), content_hash(b"no image at all")) is None
    assert arena.stats().num_entries == 0


def upload(arena, store, data, **fields):
    """Store bytes that a client has sent."""
    with arena.reserve(len(data), "encoded") as reservation:
        reservation.buffer[:] = data
        return store.publish(reservation, "image", salt="", content=content_hash(data), **fields)


def test_rejected_bytes_leave_no_entry(arena):
    store = EncodedStore(arena, MediaConfig(max_image_bytes=100))
    with pytest.raises(MediaTooLarge):
        upload(arena, store, BMP)
    assert arena.stats().num_entries == 0


def test_embeddings_and_media_of_equal_bytes_are_kept_apart(arena, store):
    embeds = msgspec.structs.replace(image(), is_embeds=True)
    upload(arena, store, BMP).release()
    assert store.lookup(embeds, content_hash(BMP)) is None
    arena.clear()
    upload(arena, store, BMP, media_type=EMBEDS_TYPE).release()
    assert store.lookup(image(), content_hash(BMP)) is None
    store.lookup(embeds, content_hash(BMP)).release()


def test_forgotten_content_is_evicted_unless_it_is_held(arena, store):
    held = upload(arena, store, BMP)
    store.forget(content_hash(BMP), "")
    assert store.bytes(held.value) == BMP
    held.release()
    store.forget(content_hash(BMP), "")
    assert (store.lookup(image(), content_hash(BMP)), arena.stats().num_entries) == (None, 0)


def test_duplicate_content_is_one_entry(arena, store):
    receive(store, BMP).finish(content_hash(BMP))
    receive(store, BMP, declared=False).finish(content_hash(BMP))
    upload(arena, store, BMP).release()
    assert arena.stats().num_entries == 1


def test_entries_are_separate_per_tenant(store):
    receive(store, BMP, salt="one").finish(content_hash(BMP))
    assert store.lookup(image(), content_hash(BMP)) is None
    assert store.lookup(image("two"), content_hash(BMP)) is None
    store.lookup(image("one"), content_hash(BMP)).release()


def test_entry_is_probed_again_for_another_modality(arena, store):
    upload(arena, store, BMP).release()
    audio = MediaRef("audio", "p", url="http://host/")
    with pytest.raises(UnsupportedMediaType):
        store.lookup(audio, content_hash(BMP))
    assert arena.stats().num_leases == 0


@settings(deadline=None, max_examples=50)
@given(st.lists(st.integers(1, 200_000), max_size=12), st.integers(0, 600_000))
def test_any_chunks_and_content_length_give_the_bytes(sizes, promised):
    data = BMP[:100] + b"".join(bytes([n % 256]) * size for n, size in enumerate(sizes))
    arena = Arena.create(ArenaConfig(size_bytes=16 * MIB))
    try:
        store = EncodedStore(arena, MediaConfig())
        body = store.open("image", "", 4 * MIB)
        body.expect(promised)
        at = 0
        for size in [100, *sizes]:
            body.write(data[at : at + size])
            at += size
        body.finish(content_hash(data))
        with store.lookup(image(), content_hash(data)) as pin:
            assert content_hash(store.bytes(pin.value)) == pin.value.content_hash == content_hash(data)
        assert arena.stats().num_reservations == 0
        assert arena.clear() == 1
        assert arena.stats().largest_hole_bytes == arena.stats().size_bytes
    finally:
        arena.close()
