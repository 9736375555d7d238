"""The worker's end of transports."""

from pathlib import Path

import pytest

from medialane.arena import Arena, ArenaConfig, describe, layout
from medialane.types.errors import HandoverFailed
from medialane.types.feature import Feature
from medialane.types.media import MediaSize
from medialane.types.tensor import InlineTensor, TensorSpec
from medialane.worker.media import Receiver

SPEC = TensorSpec("uint8", (1000,))


@pytest.fixture
def receiver():
    receiver = Receiver("/dev/shm")
    yield receiver
    receiver.close()


@pytest.fixture
def tensor(arena):
    reservation = arena.reserve(layout([SPEC])[1])
    (tensor,) = describe(reservation.range, [SPEC])
    arena.view.tensor(tensor, writable=True)[:] = bytes(range(250)) * 4
    pin = arena.publish(reservation, "k", Feature("image", "k", b"", (tensor,), MediaSize()))
    yield tensor
    pin.release()


def test_attached_arena_is_read_without_a_copy(arena, receiver, tensor):
    assert receiver.attach(arena.id, arena.nonce)
    data = receiver.fetch(tensor)
    assert data[:3] == b"\0\1\2"
    arena.view.tensor(tensor, writable=True)[0] = 9
    assert data[0] == 9
    assert data.readonly


def test_attaching_again_returns_the_same_mapping(arena, receiver, tensor):
    assert receiver.attach(arena.id, arena.nonce)
    assert receiver.attach(arena.id, arena.nonce)
    assert receiver.fetch(tensor)


@pytest.mark.parametrize("arena_id", ["f" * 32, "../../etc/shadow", ""])
def test_missing_arena_is_not_attached(receiver, arena_id):
    assert not receiver.attach(arena_id, b"n" * 16)


def test_arena_with_wrong_nonce_is_not_attached(arena, receiver, tensor):
    """Another host may have an arena of the same name: only the nonce is proof."""
    assert not receiver.attach(arena.id, b"n" * 16)
    with pytest.raises(HandoverFailed):
        receiver.fetch(tensor)


def test_wrong_nonce_does_not_affect_the_owners_mapping(arena, receiver, tensor):
    assert receiver.attach(arena.id, arena.nonce)
    assert not receiver.attach(arena.id, b"n" * 16)
    assert receiver.fetch(tensor)
    assert receiver.attach(arena.id, arena.nonce)


def test_only_the_detached_arena_is_unmapped(receiver, tensor, arena):
    other = Arena.create(ArenaConfig(size_bytes=16 << 20))
    assert receiver.attach(arena.id, arena.nonce)
    assert receiver.attach(other.id, other.nonce)
    num_mapped = Path("/proc/self/maps").read_text().count(other.id)
    for _ in range(2):
        receiver.detach(other.id)
    assert Path("/proc/self/maps").read_text().count(other.id) == num_mapped - 1
    assert receiver.fetch(tensor)
    other.close()


def test_held_bytes_outlive_the_mapping(arena, receiver, tensor):
    receiver.attach(arena.id, arena.nonce)
    data = receiver.fetch(tensor)
    receiver.close()
    assert data[:3] == b"\0\1\2"
    with pytest.raises(HandoverFailed):
        receiver.fetch(tensor)


def test_inline_tensor_is_read_from_the_message(receiver):
    assert receiver.fetch(InlineTensor(SPEC, memoryview(bytes(1000)))) == bytes(1000)
    with pytest.raises(HandoverFailed, match="incomplete"):
        receiver.fetch(InlineTensor(SPEC, memoryview(b"")))


def test_unmapped_arena_fails_the_hand_over(arena, receiver, tensor):
    receiver.attach(arena.id, arena.nonce)
    receiver.detach(arena.id)
    with pytest.raises(HandoverFailed, match="not mapped"):
        receiver.fetch(tensor)


def test_inline_tensor_of_the_wrong_size_cannot_be_built():
    with pytest.raises(ValueError, match="3 bytes"):
        InlineTensor(TensorSpec("uint8", (4,)), b"abc")
